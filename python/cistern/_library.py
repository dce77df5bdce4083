"""libcistern.so: where it lies, its functions as ctypes knows them, and when it may be loaded.

Loading it starts Go, whose threads a child of fork does not have. A process that uses PyTorch may fork until CUDA
starts, and many do (DataLoader workers); so in such a process the library is loaded by the adapter, when CUDA starts,
and never from here. The adapter and this module load the same file, which the dynamic linker makes the same library.
"""

import os
import sys
from typing import TYPE_CHECKING, Any, Callable, List, Optional

from . import _platform
from ._errors import CisternError, OutOfMemoryError, SettingsError, say
from ._version import version

if TYPE_CHECKING:
    from .hints import Device, Path, Stats

PACKAGE = os.path.dirname(os.path.abspath(__file__))

OK = 0
OUT_OF_MEMORY = 1
FORKED = 4

_NO_GPU = "no GPU to use"  # how the library's message begins where the machine has none
_BAD_SETTINGS = "CISTERN_CONF: "

# Set by cistern.torch: whether the allocator that PyTorch was given has started the library.
started_by_torch: Optional[Callable[[], bool]] = None
# Set when another library of Python's draws on the cache, which may be before PyTorch does.
used_beside_torch = False
# Set when such a library is put on the cache, which it uses at its next request.
claimed = False
# What waits for the library to run.
waiting: List[Callable[[], None]] = []
# Set by cistern.torch: the address of the adapter's function through which the library calls Python's when a device is out of
# memory, as locks of the adapter's have to be let go around it. 0: the library calls them itself.
asks_through = 0

_lib: Any = None
_complained = False


def candidates(name: str) -> List[str]:
    """Where a library of Cistern's may lie: in the wheel, in the bundle (which may lie in a tree), in the source tree."""
    return [
        os.path.join(PACKAGE, "lib", name),
        os.path.join(os.path.dirname(PACKAGE), "lib", name),
        os.path.join(os.path.dirname(os.path.dirname(PACKAGE)), "lib", name),
    ]


def path() -> str:
    """The library's file; CISTERN_LIBRARY comes first."""
    named = os.environ.get("CISTERN_LIBRARY")
    if named:
        if os.path.isfile(named):
            return os.path.abspath(named)
        raise CisternError("CISTERN_LIBRARY: there is no file %s" % named)
    return find("libcistern.so")


def claim() -> None:
    """Called when a library is put on the cache. CisternError, now and not at its next request, if the file is missing."""
    global claimed
    path()
    claimed = True


def find(name: str) -> str:
    for file in candidates(name):
        if os.path.isfile(file):
            return file
    raise CisternError("%s is missing: looked in %s" % (name, ", ".join(map(os.path.dirname, candidates(name)))))


def check_machine(file: str) -> None:
    """CisternError if the library is not for this machine. Under another C library than glibc, loading it may crash."""
    words = _platform.problem(file)
    if words:
        raise CisternError(words)


def prepare() -> None:
    """Imports what functions of the package import when they are called: by then the process may have no descriptor left."""
    try:
        import ctypes  # noqa: F401
        import functools  # noqa: F401
        import json  # noqa: F401

        from . import _attribution, _command, _cooperate, _memory, _pause, _pools, _stats, _tags  # noqa: F401
    except OSError as e:
        raise CisternError("the package cannot be imported: %s" % e) from None


def load() -> Any:
    """The library, loaded (which starts Go) if it was not yet."""
    global _lib
    if _lib is None:
        prepare()
        import ctypes

        file = path()
        check_machine(file)
        try:
            lib = ctypes.CDLL(file)
        except OSError as e:
            raise CisternError(_platform.explain(file) or "%s cannot be loaded: %s" % (file, e)) from None
        c = ctypes
        for function, result, arguments in (
            ("cistern_version", c.c_char_p, []),
            ("cistern_init", c.c_int, [c.c_char_p]),
            ("cistern_device_count", c.c_int, []),
            ("cistern_last_error", c.c_int, [c.c_char_p, c.c_size_t]),
            ("cistern_stats_json", c.c_void_p, []),
            ("cistern_string_free", None, [c.c_void_p]),
            ("cistern_snapshot_write", c.c_int, [c.c_char_p]),
            ("cistern_trim", c.c_int, [c.c_int]),
            ("cistern_tag_push", c.c_int, [c.c_char_p]),
            ("cistern_tag_pop", c.c_int, []),
            ("cistern_get_stats", c.c_int, [c.c_int, c.c_void_p]),
            ("cistern_reset_peaks", c.c_int, [c.c_int]),
            ("cistern_reset_accumulated", c.c_int, [c.c_int]),
            ("cistern_set_limit", c.c_int, [c.c_int, c.c_uint64]),
            ("cistern_get_limit", c.c_int, [c.c_int, c.POINTER(c.c_uint64)]),
            ("cistern_mem_info", c.c_int, [c.c_int, c.POINTER(c.c_uint64), c.POINTER(c.c_uint64)]),
            ("cistern_history", c.c_int, [c.c_int, c.c_size_t]),
            ("cistern_pool_get_stats", c.c_int, [c.c_int, c.c_void_p, c.c_void_p]),
            ("cistern_pause", c.c_int, [c.c_int, c.c_void_p, c.c_void_p]),
            ("cistern_resume", c.c_int, [c.c_int, c.c_void_p, c.c_void_p]),
            ("cistern_pause_buffers", c.c_int, [c.c_int, c.c_uint64]),
            ("cistern_malloc", c.c_void_p, [c.c_ssize_t, c.c_int, c.c_void_p]),
            ("cistern_free", None, [c.c_void_p, c.c_ssize_t, c.c_int, c.c_void_p]),
        ):
            try:
                f = getattr(lib, function)
            except AttributeError:
                raise CisternError("%s is of another version: it has no %s" % (file, function)) from None
            f.restype, f.argtypes = result, arguments
        _lib = lib
        run_waiting()
    return _lib


def run_waiting() -> None:
    """Called when the library runs: what waited for it is done."""
    while waiting:
        waiting.pop(0)()


def running_already() -> bool:
    """Whether the library runs in this process."""
    return _lib is not None or started_by_torch is not None and started_by_torch()


def running() -> bool:
    """Whether the library runs in this process, or may be started now."""
    if used_beside_torch:
        return True
    if started_by_torch is not None:
        return started_by_torch()
    if _lib is not None:
        return True
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or getattr(getattr(torch, "version", None), "cuda", None) is None:
        return True  # no PyTorch with CUDA here
    return bool(cuda.is_initialized())


def last_error(lib: Any) -> str:
    import ctypes

    buffer = ctypes.create_string_buffer(4096)
    lib.cistern_last_error(buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace")


def check(lib: Any, code: int) -> None:
    if code != OK:
        raise failure(lib, code)


def failure(lib: Any, code: int) -> CisternError:
    """The calling thread's last failure, to be raised."""
    words = last_error(lib) or "Cistern failed with code %d and no message" % code
    if code == OUT_OF_MEMORY:
        return OutOfMemoryError(words)
    return SettingsError(words) if words.startswith(_BAD_SETTINGS) else CisternError(words)


def in_use() -> Any:
    """The library, started; None where Cistern does not run: before CUDA starts in a program that uses PyTorch, in a child of
    fork, and without a GPU."""
    if not running():
        return None
    lib = load()
    if lib.cistern_device_count() >= 0:
        return lib
    code = lib.cistern_last_error(None, 0)
    if code == FORKED or last_error(lib).startswith(_NO_GPU):
        return None
    raise failure(lib, code)


def start(conf: Optional[str]) -> None:
    """Starts the library with these settings; None: CISTERN_CONF."""
    lib = load()
    check(lib, lib.cistern_init(None if conf is None else conf.encode()))


def stats() -> "Stats":
    lib = in_use()
    if lib is None:
        return {"version": version, "settings": os.environ.get("CISTERN_CONF", ""), "devices": []}
    import ctypes
    import json

    text = lib.cistern_stats_json()
    if not text:
        raise failure(lib, lib.cistern_last_error(None, 0))
    try:
        found: "Stats" = json.loads(ctypes.string_at(text))
    finally:
        lib.cistern_string_free(text)
    return found


def writer(file: "Path") -> Any:
    """The library, for a function that writes what it has into a file."""
    if not running():
        raise CisternError("%s: nothing to write: CUDA has not started in this process" % os.fsdecode(os.fspath(file)))
    return load()


def snapshot(file: "Path") -> None:
    lib = writer(file)
    check(lib, lib.cistern_snapshot_write(os.fsencode(file)))


def trim(device: "Optional[Device]") -> None:
    from ._pools import device_index

    index = -1 if device is None or device == -1 else device_index(device)
    lib = in_use()
    if lib is not None:
        check(lib, lib.cistern_trim(index))


def tag_push(name: bytes) -> bool:
    global _complained
    lib = load()
    code = lib.cistern_tag_push(name)
    if code not in (OK, FORKED) and not _complained:
        _complained = True
        say("tags are ignored: " + last_error(lib))  # a label is not worth a program
    return bool(code == OK)


def tag_pop() -> None:
    load().cistern_tag_pop()
