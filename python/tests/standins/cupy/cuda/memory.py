import contextlib
import ctypes
import threading

from . import runtime

_here = threading.local()


class OutOfMemoryError(MemoryError):
    def __init__(self, size, total, limit=0):
        super().__init__("Out of memory allocating %d bytes" % size)


class BaseMemory:
    ptr = size = device_id = 0


class Memory(BaseMemory):
    def __init__(self, size):
        self.size, self.device_id = size, runtime.getDevice()
        self.ptr = runtime.malloc(size) if size else 0

    def __del__(self):
        if self.ptr:
            runtime.free(self.size, self.device_id)


_Malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)


class CFunctionAllocatorMemory(BaseMemory):
    def __init__(self, size, param, malloc_func, free_func, device_id):
        self._param, self._free_func = param, free_func
        self.device_id, self.size = device_id, size
        self.ptr = _Malloc(malloc_func)(param, size, device_id) or 0 if size else 0

    def __del__(self):
        if self.ptr:
            _Free(self._free_func)(self._param, self.ptr, self.device_id)


class MemoryPointer:
    def __init__(self, mem, offset):
        assert mem.ptr != 0 or offset == 0
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id


def _malloc(size):
    return MemoryPointer(Memory(size), 0)


class PooledMemory(BaseMemory):
    def __init__(self, mem, pool):
        self.mem, self.pool = mem, pool
        self.ptr, self.size, self.device_id = mem.ptr, mem.size, mem.device_id

    def __del__(self):
        self.pool.free.append(self.mem)


class MemoryPool:
    """A pool that gives a block again to a request of its size."""

    def __init__(self, allocator=_malloc):
        self._allocator = allocator
        self.free = []
        self.asked = 0

    def malloc(self, size):
        for mem in self.free:
            if mem.size == size and mem.device_id == runtime.getDevice():
                self.free.remove(mem)
                return MemoryPointer(PooledMemory(mem, self), 0)
        for last in False, True:
            try:
                return MemoryPointer(PooledMemory(self._allocator(size).mem, self), 0)
            except runtime.CUDARuntimeError as e:
                if last or e.status != runtime.errorMemoryAllocation:
                    raise OutOfMemoryError(size, self.total_bytes()) from None
                self.free_all_blocks()

    def free_all_blocks(self, stream=None):
        self.asked += 1
        self.free = [m for m in self.free if m.device_id != runtime.getDevice()]

    def n_free_blocks(self):
        return sum(m.device_id == runtime.getDevice() for m in self.free)

    def free_bytes(self):
        return sum(m.size for m in self.free if m.device_id == runtime.getDevice())

    def total_bytes(self):
        return runtime.used.get(runtime.getDevice(), 0)

    def used_bytes(self):
        return self.total_bytes() - self.free_bytes()


_current = _malloc


def set_allocator(allocator=None):
    global _current
    if getattr(_here, "allocator", None) is not None:
        raise ValueError("Can't change the global allocator inside `using_allocator` context manager")
    _current = allocator or _malloc


def get_allocator():
    return getattr(_here, "allocator", None) or _current


@contextlib.contextmanager
def using_allocator(allocator=None):
    before, _here.allocator = getattr(_here, "allocator", None), allocator or _malloc
    try:
        yield
    finally:
        _here.allocator = before


def alloc(size):
    return get_allocator()(size)
