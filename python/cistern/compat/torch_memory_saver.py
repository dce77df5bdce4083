"""The Python API of torch_memory_saver 0.0.10 over Cistern: regions, pause and resume by tag.

    from torch_memory_saver import torch_memory_saver     # after cistern.compat.install("torch_memory_saver")

    with torch_memory_saver.region("weights", enable_cpu_backup=True):
        model = build()
    torch_memory_saver.pause("weights")
    torch_memory_saver.resume("weights")

The names and their arguments are those of that package. docs/serving.md lists what behaves differently.
"""

import contextlib
import os
import threading
from typing import Any, Iterator, Literal, Optional

from . import VARIABLE, wanted
from ._regions import Regions

from ..hints import Keep

HookMode = Literal["preload", "torch"]
CpuBackupBackend = Literal["mmap", "pinned"]

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]

_DEFAULT = "default"
_thread = threading.local()


class TorchMemorySaver:
    """Memory that is paused and resumed by tag. The package has one, `torch_memory_saver`."""

    def __init__(self) -> None:
        self._regions = Regions()
        self._folder: Optional[str] = os.environ.get("TMS_DISK_BACKUP_DIR") or None

    @contextlib.contextmanager
    def region(self, tag: str = _DEFAULT, enable_cpu_backup: bool = False, enable_disk_backup: bool = False,
               cpu_backup_backend: Optional[CpuBackupBackend] = None) -> Iterator[None]:
        """Makes what the calling thread allocates inside memory of the tag.

        Args:
            tag: the name by which it is paused.
            enable_cpu_backup: a pause keeps the contents in page-locked host memory. Without a backup they are dropped.
            enable_disk_backup: a pause keeps them in a file.
            cpu_backup_backend: `"pinned"` is the only one.
        """
        keep = _keep(enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        with self._regions.scope(tag, keep), _inside(True):
            yield

    @contextlib.contextmanager
    def cuda_graph(self, cuda_graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "global",
                   tag: str = _DEFAULT, enable_cpu_backup: bool = False,
                   cpu_backup_backend: Optional[CpuBackupBackend] = None) -> Iterator[None]:
        """Captures a graph as `torch.cuda.graph` does, and makes the memory of its pool memory of the tag."""
        import torch

        from .. import tag as label
        from .. import torch as ours

        ours.adapter_in_use()
        keep = _keep(enable_cpu_backup, False, cpu_backup_backend)
        with torch.cuda.graph(cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode):
            with label(tag), _inside(True):
                yield
        self._regions.add_graph(tag, keep, cuda_graph.pool())  # which has one once its capture has ended

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """Within a region: makes what is allocated inside ordinary memory, which is never paused."""
        if not getattr(_thread, "inside", False):
            raise AssertionError("disable() should be called only when tms is active")
        import torch

        from .. import tag as label

        with torch.cuda.use_mem_pool(torch.cuda.MemPool()), label("outside of regions"), _inside(False):
            yield

    def pause(self, tag: Optional[str] = None) -> None:
        """Returns the physical memory of a tag to the device, that of all tags without one."""
        self._regions.pause(lambda r: not tag or r.tag == tag, lambda r: r.keep, self._folder)

    def resume(self, tag: Optional[str] = None) -> None:
        """Gives a tag its memory again, all tags without one. Contents that were not kept are undefined.

        Raises:
            cistern.OutOfMemoryError: the device has too little memory. What is paused stays so; call it again.
        """
        self._regions.resume(lambda r: not tag or r.tag == tag)

    @property
    def enabled(self) -> bool:
        return True

    @property
    def hook_mode(self) -> HookMode:
        raise AttributeError("hook_mode can be set only")

    @hook_mode.setter
    def hook_mode(self, hook_mode: HookMode) -> None:
        # Both modes are ways to see what PyTorch allocates, which Cistern allocates itself.
        if hook_mode not in ("preload", "torch"):
            raise ValueError("hook_mode is preload or torch, got %r" % (hook_mode,))

    @property
    def memory_margin_bytes(self) -> int:
        raise NotImplementedError("Only setter is supported")

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        if value != 0:
            raise NotImplementedError("memory_margin_bytes: Cistern keeps no margin of the device's free memory; "
                                      "set limit: in CISTERN_CONF to leave memory to others")

    @property
    def retain_cpu_backup(self) -> bool:
        return False

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        if value:
            raise NotImplementedError("retain_cpu_backup: Cistern gives up contents when memory is resumed; "
                                      "the page-locked memory stays for the next pause in any case")

    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        raise NotImplementedError("get_cpu_backup: Cistern cannot read contents of paused memory: resume it first")

    def set_disk_backup_dir(self, path: str) -> None:
        """Names the folder for files of `enable_disk_backup`, and makes it if it is missing."""
        os.makedirs(path, exist_ok=True)
        self._folder = path


def _keep(cpu: bool, disk: bool, backend: Optional[str]) -> Keep:
    if cpu and disk:
        raise AssertionError("enable_cpu_backup and enable_disk_backup are mutually exclusive")
    if backend is not None and not cpu:
        raise ValueError("cpu_backup_backend requires enable_cpu_backup=True")
    if backend not in (None, "pinned"):
        raise ValueError("cpu_backup_backend=%r: Cistern keeps contents in page-locked memory, which is \"pinned\"" % backend)
    return "host" if cpu else "disk" if disk else "drop"


@contextlib.contextmanager
def _inside(inside: bool) -> Iterator[None]:
    """Notes that the calling thread is in a region, or out of it again by disable()."""
    before = getattr(_thread, "inside", False)
    _thread.inside = inside
    try:
        yield
    finally:
        _thread.inside = before


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """Has Python processes that are started inside run on Cistern, with this module, as `cistern run` does."""
    inject = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "_inject")
    path = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != inject]
    names = wanted()
    changed = {
        VARIABLE: ",".join(names if "torch_memory_saver" in names else names + ["torch_memory_saver"]),
        "PYTHONPATH": os.pathsep.join([inject] + path),
        "_CISTERN_INJECT": os.environ.get("_CISTERN_INJECT") or "run",
    }
    before = {key: os.environ.get(key) for key in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


torch_memory_saver = TorchMemorySaver()
