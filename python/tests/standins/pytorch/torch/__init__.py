"""A few lines of PyTorch over the real library: tensors without contents, memory pools with their scopes, and CUDA graphs that
are announced to the library as the adapter does, with nothing to launch in them."""

from . import accelerator, cuda, version  # noqa: F401

__version__ = version.__version__
uint8 = "uint8"


class Tensor:
    def __init__(self, size, device):
        self.nbytes, self.device = size, device
        self._address = cuda.allocate(size, device) if size else 0

    def data_ptr(self):
        return self._address

    def __del__(self):
        if self._address:
            cuda.release(self._address)


def empty(size, dtype=uint8, device="cuda"):
    return Tensor(size, cuda.current_device() if device == "cuda" else int(device.rpartition(":")[2]))
