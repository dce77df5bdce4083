"""Allocations by stack: stacks of requests, the trace that has them, and a file for each out-of-memory.

The library takes the stacks, of native functions and of Python's, where a request is made; nothing here is called then.
What is asked for before the library runs are settings that it starts with (_settings).
"""

import ctypes
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, List, NamedTuple, Optional

from . import _library, _settings
from ._errors import CisternError

if TYPE_CHECKING:
    from .hints import Device, Path, Size, StackUse

_KINDS = {"off": 0, "python": 2, "native": 1, "all": 3}  # CISTERN_STACKS_ in cistern.h
_REPORT_HISTORY = "1000000"  # what the library keeps for a report where no history is given
_MOST_EVENTS = 1 << 30
_TEXT = 1 << 16  # bytes of a stack in words


class _StackUse(ctypes.Structure):
    """cistern_stack_use."""

    _fields_ = [("stack", ctypes.c_uint32), ("reserved", ctypes.c_uint32), ("blocks", ctypes.c_int64),
                ("requested", ctypes.c_uint64), ("allocated", ctypes.c_uint64)]


# Functions beyond those of _library, with what they return and take.
_FUNCTIONS = (
    ("cistern_stacks", ctypes.c_int, [ctypes.c_uint32, ctypes.c_uint64]),
    ("cistern_trace_write", ctypes.c_int, [ctypes.c_char_p]),
    ("cistern_stack_usage", ctypes.c_int, [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t)]),
    ("cistern_stack_text", ctypes.c_int, [ctypes.c_uint32, ctypes.c_char_p, ctypes.c_size_t]),
    ("cistern_report", ctypes.c_int, [ctypes.c_char_p, ctypes.c_int]),
    ("cistern_history_hash", ctypes.c_int, [ctypes.c_int, ctypes.POINTER(ctypes.c_uint64)]),
    ("cistern_last_report", ctypes.c_size_t, [ctypes.c_char_p, ctypes.c_size_t]),
)

_lock = threading.RLock()


def _lib() -> Any:
    lib = _library.load()
    for name, result, arguments in _FUNCTIONS:
        try:
            f = getattr(lib, name)
        except AttributeError:
            raise CisternError("%s is of another version: it has no %s" % (lib._name, name)) from None
        f.restype, f.argtypes = result, arguments
    return lib


class _State(NamedTuple):
    """What is kept: kinds of stacks, the bytes below which only some requests have one, and events of each device."""

    stacks: str
    sample: int
    history: int


_state: Optional[_State] = None  # as set here; None: as the settings have it
_reporting = False  # report() has been called while the library ran, which keeps a history where there was none


def current() -> _State:
    if _state is not None:
        return _state
    from ._pools import size_in_bytes

    conf = _settings.current()
    try:
        return _State(conf.get("stacks", "off"), size_in_bytes(conf.get("stack_sample", "0"), "stack_sample"), int(conf.get("history", _REPORT_HISTORY if "report" in conf else "0")))
    except ValueError:
        return _State("off", 0, 0)  # the library will say what is wrong with them


class Attribution:
    """What `cistern.attribution` returns: in force until `remove()` or the end of a `with` block."""

    def __init__(self, stacks: str, sample: "Size", history: Optional[int]) -> None:
        from ._pools import size_in_bytes

        if stacks not in _KINDS:
            raise ValueError("stacks: expected one of %s, got %r" % (", ".join(_KINDS), stacks))
        if history is not None and (not isinstance(history, int) or isinstance(history, bool)):
            raise TypeError("history: expected a number of events, got %s" % type(history).__name__)
        if history is not None and not 0 <= history <= _MOST_EVENTS:
            raise ValueError("history: expected a number of events up to %d, got %d" % (_MOST_EVENTS, history))
        size = size_in_bytes(sample, "sample")
        with _lock:
            self._was: Optional[_State] = current()
            _set(_State(stacks, size, self._was.history if history is None else history))

    def remove(self) -> None:
        """Restores the former state. The history is dropped if there was none before."""
        with _lock:
            was, self._was = self._was, None
            if was is not None:
                _set(was)

    def __enter__(self) -> "Attribution":
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def _set(wanted: _State) -> None:
    global _state
    before = current()
    if _library.running_already():
        lib = _lib()
        _library.check(lib, lib.cistern_stacks(_KINDS[wanted.stacks], wanted.sample))
        if wanted.history != before.history:
            _library.check(lib, lib.cistern_history(-1, wanted.history))  # of devices that are not yet in use too
    else:
        some = wanted.stacks != "off"
        _settings.want({"stacks": wanted.stacks if some else None,
                        "stack_sample": str(wanted.sample) if some and wanted.sample else None,
                        "history": str(wanted.history) if wanted.history or "report" in _settings.current() else None})
    _state = wanted


def write(file: "Path") -> None:
    _library.writer(file)
    lib = _lib()
    _library.check(lib, lib.cistern_trace_write(os.fsencode(file)))


def write_trace(file: "Path") -> None:
    write(file)
    if not has_history():
        import warnings

        # Of the caller of cistern.write_trace.
        warnings.warn("%s has the current allocations alone, as no history is kept: cistern.attribution(history=100_000) keeps one" %
                      os.fsdecode(file), stacklevel=3)


def has_history() -> bool:
    """Whether events are kept: as asked for here or in the settings, or by torch.cuda.memory._record_memory_history."""
    if current().history or _reporting:
        return True
    torch: Any = sys.modules.get("torch")
    if torch is None or _library.started_by_torch is None:
        return False
    enabled: Any = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return enabled is not None and bool(enabled())


def history_hash(device: int) -> int:
    """The hash of the sizes of the requests since the last call, in their order; 0 where there is no history."""
    value = ctypes.c_uint64()
    lib = _lib()
    _library.check(lib, lib.cistern_history_hash(device, ctypes.byref(value)))
    return value.value


def last_report() -> str:
    """The file of the calling thread's last failure, "" where there is none."""
    path = ctypes.create_string_buffer(4096)
    n = int(_lib().cistern_last_report(path, len(path)))
    return os.fsdecode(path.value) if n < len(path) else ""


def report(folder: "Optional[Path]", child: bool) -> None:
    global _reporting
    path = None if folder is None else _folder(os.fsdecode(os.fspath(folder)))
    if path is None and child:
        raise ValueError("child=True: expected the folder whose files it explains, got None")
    if child:
        _name_command()
    with _lock:
        if _library.running_already():
            lib = _lib()
            _library.check(lib, lib.cistern_report(None if path is None else os.fsencode(path), int(bool(child))))
            _reporting = _reporting or path is not None
        else:
            _settings.want({"report": path, "report_child": "true" if child else None})


def _folder(name: str) -> str:
    """The folder, made if need be, as a path that stays right where the program goes to another."""
    path = os.path.abspath(name)
    if "," in path or path != path.strip():
        raise ValueError("folder: expected a name without commas and without spaces at its ends, got %r" % path)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as e:
        raise CisternError("%s: no reports can be written there: %s" % (name, e.strerror or e)) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise CisternError("%s: no reports can be written there: permission denied" % name)
    return path


def _name_command() -> None:
    """Tells the library where the command is, if it is where the package looks; else it looks itself."""
    from . import _command

    try:
        os.environ.setdefault("CISTERN_COMMAND", _command.path())
    except CisternError:
        pass


def stack_usage(device: "Optional[Device]") -> "List[StackUse]":
    from ._pools import device_index

    index = device_index(device)
    if _library.in_use() is None:
        return []
    lib, n, cap = _lib(), ctypes.c_size_t(), 1024
    while True:
        found = (_StackUse * cap)()
        _library.check(lib, lib.cistern_stack_usage(index, found, cap, ctypes.byref(n)))
        if n.value <= cap:
            break
        cap = n.value + 1024  # other threads allocate
    text = ctypes.create_string_buffer(_TEXT)
    result: "List[StackUse]" = []
    for u in found[:n.value]:
        frames: List[str] = []
        if u.stack:
            _library.check(lib, lib.cistern_stack_text(u.stack, text, _TEXT))
            frames = text.value.decode("utf-8", "replace").splitlines()
        result.append({"stack": u.stack, "blocks": u.blocks, "requested": u.requested, "allocated": u.allocated, "frames": frames})
    return result
