"""PyTorch, CuPy and numba in one process, on one cache: what one frees the next one uses.

    python sharing.py                 a GPU, with torch, cupy and numba-cuda installed

Each library has a cache of its own otherwise, and what it holds free is lost to the others: a program that fills 60 % of the GPU
through one of them and frees it is out of memory when it wants as much through the next.
"""

import cistern

cistern.torch.enable()  # before CUDA starts
cistern.cupy.enable()
cistern.numba.enable()

import cupy  # noqa: E402
import numpy  # noqa: E402
import torch  # noqa: E402
from numba import cuda  # noqa: E402


def held():
    """What Cistern has got from the driver, and how often it asked."""
    device = cistern.stats()["devices"][0]
    return device["reserved"]["all"]["current"], device["device_allocs"]


def main():
    size = int(0.6 * torch.cuda.mem_get_info()[1]) >> 21 << 21

    # The same bytes, three times.
    a = cupy.full(size, 1, dtype=cupy.uint8)
    print("cupy  filled %.1f GiB, the last byte is %d" % (size / 2**30, int(a[-1])))
    del a
    before = held()
    b = torch.full((size,), 2, dtype=torch.uint8, device="cuda")
    print("torch filled %.1f GiB, the last byte is %d" % (size / 2**30, int(b[-1])))
    del b
    c = cuda.device_array(size, dtype=numpy.uint8)
    torch.as_tensor(c, device="cuda").fill_(2)  # each works on the others' arrays, in place
    part = c[size - 1000:]
    part.copy_to_device(part.copy_to_host() + 1)
    print("numba filled %.1f GiB, the last byte is %d" % (size / 2**30, int(part.copy_to_host()[-1])))
    print("the driver was asked for %d MiB more, %d times" % ((held()[0] - before[0]) >> 20, held()[1] - before[1]))
    assert held()[0] - before[0] < 64 << 20
    del c, part

    # Arrays pass from one to the other without a copy, and one table has the memory of all.
    with cistern.tag("shared"):
        x = torch.randn(100, device="cuda")
        y = cupy.random.randn(100)
    z = cupy.asarray(x) + y
    w = torch.as_tensor(z, device="cuda").sum()
    print("a sum over both: %.3f" % float(w))
    device = cistern.stats()["devices"][0]
    for use in device["libraries"]:
        print("%-6s %3d blocks, %6d bytes asked for" % (use["library"], use["blocks"], use["requested"]))
    print("under the tag: %d bytes" % sum(t["requested"] for t in device["tags"] if t["name"] == "shared"))
    assert sum(u["requested"] for u in device["libraries"]) == device["requested"]["all"]["current"]
    print("ok")


if __name__ == "__main__":
    main()
