from .cudadrv import driver
from .cudadrv.driver import HostOnlyCUDAMemoryManager, MemoryPointer, set_memory_manager


def current_context(device=0):
    context = driver.driver.get_device(device).get_primary_context()
    context.push()
    context.pop()
    return context


def device_array(nbytes, device=0):
    return current_context(device).memalloc(nbytes)


def external_stream(ptr):
    return current_context().create_external_stream(ptr)


def launch(stream=0):
    return driver._to_core_stream(stream)
