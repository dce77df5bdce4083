from . import cuda


def synchronize():
    cuda.synchronize()


def get_memory_info():
    return cuda.mem_get_info()
