"""Memory for other libraries of Python: what cistern.cupy, numba, rmm and cuda_core ask of the C library.

A request is one call of a C function. It releases the interpreter lock, because it may wait for the GPU, which may wait for
a Python function that was put on a stream; but what is cached can be asked for alone, which never waits and keeps the
lock, as giving memory back does.

The library is loaded, and Go started, by the first request: until then the process may fork.
"""

import ctypes
import threading
from typing import Any, Dict, Optional

from . import _library
from ._errors import CisternError

HOST_ORDER = 1  # CISTERN_ALLOC_HOST_ORDER
CACHED = 2  # CISTERN_ALLOC_CACHED

FORKED = _library.FORKED


class AllocOptions(ctypes.Structure):
    """cistern_alloc_options."""

    _fields_ = [("size", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("pool", ctypes.c_uint64 * 2),
                ("library", ctypes.c_uint32), ("reserved", ctypes.c_uint32)]


class Source(ctypes.Structure):
    """cistern_source: the calling library, and its stream."""

    _fields_ = [("stream", ctypes.c_void_p), ("options", AllocOptions)]


# Functions beyond those of _library, with what they return and take.
_FUNCTIONS = (
    ("cistern_library", ctypes.c_uint32, [ctypes.c_char_p]),
    ("cistern_library_usage", ctypes.c_int,
     [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t)]),
    ("cistern_source_malloc", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]),
    ("cistern_release_on", ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p]),
    ("cistern_record_stream", ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p]),
    ("cistern_node_allow_pause", ctypes.c_int, [ctypes.c_int, ctypes.c_void_p]),
    ("cistern_node_deny_pause", ctypes.c_int, [ctypes.c_int]),
    ("cistern_node_available", ctypes.c_int, [ctypes.c_int, ctypes.POINTER(ctypes.c_uint64)]),
    ("cistern_node_build", ctypes.c_int,
     [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)]),
    ("cistern_node_commit", ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p]),
    ("cistern_node_abandon", ctypes.c_int, [ctypes.c_void_p]),
    ("cistern_node_open", ctypes.c_int,
     [ctypes.c_int, ctypes.c_char_p, ctypes.c_int64, ctypes.c_uint64, ctypes.POINTER(ctypes.c_void_p)]),
    ("cistern_node_close", ctypes.c_int, [ctypes.c_void_p]),
    ("cistern_node_write", ctypes.c_int, [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p]),
    ("cistern_node_read", ctypes.c_int, [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p]),
    ("cistern_node_describe", ctypes.c_void_p, [ctypes.c_void_p]),
    ("cistern_node_objects", ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_int64]),
    ("cistern_node_remove", ctypes.c_int, [ctypes.c_char_p, ctypes.c_int64, ctypes.c_uint64]),
    ("cistern_peer", ctypes.c_int, [ctypes.c_int, ctypes.c_int]),
    ("cistern_stream_durable", ctypes.c_int, [ctypes.c_int, ctypes.c_void_p]),
    ("cistern_pool_create", ctypes.c_int, [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]),
    ("cistern_pool_release", ctypes.c_int, [ctypes.c_int, ctypes.c_void_p]),
    ("cistern_capture_begin", ctypes.c_int, [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]),
    ("cistern_capture_end", ctypes.c_int, [ctypes.c_int, ctypes.c_void_p]),
    ("cistern_on_out_of_memory", ctypes.c_int, [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]),
    ("cistern_off_out_of_memory", ctypes.c_int, [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]),
)

_loaded: Any = None


def library() -> Any:
    """The C library with all functions that are used here; loads it, which starts Go."""
    global _loaded
    if _loaded is not None:
        return _loaded
    from . import _tags

    lib = _library.load()
    for name, result, arguments in _FUNCTIONS:
        try:
            f = getattr(lib, name)
        except AttributeError:
            raise CisternError("%s is of another version: it has no %s" % (lib._name, name)) from None
        f.restype, f.argtypes = result, arguments
    _loaded, _library.used_beside_torch = lib, True  # by several threads at once, all alike
    _tags.library_started()
    return _loaded


def address(lib: Any, name: str) -> int:
    """Where a function of the library is, for callers without Python."""
    found = ctypes.cast(getattr(lib, name), ctypes.c_void_p).value
    assert found is not None
    return found


def releaser(lib: Any) -> Any:
    """A function that gives an address back and keeps the interpreter lock. Its answer is a code."""
    f = ctypes.PyDLL(lib._name).cistern_release
    f.restype, f.argtypes = ctypes.c_int, [ctypes.c_void_p]
    return f


def number(lib: Any, name: str) -> int:
    """The number that statistics tell a library by."""
    found = int(lib.cistern_library(name.encode()))
    if found == 0:
        raise CisternError(_library.last_error(lib))
    return found


def failure(lib: Any) -> CisternError:
    """The calling thread's last failure, to be raised: OutOfMemoryError where every reclaim stage failed."""
    return _library.failure(lib, lib.cistern_last_error(None, 0))


class Sources:
    """The sources of one library, by stream."""

    def __init__(self, lib: Any, name: str, flags: int = 0) -> None:
        self._number, self._flags = number(lib, name), flags
        self.known: Dict[int, Any] = {}  # by the stream's handle, as ctypes passes it to C

    def make(self, stream: int) -> Source:
        s = Source(stream=stream)
        s.options.size, s.options.flags, s.options.library = ctypes.sizeof(AllocOptions), self._flags, self._number
        return s

    def add(self, stream: int) -> Any:
        """The source of a stream, from now on known."""
        s = self.make(stream)
        if len(self.known) >= 4096:  # handles of streams long gone
            self.known = {}
        found = self.known[stream] = ctypes.byref(s)
        return found


class CachedSources:
    """The sources of one library for what is cached alone, by stream, as addresses: for callers that call C themselves and keep
    the interpreter lock."""

    def __init__(self, lib: Any, name: str) -> None:
        self._sources, self._all = Sources(lib, name, CACHED), []  # type: ignore[var-annotated]
        self.known: Dict[int, int] = {}

    def add(self, stream: int) -> None:
        if len(self._all) < 4096:  # they stay where they are, as another thread may be using one
            self._all.append(self._sources.make(stream))
            self.known[stream] = ctypes.addressof(self._all[-1])


class Memory:
    """Memory of one library, for callers that a Python function is fast enough for."""

    def __init__(self, name: str, flags: int = 0) -> None:
        self.lib = library()
        self._sources = Sources(self.lib, name, flags)
        self._malloc = self.lib.cistern_source_malloc
        self._release = releaser(self.lib)

    def allocate(self, size: int, device: int, stream: int = 0) -> int:
        """The address of so many bytes, 0 for none. Raises OutOfMemoryError or CisternError."""
        p: Optional[int] = self._malloc(self._sources.known.get(stream) or self._sources.add(stream), size, device)
        if not p and size:
            raise failure(self.lib)
        return p or 0

    def release(self, address: int) -> None:
        """Gives memory back in the order of the stream that it was allocated on."""
        if self._release(address) not in (_library.OK, FORKED):
            raise CisternError(_library.last_error(self.lib))

    def release_on(self, address: int, stream: int) -> None:
        """Gives memory back in the order of a stream behind all its use; the one that it was allocated on may be gone."""
        if self.lib.cistern_release_on(address, stream) not in (_library.OK, FORKED):
            raise CisternError(_library.last_error(self.lib))

    def release_after(self, address: int, stream: int) -> None:
        """release, for memory that another stream, which exists, may have used as well."""
        _library.check(self.lib, self.lib.cistern_record_stream(address, stream))
        self.release(address)


class LibraryUse(ctypes.Structure):
    """cistern_library_use."""

    _fields_ = [("library", ctypes.c_uint32), ("reserved", ctypes.c_uint32), ("blocks", ctypes.c_int64),
                ("requested", ctypes.c_uint64), ("allocated", ctypes.c_uint64)]


def use(name: str, device: int) -> LibraryUse:
    """What a library has out on a device."""
    lib = library()
    wanted, n, most = number(lib, name), ctypes.c_size_t(), 256
    found = (LibraryUse * most)()
    _library.check(lib, lib.cistern_library_usage(device, found, most, ctypes.byref(n)))
    for u in found[:min(n.value, most)]:
        if u.library == wanted:
            return u
    return LibraryUse(library=wanted)


class Pool:
    """A pool for one capture, which is released with this object."""

    _mutex = threading.Lock()
    _next = 0

    def __init__(self, device: int) -> None:
        with Pool._mutex:
            Pool._next += 1
            n = Pool._next
        self.device = device
        # No other pools have this first number: PyTorch counts both of its from 0.
        self.id = (ctypes.c_uint64 * 2)(0x6369737465726e, n)
        self._lib = library()
        _library.check(self._lib, self._lib.cistern_pool_create(device, self.id, None))

    def __del__(self) -> None:
        lib: Any = getattr(self, "_lib", None)
        if lib is not None:
            lib.cistern_pool_release(self.device, self.id)
