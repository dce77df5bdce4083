"""Allocators that stay separate and ask each other: one fills most of the GPU and frees it, and the other asks for as much.

    python cooperate.py
"""
import argparse
import sys

import shared
from shared import common

SHARE = 0.6

# What keeps its own memory, what is on Cistern, and which fills first.
CASES = (
    ("cupy", "torch", "own"), ("cupy", "torch", "cistern"),
    ("cupy", "numba", "own"), ("cupy", "numba", "cistern"),
    ("torch", "cupy", "own"), ("torch", "cupy", "cistern"),
    ("torch", "numba", "own"), ("torch", "numba", "cistern"),
    ("numba", "cupy", "own"), ("numba", "cupy", "cistern"),
    ("numba", "torch", "own"), ("numba", "torch", "cistern"),
)


def work(own, other, first, together):
    import cistern
    shared.enable([other])
    if together:
        getattr(cistern, own).cooperate()
    names = (own, other) if first == "own" else (other, own)
    # numba puts off freeing what is below a fifth of the GPU, and keeps nothing else.
    sizes = (0.15, 0.9) if own == "numba" and first == "own" else (SHARE, SHARE)
    filled, size = (int(shared.total() * s) >> 21 << 21 for s in sizes)
    source = shared.Source(names[0])
    memory = source.allocate(filled)
    source.touch(memory)
    shared.synchronize()
    del memory
    shared.collect()
    source, attempts, words = shared.Source(names[1]), 0, ""
    for attempts in (1, 2):
        try:
            memory = source.allocate(size)
            source.touch(memory)
            shared.synchronize()
            break
        except Exception as e:
            if not shared.is_out_of_memory(e):
                raise
            words = " ".join(str(e).split())[:160]
    else:
        attempts = 0
    shared.answer({"own": own, "cistern": other, "first": names[0], "together": together, "attempts": attempts, "words": words})


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--timeout", type=float, default=60)
    p.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return work(*args.child[:3], args.child[3] == "1")
    shared.prepare()
    c, results = common.Checks("libs-cooperate"), []
    for own, other, first in CASES:
        for together in (0, 1) if {own, other} == {"cupy", "torch"} else (1,):
            done = shared.child("cooperate.py", [own, other, first, together], args.timeout)
            r = done.last_json()
            what = f"{own} keeps its own, {other} is on Cistern, {own if first == 'own' else other} fills first" + ("" if together else ", not asked")
            if done.rc != 0 or r is None:
                print(done.err[-2000:])
                c.add(what, done.why(), "runs", False)
                continue
            results.append(r)
            got = f"got it at attempt {r['attempts']}" if r["attempts"] else "out of memory"
            if not together:
                c.add(what, got)
                continue
            # PyTorch tells only that a request has failed: its next one succeeds.
            most = 2 if own == "torch" and first == "cistern" else 1
            c.add(what, got, f"attempt {most}", 0 < r["attempts"] <= most)
    return shared.finish("cooperate", c, results)


if __name__ == "__main__":
    sys.exit(main())
