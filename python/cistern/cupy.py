"""CuPy on Cistern.

    import cistern
    cistern.cupy.enable()

From then on CuPy's arrays come from the same cache as PyTorch's and numba's: what one frees, the others use. It may be
called at any time; arrays that exist stay where they are. The library is loaded by CuPy's next request.

Memory is allocated on CuPy's current stream of the current device and given back in that stream's order, as CuPy's own
pool does it: at once for the same stream, and for others when the GPU has come so far. What another stream uses as well
must be kept until that is done, as with CuPy's pool.

Streams: those that CuPy made and that memory was allocated on are not destroyed with their Stream object, as arrays often
live longer, but used again for the next Stream of the same kind. A stream made by others (Stream.from_external,
ExternalStream) must exist until the arrays that were allocated on it are gone.

CUDA graphs: from Stream.begin_capture to end_capture what the stream allocates comes from a pool of its own, whose
memory has no other use until the Graph object is gone. So it is for streams that join the capture. Arrays from before that the
graph uses have to be kept by the program, as always.

What stays CuPy's: pinned host memory, and malloc_managed, malloc_async and the like where a program asks for them by name.
cupy.get_default_memory_pool() gives a pool that speaks for Cistern (MemoryPool). Memory hooks are not called: they are a feature
of CuPy's pool.
"""

import threading
from typing import Any, Callable, List, Literal, Optional, Tuple

from . import _cooperate, _cupy_streams, _library, _memory
from ._errors import CisternError, OutOfMemoryError, say

__all__ = ["MemoryPool", "cooperate", "disable", "enable", "malloc"]

_lock = threading.RLock()
_allocate: Optional[Callable[[int], Any]] = None  # once the library is loaded
_before: Optional[Tuple[Any, Any]] = None  # what enable replaced: the allocator, get_default_memory_pool
_with_cupy: Optional[_cooperate.Cooperation] = None


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as e:
        raise CisternError("CuPy is not installed, or cannot be imported: %s" % e) from None
    if not hasattr(getattr(cupy.cuda.memory, "CFunctionAllocatorMemory", None), "__init__"):
        raise CisternError("CuPy %s is too old for Cistern: it has no CFunctionAllocator" % cupy.__version__)
    if getattr(cupy.cuda.runtime, "is_hip", False):
        raise CisternError("this CuPy is built for ROCm; Cistern is for CUDA")
    return cupy


def enable() -> None:
    """Has CuPy allocate from Cistern. Arrays that exist stay where they are. A second call does nothing.

    Raises:
        CisternError: CuPy is missing, `cistern.cupy.cooperate` is in force, or it is called inside of
            `with cupy.cuda.using_allocator(...)`.

    Example:
        cistern.cupy.enable()
    """
    global _before
    with _lock:
        if _before is not None:
            return
        cupy = _cupy()
        if _with_cupy is not None:
            raise CisternError("CuPy keeps its own pool: cistern.cupy.cooperate() is in force; undo it by .remove() first")
        _library.claim()
        before = _global_allocator(cupy)
        _set_allocator(cupy, _allocate or malloc)
        _before = before, cupy.get_default_memory_pool
        pool = MemoryPool(_before[1]())
        cupy.get_default_memory_pool = lambda: pool
        _cupy_streams.follow(cupy)


def disable() -> None:
    """Restores CuPy's former allocator. Arrays that exist stay in Cistern's memory, and are freed there."""
    global _before
    with _lock:
        if _before is None:
            return
        cupy = _cupy()
        if _global_allocator(cupy) in (malloc, _allocate):  # else the program has set another
            _set_allocator(cupy, _before[0])
        cupy.get_default_memory_pool = _before[1]
        _cupy_streams.unfollow()
        _before = None


def _set_allocator(cupy: Any, allocator: Any) -> None:
    try:
        cupy.cuda.set_allocator(allocator)
    except ValueError as e:
        raise CisternError("CuPy's allocator cannot be changed here: %s" % e) from None


def _global_allocator(cupy: Any) -> Any:
    """CuPy's allocator where no using_allocator() is in force."""
    current = cupy.cuda.get_allocator()
    _set_allocator(cupy, current)  # refused inside of using_allocator, where it is the thread's own
    return current


def malloc(size: int) -> Any:
    """Allocates memory from Cistern on CuPy's current stream: the allocator that `enable` gives CuPy.

    Args:
        size: bytes.

    Returns:
        A `cupy.cuda.MemoryPointer`.

    Raises:
        CisternError: CuPy or the library is missing. When memory is out it is `cupy.cuda.memory.OutOfMemoryError`.

    Example:
        with cupy.cuda.using_allocator(cistern.cupy.malloc):
            table = cupy.zeros(1 << 20)
    """
    return (_allocate or _start())(size)


def _start() -> Callable[[int], Any]:
    """Loads the library and makes the function that allocates."""
    global _allocate
    with _lock:
        if _allocate is None:
            cupy = _cupy()
            _cupy_streams.follow(cupy)
            _allocate = _allocator(cupy, _memory.library())
            # What CuPy's own pool holds free is of no more use.
            if _before is not None:
                try:
                    _before[1]().free_all_blocks()
                except Exception as e:
                    say("CuPy's pool keeps what it holds: %s" % e)
                if _global_allocator(cupy) is malloc:
                    _set_allocator(cupy, _allocate)  # one Python function less from now on
        return _allocate


def _allocator(cupy: Any, lib: Any) -> Callable[[int], Any]:
    sources = _memory.Sources(lib, "cupy")
    source_of, new_source = sources.known.get, sources.add
    obtain = lib.cistern_source_malloc
    cached = _memory.CachedSources(lib, "cupy")
    cached_of = cached.known.get
    obtain_cached = _memory.address(lib, "cistern_source_malloc")
    give_back = _memory.address(lib, "cistern_source_free")
    current_stream, current_device = cupy.cuda.get_current_stream, cupy.cuda.device.get_device_id
    # Memory that CuPy gets and gives back by C functions of two pointers and the device, without Python.
    Owned, MemoryPointer = cupy.cuda.memory.CFunctionAllocatorMemory, cupy.cuda.memory.MemoryPointer
    null = 2 if _cupy_streams.null_is_per_thread() else 0
    seen, captures = _cupy_streams.seen, _cupy_streams.captures
    devices: List[int] = []

    def allocate(size: int) -> Any:
        if type(size) is not int:
            size = int(size)
        stream = current_stream()
        handle = stream.ptr or null
        device = current_device()
        if device not in devices:
            join_devices(device)
        if handle not in seen:
            _cupy_streams.first_seen(cupy, lib, stream, handle, device)
        if captures:
            _cupy_streams.join(stream, handle, device)
        source = cached_of(handle)
        if source is not None:
            owned = Owned(size, source, obtain_cached, give_back, device)
            if owned.ptr:
                return MemoryPointer(owned, 0)
        else:
            cached.add(handle)
        p = obtain(source_of(handle) or new_source(handle), size, device)
        if not p and size:
            p = again(size, device, handle)
        owned = Owned(0, 0, 0, give_back, device)
        owned.ptr, owned.size = p or 0, size
        return MemoryPointer(owned, 0)

    def join_devices(device: int) -> None:
        """CuPy's kernels may use arrays of other devices, for which it enables peer access where the devices have it. That does
        not hold for memory that is mapped, so it is done here too."""
        for other in devices:
            for a, b in ((device, other), (other, device)):
                if cupy.cuda.runtime.deviceCanAccessPeer(a, b) and lib.cistern_peer(b, a) != _library.OK:
                    say("memory of device %d is not accessible from device %d: %s" % (b, a, _library.last_error(lib)))
        devices.append(device)

    def again(size: int, device: int, handle: int) -> int:
        """What CuPy does when there is no memory: arrays in unreferenced cycles are found and freed."""
        e = _memory.failure(lib)
        if isinstance(e, OutOfMemoryError):
            import gc

            gc.collect()
            p = obtain(source_of(handle) or new_source(handle), size, device)
            if p:
                return int(p)
            e = _memory.failure(lib)
        if not isinstance(e, OutOfMemoryError):
            raise e
        error = cupy.cuda.memory.OutOfMemoryError(size, -1)
        error.args = (str(e),)
        raise error from None

    return allocate


class MemoryPool:
    """The result of `cupy.get_default_memory_pool()` while CuPy allocates from Cistern, so that programs need no change.

    All figures are of the current device. `free_all_blocks` returns free memory, Cistern's and that of CuPy's own pool, to the
    driver. `used_bytes` is the memory of CuPy's arrays. `free_bytes` is the memory cached for all libraries, and
    `n_free_blocks` its pieces. A limit has no effect: the setting `limit` of `CISTERN_CONF` is that of all libraries.

    Args:
        own: CuPy's own pool, which has the arrays from before.
    """

    def __init__(self, own: Any) -> None:
        self._own = own  # CuPy's pool: arrays from before are in it
        self._limit = 0
        self._said = False

    def malloc(self, size: int) -> Any:
        return malloc(size)

    def free_all_blocks(self, stream: Any = None) -> None:
        self._own.free_all_blocks(stream)
        if _allocate is not None:
            _library.trim(_device())

    def free_all_free(self) -> None:
        self.free_all_blocks()

    def n_free_blocks(self) -> int:
        return _current("inactive") + int(self._own.n_free_blocks())

    def used_bytes(self) -> int:
        ours = int(_memory.use("cupy", _device()).allocated) if _allocate is not None else 0
        return ours + int(self._own.used_bytes())

    def free_bytes(self) -> int:
        return _current("inactive_bytes") + int(self._own.free_bytes())

    def total_bytes(self) -> int:
        return self.used_bytes() + self.free_bytes()

    def set_limit(self, size: Optional[int] = None, fraction: Optional[float] = None) -> None:
        if size is not None and fraction is not None:
            raise ValueError("size and fraction cannot be specified at one time")
        if size is None and fraction is not None:
            if not 0 <= fraction <= 1:
                raise ValueError("memory limit fraction out of range: %s" % fraction)
            size = int(fraction * _cupy().cuda.runtime.memGetInfo()[1])
        if size is not None and size < 0:
            raise ValueError("memory limit size out of range: %s" % size)
        self._limit = size or 0
        if self._limit and not self._said:
            self._said = True
            say("a limit of CuPy's pool has no effect on memory from Cistern: CISTERN_CONF=limit:SIZE is that of all libraries")

    def get_limit(self) -> int:
        return self._limit


def _device() -> int:
    return int(_cupy().cuda.device.get_device_id())


def _current(what: "Literal['inactive', 'inactive_bytes']") -> int:
    if _allocate is None:
        return 0
    device = _device()
    for d in _library.stats()["devices"]:
        if d["device"] == device:
            return d[what]["all"]["current"]
    return 0


def cooperate() -> _cooperate.Cooperation:
    """Has CuPy, with its own pool, and Cistern return free memory for each other's requests.

    When Cistern has no memory for another library, CuPy's pool returns its free blocks; its pinned host memory stays. When
    CuPy's allocator has none, Cistern returns its free memory, and CuPy tries again.

    Returns:
        An object whose `remove()` ends it.

    Raises:
        CisternError: CuPy is missing, or is on Cistern already.
    """
    global _with_cupy
    with _lock:
        if _with_cupy is not None:
            return _with_cupy
        if _before is not None:
            raise CisternError("CuPy's memory is Cistern's already: cistern.cupy.enable() was called")
        cupy = _cupy()
        theirs = _global_allocator(cupy)
        error = cupy.cuda.memory.OutOfMemoryError
        driver_error = cupy.cuda.runtime.CUDARuntimeError
        no_memory = getattr(cupy.cuda.runtime, "errorMemoryAllocation", 2)
        current_device = cupy.cuda.device.get_device_id

        def allocate(size: int) -> Any:
            try:
                return theirs(size)
            except error:
                if not _cooperate.trimmed(current_device()):
                    raise
            except driver_error as e:  # of an allocator without a pool
                if e.status != no_memory or not _cooperate.trimmed(current_device()):
                    raise
            return theirs(size)

        def give(device: int, missing: int) -> bool:
            pools = [cupy.get_default_memory_pool(), getattr(theirs, "__self__", None)]
            given = False
            with cupy.cuda.Device(device):
                for pool in {id(p): p for p in pools if hasattr(p, "free_all_blocks")}.values():
                    before = pool.total_bytes()
                    pool.free_all_blocks()
                    given = given or pool.total_bytes() < before
            return given

        def undo() -> None:
            global _with_cupy
            with _lock:
                _with_cupy = None
                if _global_allocator(cupy) is allocate:
                    _set_allocator(cupy, theirs)

        _set_allocator(cupy, allocate)
        _with_cupy = _cooperate.Cooperation(_cooperate.on_out_of_memory(give), undo)
        return _with_cupy


