"""Without an adapter: PyTorch's plain pluggable allocator over Cistern, with every hook, and one warning that says why."""
import sys

from .base import GUARD, GiB, MiB, bytes_on, cap, case, check, eq, raises, requested, reserved, script, drain, stat, torch

NO_ADAPTER = {"CISTERN_ADAPTER": "off"}


def plain(timeout=60):
    return case(timeout=timeout, native="the fallback is Cistern's", env=NO_ADAPTER, guard="plain")


@case(native="the fallback is Cistern's", guard=None, env=NO_ADAPTER)
def plain_warns():
    """One warning, that names what is missing and why."""
    # Said when torch is imported.
    done = script("import torch\nfor i in range(3): torch.ones(1000, device='cuda')\nprint('ok')\n", python=sys.executable)
    eq(done.rc, 0, done.why())
    lines = [line for line in done.err.splitlines() if "istern" in line]
    check(lines, "nothing was said")
    check("CISTERN_ADAPTER=off" in done.err, f"why: {done.err[-500:]!r}")
    return lines[0][:250]


@plain()
def plain_works():
    for i in range(200):
        t = torch.full(((i % 40 + 1) * 100_000,), i % 251, dtype=torch.uint8, device="cuda")
        check(int(t[-1]) == i % 251, "contents")
    x = torch.randn(500, 500, device="cuda", requires_grad=True)
    (x @ x).square().mean().backward()
    check(torch.isfinite(x.grad).all(), "backward")


@plain()
def plain_statistics():
    t = bytes_on(3 * MiB)
    eq(requested(), 3 * MiB, "requested")
    check(torch.cuda.memory_allocated() >= 3 * MiB, "memory_allocated")
    check(reserved() >= 3 * MiB, "memory_reserved")
    check(torch.cuda.max_memory_allocated() >= 3 * MiB, "max_memory_allocated")
    del t
    eq(requested(), 0, "after the free")
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory_summary()
    torch.cuda.empty_cache()
    eq(reserved(), 0, "after empty_cache")
    eq(stat("allocation.all.current"), 0, "allocations")


@plain()
def plain_oom():
    """Out of memory is an exception, not a null tensor that faults later."""
    cap(1 * GiB)
    for _ in range(20):
        with raises(RuntimeError, "out of memory"):
            bytes_on(2 * GiB)
    t = torch.full((900 * MiB,), 3, dtype=torch.uint8, device="cuda")
    eq(int(t[-1]), 3, "and life goes on")


@plain(timeout=90)
def plain_record_stream():
    side = torch.cuda.Stream()
    for i in range(30):
        a = torch.full((4 * MiB,), i, dtype=torch.uint8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(4_000_000)
            out = a + 0
            a.record_stream(side)
        del a
        b = torch.full((4 * MiB,), 255, dtype=torch.uint8, device="cuda")
        side.synchronize()
        check(bool((out == i).all()), f"round {i}: overwritten")
        del b, out


@plain()
def plain_graph():
    x = torch.ones(MiB, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x * 2
    torch.cuda.current_stream().wait_stream(side)
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        y = x * 2
    for i in range(4):
        x.fill_(i)
        junk = [torch.full((MiB,), 9.0, device="cuda") for _ in range(5)]
        g.replay()
        eq(float(y[-1]), i * 2.0, f"replay {i}")
        check(all(bool((j == 9).all()) for j in junk), "eager tensors are intact")
    del g, y
    drain()


@plain()
def plain_graph_unannounced():
    """A capture that begins in C++, past the class of Python's: it is announced by its first allocation."""
    x = torch.ones(MiB, device="cuda")
    stream, side = torch.cuda.Stream(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    g = torch._C._CUDAGraph()
    with torch.cuda.stream(stream):
        g.capture_begin(pool=None, capture_error_mode="global")
        a = x * 2
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            b = a * 3
        stream.wait_stream(side)
        c = a + b
        g.capture_end()
    for i in range(4):
        x.fill_(i)
        torch.cuda.synchronize()
        g.replay()
        torch.cuda.synchronize()
        eq(float(c[-1]), i * 8.0, f"replay {i}")


@plain()
def plain_graph_callables():
    model = torch.nn.Linear(64, 64).cuda()
    sample = torch.randn(8, 64, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(model, (sample,))
    for i in range(5):
        x = torch.randn(8, 64, device="cuda")
        y = graphed(x)
        want = x @ model.weight.T + model.bias
        check(torch.allclose(y, want, atol=1e-4), f"call {i}")
        y.sum().backward()
        check(torch.allclose(model.bias.grad, torch.full_like(model.bias.grad, 8.0)), f"gradient {i}")
        model.zero_grad(set_to_none=True)


@plain()
def plain_exit():
    done = script("import torch\nt = torch.ones(10, device='cuda')\nprint('bye')\n")
    eq(done.rc, 0, done.why())
    check("bye" in done.out, done.out)
    bytes_on(1)


@case(guard=None)
def adapter_is_used():
    """The other way round: with a compiler, the adapter is what is loaded."""
    done = script("import torch\nprint(int(torch.ones(5, device='cuda').sum()))\n" + GUARD)
    eq((done.rc, done.out.strip()), (0, "5"), done.err[-300:])
