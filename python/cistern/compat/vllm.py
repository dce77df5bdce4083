"""What vLLM's sleep mode needs of an allocator: `CuMemAllocator` of `vllm.device_allocator.cumem` (vLLM 0.33) over Cistern.

    cistern.compat.install("vllm")     # then vLLM imports this module in place of its own

Memory of a tag is in a pool of its own. `sleep` pauses all pools, keeping the contents of some tags in page-locked host
memory, and `wake_up` resumes them at the same addresses. docs/serving.md lists what behaves differently.
"""

import contextlib
import gc
import logging
from typing import Any, Dict, Iterator, List, Optional, Tuple, Union

from .. import _pools
from ..hints import PauseResult, PoolId
from ._regions import Choice, KeepOf, Regions

__all__ = ["CuMemAllocator"]

# wake_up() with tags leaves only these paused; any other tag wakes with the first call, as in vLLM.
DEFERRABLE_TAGS: Tuple[str, ...] = ("weights", "kv_cache")

_GRAPHS = "cudagraph"
_logger = logging.getLogger(__name__)


class CuMemAllocator:
    """Memory in pools by tag, which sleeps and wakes up. `get_instance` returns the only one."""

    instance: "Optional[CuMemAllocator]" = None
    default_tag: str = "default"

    @staticmethod
    def get_instance() -> "CuMemAllocator":
        """Returns the allocator of this process.

        Raises:
            CisternError: PyTorch does not use Cistern's adapter.
        """
        from .. import torch as ours

        ours.adapter_in_use()
        if CuMemAllocator.instance is None:
            CuMemAllocator.instance = CuMemAllocator()
        return CuMemAllocator.instance

    def __init__(self) -> None:
        self._regions = Regions()
        self._kept: Dict[Tuple[PoolId, int], bool] = {}  # how a pool was put to sleep: whether contents were kept

    @contextlib.contextmanager
    def use_memory_pool(self, tag: Optional[str] = None) -> Iterator[None]:
        """Makes what the calling thread allocates inside memory of the tag."""
        with self._regions.scope(self.default_tag if tag is None else tag):
            yield

    @contextlib.contextmanager
    def cudagraph_pool(self) -> Iterator[PoolId]:
        """The pool to capture CUDA graphs into, whose tag is `"cudagraph"`."""
        from .. import tag as label

        pool = self._regions.pool(_GRAPHS)
        with label(_GRAPHS):
            yield _pools.numbers(pool)

    def sleep(self, offload_tags: Union[Tuple[str, ...], str, None] = None) -> None:
        """Pauses all memory. Contents of these tags are kept in host memory, all others are dropped.

        Args:
            offload_tags: a tag or several; None: the default tag.
        """
        tags = _tuple(self.default_tag if offload_tags is None else offload_tags)
        report = self._pause(lambda r: True, lambda r: "host" if r.tag in tags else "drop", "sleep")
        _logger.info("sleep returned %.2f GiB to the device; the contents of %.2f GiB are in host memory",
                     report["physical"] / 1024 ** 3, report["kept"] / 1024 ** 3)
        gc.collect()
        _empty_cache()

    def discard(self, tags: Union[Tuple[str, ...], str]) -> None:
        """Pauses the memory of these tags without its contents."""
        chosen = _tuple(tags)
        report = self._pause(lambda r: r.tag in chosen, lambda r: "drop", "discard")
        _logger.info("discard returned %.2f GiB of %s to the device", report["physical"] / 1024 ** 3, ", ".join(chosen))

    def wake_up(self, tags: Optional[List[str]] = None) -> None:
        """Gives memory back its addresses, and the contents that were kept.

        Args:
            tags: which of `"weights"` and `"kv_cache"` come back; None: both. All other tags come back in any case.

        Raises:
            cistern.OutOfMemoryError: the device has too little memory. What is paused stays so; call it again.
        """
        gc.collect()
        _empty_cache()
        self._regions.resume(lambda r: tags is None or r.tag in tags or r.tag not in DEFERRABLE_TAGS)

    def get_current_usage(self) -> int:
        """Returns the bytes allocated in the pools of all tags, paused ones included."""
        return self._regions.allocated()

    def release_pools(self) -> None:
        """Forgets all pools. Tensors in them stay valid, and do not sleep any more."""
        self._regions.clear()
        self._kept.clear()
        gc.collect()

    close = release_pools

    def _pause(self, chosen: Choice, keep: KeepOf, what: str) -> PauseResult:
        """Pauses regions; a warning says where memory is paused already in the other way, which stays so."""
        conflict = False
        for r in self._regions.all(chosen):
            kept = keep(r) == "host"
            paused = _pools.stats(r.pool, r.device)["paused"] > 0
            conflict = conflict or paused and self._kept.get((r.pool, r.device), kept) != kept
            if not paused:
                self._kept[r.pool, r.device] = kept
        if conflict:
            _logger.warning("%s cannot change what was decided about contents of memory that sleeps already", what)
        return self._regions.pause(chosen, keep)


def _tuple(tags: Union[Tuple[str, ...], str]) -> Tuple[str, ...]:
    if isinstance(tags, str):
        return (tags,)
    if not isinstance(tags, tuple):
        raise TypeError("tags are a string or a tuple of strings, got %s" % type(tags).__name__)
    return tags


def _empty_cache() -> None:
    import torch

    torch.cuda.empty_cache()


def __getattr__(name: str) -> Any:
    # vLLM asks for it before it allows sleep mode.
    if name == "cumem_available":
        from .. import torch as ours

        return ours.mode() == "adapter"
    raise AttributeError("module %r has no attribute %r" % (__name__, name))
