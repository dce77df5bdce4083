"""A process with memory of Cistern's C library, without PyTorch. It does what a line of JSON on its standard input says, on device 0
or the one that the line names, and answers with one:

    free                            free and total bytes of the device
    hold {bytes, each}              allocates so many bytes in blocks, and keeps them
    write                           writes to what it keeps, as programs do to memory that they use
    keep {bytes}                    one block, which stays to the end
    ask {bytes}                     one block, kept; the time of the request in ms
    drop                            frees what it keeps; the memory stays cached
    trim                            returns what is cached to the driver
    fill {leave, near}              allocates until that much is free in the driver, or a little more
    loops {n}                       pairs.c: ns of an allocation and its release
"""
import ctypes
import json
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../torch"))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../see"))

import common  # noqa: E402
import peers  # noqa: E402  the loops of pairs.c

MiB, GiB = common.MiB, common.GiB


class Memory:
    """Blocks of this process."""

    def __init__(self):
        self.lib = ctypes.CDLL(common.library())
        self.lib.cistern_malloc.restype, self.lib.cistern_malloc.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self.lib.cistern_release.argtypes = [ctypes.c_void_p]
        self.lib.cistern_last_error.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self.blocks, self.sizes = [], {}

    def error(self):
        text = ctypes.create_string_buffer(2048)
        self.lib.cistern_last_error(text, len(text))
        return text.value.decode(errors="replace")

    def check(self, code):
        if code != 0:
            raise MemoryError(self.error())

    def add(self, size, device=0):
        p = self.lib.cistern_malloc(size, device, None)
        if not p:
            raise MemoryError(self.error())
        self.blocks.append(p)
        self.sizes[p] = size

    def free(self, device=0):
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        self.check(self.lib.cistern_mem_info(device, ctypes.byref(free), ctypes.byref(total)))
        return {"free": free.value, "total": total.value}

    def hold(self, bytes, each, device=0):
        for _ in range(bytes // each):
            self.add(each, device)
        return {}

    def write(self):
        import seen
        driver = seen.Driver()
        for p, size in self.sizes.items():
            driver.check("cuMemsetD8_v2", ctypes.c_uint64(p), ctypes.c_ubyte(1), ctypes.c_size_t(size))
        driver.check("cuCtxSynchronize")
        return {}

    def keep(self, bytes, device=0):
        self.add(bytes, device)
        self.sizes.pop(self.blocks.pop())
        return {}

    def ask(self, bytes, device=0):
        begin = time.perf_counter()
        self.add(bytes, device)
        return {"ms": 1e3 * (time.perf_counter() - begin)}

    def drop(self):
        for p in self.blocks:
            self.check(self.lib.cistern_release(p))
        self.blocks, self.sizes = [], {}
        return {}

    def trim(self, device=0):
        self.check(self.lib.cistern_trim(device))
        return {}

    def fill(self, leave, near, device=0):
        """In smaller and smaller blocks, as a driver does not give all that it says is free."""
        most = GiB
        while most >= 2 * MiB:
            more = self.free(device)["free"] - leave
            if more < near:
                break
            try:
                self.add(min(most, more // (2 * MiB) * 2 * MiB), device)
            except MemoryError:
                most //= 2
        return self.free(device)

    def loops(self, n):
        f = [ctypes.cast(g, ctypes.c_void_p) for g in (self.lib.cistern_malloc, self.lib.cistern_free)]
        found = {"pair of 512 B": peers.pairs().pair_ns(*f, 512, n), "pair of 1 MiB": peers.pairs().pair_ns(*f, MiB, n),
                 "churn": peers.pairs().churn_ns(*f, 2000, n)}
        if min(found.values()) < 0:
            raise MemoryError(self.error())
        return {"ns": found}


def main():
    memory = Memory()
    for line in sys.stdin:
        what = json.loads(line)
        try:
            found = getattr(memory, what.pop("do"))(**what)
        except MemoryError as e:
            found = {"error": str(e)}
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
