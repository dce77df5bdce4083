"""What an allocation and its free cost the host, through CuPy's own pool and numba's own memory, and through Cistern.

    python cost.py [--pairs 20000]
"""
import argparse
import sys
import time

import shared
from shared import common

SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20, "64 MiB": 64 << 20}


def nanoseconds(pair, n):
    best = None
    for _ in range(5):
        begin = time.perf_counter_ns()
        for _ in range(n):
            pair()
        took = (time.perf_counter_ns() - begin) / n
        best = took if best is None else min(best, took)
    return best


def work(library, mode, pairs):
    if mode == "cistern":
        shared.enable([library])
    out = {}
    if library == "cupy":
        import cupy
        alloc, own = cupy.cuda.alloc, cupy.cuda.Stream(non_blocking=True)
        for name, size in SIZES.items():
            out["alloc " + name] = nanoseconds(lambda: alloc(size), pairs)
            out["empty " + name] = nanoseconds(lambda: cupy.empty(size, dtype=cupy.uint8), pairs)
            with own:
                out["alloc " + name + ", own stream"] = nanoseconds(lambda: alloc(size), pairs)
        held = [alloc(512 * (1 + i % 50)) for i in range(10000)]
        out["alloc 4 KiB among 10,000"] = nanoseconds(lambda: alloc(4096), pairs)
        del held
        a, b = cupy.zeros(1000), cupy.zeros(1000)
        out["a + b, 1000 numbers"] = nanoseconds(lambda: a + b, min(pairs, 5000))
    else:
        import numpy
        from numba import cuda
        context, n = cuda.current_context(), min(pairs, 2000)
        for name, size in SIZES.items():
            out["alloc " + name] = nanoseconds(lambda: context.memalloc(size), n)
            out["device_array " + name] = nanoseconds(lambda: cuda.device_array(size, dtype=numpy.uint8), n)
    shared.answer({"library": library, "mode": mode, "ns": out})


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--pairs", type=int, default=20000)
    p.add_argument("--timeout", type=float, default=120)
    p.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return work(args.child[0], args.child[1], int(args.child[2]))
    shared.prepare()
    c, results = common.Checks("libs-cost"), []
    for library, most in (("cupy", 3), ("numba", 1)):
        found = {}
        for mode in ("native", "cistern"):
            done = shared.child("cost.py", [library, mode, args.pairs], args.timeout)
            r = done.last_json()
            if done.rc != 0 or r is None:
                print(done.err[-2000:])
                c.add(f"{library}, {mode}", done.why(), "runs", False)
                continue
            results.append(r)
            found[mode] = r["ns"]
        for what in found.get("native", {}):
            if what in found.get("cistern", {}):
                theirs, ours = found["native"][what], found["cistern"][what]
                # CuPy's pool is compiled, and has no others to think of; numba asks the driver each time.
                limit = most if what.startswith("alloc") else None
                c.add(f"{library}: {what}", f"{ours:,.0f} ns, its own {theirs:,.0f} ns", f"at most {limit} x" if limit else "",
                      ours <= limit * theirs if limit else None)
    return shared.finish("cost", c, results)


if __name__ == "__main__":
    sys.exit(main())
