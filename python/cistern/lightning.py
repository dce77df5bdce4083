"""A callback for Lightning that logs peaks of GPU memory.

    from cistern.lightning import MemoryCallback

    trainer = Trainer(callbacks=[MemoryCallback()])

Lightning is imported when MemoryCallback is first named: `pytorch_lightning` where the program has imported that, else
`lightning.pytorch`, whichever is installed.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from ._errors import CisternError
from ._peaks import Peaks

__all__ = ["MemoryCallback"]


class MemoryCallbackMixin:
    """A Lightning callback that logs the peaks of GPU memory with each training step, in GiB.

    It logs `gpu_peak_allocated_gib` and `gpu_peak_reserved_gib` of the process's current device, for all libraries on Cistern.
    The peaks start again with each epoch. Where Cistern does not run, it logs nothing and says so once.

    Example:
        from cistern.lightning import MemoryCallback

        trainer = Trainer(callbacks=[MemoryCallback()])
    """

    def __init__(self) -> None:
        super().__init__()
        self._peaks = Peaks()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._peaks.reset()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Lightning writes them down as often as the trainer's log_every_n_steps says.
        pl_module.log_dict(self._peaks.read(), on_step=True, on_epoch=False, batch_size=1)


if TYPE_CHECKING:
    from lightning.pytorch import Callback

    class MemoryCallback(MemoryCallbackMixin, Callback):  # type: ignore[misc]
        """See MemoryCallbackMixin."""


def __getattr__(name: str) -> Any:
    if name != "MemoryCallback":
        raise AttributeError("module %r has no attribute %r" % (__name__, name))
    packages = ["lightning.pytorch", "pytorch_lightning"]
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        packages.reverse()
    for package in packages:
        try:
            base = importlib.import_module(package).Callback
            break
        except ModuleNotFoundError as e:
            if e.name not in ("lightning", package):
                raise
    else:
        raise CisternError("Lightning is not installed: neither lightning nor pytorch_lightning is there")
    made = type(name, (MemoryCallbackMixin, base), {"__module__": __name__, "__doc__": MemoryCallbackMixin.__doc__})
    globals()[name] = made
    return made
