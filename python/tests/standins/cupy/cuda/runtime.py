import threading

is_hip = False
errorMemoryAllocation = 2
streamPerThread = 2
devices = 2
LOG = []
capacity = 1 << 40  # of each device
used = {}
capturing = set()
here = threading.local()
_free = []
_next = 0x1000
_flags = {}


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        self.status = status
        super().__init__("error %d" % status)


def getDevice():
    return getattr(here, "device", 0)


def setDevice(device):
    here.device = device


def getDeviceCount():
    return devices


def deviceCanAccessPeer(device, peer):
    return device != peer


def memGetInfo():
    return capacity - used.get(getDevice(), 0), capacity


def malloc(size):
    if used.get(getDevice(), 0) + size + elsewhere() > capacity:
        raise CUDARuntimeError(errorMemoryAllocation)
    used[getDevice()] = used.get(getDevice(), 0) + size
    return 0x10000000 + used[getDevice()]


def free(size, device):
    LOG.append("free")
    used[device] -= size


def elsewhere():
    """What others hold of the device."""
    return 0


def streamCreateWithPriority(flags, priority):
    # As the driver does, a handle that was destroyed is used again.
    global _next
    if _free:
        handle = _free.pop()
    else:
        handle, _next = _next, _next + 16
    _flags[handle] = flags, priority
    LOG.append("create %#x" % handle)
    return handle


def streamDestroy(handle):
    LOG.append("destroy %#x" % handle)
    _free.append(handle)


def streamGetFlags(handle):
    return _flags[handle][0]


def streamGetPriority(handle):
    return _flags[handle][1]
