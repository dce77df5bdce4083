"""Memory from Cistern for programs that use cuda.core.

    memory = cistern.cuda_core.resource()
    buffer = memory.allocate(1 << 20, stream=stream)

The buffer is given back in the order of the stream that it is closed on, or else was allocated on, and of that alone:
what other streams use must be kept until they are done, as with cuda.core's own pools. Graphs that are being built take
memory from cuda.core's GraphMemoryResource.
"""

import threading
from typing import Any, Dict, Optional

from . import _library, _memory
from ._errors import CisternError

__all__ = ["resource"]

_lock = threading.Lock()
_class: Any = None
_made: Dict[int, Any] = {}


def resource(device: Optional[Any] = None) -> Any:
    """Returns Cistern's memory of a device as a resource of cuda.core, the same for every call.

    Args:
        device: a number or a `cuda.core.Device`; None is the current one.

    Returns:
        A `cuda.core.MemoryResource`. Its `allocate` raises `cistern.OutOfMemoryError`, a MemoryError, when memory is out.

    Raises:
        CisternError: cuda.core is missing.

    Example:
        buffer = cistern.cuda_core.resource().allocate(1 << 20, stream=stream)
    """
    core = _core()
    if device is None:
        device = core.Device()
    number = getattr(device, "device_id", device)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError("device: expected the number of a device, a cuda.core.Device, or None for the current one; got %r" % (device,))
    _library.claim()
    with _lock:
        if number not in _made:
            _made[number] = _make(core)(number)
        return _made[number]


def _core() -> Any:
    try:
        import cuda.core as core

        if not hasattr(core, "MemoryResource"):
            import cuda.core.experimental as core  # as it was called before 0.5
    except ImportError as e:
        raise CisternError("cuda.core is not installed: %s" % e) from None
    return core


def _handle(stream: Any) -> int:
    if stream is None:
        return 0
    if hasattr(stream, "begin_building"):
        raise CisternError("a graph that is being built takes memory from cuda.core's GraphMemoryResource, not from Cistern")
    return int(stream.__cuda_stream__()[1])


def _make(core: Any) -> Any:
    global _class
    if _class is not None:
        return _class

    class CisternMemoryResource(core.MemoryResource):  # type: ignore[misc]
        """cuda.core's memory from Cistern, of one device."""

        def __init__(self, device: int) -> None:
            self._device = device
            self._memory: Optional[_memory.Memory] = None
            self._streams: Dict[int, Any] = {}  # by address: those that the buffers of an old cuda.core know nothing of

        def allocate(self, size: int, stream: Any = None) -> Any:
            handle = _handle(stream)
            if self._memory is None:
                self._memory = _memory.Memory("cuda.core")
            address = self._memory.allocate(size, self._device, handle)
            try:
                try:
                    return core.Buffer.from_handle(address, size, mr=self, stream=stream)
                except TypeError:  # before 1.2: it is closed on a stream that is then said, or the default one
                    self._streams[address] = stream
                    return core.Buffer.from_handle(address, size, mr=self)
            except BaseException:
                self._streams.pop(address, None)
                self._memory.release(address)
                raise

        def deallocate(self, ptr: Any, size: int, stream: Any = None) -> None:
            address = int(ptr)
            if address == 0 or self._memory is None:
                return
            if address in self._streams:
                try:
                    self._memory.release_after(address, _handle(stream))
                finally:
                    self._streams.pop(address, None)
            else:
                self._memory.release_on(address, _handle(stream))

        @property
        def is_device_accessible(self) -> bool:
            return True

        @property
        def is_host_accessible(self) -> bool:
            return False

        @property
        def is_managed(self) -> bool:
            return False

        @property
        def device_id(self) -> int:
            return self._device

        def __repr__(self) -> str:
            return "<Cistern's memory of device %d>" % self._device

    _class = CisternMemoryResource
    return _class
