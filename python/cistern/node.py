"""The node's broker (`cistern serve`): how much GPU memory this process may use beside others.

    import cistern.node
    blocks = cistern.node.available() * 9 // 10 // BLOCK_BYTES
"""

import ctypes
from typing import TYPE_CHECKING, Optional

from . import _library, _memory, _pools

if TYPE_CHECKING:
    from .hints import Device

__all__ = ["available"]


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
