"""Peaks of GPU memory in Weights & Biases, for training loops without a framework.

    from cistern.wandb import MemoryLogger

    memory = MemoryLogger(wandb.init())
    for batch in loader:
        loss = train(batch)
        memory.log()
        run.log({"loss": loss})

Lightning's and Hugging Face's loops have callbacks (cistern.lightning, cistern.transformers), whose values reach Weights & Biases too.
"""

from typing import Any

from ._peaks import Peaks

__all__ = ["MemoryLogger"]


class MemoryLogger:
    """Adds the peaks of GPU memory to what a run of Weights & Biases logs, in GiB.

    They are `gpu_peak_allocated_gib` and `gpu_peak_reserved_gib` of the process's current device, for all libraries on Cistern.
    They are the peaks since the last log. Where Cistern does not run, it adds nothing and says so once.

    Args:
        run: a `wandb.Run`, as `wandb.init()` returns it.

    Example:
        from cistern.wandb import MemoryLogger

        memory = MemoryLogger(run)
        memory.log()
        run.log({"loss": loss})
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._peaks = Peaks()
        self._peaks.reset()

    def log(self) -> None:
        """Adds the peaks since the last call to the row that the program's next `run.log` completes."""
        peaks = self._peaks.read()
        if peaks:
            self._run.log(peaks, commit=False)
        self._peaks.reset()
