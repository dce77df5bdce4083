from . import runtime


def get_device_id():
    return runtime.getDevice()


class Device:
    def __init__(self, device=None):
        self.id = runtime.getDevice() if device is None else device

    def __enter__(self):
        self.before = runtime.getDevice()
        runtime.setDevice(self.id)
        return self

    def __exit__(self, *exc):
        runtime.setDevice(self.before)
