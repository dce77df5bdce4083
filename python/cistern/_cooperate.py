"""Allocators that stay separate, but ask each other for memory before a request fails.

When all other stages of a request have failed, Cistern calls functions of the program (on_out_of_memory), on whatever thread
asks for memory and with no lock of Cistern's held. The interpreter lock is taken for the call alone. The functions are taken
back before Python ends. The other way, libraries with a cache of their own ask Cistern to give back its free memory (trimmed).

What is registered before the library runs waits for it, so that the process can still fork.
"""

import sys
import threading
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Tuple

from . import _library, _pools
from ._errors import CisternError, say

if TYPE_CHECKING:
    from .hints import Device

_INVALID = 2  # CISTERN_INVALID
ALL = -1  # every device, also those that come into use later

_lock = threading.RLock()
_registered: List["Registration"] = []
_inside = threading.local()
_ending = False


class Registration:
    """A function that the callback stage asks for memory, until remove()."""

    def __init__(self, fn: Callable[[int, int], Any], device: int) -> None:
        self._fn: Optional[Callable[[int, int], Any]] = fn
        self._device = device
        self._complained = False
        self._c: Any = None  # what C calls; kept to the end once C has it, as it may be removed from within a call
        self._address = 0
        self._through = 0  # what C calls instead, with the address
        self._given = False  # guarded by _lock: C knows of it

    def remove(self) -> None:
        """Ends the calls. When it returns, none is under way, unless it is called from within one."""
        self._fn = None
        with _lock:
            if self in _registered:
                _registered.remove(self)
            given, self._given = self._given, False
        if given and not self._take_back():
            _lingering.append(self)  # removed from within a call: what C calls does nothing from now on

    def _take_back(self) -> bool:
        """Has C forget it. Not under the lock: this waits for calls, which may register and remove."""
        return bool(_library.load().cistern_off_out_of_memory(self._device, *self._called()) in (_library.OK, _library.FORKED))

    def _called(self) -> Tuple[int, Optional[int]]:
        """What C calls, and with what."""
        return (self._through, self._address) if self._through else (self._address, None)

    def _give(self) -> None:
        """Tells C of it. The caller holds the lock."""
        import ctypes

        from . import _memory

        lib = _memory.library()
        if self._given:
            return
        if self._c is None:
            self._c = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)(self._ask)
            self._address = ctypes.cast(self._c, ctypes.c_void_p).value or 0
            _kept.append(self._c)
        self._through = _library.asks_through
        _library.check(lib, lib.cistern_on_out_of_memory(self._device, *self._called()))
        self._given = True

    def _ask(self, context: Any, device: int, missing: int) -> int:
        fn = self._fn
        if fn is None or _ending or getattr(_inside, "asking", False):
            return 0
        _inside.asking = True
        try:
            return 1 if fn(device, missing) else 0
        except BaseException as e:
            if not self._complained:
                self._complained = True
                say("a function that was asked for memory failed, which counts as nothing given: %s: %s" %
                    (type(e).__name__, e), every_rank=True)
                self._print()
            return 0
        finally:
            _inside.asking = False

    @staticmethod
    def _print() -> None:
        import traceback

        try:
            traceback.print_exc(file=sys.stderr)
        except (AttributeError, OSError, ValueError):
            pass  # no standard error, or a closed one


_kept: List[Any] = []
_lingering: List[Registration] = []


def on_out_of_memory(fn: Callable[[int, int], object], device: "Optional[Device]" = None) -> Registration:
    """cistern.on_out_of_memory."""
    if not callable(fn):
        raise TypeError("fn: expected a function of a device and the missing bytes, got %s" % type(fn).__name__)
    global _follows_exit
    registration = Registration(fn, ALL if device is None else _pools.device_index(device))
    with _lock:
        if not _follows_exit:
            import atexit

            atexit.register(_end)
            _follows_exit = True
        _registered.append(registration)
        if not _library.running_already():
            if library_started not in _library.waiting:
                _library.waiting.append(library_started)
            return registration
        try:
            registration._give()
        except BaseException:
            _registered.remove(registration)
            raise
    return registration


_follows_exit = False


def library_started() -> None:
    """Called when the library runs: registers with C what waited for that."""
    with _lock:
        for registration in list(_registered):
            try:
                registration._give()
            except CisternError as e:
                say("a function will not be asked for memory: %s" % e, every_rank=True)


def follow_torch() -> None:
    """Called when PyTorch's adapter is in place: what is registered already is called through it from now on."""
    for registration in list(_registered):
        with _lock:
            given, registration._given = registration._given, False
        if given and registration._take_back():
            with _lock:
                registration._give()


def _end() -> None:
    """Python ends: nothing is called in it any more."""
    global _ending
    _ending = True
    for registration in list(_registered):
        registration.remove()
    for registration in _lingering:
        registration._take_back()


def trimmed(device: int) -> bool:
    """Has Cistern give the free memory of a device back to the driver; whether that gave any."""
    if not _library.running_already():
        return False
    before = _held(device)
    try:
        _library.trim(device)
    except CisternError:
        return False
    return _held(device) < before


def _held(device: int) -> int:
    for d in _library.stats()["devices"]:
        if d["device"] == device:
            return d["reserved"]["all"]["current"]
    return 0


class Cooperation:
    """Two allocators that ask each other, until remove()."""

    def __init__(self, registration: Registration, undo: Callable[[], None]) -> None:
        self._registration, self._undo = registration, undo

    def remove(self) -> None:
        """Ends it: neither allocator asks the other."""
        self._registration.remove()
        self._undo()


# ---- PyTorch ----

_with_torch: Optional[Cooperation] = None


def cooperate_torch() -> Cooperation:
    """Has PyTorch, with its own allocator, and Cistern return free memory for each other's requests.

    When Cistern has no memory for another library, `torch.cuda.empty_cache()` returns PyTorch's free memory. When PyTorch
    has none, Cistern returns its own. PyTorch reports a failed request only after its last attempt: that request still
    raises `torch.OutOfMemoryError`, and the program's next attempt finds the memory.

    Returns:
        An object whose `remove()` ends it.

    Raises:
        CisternError: PyTorch is missing, is built without CUDA, or is on Cistern already.

    Example:
        import cistern.torch

        cistern.torch.cooperate()
    """
    # No reclaim stage runs within PyTorch's own allocator over cudaMalloc, so no thread that holds its lock waits for empty_cache.
    # That is not so of a torch.cuda.MemPool whose allocator calls cistern_malloc: PyTorch holds its lock over that call.
    global _with_torch
    try:
        import torch
    except ImportError:
        raise CisternError("PyTorch is not installed") from None
    from . import torch as ours

    if getattr(torch.version, "cuda", None) is None:
        raise CisternError("this PyTorch was built without CUDA")
    if ours.mode() is not None:
        raise CisternError("PyTorch's memory is Cistern's already: cistern.torch.enable() was called")
    with _lock:
        if _with_torch is not None:
            return _with_torch

        def give(device: int, missing: int) -> bool:
            if not torch.cuda.is_initialized():
                return False
            before = torch.cuda.memory_reserved(device)
            if before == 0:
                return False
            torch.cuda.empty_cache()
            return bool(torch.cuda.memory_reserved(device) < before)

        asked = [True]

        def observe(device: int, *sizes: int) -> None:
            if asked[0]:
                trimmed(device)

        def undo() -> None:
            global _with_torch
            asked[0] = False  # PyTorch has no way to take an observer back
            with _lock:
                _with_torch = None

        attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is not None:
            torch.cuda._lazy_call(lambda: attach(observe))
        _with_torch = Cooperation(on_out_of_memory(give), undo)
        return _with_torch
