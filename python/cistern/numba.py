"""numba (numba-cuda) on Cistern, through numba's external memory management.

    import cistern
    cistern.numba.enable()                                        # at any time; or, without a line,
    NUMBA_CUDA_MEMORY_MANAGER=cistern.numba python program.py

numba does not say on which stream it will use memory, so what it is given and gives back is ordered like this:

 - Memory is handed to numba once the host knows that the GPU is done with whatever used it before, and may be used on any
   stream at once, by numba or by those that numba's arrays are passed to. Memory that was just freed and is still in use may
   be waited for.
 - Memory that numba gives back counts as used by what was queued by then on the legacy default stream and all streams that
   wait for it: the default streams, and those that numba.cuda.stream() makes. So others, also on their own non-blocking
   streams, use it after that.
 - From the moment when numba is given a stream that does not wait for the legacy one (numba.cuda.external_stream or a
   cuda.core.Stream that is non-blocking), memory is given back as numba itself frees it: several arrays at a time, after
   waiting for all work of the device, and not within numba.cuda.defer_cleanup().
 - What another library does with a numba array on a non-blocking stream of its own is not seen: keep the array until that is
   done.

Pinned, mapped and managed memory stay numba's.
"""

import itertools
import threading
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import _cooperate, _library, _memory
from ._errors import CisternError, OutOfMemoryError

__all__ = ["cooperate", "disable", "enable"]

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY

_lock = threading.RLock()
_class: Any = None
_before: Any = None  # the manager's class that enable() replaced
_enabled = False
_with_numba: Optional[_cooperate.Cooperation] = None
_non_blocking_seen = False


def _numba() -> Any:
    """numba's module of the driver."""
    try:
        from numba import cuda
        from numba.cuda.cudadrv import driver
    except ImportError as e:
        raise CisternError("numba is not installed, or has no CUDA: %s" % e) from None
    if not hasattr(cuda, "HostOnlyCUDAMemoryManager") or not hasattr(driver, "set_memory_manager"):
        raise CisternError("this numba takes no other memory: it simulates CUDA (NUMBA_ENABLE_CUDASIM), or is older than 0.50")
    return driver


def __getattr__(name: str) -> Any:
    # What numba asks of the module that NUMBA_CUDA_MEMORY_MANAGER names.
    if name == "_numba_memory_manager":
        return _manager(_numba())
    raise AttributeError("module %r has no attribute %r" % (__name__, name))


def enable() -> None:
    """Has numba allocate from Cistern, also on devices that it uses already. A second call does nothing.

    Arrays that exist stay where they are.

    Raises:
        CisternError: numba is missing, or `cistern.numba.cooperate` is in force.

    Example:
        cistern.numba.enable()
    """
    global _before, _enabled
    with _lock:
        if _enabled:
            return
        driver = _numba()
        if _with_numba is not None:
            raise CisternError("numba keeps its own memory: cistern.numba.cooperate() is in force; undo it by .remove() first")
        _library.claim()
        manager = _manager(driver)
        before = driver._memory_manager
        driver.set_memory_manager(manager)
        _replace(driver, manager)
        _before, _enabled = None if before is manager else before, True


def disable() -> None:
    """Restores numba's former memory manager. Arrays that exist stay in Cistern's memory, and are freed there."""
    global _enabled
    with _lock:
        if not _enabled:
            return
        driver = _numba()
        before = _before or driver.NumbaCUDAMemoryManager
        driver.set_memory_manager(before)
        _replace(driver, before)
        _enabled = False


def _contexts(driver: Any) -> List[Any]:
    found = [getattr(d, "primary_context", None) for d in list(driver.driver.devices.values())]
    return [c for c in found if c is not None]


def _replace(driver: Any, manager: Any) -> None:
    """Gives contexts that exist another manager. What the former holds for them goes on being its business."""
    for context in _contexts(driver):
        former = context.memory_manager
        if isinstance(former, manager):
            continue
        context.push()
        try:
            former.deallocations.clear()
            context.memory_manager = manager(context=context)
            context.memory_manager.initialize()
        finally:
            context.pop()


def _manager(driver: Any) -> Any:
    """The memory manager's class, made when numba is there to derive it from."""
    global _class
    with _lock:
        if _class is None:
            _class = _make(driver)
            _follow_streams(driver)
        return _class


class _Given:
    """Memory that one manager has out, and how it goes back."""

    def __init__(self, driver: Any, context: Any) -> None:
        self.driver = driver
        self.context = context  # a weak reference: numba's context owns the manager
        self.memory: Optional[_memory.Memory] = None
        # Address and bytes by a number of the allocation's own: after a reset an address may be another's.
        self.live: Dict[int, Tuple[int, int]] = {}
        self._numbers = itertools.count()
        self.non_blocking = _non_blocking_seen  # numba was given a stream that does not wait for the legacy one
        self._waiting: List[int] = []  # to be given back after all work of the device

    def allocate(self, size: int, device: int) -> Tuple[int, int]:
        """The address and the number of an allocation."""
        if self.memory is None:
            self.memory = _memory.Memory("numba", _memory.HOST_ORDER)
        address, number = self.memory.allocate(size, device), next(self._numbers)
        if address:
            self.live[number] = address, size
        return address, number

    def free(self, number: int, deallocations: Any) -> None:
        """What a pointer's finalizer calls, in whatever thread."""
        address, size = self.live.pop(number, (0, 0))
        if not address:
            return  # a reset has taken it back
        if not self.non_blocking:
            assert self.memory is not None
            self.memory.release(address)
            return
        self._waiting.append(address)
        deallocations.add_item(self.release_waiting, address, size)

    def release_waiting(self, address: int) -> None:
        """numba frees one of those that wait: all go back, once nothing of the device's work is under way."""
        if address not in self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        context = self.context()
        try:
            if context is not None:
                self.driver.driver.cuCtxPushCurrent(context.handle)
                try:
                    self.driver.driver.cuCtxSynchronize()
                finally:
                    self.driver.driver.cuCtxPopCurrent()
        except BaseException:
            self._waiting = waiting + self._waiting  # as during a capture: next time
            return
        assert self.memory is not None
        for a in waiting:
            self.memory.release(a)

    def flush(self) -> bool:
        """release_waiting for all; whether any went back."""
        before = len(self._waiting)
        if before:
            self.release_waiting(self._waiting[0])
        return len(self._waiting) < before

    def reset(self) -> None:
        live, self.live = self.live, {}
        self._waiting += [address for address, _ in live.values()]
        self.flush()


def _make(driver: Any) -> Any:
    import ctypes
    import weakref

    mixin = getattr(driver, "GetIpcHandleMixin", object)

    class CisternMemoryManager(mixin, driver.HostOnlyCUDAMemoryManager):  # type: ignore[misc, valid-type]
        """numba's external memory manager over Cistern."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            context = self.context
            self.given = _Given(driver, (lambda: None) if context is None else weakref.ref(context))
            if context is not None:
                _managers.add(self)

        def initialize(self) -> None:
            if not self.deallocations.memory_capacity:
                self.deallocations.memory_capacity = self.get_memory_info().total

        def memalloc(self, size: int) -> Any:
            context, given, deallocations = self.context, self.given, self.deallocations
            address, number = self._attempt_allocation(lambda: self._obtain(size, context.device.id))
            finalizer = (lambda: given.free(number, deallocations)) if address else None
            return driver.MemoryPointer(weakref.proxy(context), _pointer(driver, address), size, finalizer=finalizer)

        def _obtain(self, size: int, device: int) -> Tuple[int, int]:
            try:
                return self.given.allocate(size, device)
            except OutOfMemoryError as e:
                self.flush()  # numba tries once more
                raise driver.CudaAPIError(_out_of_memory(driver), str(e)) from None

        def flush(self) -> bool:
            return not self.deallocations.is_disabled and self.given.flush()

        def get_ipc_handle(self, memory: Any) -> Any:
            try:
                return super().get_ipc_handle(memory)
            except (AttributeError, driver.CudaAPIError) as e:
                raise CisternError("CUDA cannot export this memory to another process (%s): start the program with "
                                   "CISTERN_CONF=backend:malloc, whose memory it can" % e) from None

        def get_memory_info(self) -> Any:
            lib = _memory.library()
            free, total = ctypes.c_uint64(), ctypes.c_uint64()
            _library.check(lib, lib.cistern_mem_info(self.context.device.id, ctypes.byref(free), ctypes.byref(total)))
            return driver.MemoryInfo(free=free.value, total=total.value)

        def reset(self) -> None:
            super().reset()
            self.given.reset()

        @property
        def interface_version(self) -> int:
            return 1

    return CisternMemoryManager


def _pointer(driver: Any, address: int) -> Any:
    kind = getattr(getattr(driver, "binding", None), "CUdeviceptr", None)
    if kind is not None:
        return kind(address)
    import ctypes

    return ctypes.c_void_p(address)


def _out_of_memory(driver: Any) -> Any:
    found = getattr(getattr(driver, "binding", None), "CUresult", None)
    return getattr(found, "CUDA_ERROR_OUT_OF_MEMORY", _OUT_OF_MEMORY)


class _Managers:
    """The managers that there are, without keeping them."""

    def __init__(self) -> None:
        import weakref

        self._all: Any = weakref.WeakSet()

    def add(self, manager: Any) -> None:
        self._all.add(manager)

    def non_blocking(self) -> None:
        for manager in list(self._all):
            manager.given.non_blocking = True

    def flush(self, device: int, missing: int) -> bool:
        given = False
        for manager in list(self._all):
            if manager.context.device.id == device:
                given = manager.flush() or given
        return given


_managers = _Managers()


def _stream_seen(non_blocking: Callable[[], bool]) -> None:
    """numba is given a stream by the program."""
    global _non_blocking_seen
    try:
        found = non_blocking()
    except Exception:
        found = True  # where it is not known, the worse is assumed
    if found and not _non_blocking_seen:
        _non_blocking_seen = True
        _managers.non_blocking()
        try:
            _cooperate.on_out_of_memory(_managers.flush)
        except CisternError:
            pass  # what waits is given back when numba next frees something


def _follow_streams(driver: Any) -> None:
    """Notices streams that do not wait for the legacy default stream. Those that numba makes do."""
    theirs = driver.Context.create_external_stream

    def create_external_stream(self: Any, ptr: int) -> Any:
        stream = theirs(self, ptr)
        if ptr > 2:
            _stream_seen(lambda: bool(int(driver.driver.cuStreamGetFlags(stream.handle)) & _NON_BLOCKING))
        return stream

    create_external_stream.__doc__ = theirs.__doc__
    driver.Context.create_external_stream = create_external_stream
    # Where numba takes streams of cuda.core.
    kind = getattr(driver, "ExperimentalStream", None)
    if kind is None:
        return
    for name in ("_to_core_stream", "_stream_handle"):
        if hasattr(driver, name):
            setattr(driver, name, _noticing(getattr(driver, name), driver))


def _noticing(theirs: Callable[[Any], Any], driver: Any) -> Callable[[Any], Any]:
    own = (int, driver.Stream)

    def convert(stream: Any) -> Any:
        if stream is not None and not isinstance(stream, own) and not _non_blocking_seen:
            inner = getattr(stream, "stream", stream)  # of a GraphBuilder
            _stream_seen(lambda: bool(inner.is_nonblocking))
        return theirs(stream)

    convert.__doc__ = theirs.__doc__
    return convert


def cooperate() -> _cooperate.Cooperation:
    """Has numba, with its own memory, and Cistern return free memory for each other's requests.

    When Cistern has no memory for another library, numba frees what it has put off freeing. When numba has none, Cistern
    returns its free memory, and numba tries again.

    Returns:
        An object whose `remove()` ends it.

    Raises:
        CisternError: numba is missing, or is on Cistern already.
    """
    global _with_numba
    with _lock:
        if _with_numba is not None:
            return _with_numba
        if _enabled:
            raise CisternError("numba's memory is Cistern's already: cistern.numba.enable() was called")
        driver = _numba()
        manager = driver.NumbaCUDAMemoryManager
        theirs = manager._attempt_allocation

        def attempt(self: Any, allocator: Callable[[], Any]) -> Any:
            try:
                return theirs(self, allocator)
            except driver.CudaAPIError as e:
                if e.code != _out_of_memory(driver) or not _cooperate.trimmed(self.context.device.id):
                    raise
            return allocator()

        def give(device: int, missing: int) -> bool:
            given = False
            for context in _contexts(driver):
                pending = context.memory_manager.deallocations
                if context.device.id != device or not len(pending) or pending.is_disabled:
                    continue
                context.push()
                try:
                    pending.clear()
                finally:
                    context.pop()
                given = True
            return given

        def undo() -> None:
            global _with_numba
            with _lock:
                _with_numba = None
                if vars(manager).get("_attempt_allocation") is attempt:
                    del manager._attempt_allocation

        manager._attempt_allocation = attempt
        _with_numba = _cooperate.Cooperation(_cooperate.on_out_of_memory(give), undo)
        return _with_numba
