"""A self-test of the adapter: whether PyTorch, as it is installed, and the adapter understand each other.

    _selftest FILE

The adapter runs over the simulated device, and is asked by functions of PyTorch's own, so that a difference between PyTorch's
headers and its libraries shows. It needs no GPU: where there is no driver, memory is not asked for, as PyTorch asks the driver for the
device first. The first difference is printed, and the exit code is 1.
"""

import os
import sys
from typing import Any, List

from . import _injected, _library, _toolchain
from . import torch as ours


class Differs(Exception):
    """What PyTorch says and what it should say."""


def expect(what: str, got: Any, wanted: Any) -> None:
    if got != wanted:
        raise Differs("%s: expected %r, got %r" % (what, wanted, got))


def run(file: str) -> str:
    """Tests the adapter; what was tested."""
    import torch

    adapter = ours.load(file, _toolchain.find_torch().release)
    words = adapter.cistern_torch_install(os.fsencode(_library.path()), b"driver:sim:1GiB")
    if words:
        raise Differs(words.decode("utf-8", "replace"))
    expect("the name of PyTorch's allocator", torch.cuda.memory.get_allocator_backend(), "cistern")
    words = adapter.cistern_torch_start(1)
    if words:
        raise Differs(words.decode("utf-8", "replace"))
    c = torch._C

    def bytes_of(what: str, which: str = "current") -> Any:
        return c._cuda_memoryStats(0)[what + "_bytes"]["all"][which]

    expect("what is allocated at first", bytes_of("allocated"), 0)
    if not _injected.has_driver():
        return "the interface; there is no driver of NVIDIA's, so no memory was allocated"
    size = 3 << 20
    memory = c._cuda_cudaCachingAllocator_raw_alloc(size, 0)
    expect("what is allocated", bytes_of("allocated"), size)
    blocks = [(s["address"], b["size"]) for s in torch.cuda.memory.memory_snapshot() for b in s["blocks"]
              if b["state"] == "active_allocated"]
    expect("the snapshot", blocks[:1], [(memory, size)])
    c._cuda_cudaCachingAllocator_raw_delete(memory)
    expect("what is allocated after it was freed", bytes_of("allocated"), 0)
    c._cuda_emptyCache()
    expect("what is reserved after the cache was emptied", bytes_of("reserved"), 0)
    c._cuda_resetPeakMemoryStats(0)
    expect("the peak after it was reset", bytes_of("allocated", "peak"), 0)
    return "the interface, and memory of a simulated device"


def main(arguments: List[str]) -> int:
    try:
        sys.stdout.write("%s\n" % run(arguments[0]))
    except Exception as e:
        sys.stdout.write("%s\n" % (e if isinstance(e, Differs) else "%s: %s" % (type(e).__name__, str(e).partition("\n")[0])))
        return 1
    return 0
