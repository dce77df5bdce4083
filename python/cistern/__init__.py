"""Cistern: one cache of GPU memory under every library of a process.

    import cistern.torch
    cistern.torch.enable()            # before CUDA starts; `cistern run -- python train.py` does it without a line
    cistern.cupy.enable()             # and CuPy, numba, RMM, cuda.core on the same cache: what one frees the others use
    cistern.numba.enable()

    with cistern.tag("optimizer"):    # labels what is allocated inside
        ...
    cistern.stats()                   # memory now and at its peak, by device, tag, library and pool
    cistern.memory_stats()            # the same by the names of torch.cuda.memory_stats
    cistern.snapshot("run.pickle")    # for PyTorch's viewer, `cistern inspect` and `cistern replay`
    cistern.trim()                    # returns free memory to the driver, as torch.cuda.empty_cache() does
    cistern.attribution()             # keeps the Python stacks of requests: stack_usage(), write_trace(file)
    cistern.report("oom")             # a file for each request that fails, which `cistern report` explains
    cistern.Report("oom")             # that explanation, in a notebook
    cistern.step()                    # the end of a step of training, for `cistern fleet`
    cistern.pause(tag="optimizer")    # returns physical memory while addresses stay; resume() brings it back

Importing this package does no work and imports neither PyTorch nor the library behind it. The library is loaded by the
first call that needs it, in a process that uses PyTorch only once CUDA has started there: until then statistics are empty,
so that the process can still fork. They are also empty in a child of fork and on a machine without a GPU.

All exceptions that Cistern has of its own derive from CisternError. TypeError and ValueError are for arguments of a wrong
type or value.
"""

from __future__ import annotations

from ._errors import CisternError, OutOfMemoryError, SettingsError
from ._tags import tag
from ._version import version

TYPE_CHECKING = False  # as typing has it, which takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any, Callable, List, Optional, Union

    from ._attribution import Attribution
    from ._report import Report as Report
    from .hints import Device, Keep, MemoryStats, Path, PauseResult, Pool, Removable, Size, Stacks, StackUse, Stats

__version__ = version
__all__ = ["CisternError", "OutOfMemoryError", "Report", "SettingsError", "attribution", "empty_cache", "max_memory_allocated",
           "max_memory_reserved", "memory_allocated", "memory_reserved", "memory_stats", "on_out_of_memory", "pause",
           "pause_buffers", "report", "reset_accumulated_memory_stats", "reset_peak_memory_stats", "resume", "snapshot",
           "stack_usage", "stats", "step", "tag", "trim", "version", "write_trace"]


def _part(name: str) -> Any:
    """A module of the package. The library, once loaded, has imported all of them: see _library.prepare."""
    try:
        return __import__(__name__ + "." + name, fromlist=[name])
    except OSError as e:  # no descriptor is left, as for anything else that this process would open
        raise CisternError("cistern.%s cannot be imported: %s" % (name, e)) from None


def stats() -> Stats:
    """Returns the memory of this process on Cistern, now and at its peak, by device, tag, library and pool.

    Returns:
        A dictionary (`cistern.hints.Stats`) with Cistern's `"version"`, the `"settings"` in force, and under `"devices"` an
        entry for each device in use. Sizes are bytes. `"devices"` is an empty list where Cistern does not run: in a PyTorch
        program before CUDA starts, in a child of fork, and without a GPU.

    Raises:
        SettingsError: `CISTERN_CONF` has bad settings.
        CisternError: the library or the driver cannot be used.

    Example:
        for device in cistern.stats()["devices"]:
            print(device["device"], device["reserved"]["all"]["peak"])
    """
    found: Stats = _part("_library").stats()
    return found


def memory_stats(device: Optional[Device] = None) -> MemoryStats:
    """Returns the statistics of a device by the names of `torch.cuda.memory_stats`, for all libraries together.

    Args:
        device: the device; None is the current one.

    Returns:
        A dictionary of flat keys such as `"allocated_bytes.all.peak"` and `"num_ooms"`; empty where Cistern does not run.

    Raises:
        CisternError: there is no such device.

    Example:
        peak = cistern.memory_stats().get("reserved_bytes.all.peak", 0)
    """
    found: MemoryStats = _part("_stats").flat(device)
    return found


def memory_allocated(device: Optional[Device] = None) -> int:
    """Returns the allocated bytes of a device, as `torch.cuda.memory_allocated` does, for all libraries together.

    Args:
        device: the device; None is the current one.

    Returns:
        Bytes; 0 where Cistern does not run.
    """
    return memory_stats(device).get("allocated_bytes.all.current", 0)


def max_memory_allocated(device: Optional[Device] = None) -> int:
    """Returns the peak of the allocated bytes since the start or the last `reset_peak_memory_stats`.

    Args:
        device: the device; None is the current one.

    Returns:
        Bytes; 0 where Cistern does not run.

    Example:
        cistern.reset_peak_memory_stats()
        train_step()
        print(cistern.max_memory_allocated())
    """
    return memory_stats(device).get("allocated_bytes.all.peak", 0)


def memory_reserved(device: Optional[Device] = None) -> int:
    """Returns the bytes of physical memory that Cistern has of a device, allocated or cached.

    Args:
        device: the device; None is the current one.

    Returns:
        Bytes; 0 where Cistern does not run.
    """
    return memory_stats(device).get("reserved_bytes.all.current", 0)


def max_memory_reserved(device: Optional[Device] = None) -> int:
    """Returns the peak of the reserved bytes since the start or the last `reset_peak_memory_stats`.

    Args:
        device: the device; None is the current one.

    Returns:
        Bytes; 0 where Cistern does not run.
    """
    return memory_stats(device).get("reserved_bytes.all.peak", 0)


def reset_peak_memory_stats(device: Optional[Device] = None) -> None:
    """Sets the peaks of a device to what is current. It does nothing where Cistern does not run.

    Args:
        device: the device; None is the current one.

    Raises:
        CisternError: there is no such device.
    """
    _part("_stats").reset_peaks(device)


def reset_accumulated_memory_stats(device: Optional[Device] = None) -> None:
    """Sets the totals and counters of a device to 0. It does nothing where Cistern does not run.

    Args:
        device: the device; None is the current one.

    Raises:
        CisternError: there is no such device.
    """
    _part("_stats").reset_accumulated(device)


def snapshot(path: Path) -> None:
    """Writes all memory that Cistern has, and the history where it is kept, as a PyTorch memory snapshot.

    Args:
        path: the file, compressed if the name ends in `.gz`. It appears whole or not at all.

    Raises:
        CisternError: Cistern does not run yet, or the file cannot be written.

    Example:
        cistern.snapshot("now.pickle")
    """
    _part("_library").snapshot(path)


def attribution(stacks: Stacks = "python", sample: Size = "64KiB", history: Optional[int] = None) -> Attribution:
    """Keeps the stacks of requests from now on, for `stack_usage`, `write_trace` and the files of `report`.

    A request costs more with a stack, and with history.

    Args:
        stacks: `"python"` keeps the stack of Python functions of each request, `"native"` that of native ones,
            `"all"` both, `"off"` none.
        sample: of requests smaller than this only some get a stack, in proportion to their size; 0: all get one.
        history: how many of the last events of each device are kept, 0 for none; None leaves it as it is.

    Returns:
        An object whose `remove()` restores the former state; it is also a context manager. History that was off before is
        dropped then, so call `write_trace` first.

    Raises:
        CisternError: stacks are not available, for example of a version of Python that Cistern does not know.

    Example:
        with cistern.attribution(history=100_000):
            train_step()
            cistern.write_trace("step.cistern")
    """
    found: Attribution = _part("_attribution").Attribution(stacks, sample, history)
    return found


def stack_usage(device: Optional[Device] = None) -> List[StackUse]:
    """Returns the current allocations of a device by the stack that requested them. It looks at every block.

    Args:
        device: the device; None is the current one.

    Returns:
        For each stack, the most bytes first, its number, its blocks, their bytes as `"requested"` and as `"allocated"`
        (rounded), and its `"frames"`, innermost first. Stack 0, without frames, stands for allocations without a known
        stack. The list is empty while no stacks are kept, and where Cistern does not run.

    Example:
        for use in cistern.stack_usage()[:3]:
            print(use["allocated"], use["frames"][:1])
    """
    found: List[StackUse] = _part("_attribution").stack_usage(device)
    return found


def write_trace(path: Path) -> None:
    """Writes all memory that Cistern has, and the history where it is kept, in Cistern's own format.

    The file has tags, libraries, threads and stacks. `cistern inspect`, `report`, `replay` and `convert` read it. Without a
    history it has the current allocations alone, and a `UserWarning` says so: `cistern.attribution(history=100_000)` keeps one.

    Args:
        path: the file. It appears whole or not at all.

    Raises:
        CisternError: Cistern does not run yet, or the file cannot be written.

    Example:
        cistern.write_trace("now.cistern")
    """
    _part("_attribution").write_trace(path)


def report(folder: Optional[Path], child: bool = False) -> None:
    """Has a file `oom-PID-N.cistern` written for each request that runs out of memory.

    Files are written for the first four such requests of the process; a fifth has the newest. `cistern report FILE` and
    `Report` explain them. Remedies are found by a replay of the history: where none is kept, the last 1,000,000 events are
    from now on.

    Args:
        folder: the folder of the files, which is made if needed; None ends it.
        child: True has the first four files explained at once, by a process of its own, into FILE.txt and FILE.html.

    Raises:
        CisternError: the folder cannot be written.

    Example:
        cistern.report("oom")
    """
    _part("_attribution").report(folder, child)


def trim(device: Optional[Device] = None) -> None:
    """Returns the free memory of a device to the driver, as far as no graph needs it. It waits for the GPU where it must.

    It does nothing where Cistern does not run.

    Args:
        device: the device; None or -1: every device.

    Raises:
        CisternError: there is no such device.

    Example:
        cistern.trim()
    """
    _part("_library").trim(device)


def empty_cache() -> None:
    """Returns the free memory of every device to the driver: `trim()` by the name of `torch.cuda.empty_cache`."""
    trim()


def on_out_of_memory(fn: Callable[[int, int], object], device: Optional[Device] = None) -> Removable:
    """Has a function called before a request to Cistern fails, when all that Cistern can do has not sufficed.

    It is called in the thread of the request, and must not allocate GPU memory. An exception in it is printed once, and
    counts as False.

    Args:
        fn: a function of the device's number and the bytes that are missing. It gives memory back, to the driver or to
            Cistern, and returns whether it gave any; then the request is tried again.
        device: the device; None: every device.

    Returns:
        An object whose `remove()` ends it, as does the end of Python.

    Example:
        def free(device: int, missing: int) -> bool:
            batches.clear()
            return True

        registration = cistern.on_out_of_memory(free)
    """
    found: Removable = _part("_cooperate").on_out_of_memory(fn, device)
    return found


def pause(tag: Optional[Union[str, tag]] = None, pool: Optional[Pool] = None, device: Optional[Device] = None, keep: Keep = "host",
          dir: Optional[Path] = None, captured: bool = False) -> PauseResult:
    """Returns the physical memory of allocations to the device, while their addresses stay reserved.

    The allocations must not be used until `resume`. It waits for the work of the device. Paused allocations stay paused.

    Args:
        tag: pauses what has this tag.
        pool: pauses what is in this pool: a `torch.cuda.MemPool` or the pair of numbers that is its id. With neither a tag
            nor a pool, everything is paused.
        device: the device; None is the current one.
        keep: `"host"` keeps contents in page-locked host memory, `"disk"` in an unnamed file, `"drop"` drops them.
        dir: the folder of the file of `keep="disk"`.
        captured: True includes memory that a CUDA graph uses, which must not be launched before `resume`.

    Returns:
        The `"blocks"` that lost memory and their `"bytes"`, the `"physical"` bytes returned, the bytes `"kept"`, and the bytes
        that stayed because other allocations share them (`"shared"`).

    Raises:
        CisternError: some of it cannot be paused, and nothing is: it is shared with another process, registered for
            communication, used by a graph, or of an upstream that cannot do it.

    Example:
        cistern.pause(tag="optimizer")
        evaluate()
        cistern.resume()
    """
    found: PauseResult = _part("_pause").pause(tag, pool, device, keep, dir, captured)
    return found


def resume(tag: Optional[Union[str, tag]] = None, pool: Optional[Pool] = None, device: Optional[Device] = None) -> PauseResult:
    """Gives paused allocations their memory and contents again, at the same addresses.

    Args:
        tag: resumes what has this tag; None: any.
        pool: resumes what is in this pool; None: any.
        device: the device; None is the current one.

    Returns:
        The same figures as `pause`, of what has memory again.

    Raises:
        OutOfMemoryError: the device has too little memory, and everything stays paused. Free some and try again.
    """
    found: PauseResult = _part("_pause").resume(tag, pool, device)
    return found


def pause_buffers(bytes: Size, device: Optional[Device] = None) -> None:
    """Allocates page-locked host memory for the contents of the next pauses, which makes them much faster.

    A pause keeps what it needed for the next anyway.

    Args:
        bytes: the size; 0 frees the buffers that are empty.
        device: the device; None is the current one.

    Raises:
        CisternError: Cistern does not run yet, or the host has too little memory.

    Example:
        cistern.pause_buffers("8GiB")
    """
    _part("_pause").buffers(bytes, device)


def step() -> None:
    """Marks the end of a step of training, for `cistern fleet`, which compares ranks step by step.

    Under `cistern run --record` and `cistern record -o FOLDER/` it reads the counters of the process's devices. Elsewhere it does
    nothing. Without a call, each step of the first optimizer of PyTorch that steps is a mark.

    Example:
        for batch in loader:
            train(batch)
            cistern.step()
    """
    _part("_fleet").step()


def __getattr__(name: str) -> Any:
    # `import cistern` is enough for cistern.torch and the like, which are loaded when they are first named.
    if name == "Report":
        return _part("_report").Report
    if name in ("compat", "cuda_core", "cupy", "fleet", "hints", "lightning", "node", "numba", "rmm", "tensorboard", "torch", "transformers",
                "wandb"):
        import importlib

        return importlib.import_module(__name__ + "." + name)
    raise AttributeError("module %r has no attribute %r" % (__name__, name))
