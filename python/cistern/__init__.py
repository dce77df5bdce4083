"""Cistern: one cache of GPU memory under every library of a process.

    import cistern.torch
    cistern.torch.enable()            # before CUDA starts; `cistern run -- python train.py` does it without a line
    cistern.cupy.enable()             # and CuPy, numba, RMM, cuda.core on the same cache: what one frees the others use
    cistern.numba.enable()

    with cistern.tag("optimizer"):    # labels what is allocated inside
        ...
    cistern.stats()                   # what is held, now and at its highest, for each device and tag
    cistern.snapshot("run.pickle")    # for PyTorch's viewer, `cistern inspect` and `cistern replay`
    cistern.trim()                    # gives free memory back to the driver
    cistern.attribution()             # keeps where memory was asked for, by Python stack: stack_usage(), write_trace(file)
    cistern.report("oom")             # a file for each out-of-memory, which `cistern report` explains
    cistern.pause(tag="optimizer")    # gives physical memory back while addresses stay; resume() brings it back

Importing this package does no work and imports neither PyTorch nor the library behind it. The library is loaded by the
first call that needs it, in a process that uses PyTorch only once CUDA has started there: until then `stats()` is empty,
so that the process can still fork.
"""

from __future__ import annotations

from ._errors import CisternError, OutOfMemoryError
from ._tags import tag
from ._version import version

TYPE_CHECKING = False  # as typing has it, which takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional

__version__ = version
__all__ = ["CisternError", "OutOfMemoryError", "attribution", "on_out_of_memory", "pause", "pause_buffers", "report", "resume",
           "snapshot", "stack_usage", "stats", "tag", "trim", "version", "write_trace"]


def _part(name: str) -> Any:
    """A module of the package. The library, once loaded, has imported all of them: see _library.prepare."""
    try:
        return __import__(__name__ + "." + name, fromlist=[name])
    except OSError as e:  # no descriptor is left, as for anything else that this process would open
        raise CisternError("cistern.%s cannot be imported: %s" % (name, e)) from None


def stats() -> Dict[str, Any]:
    """What Cistern holds in this process, as its C library reports it (cistern_stats_json): a dictionary with one entry
    for each device in use under "devices". Sizes are bytes. Empty where Cistern does not run: in a PyTorch program
    before CUDA starts, and in a child of fork."""
    return _part("_library").stats()


def snapshot(path: Any) -> None:
    """Writes all memory that Cistern holds, and the history where that is on, as a PyTorch memory snapshot; compressed
    if the name ends in .gz. The file appears whole or not at all. CisternError where Cistern does not run yet."""
    _part("_library").snapshot(path)


def attribution(stacks: str = "python", sample: Any = "64KiB", history: Optional[int] = None) -> Any:
    """Keeps where memory is asked for, from now on: "python" has the stack of Python functions of each request, "native" that
    of native ones, "native+python" both, "off" none. stack_usage(), write_trace() and the files of report() tell them. Of requests
    smaller than sample (bytes, or a size such as "64KiB") only some get a stack, in proportion to their size; 0: all get one.

    history is how many events, the last ones, are kept of each device, 0 for none, None as before. A request costs more with a
    stack, and with history.

    Ends with .remove() of what is returned, or with a `with` block, which put back what was before; history that was off before is
    forgotten then, so write_trace() comes first. CisternError where stacks are not available, as of a Python that Cistern
    does not know."""
    return _part("_attribution").Attribution(stacks, sample, history)


def stack_usage(device: Any = None) -> List[Dict[str, Any]]:
    """What is held of a device (default: the current one) by where it was asked for, the most bytes first: for each stack its
    number, how many blocks, their bytes as "requested" and as "allocated" (rounded), and its "frames" in words, innermost first.
    Stack 0, without frames, is what no stack is known of. It looks at every block. Empty where Cistern does not run yet."""
    return _part("_attribution").stack_usage(device)


def write_trace(path: Any) -> None:
    """Writes all memory that Cistern holds, and the history where that is on, with tags, libraries, threads and stacks, in Cistern's
    own format, for `cistern inspect`, `report`, `replay` and `convert`. The file appears whole or not at all. CisternError where
    Cistern does not run yet, or the file cannot be written."""
    _part("_attribution").write_trace(path)


def report(folder: Any, child: bool = False) -> None:
    """Has a file oom-PID-N.cistern written into the folder, which is made if need be, for each request that fails for want of
    memory: of this process the first four, and in the fifth's place the newest. `cistern report FILE` explains it; child=True has
    that done at once for the four, by a process of its own, into FILE.txt and FILE.html. What would have helped is found by
    replaying the history: where none is kept, that of the last 1,000,000 events is from now on. None ends it. CisternError
    where the folder cannot be written."""
    _part("_attribution").report(folder, child)


def trim(device: int = -1) -> None:
    """Gives the free memory of the device (-1: of every device) that nothing pins back to the driver. Waits for the GPU
    where it must; does nothing where Cistern does not run yet."""
    _part("_library").trim(device)


def on_out_of_memory(fn: Any, device: Any = None) -> Any:
    """Has fn(device, missing) called when a device (None: any) has no memory left for a request to Cistern and all that
    Cistern can do has failed. It gives back what it can, to the driver or to Cistern, and returns whether it gave anything; then
    the request is tried again. It is called in whatever thread asks for memory, and must not ask for any itself. What it
    raises is printed once, and counts as nothing given. .remove() of what is returned ends it, as does the end of Python."""
    return _part("_cooperate").on_out_of_memory(fn, device)


def pause(tag: Any = None, pool: Any = None, device: Any = None, keep: str = "host", dir: Any = None,
          captured: bool = False) -> Dict[str, int]:
    """Gives the physical memory of live allocations back to the device, while their addresses stay theirs: nothing must use
    them until resume(). It waits for the work that the device has; pausing what is paused changes nothing.

    What is paused is what bears the tag and lies in the pool (a torch.cuda.MemPool, or the pair of numbers that is its id;
    (0, 0) is what is in no pool), of one device (default: the current one); with neither, everything. keep says what becomes
    of contents: "host" keeps them in page-locked host memory, "disk" in an unnamed file in the folder dir, "drop" forgets
    them. captured=True includes memory that a CUDA graph uses, which must not be launched before resume().

    The result says how many blocks lost memory and their bytes, the physical bytes given back, the bytes kept, and the bytes
    that stayed because others share them. CisternError, and nothing is paused, where some of it cannot be: shared with
    another process, registered for communication, used by a graph, or of an upstream that cannot do it."""
    return _part("_pause").pause(tag, pool, device, keep, dir, captured)


def resume(tag: Any = None, pool: Any = None, device: Any = None) -> Dict[str, int]:
    """Gives what pause() took its memory and contents again, at the same addresses: all of the device, or of a tag and pool
    as pause() has them. OutOfMemoryError, and everything stays paused, where the device has too little; free something and
    try again."""
    return _part("_pause").resume(tag, pool, device)


def pause_buffers(bytes: Any, device: Any = None) -> None:
    """Keeps page-locked host memory of so many bytes ("8GiB") for the contents of the next pauses, which are much faster with
    it; a pause keeps what it needed for the next anyway. 0 gives back what holds nothing."""
    _part("_pause").buffers(bytes, device)


def __getattr__(name: str) -> Any:
    # `import cistern` is enough for cistern.torch and the like, which are loaded when they are first named.
    if name in ("cuda_core", "cupy", "numba", "rmm", "torch"):
        import importlib

        return importlib.import_module(__name__ + "." + name)
    raise AttributeError("module %r has no attribute %r" % (__name__, name))
