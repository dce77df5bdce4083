"""The classic case: one library fills 60 % of the GPU and frees it, and the next asks for as much. With separate caches it is
out of memory; with Cistern it gets what the first had, without a driver call for memory. Every order of PyTorch, CuPy and numba,
each in a process of its own.

    python fill.py [--share 0.6] [--native-only] [--cistern-only]
"""
import argparse
import itertools
import sys

import shared
from shared import common

# parts: in how many pieces the memory is asked for; streams: each library on a stream of its own.
SHAPES = {"whole": (1, False), "24 parts": (24, False), "own streams": (6, True)}
DRIVER = ("device_allocs", "device_frees", "remaps")


def work(order, mode, share):
    if mode == "cistern":
        shared.enable(order)
    found = []
    for shape in SHAPES if mode == "cistern" else ("whole",):
        if mode == "cistern" and found:
            import cistern
            cistern.trim()
        found.append({"order": order, "mode": mode, "shape": shape, "steps": fill(order, mode, share, *SHAPES[shape])})
    shared.answer({"found": found})


def fill(order, mode, share, parts, streams):
    size = int(shared.total() * share) // parts >> 21 << 21
    steps = []
    for name in order:
        source = shared.Source(name)
        stream = source.stream() if streams and name != "numba" else None
        before = shared.counters(*DRIVER) if steps and mode == "cistern" else None
        step = {"library": name, "bytes": size * parts, "ok": True}
        held = []
        try:
            for _ in range(parts):
                held.append(source.allocate(size, stream))
            for memory in held:
                source.touch(memory)
            memory = None
            shared.synchronize()
        except Exception as e:
            if not shared.is_out_of_memory(e):
                raise
            step["ok"], step["words"] = False, " ".join(str(e).split())[:160]
        if before is not None:
            after = shared.counters(*DRIVER)
            step["driver"] = {k: after[k] - before[k] for k in DRIVER}
        held.clear()
        shared.collect()
        steps.append(step)
        if not step["ok"]:
            break
    return steps


def judge(c, words, found):
    steps, failed = found["steps"], next((s for s in found["steps"] if not s["ok"]), None)
    if found["mode"] == "native":
        c.add(f"{words}, separate caches", f"out of memory in {failed['library']}" if failed else "no failure", "out of memory", failed is not None)
        return
    calls = sum(n for s in steps[1:] for n in s["driver"].values())
    ok = failed is None and len(steps) == 3
    got = f"3 x {common.size(steps[0]['bytes'])}, {calls} driver calls after the first" if ok else f"out of memory in {failed['library']}"
    if SHAPES[found["shape"]][1]:  # memory that moves between streams is mapped anew
        c.add(f"{words}, Cistern, {found['shape']}", got, "fits", ok)
    else:
        c.add(f"{words}, Cistern, {found['shape']}", got, "fits, 0 calls", ok and calls == 0)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--share", type=float, default=0.6)
    p.add_argument("--native-only", action="store_true")
    p.add_argument("--cistern-only", action="store_true")
    p.add_argument("--timeout", type=float, default=90)
    p.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return work(args.child[0].split(","), args.child[1], args.share)
    shared.prepare()
    c, results = common.Checks("libs-fill"), []
    for order in itertools.permutations(shared.LIBRARIES):
        words = " then ".join(order)
        for mode in ("native", "cistern"):
            if args.native_only and mode != "native" or args.cistern_only and mode != "cistern":
                continue
            done = shared.child("fill.py", [",".join(order), mode, "--share", args.share], args.timeout)
            r = done.last_json()
            if done.rc != 0 or r is None:
                print(done.err[-2000:])
                c.add(f"{words}, {mode}", done.why(), "runs", False)
                continue
            results += r["found"]
            for f in r["found"]:
                judge(c, words, f)
    return shared.finish("fill", c, results)


if __name__ == "__main__":
    sys.exit(main())
