"""A process that puts and gets named objects. With PyTorch they are tensors on the GPU; with --plain, over a simulated device, bytes.
It does what a line of JSON on its standard input says, and answers with one:

    start                             a CUDA context, and the kernels that later steps use
    put {name, bytes, each, seed}     an object of tensors of a known pattern
    get {name}                        opens an object and keeps it; ms of get, and of the first use of its tensors by a kernel
    check {seed}                      whether the object's contents are the pattern
    overwrite                         writes through the mapping; what became of that
    close                             unmaps the object
    remove {name}                     removes an object
    listed {name}                     generations of that name, and their readers
    cycles {n, seconds, bytes}        put, get, close, remove, as often as that
    file {path, bytes, each}          writes a safetensors file
    load {path}                       opens a safetensors file as an object and keeps it; ms, and ms of PyTorch's own loading
    state {name, seed}                the round trip of a model's state_dict
    open                              descriptors and resident memory of this process
"""
import argparse
import ctypes
import json
import os
import random
import struct
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../torch"))

import common  # noqa: E402

import cistern  # noqa: E402
import cistern.node  # noqa: E402
from cistern import _memory  # noqa: E402

MiB = common.MiB


def ms(begin):
    return 1e3 * (time.perf_counter() - begin)


class Plain:
    """Tensors as bytes, without PyTorch."""

    def context(self):
        cistern.node.available()
        return {}

    def tensor(self, n, seed):
        return random.Random(seed).randbytes(n)

    def bytes(self, o, name):
        a = o.array(name)
        b = ctypes.create_string_buffer(max(a.nbytes, 1))
        lib = _memory.library()
        if lib.cistern_node_read(o._mapping.ptr, a.ptr - o._mapping.ptr.value, b, a.nbytes, None):
            raise cistern.CisternError(self.error())
        return b.raw[:a.nbytes]

    def host(self, t):
        return t

    def error(self):
        text = ctypes.create_string_buffer(2048)
        _memory.library().cistern_last_error(text, len(text))
        return text.value.decode(errors="replace")

    def use(self, o, name):
        return self.bytes(o, name)

    def same(self, o, name, seed):
        return self.bytes(o, name) == self.tensor(o.array(name).nbytes, seed)

    def overwrite(self, o, name):
        """The copy of the C library, which refuses."""
        b = ctypes.create_string_buffer(4096)
        return self.error() if _memory.library().cistern_node_write(o._mapping.ptr, 0, b, len(b), None) else ""


class Torch:
    """Tensors of PyTorch on the GPU."""

    def __init__(self):
        import torch

        common.require_cistern()
        self.torch = torch

    def context(self):
        own = self.tensor(16 * MiB, 1)
        own.view(self.torch.int64).sum().item()
        self.torch.equal(own, self.tensor(16 * MiB, 1))
        own.view(self.torch.uint8).add_(1)
        _memory.library()
        self.torch.cuda.synchronize()
        return {"gpu": self.torch.cuda.get_device_name(), "torch": self.torch.__version__}

    def tensor(self, n, seed):
        """n bytes in which every 8 differ from all others of the tensor."""
        return self.torch.arange(n // 8, dtype=self.torch.int64, device="cuda").mul_(0x9E3779B97F4A7C1).add_(seed << 40).view(self.torch.float32)

    def host(self, t):
        t = t.cpu()
        return bytes((ctypes.c_char * (t.numel() * t.element_size())).from_address(t.data_ptr()))

    def use(self, o, name):
        return o[name].view(self.torch.int64).sum().item()

    def same(self, o, name, seed):
        # As integers: some of the patterns are no number.
        t = self.tensor(o.array(name).nbytes, seed)
        found = self.torch.equal(o[name].view(self.torch.int64), t.view(self.torch.int64))
        del t
        self.torch.cuda.empty_cache()  # the device's memory is measured meanwhile
        return found

    def overwrite(self, o, name):
        """A kernel that writes, after the copy of the C library."""
        refused = Plain().overwrite(o, name)
        if not refused:
            return ""
        try:
            o[name].view(self.torch.uint8).add_(1)
            self.torch.cuda.synchronize()
        except RuntimeError as e:
            return "%s; kernel: %s" % (refused, str(e).split("\n")[0])
        return ""


class Process:
    """The object that this process has open, and what it is asked to do."""

    def __init__(self, kind):
        self.kind, self.open_object = kind, None

    def start(self):
        return {"pid": os.getpid(), **self.kind.context()}

    def put(self, name, bytes, each, seed):
        tensors = {"t%d" % i: self.kind.tensor(each, seed + i) for i in range(bytes // each)}
        begin = time.perf_counter()
        cistern.node.put(name, tensors, labels={"of": "lab"})
        return {"ms": ms(begin)}

    def get(self, name):
        begin = time.perf_counter()
        o = cistern.node.get(name)
        got = ms(begin)
        names = list(o)
        for n in (names[0], names[len(names) // 2], names[-1]):
            self.kind.use(o, n)
        self.open_object = o
        return {"ms": got, "used_ms": ms(begin), "tensors": len(names)}

    def check(self, seed):
        wrong = [n for n in self.open_object if not self.kind.same(self.open_object, n, seed + int(n[1:]))]
        return {"right": not wrong, "wrong": wrong[:4]}

    def overwrite(self):
        return {"failed": self.kind.overwrite(self.open_object, next(iter(self.open_object)))}

    def close(self):
        self.open_object.close()
        self.open_object = None
        return {}

    def remove(self, name):
        cistern.node.remove(name)
        return {}

    def listed(self, name):
        return {"readers": [o["readers"] for o in cistern.node.objects(name)]}

    def cycles(self, n, seconds, bytes):
        tensors, begin, i = {"t0": self.kind.tensor(bytes, 7)}, time.perf_counter(), 0
        while i < n and ms(begin) < 1e3 * seconds:
            name = "cycle/%d" % (i % 8)
            cistern.node.put(name, tensors)
            with cistern.node.get(name) as o:
                if i % 64 == 0 and not self.kind.same(o, "t0", 7):
                    return {"error": "cycle %d: the contents are wrong" % i}
            cistern.node.remove(name)
            i += 1
        return {"n": i, "ms": ms(begin)}

    def file(self, path, bytes, each):
        header = {"t%d" % i: {"dtype": "F32", "shape": [each // 4], "data_offsets": [i * each, (i + 1) * each]} for i in range(bytes // each)}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            for i in range(bytes // each):
                f.write(self.kind.host(self.kind.tensor(each, 100 + i)))
        return {}

    def load(self, path):
        begin = time.perf_counter()
        self.open_object = cistern.node.load_safetensors(path)
        found = {"ms": ms(begin)}
        self.kind.use(self.open_object, "t0")
        found["used_ms"] = ms(begin)
        try:
            from safetensors.torch import load_file
        except ImportError:
            return found
        if isinstance(self.kind, Torch):
            begin = time.perf_counter()
            own = load_file(path, device="cuda")
            self.kind.torch.cuda.synchronize()
            found["own_ms"] = ms(begin)
            del own
        return found

    def state(self, name, seed):
        """What a model computes with its own weights and with those of the object; the readers while they are used and after."""
        torch = self.kind.torch

        def model(seed):
            torch.manual_seed(seed)
            m = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.BatchNorm1d(4096), torch.nn.Linear(4096, 1024)).cuda()
            m[2].bfloat16()
            return m.eval()

        def run(m):
            with torch.no_grad():
                return m[2](m[1](m[0](x)).bfloat16())

        first = model(seed)
        x = torch.randn(64, 1024, device="cuda")
        want = run(first)
        cistern.node.put(name, first.state_dict())
        second = model(seed + 1)
        before = torch.equal(run(second), want)
        state = dict(cistern.node.get(name))
        types = sorted({str(t.dtype) for t in state.values()})
        second.load_state_dict(state, assign=True)
        del state
        found = {"equal": torch.equal(run(second), want), "equal_before": before, "types": types, "open": self.listed(name)["readers"]}
        shared = second[0].weight.data_ptr()
        found["own"] = shared == first[0].weight.data_ptr()
        del second
        torch.cuda.synchronize()
        found["closed"] = self.listed(name)["readers"]
        cistern.node.remove(name)
        return found

    def open(self):
        return {"descriptors": len(os.listdir("/proc/self/fd")), "resident": common.resident()}


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--plain", action="store_true")
    process = Process(Plain() if p.parse_args().plain else Torch())
    for line in sys.stdin:
        what = json.loads(line)
        try:
            found = getattr(process, what.pop("do"))(**what)
        except (cistern.CisternError, MemoryError, OSError, RuntimeError, ValueError) as e:
            found = {"error": "%s: %s" % (type(e).__name__, str(e).split("\n")[0])}
        print(json.dumps(found), flush=True)
    # A context that a kernel broke makes the interpreter's end report errors of its own.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
