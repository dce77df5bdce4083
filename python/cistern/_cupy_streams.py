"""CuPy's streams, as far as memory from Cistern depends on them: how long they live, and what is captured on them.

A stream is asked for its order when memory that was allocated on it is freed, and arrays often outlive the Stream object that
was current when they were made. So a stream that CuPy made, once memory was allocated on it, is never destroyed: its handle waits
for the next Stream of the same device and kind. Cistern may then rely on it (cistern_stream_durable), which makes
allocating cheaper.
"""

import os
import threading
from typing import Any, Dict, List, Set, Tuple

from . import _library, _memory
from ._errors import say

Kind = Tuple[int, bool, int]  # device, non-blocking, priority

seen: Set[int] = {0, 1, 2}  # handles of which nothing more has to be known: the default streams, and those of _owned
_owned: Dict[int, Kind] = {}  # handles that CuPy made and that are not destroyed
_spare: Dict[Kind, List[int]] = {}  # those of them that no Stream object has
_lock = threading.Lock()

captures: List["Capture"] = []  # under way
_following = False
_patched = False
_for_ever: List[Any] = []  # pools of graphs that cannot say when they go


def null_is_per_thread() -> bool:
    """Whether CuPy takes its null stream for the per-thread default stream."""
    try:
        from cupy_backends.cuda import stream

        return int(stream.get_default_stream_ptr()) == 2
    except (ImportError, AttributeError):
        return os.environ.get("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "0") not in ("", "0")


def first_seen(cupy: Any, lib: Any, stream: Any, handle: int, device: int) -> None:
    """Looks at a stream that memory is to be allocated on. One that CuPy has not made is looked at every time: what its
    handle means may change."""
    if not _patched or not isinstance(stream, cupy.cuda.Stream) or getattr(stream, "_foreign_stream_ref", None) is not None:
        return
    try:
        kind = (device, bool(stream.is_non_blocking), int(stream.priority))
    except AttributeError:  # a CuPy that does not tell
        return
    if stream.device_id != device or lib.cistern_stream_durable(device, handle) != _library.OK:
        return
    with _lock:
        _owned[handle] = kind
        seen.add(handle)


def _take(kind: Kind) -> int:
    with _lock:
        handles = _spare.get(kind)
        return handles.pop() if handles else 0


class Capture:
    """A capture into a graph that is under way."""

    def __init__(self, device: int, handle: int) -> None:
        self.device = device
        self.pool = _memory.Pool(device)
        self.handles: List[int] = []
        self.add(handle)

    def add(self, handle: int) -> None:
        lib = _memory.library()
        _library.check(lib, lib.cistern_capture_begin(self.device, self.pool.id, handle))
        self.handles.append(handle)

    def end(self) -> None:
        lib = _memory.library()
        for handle in self.handles:
            lib.cistern_capture_end(self.device, handle)


def join(stream: Any, handle: int, device: int) -> None:
    """Called before a request while captures are under way: has a stream that has joined one allocate from its pool."""
    for capture in captures:
        if handle in capture.handles:
            return
    if handle <= 2:
        return
    for capture in reversed(captures):
        if capture.device == device and stream.is_capturing():
            capture.add(handle)
            return


def follow(cupy: Any) -> None:
    """Has streams kept, and captures announced until unfollow."""
    global _following, _patched
    with _lock:
        _following = True
        if not _patched:
            _patch(cupy)
            _patched = True


def unfollow() -> None:
    global _following
    _following = False


def _patch(cupy: Any) -> None:
    cls = cupy.cuda.Stream
    base = next(c for c in cls.__mro__ if "begin_capture" in vars(c))
    their_init, their_del = cls.__init__, cls.__del__
    their_begin, their_end = base.begin_capture, base.end_capture
    current_device = cupy.cuda.device.get_device_id

    def __init__(self: Any, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: Any = None,
                 **more: Any) -> None:
        if _spare and not null and not ptds:
            device = current_device()
            handle = _take((device, bool(non_blocking), priority or 0))
            if handle:
                their_init(self, null=True, **more)
                self.ptr, self.device_id = handle, device
                return
        if priority is not None:
            more["priority"] = priority
        their_init(self, null=null, non_blocking=non_blocking, ptds=ptds, **more)

    def __del__(self: Any, owned: Any = _owned, spare: Any = _spare, theirs: Any = their_del) -> None:
        handle = getattr(self, "ptr", 0)
        kind = owned.get(handle)
        if kind is None or getattr(self, "_foreign_stream_ref", None) is not None:
            theirs(self)
            return
        try:
            if self.is_capturing():
                return  # of no use any more
        except Exception:
            return
        spare.setdefault(kind, []).append(handle)

    def begin_capture(self: Any, *arguments: Any, **named: Any) -> Any:
        if not _following or self.ptr <= 2:
            return their_begin(self, *arguments, **named)
        capture = Capture(self.device_id if self.device_id >= 0 else current_device(), self.ptr)
        try:
            result = their_begin(self, *arguments, **named)
        except BaseException:
            capture.end()
            raise
        captures.append(capture)
        return result

    def end_capture(self: Any) -> Any:
        capture = next((c for c in captures if c.handles[0] == self.ptr), None)
        if capture is None:
            return their_end(self)
        # What CuPy keeps for the graph as long as there is one.
        kept = getattr(self, "_graph_host_funcargs", None)
        if kept is None:
            if not _for_ever:
                say("this CuPy does not tell when a graph is gone: the memory of graphs stays theirs")
            kept = _for_ever
        kept.append(capture.pool)
        try:
            return their_end(self)
        finally:
            captures.remove(capture)
            capture.end()

    for theirs, ours in ((their_init, __init__), (their_del, __del__), (their_begin, begin_capture), (their_end, end_capture)):
        ours.__doc__ = getattr(theirs, "__doc__", None)
    cls.__init__, cls.__del__ = __init__, __del__
    base.begin_capture, base.end_capture = begin_capture, end_capture
