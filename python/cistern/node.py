"""The node's broker (`cistern serve`): how much GPU memory this process may use beside others, what others may pause, and named objects.

    import cistern.node
    blocks = cistern.node.available() * 9 // 10 // BLOCK_BYTES
"""

import contextlib
import ctypes
from typing import TYPE_CHECKING, Iterator, Optional, Union

from . import _library, _memory, _pause, _pools
from ._objects import Array, Object, get, load_safetensors, objects, put, remove

if TYPE_CHECKING:
    from ._tags import tag as Tag
    from .hints import Device, Path, Pool

__all__ = ["Array", "Object", "allow_pause", "available", "get", "load_safetensors", "objects", "put", "remove"]


def available(device: "Optional[Device]" = None) -> int:
    """Returns how many bytes requests can get of a device now, beside what is allocated.

    That is what this process has cached, what is free in the driver and not granted to other processes, and what those would
    release, if a broker runs; within the limits. One request need not get all of it, and the next moment it may be another
    figure: other processes use the device too. An engine that sizes itself asks for it after its weights are loaded.

    Args:
        device: the device; None is the current one. It comes into use.

    Returns:
        Bytes.

    Raises:
        CisternError: there is no such device, or no GPU.
    """
    index = _pools.device_index(device)
    lib, n = _memory.library(), ctypes.c_uint64()
    _library.check(lib, lib.cistern_node_available(index, ctypes.byref(n)))
    return int(n.value)


@contextlib.contextmanager
def allow_pause(tag: "Union[str, Tag, None]" = None, pool: "Optional[Pool]" = None, device: "Optional[Device]" = None, keep: str = "host",
                dir: "Optional[Path]" = None, captured: bool = False, auto: bool = False) -> Iterator[None]:
    """Lets the node pause memory of this process while a block of code runs, which must not use that memory.

    Within the block an operator or a launcher may return the memory to the device with `cistern node pause --label LABEL`, where
    LABEL is the setting `node_label` of this process, and bring it back with `cistern node resume`. When the block ends the memory
    is back, whoever paused it, at the same addresses. A thread of the library pauses. It runs no Python: it refuses to pause while
    PyTorch's allocator trackers (as of NCCL's registration) are attached.

    Args:
        tag: only memory that was allocated under this `cistern.tag`.
        pool: only memory of this pool.
        device: the device; None is the current one. It comes into use.
        keep: what becomes of the contents: `"host"` (page-locked memory), `"disk"`, `"drop"`.
        dir: with `keep="disk"`, the folder of the file.
        captured: also memory that captured graphs use.
        auto: the broker may pause the memory by itself too, when a request of another process would fail and the unused memory of
            all processes does not suffice. Without it only commands pause.

    Raises:
        ValueError: an argument has a value that is not allowed.
        CisternError: such a block is open already for the device, or the device or the pool does not exist.
        OutOfMemoryError: at the end of the block the device has too little memory. It stays paused; `cistern.resume()` may be
            called when there is more.

    Example:
        with cistern.node.allow_pause(tag="optimizer"):
            wait_for_rollouts()  # another process may use the memory meanwhile
    """
    o = _pause.options(keep, dir, captured)
    if auto:
        o.flags |= _pause.AUTO
    index = _pools.device_index(device)
    lib = _memory.library()
    kept = _pause.select(o, tag, pool)
    _library.check(lib, lib.cistern_node_allow_pause(index, ctypes.byref(o)))
    del kept
    try:
        yield
    finally:
        _library.check(lib, lib.cistern_node_deny_pause(index))
