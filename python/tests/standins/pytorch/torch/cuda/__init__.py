import contextlib
import ctypes
import itertools
import threading

from cistern import _library

_ids = itertools.count(1)
_here = threading.local()
_uses = {}  # (device, pool): what keeps a pool that the library knows


class OutOfMemoryError(RuntimeError):
    pass


def lib():
    return _library.load()


def is_initialized():
    return True


def init():
    pass


def current_device():
    return getattr(_here, "device", 0)


def set_device(device):
    _here.device = device


def synchronize():
    pass


def empty_cache():
    _library.check(lib(), lib().cistern_trim(-1))


def mem_get_info():
    free, total = ctypes.c_uint64(), ctypes.c_uint64()
    _library.check(lib(), lib().cistern_mem_info(current_device(), ctypes.byref(free), ctypes.byref(total)))
    return free.value, total.value


def memory_allocated():
    return next((d["allocated"]["all"]["current"] for d in _library.stats()["devices"] if d["device"] == current_device()), 0)


# ---- pools: the library knows one from the first request or capture on, and on every device where there was any ----

def _scopes():
    if not hasattr(_here, "scopes"):
        _here.scopes = []
    return _here.scopes


def _known(pool, device):
    if (device, pool) not in _uses:
        _library.check(lib(), lib().cistern_pool_create(device, (ctypes.c_uint64 * 2)(*pool), None))
        _uses[device, pool] = 1 if pool[0] == 0 else 0  # PyTorch numbers those of torch.cuda.MemPool in the second place
    return (ctypes.c_uint64 * 2)(*pool)


def _let_go(pool, device):
    _uses[device, pool] -= 1
    if _uses[device, pool] == 0:
        del _uses[device, pool]
        _library.check(lib(), lib().cistern_pool_release(device, (ctypes.c_uint64 * 2)(*pool)))


class MemPool:
    def __init__(self):
        self.id = (0, next(_ids))

    def __del__(self):
        for device, pool in list(_uses):
            if pool == self.id:
                _let_go(pool, device)


@contextlib.contextmanager
def use_mem_pool(pool, device=None):
    _scopes().append(pool.id)
    try:
        yield
    finally:
        _scopes().remove(pool.id)


def allocate(size, device):
    pool, address = _scopes()[-1:], ctypes.c_void_p()
    ids = _known(pool[0], device) if pool else None
    if lib().cistern_alloc(ctypes.byref(address), ctypes.c_size_t(size), device, None, ids) != _library.OK:
        raise OutOfMemoryError(_library.last_error(lib()))
    return address.value


def release(address):
    lib().cistern_free(ctypes.c_void_p(address), 0, 0, None)


# ---- graphs ----

def graph_pool_handle():
    return (next(_ids), 0)


class CUDAGraph:
    _pool, _ended = None, False

    def capture_begin(self, pool=None, capture_error_mode="global"):
        self._device, self._pool = current_device(), pool or graph_pool_handle()
        ids = _known(self._pool, self._device)
        _uses[self._device, self._pool] += 1
        _library.check(lib(), lib().cistern_capture_begin(self._device, ids, None))
        _scopes().append(self._pool)

    def capture_end(self):
        _scopes().remove(self._pool)
        _library.check(lib(), lib().cistern_capture_end(self._device, None))
        self._ended = True

    def pool(self):
        if not self._ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def reset(self):
        pool, self._pool = self._pool, None
        if pool:
            _let_go(pool, self._device)


@contextlib.contextmanager
def graph(cuda_graph, pool=None, stream=None, capture_error_mode="global"):
    cuda_graph.capture_begin(pool, capture_error_mode)
    try:
        yield
    finally:
        cuda_graph.capture_end()
