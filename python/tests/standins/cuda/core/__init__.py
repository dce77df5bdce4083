"""What cuda.core is to a memory resource, without a GPU."""
import weakref


class Device:
    device_id = 0


class Stream:
    def __init__(self, handle):
        self.handle = handle

    def __cuda_stream__(self):
        return 0, self.handle


class GraphBuilder(Stream):
    def begin_building(self):
        pass


class MemoryResource:
    def allocate(self, size, *, stream):
        raise NotImplementedError


class Buffer:
    @staticmethod
    def from_handle(ptr, size, mr=None, owner=None, *, stream=None):
        if size == 13:
            raise RuntimeError("no luck with this size")
        self = Buffer()
        self.handle, self.size, self.stream = ptr, size, stream
        self.close = weakref.finalize(self, lambda: mr.deallocate(ptr, size, stream=self_stream[0]))
        self_stream = self.streams = [stream]
        return self
