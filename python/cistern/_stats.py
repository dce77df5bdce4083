"""The statistics of a device as the C struct cistern_stats, and in the form in which PyTorch gives its own."""

import ctypes
from typing import TYPE_CHECKING, Any, Dict, Optional

from . import _library, _pools

if TYPE_CHECKING:
    from .hints import Device, MemoryStats


class Value(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int64) for n in ("current", "peak", "added", "removed")]


class Grouped(ctypes.Structure):
    _fields_ = [(n, Value) for n in ("all", "small", "large")]


class Stats(ctypes.Structure):
    _fields_ = (
        [("size", ctypes.c_uint32), ("device", ctypes.c_int32)]
        + [(n, Grouped) for n in ("allocations", "active", "inactive", "segments", "requested", "allocated",
                                  "active_bytes", "inactive_bytes", "reserved")]
        + [(n, ctypes.c_uint64) for n in ("limit", "spare_bytes", "address_bytes")]
        + [(n, ctypes.c_int64) for n in ("remaps", "device_allocs", "device_frees", "retries", "ooms", "by_fit",
                                         "by_collect", "by_remap", "by_grow", "by_lend", "by_callback",
                                         "stream_syncs", "by_spill")]
        + [("paused", Value), ("borrows", ctypes.c_int64), ("by_node", ctypes.c_int64), ("imported_bytes", ctypes.c_uint64)]
    )


def read(lib: Any, device: int) -> Any:
    s = Stats()
    s.size = ctypes.sizeof(s)
    _library.check(lib, lib.cistern_get_stats(device, ctypes.byref(s)))
    return s


# PyTorch's names.
_GROUPED = (
    ("allocation", "allocations"), ("segment", "segments"), ("active", "active"), ("inactive_split", "inactive"),
    ("allocated_bytes", "allocated"), ("reserved_bytes", "reserved"), ("active_bytes", "active_bytes"),
    ("inactive_split_bytes", "inactive_bytes"), ("requested_bytes", "requested"),
)


def few_as_torch(s: Any) -> Dict[str, Any]:
    """The part of as_torch that summaries are made of, for each step of a program: without its pools, and in a fraction of the time."""
    out: Dict[str, Any] = {"num_alloc_retries": s.retries, "num_ooms": s.ooms}
    for theirs, ours in (("allocation", s.allocations), ("allocated_bytes", s.allocated), ("reserved_bytes", s.reserved),
                         ("inactive_split_bytes", s.inactive_bytes), ("requested_bytes", s.requested)):
        v = ours.all
        out[theirs] = {"all": {"current": v.current, "peak": v.peak, "allocated": v.added}}
    return out


def as_torch(s: Any) -> Dict[str, Any]:
    """What torch.cuda.memory_stats_as_nested_dict gives, for a Stats. Nothing is ever oversize here."""

    def value(v: Any) -> Dict[str, int]:
        return {"current": v.current, "peak": v.peak, "allocated": v.added, "freed": v.removed}

    out: Dict[str, Any] = {
        "num_alloc_retries": s.retries,
        "num_ooms": s.ooms,
        "num_sync_all_streams": s.stream_syncs,
        "num_device_alloc": s.device_allocs,
        "num_device_free": s.device_frees,
        "max_split_size": -1,
        "oversize_allocations": {"current": 0, "peak": 0, "allocated": 0, "freed": 0},
        "oversize_segments": {"current": 0, "peak": 0, "allocated": 0, "freed": 0},
    }
    for theirs, ours in _GROUPED:
        g = getattr(s, ours)
        out[theirs] = {"all": value(g.all), "small_pool": value(g.small), "large_pool": value(g.large)}
    return out


def flat(device: "Optional[Device]") -> "MemoryStats":
    """What torch.cuda.memory_stats gives: as_torch with the keys of each level joined by dots."""
    lib = _library.in_use()
    if lib is None:
        return {}
    found: Dict[str, int] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(prefix + "." + key if prefix else key, inner)
        else:
            found[prefix] = int(value)

    add("", as_torch(read(lib, _pools.device_index(device))))
    return dict(sorted(found.items()))


def reset_peaks(device: "Optional[Device]") -> None:
    lib = _library.in_use()
    if lib is not None:
        _library.check(lib, lib.cistern_reset_peaks(_pools.device_index(device)))


def reset_accumulated(device: "Optional[Device]") -> None:
    lib = _library.in_use()
    if lib is not None:
        _library.check(lib, lib.cistern_reset_accumulated(_pools.device_index(device)))
