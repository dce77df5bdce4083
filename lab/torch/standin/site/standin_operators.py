"""PyTorch's operators over the stand-in for CUDA's runtime: the host's, on the tensors' own memory, which is memory of the host.

What allocates does so by CUDA's allocator as ever: the operators that make, view and resize tensors, and the outputs of all others. What
an operator allocates for its own work is missing. Operators under a capture are done at once, and again by a replay, on the same
addresses. `import torch` calls autoload, as an entry point of torch.backends.
"""
import ctypes
import warnings

import torch
from torch.utils import _pytree as pytree

# They need no kernel, or are about memory itself.
KEPT = {"empty", "empty_strided", "set_", "resize_", "record_stream", "is_set_to", "_local_scalar_dense", "is_pinned", "_pin_memory"}

driver = ctypes.CDLL("libcuda.so.1")
captured = []  # what the graph that is being captured would do; there is one at a time


def autoload():
    torch.cuda._lazy_call(register)  # when CUDA starts


def on_device(value):
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def host(t):
    """The host's tensor over the memory of a tensor of a device. It does not keep the memory."""
    if not on_device(t):
        return t
    if t.numel() == 0:
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype)
    n = 1 + sum((size - 1) * stride for size, stride in zip(t.size(), t.stride()))
    memory = (ctypes.c_char * (n * t.element_size())).from_address(t.data_ptr())
    return torch.frombuffer(memory, dtype=t.dtype).as_strided(t.size(), t.stride())


def tensors(value):
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


class Call:
    """A call of an operator with the host's tensors. Made again, it writes to the same addresses."""

    def __init__(self, op, writes, given, positional):
        self.op, self.writes = op, writes
        self.device = next(t.device for t in tensors(given) if on_device(t))
        self.grown = []  # outputs that are empty as yet: the tensor of the device, and the host's
        there = {k: pytree.tree_map(lambda v, k=k: self.argument(v, k in writes), v) for k, v in given.items()}
        self.args, self.kwargs = [there.pop(name) for name in positional], there

    def argument(self, value, written):
        if isinstance(value, torch.Generator):
            return None
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if written and on_device(value) and value.numel() == 0:
            self.grown.append((value, torch.empty(0, dtype=value.dtype)))
            return self.grown[-1][1]
        return host(value)

    def compute(self):
        """What the operator returns, and what of it is to be copied to the device."""
        result = self.op(*self.args, **self.kwargs)
        return result, [made for _, made in self.grown] if self.writes else tensors(result)

    def first(self):
        result, made = self.compute()
        outputs = [out for out, _ in self.grown]
        if self.writes:
            for out, m in zip(outputs, made):
                out.resize_(m.size())
        else:
            result = pytree.tree_map_only(torch.Tensor, self.like, result)
            outputs = tensors(result)
        self.grown = [(None, m) for _, m in self.grown]  # a replay keeps no memory of the device
        self.places = [host(t) for t in outputs]
        self.copy(made)
        return result

    def like(self, made):
        return torch.empty_strided(made.size(), made.stride(), dtype=made.dtype, device=self.device)

    def copy(self, made):
        for to, m in zip(self.places, made):
            to.copy_(m)

    def again(self):
        self.copy(self.compute()[1])


def on_host(op):
    """The operator for tensors of a device."""
    writes = {a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    names = [a.name for a in op._schema.arguments]

    def call(*args, **kwargs):
        given = dict(zip(names, args), **kwargs)
        c = Call(op, writes, given, names[:len(args)])
        result = c.first()
        if torch.cuda.is_current_stream_capturing():
            # A node of the graph, which the driver's stand-in makes of a memset. It has no bytes.
            driver.cuMemsetD8Async(ctypes.c_uint64(0), 0, ctypes.c_size_t(0), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
            captured.append(c.again)
        if not writes:
            return result
        written = [given[n] for n in names if n in writes]
        return written[0] if len(op._schema.returns) == 1 else tuple(written) if op._schema.returns else None

    return call


def views(schema):
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def replay_captures():
    """Graphs have the operators that were called while they were captured."""
    graph = torch._C._CUDAGraph
    of_graph = {}  # by its id
    begin, replay = graph.capture_begin, graph.replay

    def capture_begin(self, *args, **kwargs):
        global captured
        captured = of_graph[id(self)] = []
        begin(self, *args, **kwargs)

    def replayed(self):
        replay(self)
        for call in of_graph[id(self)]:
            call()

    graph.capture_begin, graph.replay = capture_begin, replayed


def register():
    """Does nothing the second time: a process that forks has done it for its forks."""
    if hasattr(register, "library"):
        return
    library = torch.library.Library("aten", "IMPL")
    register.library = library  # what it registers goes with it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one is overridden
        for name in torch._C._dispatch_get_all_op_names():
            base, _, overload = name.partition("::")[2].partition(".")
            if not name.startswith("aten::") or base in KEPT or not (
                    base == "copy_" or torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")):
                continue
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
            if not views(op._schema) and any("Tensor" in str(a.type) for a in op._schema.arguments):
                library.impl(name.partition("::")[2], on_host(op), "CUDA")
    replay_captures()
    torch.cuda._sleep = lambda cycles: None  # over at once, as all work is
