"""How a case is written: a function under @case, which returns None or a word for the table, and fails by raising.

`torch` here is imported when first used, so that listing the cases costs nothing.
"""
import contextlib
import ctypes
import gc
import importlib
import os
import sys
import threading

import common
from common import GiB, KiB, MiB  # noqa: F401, for the cases

REGISTRY = {}


class Case:
    def __init__(self, fn, group, timeout, native, alone, conf, env, guard, gpus, gpu, chunks):
        self.fn, self.name, self.group, self.timeout, self.native = fn, fn.__name__, group, timeout, native
        self.alone, self.conf, self.env, self.guard, self.gpus, self.gpu = alone, conf, env or {}, guard, gpus, gpu
        self.chunks = chunks


def case(timeout=60, native=True, alone=False, conf=None, env=None, guard="adapter", gpus=1, gpu=None, chunks=None):
    """Registers a case.

    timeout: seconds. native: True, or why native PyTorch cannot pass. alone: nothing else may use the device meanwhile.
    conf: CISTERN_CONF. env: more variables. guard: what must be loaded when it ends, so that a case never passes because
    Cistern was not there: "adapter", "plain" (libcistern.so without the adapter) or None. gpus: how many it needs. gpu: what of a GPU it
    needs that the stand-ins of fidelity.py --standin lack; it fails if it passes there. chunks: why it holds for the device's own chunks alone; it is left out over an upstream.
    """
    def register(fn):
        assert fn.__name__ not in REGISTRY, fn.__name__
        REGISTRY[fn.__name__] = Case(fn, fn.__module__.rpartition(".")[2], timeout, native, alone, conf, env, guard, gpus, gpu, chunks)
        return fn
    return register


class Skip(Exception):
    """The machine lacks what the case needs."""


class Lazy:
    def __init__(self, name):
        self.__dict__["_name"] = name

    def __getattr__(self, attr):
        return getattr(importlib.import_module(self.__dict__["_name"]), attr)


torch = Lazy("torch")
MODE = os.environ.get("CISTERN_TEST_MODE", "native")


def under_cistern():
    return MODE == "cistern"


STANDIN = "STANDIN_DEVICES" in os.environ  # NVIDIA's libraries are stand-ins
# What runs Python programs that do not depend on how the interpreter and PyTorch start; over stand-ins they are forks.
PYTHON = os.environ.get("STANDIN_PYTHON") or sys.executable


def fewer(n):
    """So many rounds or bytes, or fewer where memory is the host's and the processor does all work."""
    return n // 8 if STANDIN else n


# ---- checks ----------------------------------------------------------------------------------------------------------

def check(ok, *what):
    if not ok:
        raise AssertionError(" ".join(str(w) for w in what) or "not so")


def eq(got, want, what=""):
    if got != want:
        raise AssertionError(f"{what}: got {got!r}, want {want!r}")


@contextlib.contextmanager
def raises(kind, *parts):
    """The block raises kind, with these parts in its message."""
    box = []
    try:
        yield box
    except kind as e:
        box.append(e)
        for p in parts:
            check(p.lower() in str(e).lower(), f"message {str(e)[:300]!r} lacks {p!r}")
    else:
        raise AssertionError(f"no {getattr(kind, '__name__', kind)} was raised")


def round512(n):
    return (n + 511) // 512 * 512


# ---- memory ----------------------------------------------------------------------------------------------------------

def bytes_on(n, **kw):
    """A tensor of n bytes."""
    return torch.empty(n, dtype=torch.uint8, device="cuda", **kw)


def usable(t):
    """The end of the tensor can be written and read."""
    t[-1:].fill_(3)
    eq(int(t[-1]), 3, "usable")


def stat(key):
    return torch.cuda.memory_stats()[key]


def requested():
    return stat("requested_bytes.all.current")


def reserved():
    return torch.cuda.memory_reserved()


def cap(n, device=0):
    """Limits the process to n bytes."""
    torch.cuda.set_per_process_memory_fraction(n / torch.cuda.get_device_properties(device).total_memory, device)


def drain():
    """Frees what is not referenced and waits for the device."""
    gc.collect()
    torch.cuda.synchronize()


def sleep_gpu(seconds):
    """Keeps the current stream busy for about that long."""
    torch.cuda._sleep(int(seconds * 1.6e9))


_probe = None


def probe():
    """The functions of probe.cpp."""
    global _probe
    if _probe is None:
        torch_file = importlib.import_module("torch").__file__  # also because its libraries must be there first
        path = os.environ.get("CISTERN_PROBE") or common.build("probe", os.path.dirname(torch_file))
        lib = ctypes.CDLL(path)
        for name in ("probe_track", "probe_observe_oom", "probe_hold", "probe_raw_alloc", "probe_raw_alloc_stream", "probe_raw_delete",
                     "probe_base", "probe_cache_info", "probe_pool_use_count", "probe_expandable_sizes", "probe_compile_context",
                     "probe_empty_cache_of", "probe_name"):
            getattr(lib, name).restype = ctypes.c_char_p
        for name in ("probe_tracked", "probe_tracked_bytes", "probe_unannounced", "probe_ooms", "probe_oom_allocated", "probe_oom_total",
                     "probe_oom_free", "probe_callback_runs", "probe_custom"):
            getattr(lib, name).restype = ctypes.c_int64
        lib.probe_hold.argtypes = [ctypes.c_size_t]
        lib.probe_raw_alloc.argtypes = [ctypes.c_size_t, ctypes.c_void_p]
        lib.probe_raw_alloc_stream.argtypes = [ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
        lib.probe_raw_delete.argtypes = [ctypes.c_void_p]
        lib.probe_base.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        lib.probe_cache_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
        lib.probe_pool_use_count.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p]
        lib.probe_expandable_sizes.argtypes = [ctypes.c_int, ctypes.c_void_p]
        lib.probe_compile_context.argtypes = [ctypes.c_char_p]
        lib.probe_empty_cache_of.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        lib.probe_known.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        lib.probe_custom_owns.argtypes = [ctypes.c_int, ctypes.c_uint64]
        lib.probe_ipc_get.argtypes = [ctypes.c_void_p]
        lib.probe_stream_create.argtypes = [ctypes.c_void_p]
        lib.probe_stream_destroy.argtypes = [ctypes.c_void_p]
        lib.path = path
        _probe = lib
    return _probe


def fine(words):
    """The result of a probe's function that gives the words of a failure."""
    if words is not None:
        raise RuntimeError(words.decode(errors="replace"))


# Actions of a trace entry, by number.
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, SNAPSHOT, OOM = range(9)


def in_thread(fn):
    """Runs fn in another thread and returns its result or raises its exception."""
    box = {}
    def body():
        try:
            box["result"] = fn()
        except BaseException as e:
            box["error"] = e
    t = threading.Thread(target=body)
    t.start()
    t.join()
    if "error" in box:
        raise box["error"]
    return box["result"]


def script(text, timeout=60, env=None, argv=(), python_args=(), python=None):
    """Runs a Python program in a process of its own, under the same allocator as this one."""
    python = python or (sys.executable if env or python_args else PYTHON)
    return common.run([python, *python_args, "-c", text, *argv], env={**os.environ, **(env or {})}, timeout=timeout * (4 if STANDIN else 1))


# What a program of its own runs once CUDA has started, so that it never passes because Cistern was not there.
GUARD = """
if __import__("os").environ.get("CISTERN_TEST_MODE") == "cistern":
    _maps = open("/proc/self/maps").read()
    assert "libcistern.so" in _maps and "libcistern_torch" in _maps, "Cistern is not loaded here"
    del _maps
"""
