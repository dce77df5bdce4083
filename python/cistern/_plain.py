"""PyTorch on Cistern without the adapter: PyTorch's plain pluggable allocator over libcistern_plain.so.

That allocator has hooks for what allocating and freeing need, all of which are set here. It answers none of Python's
questions about memory (torch.cuda.memory_stats and what is built on it): those are answered here, in place of PyTorch's
bindings. What is not available at all raises one line that says why.
"""

import functools
import os
import pickle
import tempfile
from typing import Any, Callable, Dict, Optional, Tuple

from . import _library, _stats
from ._errors import CisternError, say

# Hooks of PyTorch's plain allocator, and the functions behind them.
_HOOKS = (
    ("set_init_fn", "cistern_plain_init"),
    ("set_reset_fn", "cistern_plain_reset"),
    ("set_memory_fraction_fn", "cistern_plain_memory_fraction"),
    ("set_base_alloc_fn", "cistern_plain_base"),
    ("set_record_stream_fn", "cistern_plain_record_stream"),
    ("set_begin_allocate_to_pool", "cistern_plain_begin_pool"),
    ("set_end_allocate_to_pool_fn", "cistern_plain_end_pool"),
    ("set_release_pool", "cistern_plain_release_pool"),
)


def install(torch: Any, library: str, why: str, started: Callable[[], bool]) -> None:
    """Makes the plain allocator PyTorch's. started says whether CUDA has started, with which the library does."""
    import ctypes

    file = _library.find("libcistern_plain.so")
    shim = ctypes.CDLL(file)

    def address(name: str) -> int:
        a = ctypes.cast(getattr(shim, name), ctypes.c_void_p).value
        assert a is not None
        return a

    configure = shim.cistern_plain_configure
    configure.restype, configure.argtypes = None, [ctypes.c_char_p, ctypes.c_char_p]
    configure(os.fsencode(library), None)
    allocator = torch.cuda.memory.CUDAPluggableAllocator(file, "cistern_plain_malloc", "cistern_plain_free")
    inner = allocator.allocator()
    for hook, name in _HOOKS:
        getattr(inner, hook)(address(name))
    torch.cuda.memory.change_current_allocator(allocator)
    _follow_captures(torch, shim.cistern_plain_to_be_captured)
    _Answers(torch, why, started).put()


def _follow_captures(torch: Any, to_be_captured: Any) -> None:
    """Has the shim know of which stream a capture is about to begin, which PyTorch does not tell a plain allocator."""
    import ctypes

    graph: Any = getattr(getattr(torch.cuda, "graphs", None), "CUDAGraph", None)
    theirs: Any = getattr(graph, "capture_begin", None)
    if theirs is None:
        return
    to_be_captured.restype, to_be_captured.argtypes = None, [ctypes.c_void_p]

    @functools.wraps(theirs)
    def capture_begin(self: Any, *arguments: Any, **named: Any) -> Any:
        to_be_captured(torch.cuda.current_stream().cuda_stream)
        try:
            return theirs(self, *arguments, **named)
        finally:
            to_be_captured(None)

    graph.capture_begin = capture_begin


class _Answers:
    """PyTorch's bindings that its plain allocator leaves unanswered."""

    def __init__(self, torch: Any, why: str, started: Callable[[], bool]) -> None:
        self.torch = torch
        self.why = why
        self.started = started
        self.history = 0

    def put(self) -> None:
        answers: Dict[str, Callable[..., Any]] = {
            "_cuda_memoryStats": self.memory_stats,
            "_cuda_resetAccumulatedMemoryStats": self.reset_accumulated,
            "_cuda_resetPeakMemoryStats": self.reset_peaks,
            "_cuda_memorySnapshot": self.snapshot,
            "_cuda_record_memory_history": self.record_history,
            "_cuda_record_memory_history_legacy": self.record_history_legacy,
            "_cuda_isHistoryEnabled": lambda: self.history > 0,
            "_cuda_getMemoryFraction": self.memory_fraction,
            "_accelerator_getDeviceStats": self.memory_stats,
            "_accelerator_resetAccumulatedStats": self.reset_accumulated,
            "_accelerator_resetPeakStats": self.reset_peaks,
        }
        for name, what in (
            ("_cuda_attach_out_of_memory_observer", "observing out-of-memory"),
            ("_cuda_getCheckpointState", "a checkpoint of a pool (torch.compile with CUDA graph trees)"),
            ("_cuda_setCheckpointPoolState", "a checkpoint of a pool (torch.compile with CUDA graph trees)"),
            ("_cuda_checkPoolLiveAllocations", "looking into a pool (torch.compile with CUDA graph trees)"),
            ("_cuda_beginAllocateCurrentThreadToPool", "torch.cuda.use_mem_pool"),
        ):
            answers[name] = self.cannot(what)
        for name, answer in answers.items():
            # PyTorch's module of today; another may not have all of them.
            if hasattr(self.torch._C, name):
                setattr(self.torch._C, name, answer)
        memory = self.torch.cuda.memory
        # torch.cuda.memory has taken this one by name.
        if hasattr(memory, "_cuda_beginAllocateCurrentThreadToPool"):
            memory._cuda_beginAllocateCurrentThreadToPool = self.cannot("torch.cuda.use_mem_pool")
        if hasattr(memory, "MemPool"):
            memory.MemPool.__init__ = self.cannot("torch.cuda.MemPool")
        storage: Any = getattr(self.torch, "UntypedStorage", None)
        if hasattr(storage, "_share_cuda_"):
            storage._share_cuda_ = self.cannot("sharing a CUDA tensor with another process")

    def cannot(self, what: str) -> Callable[..., Any]:
        words = "%s needs Cistern's PyTorch adapter, which is not in use: %s" % (what, self.why)

        def raising(*arguments: Any, **named: Any) -> Any:
            raise CisternError(words)

        return raising

    def library(self) -> Any:
        return _library.load() if self.started() else None

    def memory_stats(self, device: int) -> Dict[str, Any]:
        lib = self.library()
        return _stats.as_torch(_stats.read(lib, device) if lib is not None else _stats.Stats())

    def reset_accumulated(self, device: int) -> None:
        lib = self.library()
        if lib is not None:
            _library.check(lib, lib.cistern_reset_accumulated(device))

    def reset_peaks(self, device: int) -> None:
        lib = self.library()
        if lib is not None:
            _library.check(lib, lib.cistern_reset_peaks(device))

    def memory_fraction(self, device: int) -> float:
        lib = self.library()
        if lib is None:
            return 1.0
        import ctypes

        limit, free, total = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
        _library.check(lib, lib.cistern_get_limit(device, ctypes.byref(limit)))
        _library.check(lib, lib.cistern_mem_info(device, ctypes.byref(free), ctypes.byref(total)))
        if limit.value == 0 or total.value == 0:
            return 1.0
        return min(1.0, limit.value / total.value)

    def snapshot(self, pool: Optional[Tuple[Any, ...]] = None) -> Dict[str, Any]:
        """Cistern's own snapshot, which is in PyTorch's form."""
        lib = self.library()
        if lib is None:
            return {"segments": [], "device_traces": [], "allocator_settings": {}, "external_annotations": []}
        with tempfile.TemporaryDirectory(prefix="cistern-") as folder:
            file = os.path.join(folder, "snapshot.pickle")
            _library.check(lib, lib.cistern_snapshot_write(os.fsencode(file)))
            with open(file, "rb") as f:
                found: Dict[str, Any] = pickle.load(f)
        if pool is not None:
            if tuple(pool[:2]) != (0, 0):
                found["segments"] = [s for s in found["segments"] if tuple(s["segment_pool_id"]) == tuple(pool[:2])]
            if len(pool) > 2 and not pool[2]:
                found["device_traces"] = [[] for _ in found["device_traces"]]
        return found

    def record_history(self, enabled: Optional[str], context: Optional[str] = None, stacks: str = "all",
                       max_entries: int = 1, clear_history: bool = False, *rest: Any) -> None:
        self.torch.cuda._lazy_init()
        keep = 0 if enabled is None else max(1, min(int(max_entries), 10_000_000 if enabled == "all" else 1))
        lib = self.library()
        if lib is None:
            return
        if keep and context is not None:
            say("the history of the plain allocator has no stacks: " + self.why)
        for device in range(self.torch.cuda.device_count()):
            if clear_history and keep:
                _library.check(lib, lib.cistern_history(device, 0))
            _library.check(lib, lib.cistern_history(device, keep))
        self.history = keep

    def record_history_legacy(self, enabled: bool, record_context: bool = True, max_entries: int = 1,
                              trace_context: bool = False, *rest: Any) -> None:
        self.record_history("all" if enabled else None, "all" if trace_context else None, "all", max_entries)
