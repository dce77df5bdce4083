"""Peaks of GPU memory in TensorBoard, for training loops without a framework.

    from cistern.tensorboard import MemoryLogger

    memory = MemoryLogger(SummaryWriter("runs"))
    for step, batch in enumerate(loader):
        train(batch)
        memory.log(step)

Lightning's and Hugging Face's loops have callbacks (cistern.lightning, cistern.transformers), whose values reach TensorBoard too.
"""

from typing import Any

from ._peaks import Peaks

__all__ = ["MemoryLogger"]


class MemoryLogger:
    """Writes the peaks of GPU memory to TensorBoard, in GiB.

    They are `gpu_peak_allocated_gib` and `gpu_peak_reserved_gib` of the process's current device, for all libraries on Cistern.
    They are the peaks since the last log. Where Cistern does not run, it writes nothing and says so once.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`, or another object with its `add_scalar(name, value, step)`, as
            `tensorboard.summary.Writer` and `tensorboardX.SummaryWriter`.

    Example:
        from cistern.tensorboard import MemoryLogger

        memory = MemoryLogger(writer)
        memory.log(step)
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._peaks = Peaks()
        self._peaks.reset()

    def log(self, step: int) -> None:
        """Writes the peaks since the last call.

        Args:
            step: the number of the step that has ended.
        """
        for name, value in self._peaks.read().items():
            self._writer.add_scalar(name, value, step)
        self._peaks.reset()
