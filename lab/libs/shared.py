"""What the programs in this folder share: PyTorch, CuPy and numba as sources of memory, on Cistern or as they are.

Nothing here imports them at once: a program that starts others must not touch the GPU.
"""
import gc
import json
import os
import sys
import warnings

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "../torch"))

import common  # noqa: E402  where Cistern is, programs with a time limit, tables

sys.path.insert(0, common.package_folder())

LIBRARIES = ("torch", "cupy", "numba")
OUT_OF_MEMORY = ("OutOfMemoryError", "CudaAPIError")


def child(script, arguments, timeout, conf=None):
    """Runs a program of this folder in a process of its own."""
    env = common.environment("native", {"CISTERN_LIBRARY": common.library(), "PYTHONWARNINGS": "ignore"})
    if conf:
        env["CISTERN_CONF"] = conf
    return common.run([sys.executable, os.path.join(HERE, script), "--child", *map(str, arguments)], env=env, timeout=timeout)


def prepare():
    """Builds PyTorch's adapter, which is done once, so that no program's time limit has to hold for it."""
    code = "from cistern import _toolchain, build; build.adapter(_toolchain.find_torch())"
    env = common.environment("native", {"PYTHONPATH": common.package_folder()})
    done = common.run([sys.executable, "-c", code], env=env, timeout=300)
    if done.rc != 0:
        print("the adapter cannot be built: " + done.why())


def answer(result):
    """What a child found, for last_json."""
    print(json.dumps(result), flush=True)


def enable(libraries):
    """Puts these on Cistern."""
    import cistern
    for name in libraries:
        getattr(cistern, name).enable()
    if "torch" in libraries and cistern.torch.mode() is None:
        raise SystemExit("PyTorch does not use Cistern")
    warnings.simplefilter("ignore")


class Source:
    """One library as a source of memory. The objects that allocate gives are the memory: it goes when they go."""

    def __init__(self, name):
        self.name = name

    def allocate(self, size, stream=None):
        """Bytes, on a stream of this library's or its default one."""
        if self.name == "torch":
            import torch
            with torch.cuda.stream(stream):
                return torch.empty(size, dtype=torch.uint8, device="cuda")
        if self.name == "cupy":
            import cupy
            if stream is None:
                return cupy.empty(size, dtype=cupy.uint8)
            with stream:
                return cupy.empty(size, dtype=cupy.uint8)
        import numpy
        from numba import cuda
        return cuda.device_array(size, dtype=numpy.uint8)

    def address(self, memory):
        if self.name == "torch":
            return memory.data_ptr()
        if self.name == "cupy":
            return memory.data.ptr
        return memory.device_ctypes_pointer.value

    def touch(self, memory):
        """Writes all of it, on the default stream."""
        if self.name == "torch":
            memory.fill_(1)
        elif self.name == "cupy":
            memory.data.memset_async(1, memory.nbytes)
        else:
            from numba.cuda.cudadrv import driver
            driver.device_memset(memory, 1, memory.nbytes)

    def stream(self, kind="own"):
        """A stream of the library's: "own" is what it makes (not blocking where it can), "external" another's."""
        if self.name == "torch":
            import torch
            return torch.cuda.Stream()
        if self.name == "cupy":
            import cupy
            return cupy.cuda.Stream(non_blocking=True)
        from numba import cuda
        if kind == "own":
            return cuda.stream()
        import torch
        self.others = torch.cuda.Stream()
        return cuda.external_stream(self.others.cuda_stream)

    def handle(self, stream):
        if self.name == "torch":
            return stream.cuda_stream
        if self.name == "cupy":
            return stream.ptr
        return int(stream.handle)

    def synchronize(self):
        synchronize()


def synchronize():
    import torch
    torch.cuda.synchronize()


def collect():
    gc.collect()


def counters(*names):
    """Cistern's counters of device 0."""
    import cistern
    device = cistern.stats()["devices"][0]
    return {n: device[n] for n in names}


def requested():
    """Bytes asked for and not given back, all and by library, on device 0."""
    import cistern
    for device in cistern.stats()["devices"]:
        if device["device"] == 0:
            return device["requested"]["all"]["current"], {u["library"]: u["requested"] for u in device["libraries"]}
    return 0, {}


def total():
    """Bytes of the GPU."""
    import torch
    return torch.cuda.mem_get_info()[1]


def is_out_of_memory(e):
    return type(e).__name__ in OUT_OF_MEMORY or isinstance(e, MemoryError)


def finish(name, checks, results):
    """One line for each case, and the results as JSON."""
    for row in checks.rows:
        if row["ok"] is not None:
            print("%s %s: %s: %s" % ("PASS" if row["ok"] else "FAIL", name, row["what"], row["got"]))
    path = os.path.join(common.out_folder(), "libs-%s.json" % name)
    with open(path, "w") as f:
        json.dump(results, f, indent=1)
    return checks.finish()
