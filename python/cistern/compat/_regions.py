"""Memory that is paused and resumed by tag: a pool for each tag, way to keep contents and device.

Pools and not tags alone decide what is paused: a pause takes whole chunks, and a pool shares its chunks with no other.
"""

import contextlib
import threading
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

from .. import _pause, _pools
from .._tags import tag as _tag
from ..hints import Keep, PauseResult, PoolId

KeepOf = Callable[["Region"], Keep]
Choice = Callable[["Region"], bool]


class Region(NamedTuple):
    """A pool that is paused by its tag."""

    tag: str
    keep: Keep
    device: int
    pool: PoolId

    def known(self) -> bool:
        """Whether the library has the pool: from its first request on, and a graph's until its last graph is gone."""
        return _pools.known(self.pool, self.device)


class Regions:
    """The pools of one module. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owned: Dict[Tuple[str, Keep, int], Any] = {}  # torch.cuda.MemPool, kept alive here; guarded by _lock
        self._graphs: Dict[Tuple[PoolId, int], Region] = {}  # of pools that graphs keep alive; guarded by _lock

    def pool(self, tag: str, keep: Keep = "drop") -> Any:
        """The torch.cuda.MemPool of a tag on the current device."""
        import torch

        from .. import torch as ours

        ours.adapter_in_use()
        torch.cuda.init()
        key = (tag, keep, int(torch.cuda.current_device()))
        with self._lock:
            if key not in self._owned:
                self._owned[key] = ours.MemPool()
            return self._owned[key]

    @contextlib.contextmanager
    def scope(self, tag: str, keep: Keep = "drop") -> Iterator[Any]:
        """Takes what the calling thread allocates inside from the pool of a tag, and labels it with the tag."""
        import torch

        pool = self.pool(tag, keep)
        with torch.cuda.use_mem_pool(pool), _tag(tag):
            yield pool

    def add_graph(self, tag: str, keep: Keep, pool: PoolId) -> None:
        """Adds the pool of a CUDA graph that was captured on the current device."""
        import torch

        region = Region(tag, keep, int(torch.cuda.current_device()), _pools.numbers(pool))
        with self._lock:
            self._graphs[region.pool, region.device] = region

    def all(self, chosen: Choice) -> List[Region]:
        """The regions that are chosen and that the library knows."""
        with self._lock:
            found = [Region(tag, keep, device, _pools.numbers(p)) for (tag, keep, device), p in self._owned.items()]
            found += self._graphs.values()
        known = []
        for region in found:
            if region.known():
                known.append(region)
            else:
                with self._lock:
                    self._graphs.pop((region.pool, region.device), None)
        return [region for region in known if chosen(region)]

    def pause(self, chosen: Choice, keep: KeepOf, folder: "str | None" = None) -> PauseResult:
        """Pauses the memory of regions, that of captured graphs too; the figures of all of them."""
        total = PauseResult(blocks=0, bytes=0, physical=0, kept=0, shared=0)
        for r in self.all(chosen):
            how = keep(r)
            _add(total, _pause.pause(None, r.pool, r.device, how, folder if how == "disk" else None, True))
        return total

    def resume(self, chosen: Choice) -> PauseResult:
        """Resumes the memory of regions; the figures of all of them. What came back before an error stays."""
        total = PauseResult(blocks=0, bytes=0, physical=0, kept=0, shared=0)
        for r in self.all(chosen):
            _add(total, _pause.resume(None, r.pool, r.device))
        return total

    def allocated(self) -> int:
        """The bytes allocated in all regions, paused ones included."""
        return sum(_pools.stats(r.pool, r.device)["allocated"] for r in self.all(lambda region: True))

    def clear(self) -> None:
        """Forgets all pools. Memory that is in use in them stays so, and can be paused by its tag alone."""
        with self._lock:
            owned, self._owned = self._owned, {}
            self._graphs.clear()
        owned.clear()  # without the lock: the adapter takes locks of its own


def _add(total: PauseResult, more: PauseResult) -> None:
    total["blocks"] += more["blocks"]
    total["bytes"] += more["bytes"]
    total["physical"] += more["physical"]
    total["kept"] += more["kept"]
    total["shared"] += more["shared"]
