"""What CuPy is to an allocator: streams, devices, pointers and a pool, without a GPU. LOG is what was asked
of the driver."""

__version__ = "14.2.0"

from . import cuda

_default_memory_pool = cuda.MemoryPool()
cuda.set_allocator(_default_memory_pool.malloc)


def get_default_memory_pool():
    return _default_memory_pool


class ndarray:
    def __init__(self, nbytes):
        self.nbytes = nbytes
        self.data = cuda.alloc(nbytes)


def empty(nbytes):
    return ndarray(nbytes)
