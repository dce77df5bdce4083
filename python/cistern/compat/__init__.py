"""Modules in place of those by which inference engines release GPU memory, over Cistern's pools and pauses.

    CISTERN_COMPAT=torch_memory_saver cistern run -- python -m sglang.launch_server --enable-memory-saver ...
    CISTERN_COMPAT=vllm cistern run -- vllm serve MODEL --enable-sleep-mode

The engines import `torch_memory_saver` and `vllm.device_allocator.cumem` as ever, and get the modules of this package. A program
that is not started by `cistern run` calls `install` before it imports the engine.
"""

import importlib
import os
import sys
from typing import Dict, List

from .._errors import CisternError

__all__ = ["install"]

VARIABLE = "CISTERN_COMPAT"

# The module that an engine imports, by the name of the one here that takes its place.
_REPLACED: Dict[str, str] = {"torch_memory_saver": "torch_memory_saver", "vllm": "vllm.device_allocator.cumem"}


def install(*names: str) -> None:
    """Puts modules of Cistern in the place of those by which engines release GPU memory, in this process.

    PyTorch is put on Cistern as by `cistern.torch.enable`, if it is not yet. A second call does nothing.

    Args:
        names: `"torch_memory_saver"` for the package of that name, `"vllm"` for `vllm.device_allocator.cumem`. None: both.

    Raises:
        ValueError: another name is given.
        CisternError: the module was imported before, or PyTorch does not use Cistern's adapter.

    Example:
        import cistern.compat

        cistern.compat.install("torch_memory_saver")
        import torch_memory_saver
    """
    for name in names:
        if name not in _REPLACED:
            raise ValueError("%r: want %s" % (name, " or ".join(_REPLACED)))
    from .. import torch as ours

    ours.enable()
    ours.adapter_in_use()
    for name in names or tuple(_REPLACED):
        target = _REPLACED[name]
        module = importlib.import_module(__name__ + "." + name)
        if sys.modules.setdefault(target, module) is not module:
            raise CisternError("%s is imported already: call cistern.compat.install(%r) before that" % (target, name))
        package, _, attribute = target.rpartition(".")
        if package in sys.modules:
            setattr(sys.modules[package], attribute, module)


def wanted() -> List[str]:
    """The names in the environment variable."""
    return [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
