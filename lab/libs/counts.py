"""Statistics equal what a user can count by hand: torch.randn(100) adds 400 requested bytes, cupy.random.randn(100) 800 more,
and one table tells the libraries apart.

    python counts.py
"""
import argparse
import sys

import shared
from shared import common


def work():
    shared.enable(shared.LIBRARIES)
    import cupy
    import numpy
    import torch
    from numba import cuda
    import cistern
    # What each library keeps for itself from its first use on.
    torch.randn(10, device="cuda"), cupy.random.randn(10), cuda.to_device(numpy.zeros(3))
    shared.synchronize()
    shared.collect()
    rows, before = [], shared.requested()

    def step(what, library, bytes):
        nonlocal before
        now = shared.requested()
        rows.append({"what": what, "bytes": bytes, "all": now[0] - before[0],
                     "library": now[1].get(library, 0) - before[1].get(library, 0), "name": library,
                     "sum": sum(now[1].values()) == now[0]})
        before = now

    a = torch.randn(100, device="cuda")
    step("torch.randn(100)", "torch", 400)
    b = cupy.random.randn(100)
    step("cupy.random.randn(100)", "cupy", 800)
    c = cuda.device_array(100, dtype=numpy.float64)
    step("numba.cuda.device_array(100)", "numba", 800)
    d = torch.empty(3, 1000, 7, dtype=torch.bfloat16, device="cuda")
    step("torch.empty(3, 1000, 7, bfloat16)", "torch", 42000)
    e = cupy.empty((5, 5), dtype=cupy.int8)
    step("cupy.empty((5, 5), int8)", "cupy", 25)
    f = a * 2
    step("a * 2", "torch", 400)
    del a
    step("del a", "torch", -400)
    del b
    step("del b", "cupy", -800)
    del c
    shared.collect()
    step("del c", "numba", -800)
    with cistern.tag("mine"):
        g = cupy.zeros(1000, dtype=cupy.float32)
        h = torch.zeros(1000, device="cuda")
    step("tagged, cupy", "cupy", 4000)
    rows[-1]["all"] -= 4000  # PyTorch's, which came with it
    tags = {t["name"]: t["requested"] for t in cistern.stats()["devices"][0]["tags"]}
    rows.append({"what": "cistern.tag over two libraries", "bytes": 8000, "all": tags.get("mine"), "library": tags.get("mine"), "name": "tag", "sum": True})
    del d, e, f, g, h
    shared.answer({"rows": rows, "libraries": cistern.stats()["devices"][0]["libraries"]})


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--timeout", type=float, default=120)
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return work()
    shared.prepare()
    c, results = common.Checks("libs-counts"), []
    done = shared.child("counts.py", [], args.timeout)
    r = done.last_json()
    if done.rc != 0 or r is None:
        print(done.err[-3000:])
        c.add("counting", done.why(), "runs", False)
    else:
        results.append(r)
        for row in r["rows"]:
            c.add(row["what"], f"{row['all']:+} bytes, {row['name']} {row['library']:+}", f"{row['bytes']:+}",
                  row["all"] == row["bytes"] == row["library"] and row["sum"])
    return shared.finish("counts", c, results)


if __name__ == "__main__":
    sys.exit(main())
