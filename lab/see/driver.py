"""The traced peak against the fall in free memory, for each way to get memory from the driver, without any library.

    python driver.py

A program of ctypes does one thing, twice: the first time what the driver itself needs for it is got. It reads free
memory before and at the most of the second time. Within 1 %, or the 2 MiB that the driver gets memory in. Nothing else may
use the GPU meanwhile. About 15 s.
"""
import argparse
import ctypes
import os
import sys

import seen
from seen import MiB, common

BAR = 0.01


class Program:
    """Ways to get memory: each returns what gives it back again."""

    def __init__(self):
        self.driver = seen.Driver()
        self.prop = (ctypes.c_int * 16)(1, 0, 1, 0)  # CUmemAllocationProp: pinned, on device 0
        self.access = (ctypes.c_int * 3)(1, 0, 3)

    def plain(self, count, size):
        held = [self.driver.allocate(size) for _ in range(count)]
        if not all(held):
            raise SystemExit("too little memory")
        return lambda: [self.driver.check("cuMemFree_v2", ctypes.c_uint64(p)) for p in held]

    def small(self):
        return self.plain(5000, 60 << 10)

    def large(self):
        return self.plain(30, 70 * MiB + 512)

    def pitched(self):
        held = []
        for _ in range(20):
            p, pitch = ctypes.c_uint64(), ctypes.c_size_t()
            self.driver.check("cuMemAllocPitch_v2", ctypes.byref(p), ctypes.byref(pitch), ctypes.c_size_t(10_000), ctypes.c_size_t(3_000), 4)
            held.append(p)
        return lambda: [self.driver.check("cuMemFree_v2", p) for p in held]

    def virtual(self, times=1):
        """Handles of two sizes; mapped more than once they are there once."""
        done, size = [], 32 * MiB
        for n in range(40):
            part = size if n % 2 else 2 * MiB
            handle = ctypes.c_uint64()
            self.driver.check("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(part), self.prop, ctypes.c_uint64(0))
            for _ in range(times):
                at = ctypes.c_uint64()
                self.driver.check("cuMemAddressReserve", ctypes.byref(at), ctypes.c_size_t(part), ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))
                self.driver.check("cuMemMap", at, ctypes.c_size_t(part), ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
                self.driver.check("cuMemSetAccess", at, ctypes.c_size_t(part), self.access, ctypes.c_size_t(1))
                done.append((at, part))
            self.driver.check("cuMemRelease", handle)

        def end():
            for at, part in done:
                self.driver.check("cuMemUnmap", at, ctypes.c_size_t(part))
                self.driver.check("cuMemAddressFree", at, ctypes.c_size_t(part))
        return end

    def twice(self):
        return self.virtual(2)

    def pool(self):
        pool, forever = ctypes.c_void_p(), ctypes.c_uint64(2**64 - 1)
        self.driver.check("cuDeviceGetDefaultMemPool", ctypes.byref(pool), 0)
        self.driver.check("cuMemPoolSetAttribute", pool, 4, ctypes.byref(forever))  # RELEASE_THRESHOLD
        held = []
        for n in range(200):
            p = ctypes.c_uint64()
            self.driver.check("cuMemAllocAsync", ctypes.byref(p), ctypes.c_size_t((n % 9 + 1) << 20), None)
            held.append(p)
        self.driver.check("cuStreamSynchronize", None)

        def end():
            for p in held:
                self.driver.check("cuMemFreeAsync", p, None)
            self.driver.check("cuStreamSynchronize", None)
            self.driver.check("cuMemPoolTrimTo", pool, ctypes.c_size_t(0))
        return end

    def mixed(self):
        ends = [self.large(), self.virtual(), self.small(), self.pool()]
        return lambda: [end() for end in ends]


KINDS = ("small", "large", "pitched", "virtual", "twice", "pool", "mixed")
WORDS = {"small": "5,000 of 60 KiB by cuMemAlloc", "large": "30 of 70 MiB and a little", "pitched": "20 by cuMemAllocPitch",
         "virtual": "40 handles, mapped", "twice": "40 handles, each mapped twice", "pool": "200 from the default pool", "mixed": "all of these at once"}


def child(kind):
    program = Program()
    work = getattr(program, kind)
    work()()
    before = program.driver.memory()[0]
    end = work()
    least = program.driver.memory()[0]
    end()
    after = program.driver.memory()[0]
    seen.answer(before=before, least=least, after=after)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--kinds", default=",".join(KINDS))
    p.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return child(args.child)
    c, folder, rows = common.Checks("see-driver"), seen.folder("driver"), []
    for kind in args.kinds.split(","):
        out = os.path.join(folder, kind + ".cistern")
        done = common.run(seen.traced([sys.executable, os.path.abspath(__file__), "--child", kind], out), env=common.environment("native"), timeout=60)
        found = done.last_json()
        if done.rc != 0 or found is None:
            c.add(WORDS[kind], done.why(), "runs", False)
            continue
        peak, fell = seen.peak_held(seen.summary(out)), found["before"] - found["least"]
        off = abs(peak - fell)
        rows.append([WORDS[kind], common.size(peak), common.size(fell), "%.3f %%" % (100 * off / max(fell, 1)), common.size(found["before"] - found["after"])])
        c.add("%s: traced peak, fall in free memory" % WORDS[kind], "%d, %d" % (peak, fell), "within 1 % or 2 MiB", fell > 0 and off <= max(BAR * fell, seen.PAGE))
        if kind != "pool" and kind != "mixed":
            calls = seen.calls(out)
            held, counted = seen.held(calls)
            c.add("%s: counted anew from the calls; left at the end" % WORDS[kind], "%d; %d" % (counted, held), "%d; 0" % peak, counted == peak and held == 0)
    if rows:
        print(common.table(["memory", "traced peak", "fall in free memory", "apart", "not back at the end"], rows))
    return seen.finish(c)


if __name__ == "__main__":
    sys.exit(main())
