"""Pools of special memory for PyTorch: where their memory comes from, how much it may be, and what helps when it is short.

PyTorch makes the pool and has no word for the rest, which the adapter (adapter/upstream.cpp) gives to the library when the
pool is made. What Python has to keep for it, functions and their owners, is kept here by number until the adapter says that
they are not called any more.
"""

import atexit
import ctypes
import itertools
import os
import re
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple, Union, cast

from . import _library
from ._errors import CisternError, SettingsError, say

if TYPE_CHECKING:
    from .hints import Device, MemoryKind, Path, Pool, PoolId, PoolStats, Size

# Kinds of memory that a pool can hold: CISTERN_POOL_ in cistern.h.
KINDS = {"chunks": 0, "ipc_legacy": 2, "single_handle": 4}

_INVALID = 2

# void *alloc(void *ctx, size_t size, int device, void *stream) and its counterpart, as cistern.h has them.
ALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_ASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
_DROPPED = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Options(ctypes.Structure):
    """cistern_pool_options."""

    _fields_ = [
        ("size", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("alloc", ctypes.c_void_p), ("free", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p), ("upstream", ctypes.c_char_p), ("limit", ctypes.c_uint64), ("spill", ctypes.c_char_p),
        ("on_out_of_memory", ctypes.c_void_p), ("on_out_of_memory_ctx", ctypes.c_void_p),
    ]


class _Wanted(ctypes.Structure):
    """PoolWanted of adapter/upstream.h."""

    _fields_ = [("options", _Options), ("bare", ctypes.c_uint32), ("reserved", ctypes.c_uint32),
                ("dropped", ctypes.c_void_p), ("token", ctypes.c_void_p)]


class _Stats(ctypes.Structure):
    """cistern_pool_stats."""

    _fields_ = (
        [("size", ctypes.c_uint32), ("reserved_field", ctypes.c_uint32)]
        + [(n, ctypes.c_uint64) for n in ("reserved", "peak_reserved", "requested", "allocated", "cached", "paused", "spilled",
                                          "limit")]
        + [("blocks", ctypes.c_int64)]
    )


class External:
    """Memory from C functions of the program, for `cistern.torch.MemPool(upstream=...)`.

    The functions have the signatures of cistern.h: `void *alloc(void *ctx, size_t size, int device, void *stream)` and
    `void free(void *ctx, void *ptr, size_t size, int device, void *stream)`. They are called from any thread, for whole
    segments, with that device current. `alloc` returns addresses aligned to 512 bytes, and NULL when there is no memory. When
    Python ends they are called no more.

    Args:
        alloc: a ctypes function, or an address as an integer.
        free: its counterpart.
        ctx: an address that both are called with.
        keep: an object that is referenced, as the functions are, until the last segment is freed.

    Raises:
        TypeError: `alloc`, `free` or `ctx` is neither a ctypes function, a pointer nor an address.
        ValueError: `alloc` or `free` is null.

    Example:
        upstream = cistern.torch.External.library("libarena.so", "arena_alloc", "arena_free")
        pool = cistern.torch.MemPool(upstream=upstream)
    """

    def __init__(self, alloc: object, free: object, ctx: object = None, keep: object = None) -> None:
        self._bare = False
        self._words: Optional[str] = None  # the upstream by name that it is as well
        self._alloc = _address(alloc, "alloc")
        self._free = _address(free, "free")
        self._ctx = None if ctx is None else _address(ctx, "ctx")
        self._keep = (alloc, free, ctx, keep)

    @classmethod
    def library(cls, path: "Path", alloc: str, free: str) -> "External":
        """Takes functions from a shared library, as `torch.cuda.memory.CUDAPluggableAllocator` does.

        Their signatures are `void *alloc(ssize_t size, int device, cudaStream_t stream)` and
        `void free(void *ptr, ssize_t size, int device, cudaStream_t stream)`.

        Args:
            path: the library.
            alloc: the name of the function that allocates.
            free: the name of the function that frees.

        Raises:
            CisternError: the library cannot be loaded, or lacks a function.
        """
        try:
            functions = ctypes.CDLL(os.fspath(path))
            made = cls(getattr(functions, alloc), getattr(functions, free), keep=functions)
        except (AttributeError, OSError) as e:
            raise CisternError("no upstream: %s" % e) from None
        made._bare = True
        file = os.fspath(path)
        name = os.path.abspath(file) if isinstance(file, str) and os.sep in file else file
        if isinstance(name, str) and not re.search(r"[,;|]|^\s|\s$", name + alloc + free):
            made._words = "external:library=%s,alloc=%s,free=%s" % (name, alloc, free)
        return made

    def __repr__(self) -> str:
        return "cistern.torch.External(alloc=%#x, free=%#x)" % (self._alloc, self._free)


class PythonAllocator(External):
    """Memory from Python functions of the program, for `cistern.torch.MemPool(upstream=...)` and `cistern.torch.enable(upstream=...)`.

    The functions are called for whole segments, with the interpreter lock, from any thread that allocates, frees or trims; the
    device is current and no lock of Cistern's is held. A call takes some microseconds, and longer where another thread has the
    interpreter lock. Requests that are met from cache do not call them.

    - An exception in `alloc`, or a result that is no address, counts as no memory; one in `free`, as a free. The first one of
      each function is reported on standard error with its traceback.
    - Memory that `alloc` or `free` allocates from the same source while it runs, as by a tensor, counts as none: the call
      fails.
    - When Python ends they are called no more: memory that is out stays with the process.
    - A child of fork does not call them.

    Args:
        alloc: `alloc(size, device, stream)` returns the address of that many bytes as an integer, aligned to 512 bytes; None
            or 0 where there is no memory. The stream is its handle as an integer.
        free: `free(ptr, size, device, stream)` takes memory back. The GPU is done with it.

    Raises:
        TypeError: `alloc` or `free` cannot be called.

    Example:
        upstream = cistern.torch.PythonAllocator(arena.allocate, arena.deallocate)
        pool = cistern.torch.MemPool(upstream=upstream)
    """

    def __init__(self, alloc: "Callable[[int, int, int], Optional[int]]", free: "Callable[[int, int, int, int], object]") -> None:
        for what, f in (("alloc", alloc), ("free", free)):
            if not callable(f):
                raise TypeError("%s: expected a function, got %s" % (what, type(f).__name__))
        inside = threading.local()
        reported: List[str] = []

        def report(what: str, effect: str) -> None:
            if what not in reported:
                reported.append(what)
                say("the %s function of an upstream failed, which counts as %s:" % (what, effect), every_rank=True)
                _print_exception()

        def call_alloc(ctx: Any, size: int, device: int, stream: Optional[int]) -> Optional[int]:
            try:
                if getattr(inside, "calling", False):
                    raise RecursionError("the function asks for memory that it is to provide")
                inside.calling = True
                try:
                    address = alloc(size, device, stream or 0)
                finally:
                    inside.calling = False
                if address is None:
                    return None
                if not isinstance(address, int) or isinstance(address, bool) or not 0 <= address < 1 << 64:
                    raise TypeError("expected the address of memory as an integer, or None, got %r" % (address,))
                return address or None
            except BaseException:
                report("alloc", "no memory")
                return None

        def call_free(ctx: Any, ptr: Optional[int], size: int, device: int, stream: Optional[int]) -> None:
            try:
                free(ptr or 0, size, device, stream or 0)
            except BaseException:
                report("free", "a free")

        super().__init__(ALLOC(call_alloc), FREE(call_free))


def _print_exception() -> None:
    try:
        traceback.print_exc(file=sys.stderr)
    except (AttributeError, OSError, ValueError):
        pass  # no standard error, or a closed one


def _address(f: Any, what: str) -> int:
    if isinstance(f, int) and not isinstance(f, bool):
        address: Optional[int] = f
    else:
        try:
            if isinstance(f, (str, bytes)):
                raise TypeError
            address = ctypes.cast(f, ctypes.c_void_p).value
        except (ctypes.ArgumentError, TypeError):
            raise TypeError("%s: expected a ctypes function or pointer, or an address as an integer, got %s" %
                            (what, type(f).__name__)) from None
    if not address or address < 0:
        raise ValueError("%s: expected an address, got a null pointer" % what)
    return address


# What is kept for pools, by number: the callbacks made here, and what the program gave.
_kept: Dict[int, Any] = {}
_numbers = itertools.count(1)
_lock = threading.Lock()
_follows_exit = False  # the adapter will be notified when Python ends


def _drop(number: Optional[int]) -> None:
    _kept.pop(number or 0, None)


_dropped = _DROPPED(_drop)


def _asker(function: Callable[[int], Any]) -> Any:
    """The C function by which the library asks a Python one."""
    said: List[bool] = []

    def ask(ctx: Any, device: int, missing: int) -> int:
        try:
            return 1 if function(missing) else 0
        except BaseException:
            if not said:
                said.append(True)
                say("the on_oom of a pool failed, which counts as no help:", every_rank=True)
                _print_exception()
            return 0

    return _ASK(ask)


_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1}
_UNITS.update({n + "ib": 1 << 10 * i for i, n in enumerate("kmgtpe", 1)})
_UNITS.update({n: 1 << 10 * i for i, n in enumerate("kmgtp", 1)})
_UNITS.update({n + "b": 1000 ** i for i, n in enumerate("kmgtp", 1)})


def size_in_bytes(value: Union[int, str], what: str) -> int:
    """2147483648 of "2GiB": sizes as the library's settings have them."""
    if isinstance(value, int) and not isinstance(value, bool):
        n = value
    elif isinstance(value, str):
        found = re.fullmatch(r"\s*([0-9]+)(\.[0-9]+)?\s*([A-Za-z]*)\s*", value)
        unit = _UNITS.get(found.group(3).lower()) if found else None
        if found is None or unit is None or found.group(2) and unit == 1:
            raise ValueError("%s: %r is not a size in bytes: write 80G or 80GiB, 1.5GiB, 512MiB, 80GB or a plain number" % (what, value))
        n = int(found.group(1)) * unit
        if found.group(2):
            digits = found.group(2)[1:]
            n += int(digits) * unit // 10 ** len(digits)
    else:
        raise TypeError("%s: expected a number of bytes or a size such as \"2GiB\", got %s" % (what, type(value).__name__))
    if not 0 <= n < 1 << 63:
        raise ValueError("%s: %r is not a size that memory can have" % (what, value))
    return n


def describe(memory: str, upstream: Any, limit: Any, on_oom: Any, allocator: Any) -> Tuple[_Wanted, Any]:
    """The options of a pool as the adapter takes them, and what has to be kept for it. allocator is PyTorch's argument."""
    if memory not in KINDS:
        raise ValueError("memory: expected one of %s, got %r" % (", ".join(KINDS), memory))
    if upstream is not None and memory != "chunks":
        raise ValueError("a pool has one kind of memory: give memory or upstream, not both")
    if upstream is not None and allocator is not None:
        raise ValueError("a pool has one upstream: give allocator or upstream, not both")
    wanted = _Wanted()
    o = wanted.options
    o.size, o.flags = ctypes.sizeof(_Options), KINDS[memory]
    kept: Any = [upstream]
    if isinstance(upstream, External):
        o.alloc, o.free, o.ctx, wanted.bare = upstream._alloc, upstream._free, upstream._ctx, upstream._bare
    elif upstream is not None:
        o.upstream = _words(upstream, "upstream", "the name of an upstream such as \"nccl\", or cistern.torch.External")
    if limit is not None:
        o.limit = size_in_bytes(limit, "limit")
        if not o.limit:
            raise ValueError("limit: expected more than 0 bytes; leave it out for a pool without a limit of its own")
    if callable(on_oom):
        ask = _asker(on_oom)
        kept.append(ask)
        o.on_out_of_memory = ctypes.cast(ask, ctypes.c_void_p).value
    elif on_oom != "error":
        o.spill = _words(on_oom, "on_oom", "\"error\", the name of an upstream to go on with, or a function of the bytes that "
                         "are missing")
    return wanted, kept


def _words(value: Any, what: str, choices: str) -> bytes:
    if not isinstance(value, str):
        raise TypeError("%s: expected %s, got %s" % (what, choices, type(value).__name__))
    if not value or "\0" in value:
        raise ValueError("%s: expected %s, got %r" % (what, choices, value))
    return value.encode()


class MemPoolMixin:
    """A `torch.cuda.MemPool` of the current device, for `torch.cuda.use_mem_pool`, whose memory is of a kind of its own.

    An upstream gives whole segments, which the pool caches and cuts. Options follow its name after a colon, and adaptors
    stand before a bar, outermost first, as in cistern.h: `"async:threshold=1GiB"`, `"limiting:bytes=2GiB|nccl"`.
    Tensors of a pool over `"async"` can be sent to other processes where that is `"async:handles=posix"`.

    Args:
        memory: `"chunks"` is memory as everywhere else. `cudaIpcGetMemHandle` takes addresses of `"ipc_legacy"`, and RDMA
            registration takes any tensor of `"single_handle"`.
        upstream: where the memory comes from: `"device"`, `"virtual"`, `"async"`, `"managed"`, `"pinned"`, `"host_numa"`,
            `"nccl"`, `"external"`, or an `External` or a `PythonAllocator`.
        limit: what the pool may reserve, in bytes or as `"2GiB"`.
        on_oom: what happens when the pool is out of memory and what is cached does not help: `"error"`
            (`torch.OutOfMemoryError`), the name of an upstream to go on with, or a function of the bytes that are
            missing, which returns whether it gave some back.
        arguments: the arguments of `torch.cuda.MemPool`.

    Raises:
        SettingsError: the words make no pool.
        CisternError: PyTorch does not use Cistern's adapter.

    Example:
        pool = cistern.torch.MemPool(upstream="pinned", limit="2GiB")
        with torch.cuda.use_mem_pool(pool):
            table = torch.zeros(1 << 28, device="cuda")
    """

    if TYPE_CHECKING:
        @property
        def id(self) -> "PoolId": ...

    def __init__(self, memory: "MemoryKind" = "chunks", *, upstream: "Union[str, External, None]" = None,
                 limit: "Optional[Size]" = None, on_oom: "Union[str, Callable[[int], object]]" = "error", **arguments: Any) -> None:
        from . import torch as ours

        wanted, kept = describe(memory, upstream, limit, on_oom, arguments.get("allocator"))
        adapter = ours.adapter_in_use()
        import torch

        torch.cuda.init()
        super().__init__(**arguments)
        self._cistern_device = int(torch.cuda.current_device())
        o = wanted.options
        if o.flags or o.alloc or o.upstream or o.limit or o.spill or o.on_out_of_memory:
            _tell(adapter, self._cistern_device, self.id, wanted, kept)

    def cistern_stats(self) -> "PoolStats":
        """Returns the pool's memory on its device, as `pool_stats` does."""
        return stats(self.id, self._cistern_device)


def everywhere(adapter: Any, upstream: External) -> None:
    """Has all of PyTorch's memory come from functions of the program, for the rest of the process. CUDA has not started."""
    wanted, kept = describe("chunks", upstream, None, "error", None)
    _keep(adapter, wanted, kept)
    adapter.cistern_torch_upstream.restype = ctypes.c_int
    if not adapter.cistern_torch_upstream(ctypes.byref(wanted)):
        raise CisternError("no upstream: CUDA has started already")


def _keep(adapter: Any, wanted: _Wanted, kept: Any) -> None:
    """Keeps what wanted points to until the adapter says that it is not called any more."""
    global _follows_exit
    with _lock:
        if not _follows_exit:
            atexit.register(adapter.cistern_torch_python_ends)
            _follows_exit = True
        number = next(_numbers)
        _kept[number] = kept
    wanted.dropped, wanted.token = ctypes.cast(_dropped, ctypes.c_void_p).value, number


def _tell(adapter: Any, device: int, pool: Tuple[int, int], wanted: _Wanted, kept: Any) -> None:
    _keep(adapter, wanted, kept)
    tell = adapter.cistern_torch_pool
    tell.restype = ctypes.c_int
    tell.argtypes = [ctypes.c_int, ctypes.c_ulonglong, ctypes.c_ulonglong, ctypes.c_void_p, ctypes.POINTER(ctypes.c_char_p)]
    words = ctypes.c_char_p()
    code = tell(device, pool[0], pool[1], ctypes.byref(wanted), ctypes.byref(words))
    if code != _library.OK:
        said = (words.value or b"the pool cannot be made").decode("utf-8", "replace")
        raise SettingsError(said) if code == _INVALID else CisternError(said)


def device_index(device: "Optional[Device]") -> int:
    """The number of a device: of a number, "cuda:1", a torch.device or the like; None is the current one of the library that
    uses the GPU here, PyTorch before CuPy."""
    found: Any = device
    if isinstance(device, str) and re.fullmatch(r"cuda(:[0-9]+)?", device):
        found = int(device[5:]) if ":" in device else None
    elif not isinstance(device, (int, str)) and getattr(device, "type", "cuda") == "cuda":
        found = getattr(device, "index", getattr(device, "id", device))  # torch.device, cupy.cuda.Device
    if found is None:
        torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
        if torch is not None and torch.cuda.is_initialized():
            return int(torch.cuda.current_device())
        return int(cupy.cuda.runtime.getDevice()) if cupy is not None else 0
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise ValueError("device: expected the number of a GPU, \"cuda:1\" or None, got %r" % (device,))
    return found


def numbers(pool: "Pool") -> "PoolId":
    """The two numbers that name a pool: a torch.cuda.MemPool's, a graph's, or the numbers themselves."""
    found: Any = pool if isinstance(pool, (tuple, list)) else getattr(pool, "id", None)
    if callable(found):
        found = found()
    of_graph: Any = getattr(pool, "pool", None)  # torch.cuda.CUDAGraph
    if found is None and callable(of_graph):
        found = of_graph()
    if isinstance(found, (tuple, list)) and len(found) == 2 and all(isinstance(n, int) and 0 <= n < 1 << 64 for n in found):
        return int(found[0]), int(found[1])
    raise TypeError("pool: expected a torch.cuda.MemPool or its id, a pair of numbers, got %r" % (pool,))


def known(pool: "PoolId", device: int) -> bool:
    """Whether the library has the pool: it was allocated from on the device, and is not released."""
    s = _Stats()
    s.size = ctypes.sizeof(s)
    return bool(_library.load().cistern_pool_get_stats(device, (ctypes.c_uint64 * 2)(*pool), ctypes.byref(s)) == _library.OK)


def stats(pool: "PoolId", device: int) -> "PoolStats":
    """The pool's memory on the device."""
    lib = _library.load()
    s = _Stats()
    s.size = ctypes.sizeof(s)
    code = lib.cistern_pool_get_stats(device, (ctypes.c_uint64 * 2)(*pool), ctypes.byref(s))
    if code == _INVALID and 0 <= device < lib.cistern_device_count():
        s = _Stats()  # the library knows no such pool: nothing was ever allocated from it there
    else:
        _library.check(lib, code)
    found: Dict[str, int] = {n: int(getattr(s, n)) for n, *_ in _Stats._fields_ if n not in ("size", "reserved_field")}
    return cast("PoolStats", found)
