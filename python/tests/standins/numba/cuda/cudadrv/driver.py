import collections
import contextlib
import enum
import importlib
import os
import weakref

LOG = []
capacity = 1 << 40
used = 0
MemoryInfo = collections.namedtuple("MemoryInfo", "free,total")


class binding:
    class CUresult(enum.IntEnum):
        CUDA_ERROR_OUT_OF_MEMORY = 2

    class CUdeviceptr(int):
        pass


class CudaAPIError(Exception):
    def __init__(self, code, msg):
        self.code, self.msg = code, msg
        super().__init__(code, msg)

    def __str__(self):
        return "[%s] %s" % (self.code, self.msg)


class ExperimentalStream:
    def __init__(self, is_nonblocking):
        self.is_nonblocking = is_nonblocking


class Stream:
    def __init__(self, handle, external=False):
        self.handle, self.external = handle, external


class _Driver:
    """The calls of the driver that are made here. Handles of streams that do not block end in 8."""

    def __init__(self):
        self.devices = {}
        self.refused = False  # as during a capture

    def get_device(self, n):
        if n not in self.devices:
            self.devices[n] = Device(n)
        return self.devices[n]

    def cuCtxPushCurrent(self, handle):
        LOG.append("push %d" % handle)

    def cuCtxPopCurrent(self):
        LOG.append("pop")

    def cuCtxSynchronize(self):
        if self.refused:
            raise CudaAPIError(900, "operation not permitted when stream is capturing")
        LOG.append("synchronize")

    def cuStreamGetFlags(self, handle):
        return 1 if handle % 16 == 8 else 0

    def cuMemAlloc(self, size):
        global used
        if used + size + elsewhere() > capacity:
            raise CudaAPIError(2, "out of memory")
        used += size
        return 0x10000000 + used

    def cuMemFree(self, handle):
        global used
        LOG.append("cuMemFree")
        used -= sizes.pop(handle)

    def cuIpcGetMemHandle(self, pointer):
        raise CudaAPIError(1, "invalid argument")


sizes = {}
driver = _Driver()


def elsewhere():
    return 0


class Device:
    def __init__(self, n):
        self.id, self.primary_context = n, None

    def get_primary_context(self):
        if self.primary_context is None:
            self.primary_context = Context(weakref.proxy(self), self.id)
        return self.primary_context


class _PendingDeallocs:
    def __init__(self):
        self._cons, self._size, self._disabled = collections.deque(), 0, 0
        self.memory_capacity = 0

    def add_item(self, dtor, handle, size=0):
        LOG.append("pending " + dtor.__name__)
        self._cons.append((dtor, handle, size))
        self._size += size
        if len(self._cons) > 10 or self._size > int(self.memory_capacity * 0.2):
            self.clear()

    def clear(self):
        if not self.is_disabled:
            while self._cons:
                dtor, handle, _ = self._cons.popleft()
                dtor(handle)
            self._size = 0

    @contextlib.contextmanager
    def disable(self):
        self._disabled += 1
        try:
            yield
        finally:
            self._disabled -= 1

    @property
    def is_disabled(self):
        return self._disabled > 0

    def __len__(self):
        return len(self._cons)


class BaseCUDAMemoryManager:
    def __init__(self, *args, **kwargs):
        self.context = kwargs.pop("context")


class HostOnlyCUDAMemoryManager(BaseCUDAMemoryManager):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.allocations, self.deallocations = {}, _PendingDeallocs()

    def _attempt_allocation(self, allocator):
        try:
            return allocator()
        except CudaAPIError as e:
            if e.code != binding.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise
            self.deallocations.clear()
            return allocator()

    def reset(self):
        self.allocations.clear()
        self.deallocations.clear()

    @contextlib.contextmanager
    def defer_cleanup(self):
        with self.deallocations.disable():
            yield


class GetIpcHandleMixin:
    def get_ipc_handle(self, memory):
        return driver.cuIpcGetMemHandle(memory.handle)


class NumbaCUDAMemoryManager(GetIpcHandleMixin, HostOnlyCUDAMemoryManager):
    def initialize(self):
        if not self.deallocations.memory_capacity:
            self.deallocations.memory_capacity = self.get_memory_info().total

    def memalloc(self, size):
        pointer = self._attempt_allocation(lambda: driver.cuMemAlloc(size))
        sizes[pointer] = size
        deallocations = self.deallocations
        dtor = lambda handle: driver.cuMemFree(handle)
        return MemoryPointer(weakref.proxy(self.context), pointer, size,
                             finalizer=lambda: deallocations.add_item(dtor, pointer, size))

    def get_memory_info(self):
        return MemoryInfo(capacity - used, capacity)

    @property
    def interface_version(self):
        return 1


_memory_manager = None


def _ensure_memory_manager():
    global _memory_manager
    if _memory_manager is None:
        name = os.environ.get("NUMBA_CUDA_MEMORY_MANAGER")
        if name:
            set_memory_manager(importlib.import_module(name)._numba_memory_manager)
        else:
            _memory_manager = NumbaCUDAMemoryManager


def set_memory_manager(plugin):
    global _memory_manager
    if plugin(context=None).interface_version != 1:
        raise RuntimeError("version 1 required")
    _memory_manager = plugin


class Context:
    def __init__(self, device, handle):
        self.device, self.handle = device, handle
        _ensure_memory_manager()
        self.memory_manager = _memory_manager(context=self)

    def reset(self):
        self.memory_manager.reset()

    def push(self):
        driver.cuCtxPushCurrent(self.handle)
        self.memory_manager.initialize()

    def pop(self):
        driver.cuCtxPopCurrent()

    def memalloc(self, size):
        return self.memory_manager.memalloc(size)

    def get_ipc_handle(self, memory):
        return self.memory_manager.get_ipc_handle(memory)

    def get_memory_info(self):
        return self.memory_manager.get_memory_info()

    def create_external_stream(self, ptr):
        return Stream(ptr, external=True)


class MemoryPointer:
    def __init__(self, context, pointer, size, owner=None, finalizer=None):
        self.handle = pointer
        self.context, self.size = context, size
        if finalizer is not None:
            self._finalizer = weakref.finalize(self, finalizer)


def _to_core_stream(stream):
    return stream


def _stream_handle(stream):
    return stream
