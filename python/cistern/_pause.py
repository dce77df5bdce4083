"""pause and resume: the physical memory of live allocations given back to the device and got again, through the C library."""

import ctypes
import os
from typing import TYPE_CHECKING, Any, Dict, Optional, Union, cast

from . import _library, _pools
from ._errors import CisternError

if TYPE_CHECKING:
    from ._tags import tag as Tag
    from .hints import Device, Path, PauseResult, Pool, Size

_KEEP = {"host": 0, "disk": 1, "drop": 2}
_CAPTURED = 1
AUTO = 2  # of cistern_node_allow_pause


class _Options(ctypes.Structure):
    """cistern_pause_options."""

    _fields_ = [("size", ctypes.c_uint32), ("keep", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("reserved", ctypes.c_uint32),
                ("pool", ctypes.c_void_p), ("tag", ctypes.c_char_p), ("dir", ctypes.c_char_p)]


class _Report(ctypes.Structure):
    """cistern_pause_report."""

    _fields_ = [("blocks", ctypes.c_int64)] + [(n, ctypes.c_uint64) for n in ("bytes", "physical", "kept", "shared")]


def options(keep: str, folder: "Optional[Path]", captured: bool) -> _Options:
    if keep not in _KEEP:
        raise ValueError("keep: expected one of %s, got %r" % (", ".join(_KEEP), keep))
    if folder is not None and keep != "disk":
        raise ValueError("dir: expected keep=\"disk\" with it, got keep=%r" % keep)
    return _Options(keep=_KEEP[keep], flags=_CAPTURED if captured else 0, dir=None if folder is None else os.fsencode(folder))


def pause(tag: "Union[str, Tag, None]", pool: "Optional[Pool]", device: "Optional[Device]", keep: str,
          folder: "Optional[Path]", captured: bool) -> "PauseResult":
    return _call("cistern_pause", options(keep, folder, captured), tag, pool, device)


def resume(tag: "Union[str, Tag, None]", pool: "Optional[Pool]", device: "Optional[Device]") -> "PauseResult":
    return _call("cistern_resume", _Options(), tag, pool, device)


def buffers(size: "Size", device: "Optional[Device]") -> None:
    n = _pools.size_in_bytes(size, "bytes")
    index = _pools.device_index(device)
    lib = _running()
    _library.check(lib, lib.cistern_pause_buffers(index, n))


def _call(function: str, o: _Options, tag: "Union[str, Tag, None]", pool: "Optional[Pool]",
          device: "Optional[Device]") -> "PauseResult":
    kept = select(o, tag, pool)  # noqa: F841
    index = _pools.device_index(device)
    lib, report = _running(), _Report()
    _library.check(lib, getattr(lib, function)(index, ctypes.byref(o), ctypes.byref(report)))
    found: Dict[str, int] = {name: int(getattr(report, name)) for name, *_ in _Report._fields_}
    return cast("PauseResult", found)


def select(o: _Options, tag: "Union[str, Tag, None]", pool: "Optional[Pool]") -> Any:
    """Fills in what is meant. What it returns has to live as long as the options are used."""
    o.size, o.tag = ctypes.sizeof(o), _name(tag)
    numbers = None if pool is None else (ctypes.c_uint64 * 2)(*_pools.numbers(pool))
    o.pool = None if numbers is None else ctypes.addressof(numbers)
    return numbers


def _name(tag: Any) -> Optional[bytes]:
    if tag is None:
        return None
    name = getattr(tag, "name", tag)  # of a cistern.tag
    if not isinstance(name, str):
        raise TypeError("tag: expected a string, got %s" % type(tag).__name__)
    if not name or "\0" in name:
        raise ValueError("tag: expected a string of at least one character without NUL, got %r" % name)
    return name.encode("utf-8", "replace")


def _running() -> Any:
    if not _library.running():
        raise CisternError("nothing to pause or resume: Cistern does not run in this process yet")
    return _library.load()
