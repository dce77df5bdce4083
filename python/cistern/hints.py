"""The types that functions of the package take and return, for annotations in programs that are checked.

    from cistern.hints import DeviceStats, Stats

    def reserved(device: DeviceStats) -> int:
        return device["reserved"]["all"]["current"]
"""

import os
from typing import Dict, List, Literal, Optional, Protocol, Tuple, TypedDict, Union

__all__ = ["Device", "DeviceStats", "Groups", "Keep", "LibraryUse", "MemoryKind", "MemoryStats", "ObjectInfo", "Path", "PauseResult", "Pool",
           "PoolId", "PoolStats", "PoolUse", "Removable", "Size", "StackUse", "Stacks", "Stats", "TagUse", "Value"]

Path = Union[str, "os.PathLike[str]"]
"""The name of a file or folder."""

Size = Union[int, str]
"""Bytes, or a size such as `"2GiB"` or `"512M"`: G and GiB are 2^30 bytes, GB is 10^9."""

Stacks = Literal["off", "python", "native", "all"]
"""The stacks that `cistern.attribution` keeps."""

Keep = Literal["host", "disk", "drop"]
"""Where `cistern.pause` keeps contents."""

MemoryKind = Literal["chunks", "ipc_legacy", "single_handle"]
"""Kinds of memory of a `cistern.torch.MemPool`."""

PoolId = Tuple[int, int]
"""The two numbers that name a pool; `(0, 0)` is memory outside of pools."""

MemoryStats = Dict[str, int]
"""The result of `cistern.memory_stats`."""


class _WithIndex(Protocol):
    @property
    def index(self) -> Optional[int]: ...


class _WithNumber(Protocol):
    @property
    def id(self) -> int: ...


class _WithPoolId(Protocol):
    @property
    def id(self) -> PoolId: ...


class _WithPool(Protocol):
    def pool(self) -> PoolId: ...


Device = Union[int, str, _WithIndex, _WithNumber]
"""A device: its number, `"cuda:1"`, a `torch.device` or a `cupy.cuda.Device`."""

Pool = Union[PoolId, _WithPoolId, _WithPool]
"""A pool: its id, a `torch.cuda.MemPool` or a `torch.cuda.CUDAGraph`."""


class Removable(Protocol):
    """Something that is in force until `remove()` is called."""

    def remove(self) -> None: ...


class Value(TypedDict):
    """A number over time: now, at its peak, and all that was ever added and removed."""

    current: int
    peak: int
    added: int
    removed: int


class Groups(TypedDict):
    """A number for all blocks, for those cut for requests of up to 256 KiB, and for larger ones."""

    all: Value
    small: Value
    large: Value


class TagUse(TypedDict):
    """The allocations under one tag, in bytes."""

    name: str
    allocations: int
    requested: int
    allocated: int


class LibraryUse(TypedDict):
    """The allocations of one library, in bytes."""

    library: str
    blocks: int
    requested: int
    allocated: int


class PoolStats(TypedDict):
    """A pool's memory on a device, in bytes. `allocated` includes `paused` and `spilled`; `limit` 0 is none."""

    reserved: int
    peak_reserved: int
    requested: int
    allocated: int
    cached: int
    paused: int
    spilled: int
    limit: int
    blocks: int


class _ObjectOptional(TypedDict, total=False):
    ttl_s: float
    labels: Dict[str, str]
    contents_sha256: str


class ObjectInfo(_ObjectOptional):
    """A generation of a named object. `ttl_s`, `labels` and `contents_sha256` are left out where there are none."""

    name: str
    uid: int
    gid: int
    generation: int
    state: str
    device: str
    bytes: int
    reserved_bytes: int
    mode: int
    layout_sha256: str
    readers: int
    pid: int
    created_unix: int


class PoolUse(PoolStats):
    """`PoolStats` with the pool's id and the name of its upstream."""

    pool: List[int]
    upstream: str


class DeviceStats(TypedDict):
    """The memory of one device. Sizes are bytes; cistern.h describes each field of `cistern_stats`."""

    device: int
    name: str
    allocations: Groups
    active: Groups
    inactive: Groups
    segments: Groups
    requested: Groups
    allocated: Groups
    active_bytes: Groups
    inactive_bytes: Groups
    reserved: Groups
    limit: int
    spare_bytes: int
    address_bytes: int
    remaps: int
    device_allocs: int
    device_frees: int
    retries: int
    ooms: int
    by_fit: int
    by_collect: int
    by_remap: int
    by_grow: int
    by_lend: int
    by_callback: int
    stream_syncs: int
    by_spill: int
    paused: Value
    borrows: int
    by_node: int
    imported_bytes: int
    tags: List[TagUse]
    libraries: List[LibraryUse]
    pools: List[PoolUse]


class Stats(TypedDict):
    """The result of `cistern.stats`."""

    version: str
    settings: str
    devices: List[DeviceStats]


class StackUse(TypedDict):
    """The allocations of one stack, in bytes; `frames` are innermost first."""

    stack: int
    blocks: int
    requested: int
    allocated: int
    frames: List[str]


class PauseResult(TypedDict):
    """The result of `cistern.pause` and `cistern.resume`."""

    blocks: int
    bytes: int
    physical: int
    kept: int
    shared: int
