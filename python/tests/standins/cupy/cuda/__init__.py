from . import device, memory, runtime, stream
from .device import Device
from .memory import BaseMemory, MemoryPointer, MemoryPool, alloc, get_allocator, set_allocator, using_allocator
from .stream import Graph, Stream, get_current_stream
