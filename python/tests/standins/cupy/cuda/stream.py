import threading

from . import runtime

_here = threading.local()


def _current():
    if not hasattr(_here, "streams"):
        _here.streams = [_default()] * runtime.devices
    return _here.streams


def get_current_stream(device_id=-1):
    return _current()[runtime.getDevice() if device_id == -1 else device_id]


class Graph:
    def __init__(self, host_funcargs):
        self.host_funcargs = host_funcargs


class _BaseStream:
    def __init__(self, ptr, device_id):
        self.ptr = ptr
        self.device_id = device_id
        self._graph_host_funcargs = None

    def __enter__(self):
        device = runtime.getDevice() if self.device_id == -1 else self.device_id
        self._before = device, _current()[device]
        _current()[device] = self
        return self

    def __exit__(self, *exc):
        device, stream = self._before
        _current()[device] = stream

    def begin_capture(self, mode=None):
        if mode == "bad":
            raise RuntimeError("no such mode")
        runtime.LOG.append("capture")
        runtime.capturing.add(self.ptr)
        self._graph_host_funcargs = []

    def end_capture(self):
        kept, self._graph_host_funcargs = self._graph_host_funcargs, None
        runtime.capturing.remove(self.ptr)
        return Graph(kept)

    def is_capturing(self):
        return self.ptr in runtime.capturing

    @property
    def is_non_blocking(self):
        return bool(runtime.streamGetFlags(self.ptr) & 1)

    @property
    def priority(self):
        return runtime.streamGetPriority(self.ptr)


class Stream(_BaseStream):
    null = None
    ptds = None

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        if null or ptds:
            super().__init__(0 if null else 2, -1)
        else:
            super().__init__(runtime.streamCreateWithPriority(int(non_blocking), priority or 0), runtime.getDevice())
        self._foreign_stream_ref = None

    def __del__(self):
        if self._foreign_stream_ref is None and self.ptr > 2:
            runtime.streamDestroy(self.ptr)

    @classmethod
    def from_external(cls, obj):
        stream = cls.__new__(cls)
        _BaseStream.__init__(stream, obj.__cuda_stream__()[1], -1)
        stream._foreign_stream_ref = obj
        return stream


Stream.null = Stream(null=True)
Stream.ptds = Stream(ptds=True)


def _default():
    from cupy_backends.cuda import stream

    return Stream.ptds if stream.get_default_stream_ptr() == 2 else Stream.null
