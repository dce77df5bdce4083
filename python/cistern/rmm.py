"""Memory from Cistern for RMM, and so for cuDF and whatever else allocates through RMM.

    cistern.rmm.enable()                                          # RMM's resource of every device
    rmm.mr.set_current_device_resource(cistern.rmm.resource())    # or of the current one

It is RMM's CallbackMemoryResource: each request is a Python function, some microseconds. Programs in C++ give RMM two
functions over the C interface instead, which cost what Cistern costs:

    #include <cistern.h>
    #include <rmm/mr/callback_memory_resource.hpp>

    int device = 0;
    rmm::mr::callback_memory_resource memory(
        [](std::size_t bytes, rmm::cuda_stream_view stream, void* arg) -> void* {
          void* p = nullptr;
          if (cistern_alloc(&p, bytes, *static_cast<int*>(arg), stream.value(), nullptr) != CISTERN_OK) {
            char why[512];
            cistern_last_error(why, sizeof why);
            throw rmm::out_of_memory(why);
          }
          return p;
        },
        [](void* p, std::size_t, rmm::cuda_stream_view stream, void*) {
          cistern_release_on(p, stream.value());
        },
        &device, &device);

Memory is usable on the stream that it was asked for on, at once. It is given back in the order of the one that is named when
it is freed; the former may be gone by then.

When the interpreter ends RMM gets the resources back that it had before enable(). Memory that is out then is the process's
end to give back.
"""

import atexit
import ctypes
import sys
import threading
import time
from typing import Any, Dict, List, Optional

from . import _library, _memory
from ._errors import CisternError, OutOfMemoryError

__all__ = ["enable", "resource"]

_lock = threading.Lock()
_made: Dict[int, Any] = {}
_functions: List["_Functions"] = []
_before: Dict[int, Any] = {}  # RMM's resources before enable()


def _rmm() -> Any:
    try:
        import rmm
        import rmm.mr
    except ImportError as e:
        raise CisternError("RMM is not installed, or cannot be imported: %s" % e) from None
    return rmm


def resource(device: Optional[int] = None) -> Any:
    """Returns Cistern's memory of a device as a resource of RMM, the same for every call.

    Args:
        device: the number of the device; None is the current one.

    Returns:
        An `rmm.mr.DeviceMemoryResource`. Its requests raise MemoryError, with Cistern's message, when memory is out.

    Raises:
        CisternError: RMM is missing.

    Example:
        rmm.mr.set_current_device_resource(cistern.rmm.resource())
    """
    rmm = _rmm()
    if device is None:
        device = _current(rmm)
    elif not isinstance(device, int) or isinstance(device, bool) or device < 0:
        raise ValueError("device: expected the number of a device, or None for the current one; got %r" % (device,))
    _library.claim()
    with _lock:
        if device not in _made:
            functions = _Functions(device)
            _functions.append(functions)
            made = rmm.mr.CallbackMemoryResource(functions.allocate, functions.deallocate)
            # RMM's C++ code has plain pointers to what it calls and copies of the resource that live as long as the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
            _made[device] = made
        return _made[device]


def enable() -> None:
    """Makes Cistern RMM's resource of every device. Earlier allocations are freed where they came from.

    Raises:
        CisternError: RMM is missing.

    Example:
        cistern.rmm.enable()
    """
    rmm = _rmm()
    from rmm._cuda.gpu import getDeviceCount

    for device in range(getDeviceCount()):
        ours, now = resource(device), rmm.mr.get_per_device_resource(device)
        if now is not ours:
            if not _before:
                atexit.register(_put_back, rmm)
            _before[device] = now
            rmm.mr.set_per_device_resource(device, ours)


def _put_back(rmm: Any) -> None:
    """Afterwards nothing allocates here without asking for it: what is allocated at the end of the interpreter stays so."""
    for device, before in _before.items():
        if rmm.mr.get_per_device_resource(device) is _made[device]:
            rmm.mr.set_per_device_resource(device, before)
    # A daemon thread that the interpreter stops while RMM calls here takes the process down. What such threads go on giving
    # back is waited for, a moment.
    if any(t.daemon for t in threading.enumerate()):
        for _ in range(10):
            calls = [f.calls for f in _functions]
            time.sleep(0.02)
            if calls == [f.calls for f in _functions]:
                break


def _current(rmm: Any) -> int:
    from rmm._cuda.gpu import getDevice

    return int(getDevice())


class _Functions:
    """What RMM calls. At the end of the interpreter that may be when modules are empty already."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._memory: Optional[_memory.Memory] = None
        self._ending = sys.is_finalizing
        self.calls = 0

    def allocate(self, size: int, stream: Any) -> int:
        self.calls += 1
        if self._ending():
            raise OutOfMemoryError("Cistern has no memory for RMM any more: the interpreter is ending")
        if self._memory is None:
            self._memory = _memory.Memory("rmm")
        return self._memory.allocate(size, self._device, int(stream.__cuda_stream__()[1]))

    def deallocate(self, address: int, size: int, stream: Any) -> None:
        self.calls += 1
        if address and self._memory is not None and not self._ending():
            self._memory.release_on(address, int(stream.__cuda_stream__()[1]))
