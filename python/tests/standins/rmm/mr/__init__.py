per_device = {}


class Stream:
    def __init__(self, handle):
        self._handle = handle

    def __cuda_stream__(self):
        return 0, self._handle


DEFAULT_STREAM = Stream(0)


class DeviceMemoryResource:
    pass


class CallbackMemoryResource(DeviceMemoryResource):
    def __init__(self, allocate_func, deallocate_func):
        self._allocate_func, self._deallocate_func = allocate_func, deallocate_func

    def allocate(self, nbytes, stream=DEFAULT_STREAM):
        return self._allocate_func(nbytes, stream)

    def deallocate(self, ptr, nbytes, stream=DEFAULT_STREAM):
        self._deallocate_func(ptr, nbytes, stream)


class CudaMemoryResource(DeviceMemoryResource):
    pass


def get_per_device_resource(device):
    return per_device.setdefault(device, CudaMemoryResource())


def set_per_device_resource(device, mr):
    per_device[device] = mr
