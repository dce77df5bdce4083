"""A callback for the Trainer of Hugging Face's transformers that logs peaks of GPU memory.

    from cistern.transformers import MemoryCallback

    trainer = Trainer(...)
    MemoryCallback.add_to(trainer)

transformers is imported when MemoryCallback is first named.
"""

from typing import TYPE_CHECKING, Any, Dict, Optional

from ._errors import CisternError
from ._peaks import Peaks

__all__ = ["MemoryCallback"]


class MemoryCallbackMixin:
    """A TrainerCallback that adds the peaks of GPU memory to what the Trainer logs, in GiB.

    It adds `gpu_peak_allocated_gib` and `gpu_peak_reserved_gib` of the process's current device, for all libraries on Cistern.
    They are the peaks since the last logs. Where Cistern does not run, it adds nothing and says so once.

    `Trainer(callbacks=[MemoryCallback()])` works too, but then TensorBoard, Weights & Biases and others that the Trainer
    reports to are called before it, and get no peaks.

    Example:
        from cistern.transformers import MemoryCallback

        MemoryCallback.add_to(trainer)
    """

    def __init__(self) -> None:
        super().__init__()
        self._peaks = Peaks()

    @classmethod
    def add_to(cls, trainer: Any) -> None:
        """Adds a callback to a Trainer, before those that report to TensorBoard and others.

        Args:
            trainer: the `transformers.Trainer`.
        """
        callback = cls()
        trainer.add_callback(callback)
        callbacks = trainer.callback_handler.callbacks
        callbacks.remove(callback)
        callbacks.insert(0, callback)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._peaks.reset()

    def on_log(self, args: Any, state: Any, control: Any, logs: Optional[Dict[str, Any]] = None, **kwargs: Any) -> None:
        peaks = self._peaks.read()
        if logs is not None:
            logs.update(peaks)
        if state.log_history:
            state.log_history[-1].update(peaks)  # made of the logs before callbacks are called
        self._peaks.reset()


if TYPE_CHECKING:
    from transformers import TrainerCallback

    class MemoryCallback(MemoryCallbackMixin, TrainerCallback):  # type: ignore[misc]
        """See MemoryCallbackMixin."""


def __getattr__(name: str) -> Any:
    if name != "MemoryCallback":
        raise AttributeError("module %r has no attribute %r" % (__name__, name))
    try:
        from transformers import TrainerCallback as base
    except ModuleNotFoundError as e:
        if e.name != "transformers":
            raise
        raise CisternError("transformers is not installed") from None
    made = type(name, (MemoryCallbackMixin, base), {"__module__": __name__, "__doc__": MemoryCallbackMixin.__doc__})
    globals()[name] = made
    return made
