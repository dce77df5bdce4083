"""CUDA graphs: captures, shared pools, memory that a graph keeps, checkpoints of torch.compile's graph trees."""
import ctypes

from .base import GiB, MiB, STANDIN, Skip, bytes_on, cap, case, check, eq, fewer, probe, raises, requested, reserved, drain, torch


def capture(fn, pool=None, stream=None):
    """Warms up on a side stream and captures."""
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn()
    torch.cuda.current_stream().wait_stream(stream)
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, pool=pool, stream=stream):
        out = fn()
    return g, out


@case()
def graph_replay():
    x = torch.ones(1000, 1000, device="cuda")
    g, y = capture(lambda: (x @ x).relu() + x)
    for i in range(5):
        x.fill_(i / 100)
        g.replay()
        want = (x @ x).relu() + x
        check(torch.allclose(y, want), f"replay {i}")


@case()
def graph_keeps_memory():
    """What a capture freed belongs to the graph while it lives: eager tensors must not get it."""
    x = torch.ones(4 * MiB, device="cuda")
    def f():
        a = x * 2
        b = a + 1
        del a
        return (b * 3).sum()
    g, y = capture(f)
    for i in range(20):
        junk = [torch.full((4 * MiB,), 99.0, device="cuda") for _ in range(8)]
        x.fill_(i)
        g.replay()
        eq(float(y), (i * 2 + 1) * 3.0 * 4 * MiB, f"replay {i}")
        check(all(bool((j == 99).all()) for j in junk), "eager tensors are intact")
        del junk
        if i % 5 == 4:
            torch.cuda.empty_cache()


@case()
def graph_output_dropped():
    """The tensor objects of a capture are gone, its memory is not."""
    x = torch.ones(4 * MiB, device="cuda")
    result = torch.zeros(1, device="cuda")
    def f():
        result.copy_((x * 2).sum())
    g, _ = capture(f)
    drain()
    torch.cuda.empty_cache()
    junk = [torch.full((8 * MiB,), 7.0, device="cuda") for _ in range(20)]
    g.replay()
    eq(float(result), 8.0 * MiB, "replayed")
    check(all(bool((j == 7).all()) for j in junk), "the replay wrote into unused memory")


@case()
def graph_memory_returns():
    x = torch.ones(64 * MiB, device="cuda")
    drain()
    torch.cuda.empty_cache()
    before = reserved()
    g, y = capture(lambda: x * 2 + 1)
    check(reserved() > before, "the graph holds memory")
    del y
    drain()
    torch.cuda.empty_cache()
    check(reserved() > before, "also when its tensors are gone")
    g.replay()
    torch.cuda.synchronize()
    g.reset()
    del g
    drain()
    torch.cuda.empty_cache()
    check(reserved() <= before, f"it returns with the graph: {reserved() - before} bytes more than before")


@case()
def graphs_share_pool():
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()
    x = torch.ones(MiB, device="cuda")
    g1, a = capture(lambda: x * 2, pool, stream)
    g2, b = capture(lambda: a + 3, pool, stream)
    g3, c = capture(lambda: (b * 5, b.sum()), pool, stream)
    for i in range(5):
        x.fill_(i)
        for g in (g1, g2, g3):
            g.replay()
        eq(float(c[0][-1]), (i * 2 + 3) * 5.0, f"replay {i}")
        eq(float(c[1]), (i * 2 + 3.0) * MiB, f"replay {i}, sum")
    del g1, a
    drain()
    torch.cuda.empty_cache()
    x.fill_(1)
    junk = [torch.full((MiB,), 9.0, device="cuda") for _ in range(30)]
    g2.replay(), g3.replay()
    torch.cuda.synchronize()
    check(all(bool((j == 9).all()) for j in junk), "the pool lives as long as one graph does")


@case(timeout=90)
def graph_callables():
    torch.manual_seed(0)
    def model():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)).cuda()
    a, b = model(), model()
    sample = torch.randn(32, 128, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(a, (sample,))
    oa, ob = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (a, b))
    for i in range(10):
        x = torch.randn(32, 128, device="cuda")
        la, lb = graphed(x).square().mean(), b(x).square().mean()
        # Gradients are the graph's own memory: kept and zeroed in place, the next replay would be added to itself.
        oa.zero_grad(set_to_none=True), ob.zero_grad(set_to_none=True)
        la.backward(), lb.backward()
        oa.step(), ob.step()
        check(abs(float(la) - float(lb)) < 1e-5, f"step {i}: {float(la)} and {float(lb)}")
        junk = [torch.full((MiB,), 3.0, device="cuda") for _ in range(4)]
        del junk


@case(timeout=90)
def graph_whole_training_step():
    torch.manual_seed(2)
    m = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Dropout(0.1), torch.nn.Linear(256, 256)).cuda()
    opt = torch.optim.Adam(m.parameters(), lr=1e-3, capturable=True)
    x, y = torch.randn(64, 256, device="cuda"), torch.randn(64, 256, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            opt.zero_grad(set_to_none=True)
            torch.nn.functional.mse_loss(m(x), y).backward()
            opt.step()
    torch.cuda.current_stream().wait_stream(side)
    g = torch.cuda.CUDAGraph()
    opt.zero_grad(set_to_none=True)
    with torch.cuda.graph(g):
        loss = torch.nn.functional.mse_loss(m(x), y)
        loss.backward()
        opt.step()
    losses = []
    for _ in range(60):
        g.replay()
        losses.append(float(loss))
    check(losses[-1] < losses[0], f"it learns: {losses[0]} to {losses[-1]}")
    check(all(torch.isfinite(p).all() for p in m.parameters()), "finite")


@case()
def graph_side_streams():
    """A capture that forks to another stream and joins, with record_stream inside."""
    x = torch.ones(MiB, device="cuda")
    side = torch.cuda.Stream()
    def f():
        a = x * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            b = a * 3
            a.record_stream(side)
        c = a + 1
        torch.cuda.current_stream().wait_stream(side)
        b.record_stream(torch.cuda.current_stream())
        return b + c
    g, y = capture(f)
    for i in range(5):
        x.fill_(i)
        g.replay()
        eq(float(y[-1]), i * 8.0 + 1, f"replay {i}")


@case()
def graph_new_side_stream():
    """A stream that allocates for the first time while it is captured: the driver cannot be asked what it is then."""
    x = torch.ones(MiB, device="cuda")
    torch.cuda.synchronize()
    side, g = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        a = x * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            b = a * 3
            c = b + 1
        torch.cuda.current_stream().wait_stream(side)
        d = c + a
    for i in range(5):
        x.fill_(i)
        junk = [torch.full((MiB,), 9.0, device="cuda") for _ in range(5)]
        g.replay()
        eq(float(d[-1]), i * 8.0 + 1, f"replay {i}")
        check(all(bool((j == 9).all()) for j in junk), "eager tensors are intact")
    with torch.cuda.stream(side):
        eq(float(torch.full((MiB,), 4.0, device="cuda").sum()), 4.0 * MiB, "the stream works on")


@case()
def graph_external_stream():
    """A capture of a stream that PyTorch did not make, and that its owner destroys."""
    p = probe()
    for i in range(5):
        handle = ctypes.c_void_p()
        eq(p.probe_stream_create(ctypes.byref(handle)), 0, "cudaStreamCreate")
        x = torch.ones(MiB, device="cuda")
        g, y = capture(lambda: (x * 2 + 1) * 3, stream=torch.cuda.ExternalStream(handle.value))
        x.fill_(i)
        g.replay()
        eq(float(y[-1]), i * 6.0 + 3, f"replay {i}")
        torch.cuda.synchronize()
        del g, y
        eq(p.probe_stream_destroy(handle), 0, "cudaStreamDestroy")
    drain()


@case()
def graph_capture_fails():
    """A capture that fails leaves an allocator that works."""
    x = torch.ones(MiB, device="cuda")
    side = torch.cuda.Stream()
    g = torch.cuda.CUDAGraph()
    with raises(Exception):
        with torch.cuda.stream(side):
            g.capture_begin()
            try:
                y = x * 2
                float(y.sum())  # synchronises: not allowed here
            finally:
                g.capture_end()
    torch.cuda.synchronize()
    del g
    drain()
    t = torch.full((MiB,), 2.0, device="cuda")
    eq(float(t.sum()), 2.0 * MiB, "eager work goes on")
    g2, z = capture(lambda: x * 4)
    g2.replay()
    eq(float(z[0]), 4.0, "so do captures")


@case()
def graph_oom():
    cap(2 * GiB)
    x = torch.ones(MiB, device="cuda")
    side = torch.cuda.Stream()
    g = torch.cuda.CUDAGraph()
    with raises(torch.OutOfMemoryError, "Tried to allocate"):
        with torch.cuda.graph(g, stream=side):
            y = x * 2
            bytes_on(3 * GiB)
    del g
    drain()
    eq(float(torch.full((10,), 1.0, device="cuda").sum()), 10.0, "eager work goes on")


@case()
def graph_other_thread_allocates():
    """Another thread allocates while this one captures."""
    import threading
    stop, failed, rounds = threading.Event(), [], [0]
    other = torch.cuda.Stream()
    def work():
        try:
            with torch.cuda.stream(other):
                while not stop.is_set():
                    t = torch.full((300_000,), 5, dtype=torch.uint8, device="cuda")
                    u = bytes_on((rounds[0] % 60 + 1) * MiB)
                    del t, u
                    rounds[0] += 1
        except Exception as e:
            failed.append(repr(e))
    x = torch.ones(MiB, device="cuda")
    torch.cuda.synchronize()
    t = threading.Thread(target=work)
    t.start()
    try:
        for i in range(10):
            s = torch.cuda.Stream()
            s.wait_stream(torch.cuda.current_stream())
            g = torch.cuda.CUDAGraph()
            with torch.cuda.stream(s):
                g.capture_begin(capture_error_mode="thread_local")
                y = x * 2
                z = [y + j for j in range(20)]
                g.capture_end()
            torch.cuda.current_stream().wait_stream(s)
            g.replay()
            torch.cuda.synchronize()
            eq(float(z[7][0]), 9.0, "replayed")
    finally:
        stop.set()
        t.join()
    eq(failed, [], "the other thread")
    return f"{rounds[0]} rounds beside"


@case(timeout=90)
def graph_beside_scopes():
    """Threads open and close scopes of their own pools, and allocate outside of them, while this one captures one graph after the
    other: each is right, and the threads go on."""
    import threading
    stop, failed, rounds = threading.Event(), [], [0, 0, 0]
    pools = [torch.cuda.MemPool() for _ in rounds]
    def work(i):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    with torch.cuda.use_mem_pool(pools[i]):
                        t = torch.full((300_000,), i, dtype=torch.uint8, device="cuda")
                    u = bytes_on((rounds[i] % 60 + 1) * MiB)
                    del t, u
                    rounds[i] += 1
        except Exception as e:
            failed.append(repr(e))
    x = torch.ones(MiB, device="cuda")
    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(rounds))]
    for t in threads:
        t.start()
    s, shared = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    keep = []
    try:
        for i in range(fewer(100)):
            g = torch.cuda.CUDAGraph()
            with torch.cuda.stream(s):
                g.capture_begin(pool=shared, capture_error_mode="thread_local")
                y = x * 2
                z = [y + j for j in range(20)]
                g.capture_end()
                g.replay()
                eq(float(z[7][0]), 9.0, f"graph {i}")
            keep = [g, z]
    finally:
        stop.set()
        for t in threads:
            t.join()
    eq(failed, [], "the other threads")
    check(all(rounds), f"each thread went on: {rounds}")
    return f"{sum(rounds)} rounds beside"


@case()
def graph_pool_reused_by_later_capture():
    """Graphs one after the other into one pool: what an earlier capture freed serves the later."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()
    x = torch.ones(16 * MiB, device="cuda")
    graphs = []
    for i in range(6):
        graphs.append(capture(lambda: (x * 2 + 1).sum(), pool, stream))
        if i == 1:
            held = reserved()
    check(reserved() <= held + 40 * MiB, f"later captures reuse the pool: {reserved() - held} bytes more")
    for i, (g, y) in enumerate(graphs):
        x.fill_(i)
        g.replay()
        eq(float(y), (2.0 * i + 1) * 16 * MiB, f"graph {i}")


# ---- checkpoints ----------------------------------------------------------------------------------------------------

def pool_live(pool):
    """{address: requested} of what lives in the pool."""
    return {b["address"]: b["requested_size"] for s in torch.cuda.memory_snapshot(pool) for b in s["blocks"] if b["state"] == "active_allocated"}


def weak(t):
    """A tensor over the same memory that does not own it, as torch.compile's graph trees make."""
    s = torch._C._construct_storage_from_data_pointer(t.untyped_storage().data_ptr(), t.device, t.untyped_storage().nbytes())
    return torch.empty([0], device=t.device, dtype=t.dtype).set_(source=s, storage_offset=t.storage_offset(), size=t.shape, stride=t.stride())


@case()
def graph_checkpoint():
    """get/setCheckpointState: the pool's live blocks are again what they were, at the same addresses."""
    C = torch._C
    x = torch.ones(MiB, device="cuda")
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()
    keep = torch.cuda.CUDAGraph()
    with torch.cuda.graph(keep, pool=pool, stream=stream):
        out1 = x * 2
        small = x[:100] + 1
    device = x.device.index
    eq(len(pool_live(pool)), 2, "two outputs live")
    state = C._cuda_getCheckpointState(device, pool)
    live = pool_live(pool)
    check(C._cuda_checkPoolLiveAllocations(device, pool, set(live)), "checkPoolLiveAllocations agrees")
    check(not C._cuda_checkPoolLiveAllocations(device, pool, set(list(live)[:1])), "and disagrees where it should")

    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second, pool=pool, stream=stream):
        out2 = out1 + small.sum()
        out3 = out2 * 2
    eq(len(pool_live(pool)), 4, "four live after the second capture")
    # Back to the state after the first: what the second made is stale.
    C._cuda_setCheckpointPoolState(device, state, [t.untyped_storage()._cdata for t in (out2, out3)], [])
    eq(pool_live(pool), live, "live blocks are those of the checkpoint")
    del out2, out3
    eq(pool_live(pool), live, "stale tensors that die free nothing")
    third = torch.cuda.CUDAGraph()
    with torch.cuda.graph(third, pool=pool, stream=stream):
        out4 = out1 * 3
    keep.replay()
    third.replay()
    eq(float(out4[0]), 6.0, "a third graph from there")
    check(out4.data_ptr() not in live, "on memory that the first does not use")


@case()
def graph_checkpoint_revives():
    """Blocks that died since the checkpoint live again and get their deleters back."""
    C = torch._C
    x = torch.ones(MiB, device="cuda")
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, pool=pool, stream=stream):
        out = x * 2
    device = x.device.index
    live = pool_live(pool)
    state = C._cuda_getCheckpointState(device, pool)
    copy = weak(out)
    del out
    drain()
    eq(pool_live(pool), {}, "nothing lives")
    C._cuda_setCheckpointPoolState(device, state, [], [copy.untyped_storage()._cdata])
    eq(pool_live(pool), live, "it lives again")
    x.fill_(21)
    g.replay()
    eq(float(copy[5]), 42.0, "and is where the graph writes")
    before = requested()
    del copy
    drain()
    eq(pool_live(pool), {}, "its new deleter frees it")
    eq(before - requested(), 4 * MiB, "and statistics know")


@case(timeout=280, gpu="kernels that Triton compiles")
def compile_reduce_overhead():
    """torch.compile(mode="reduce-overhead"): graph trees with several shapes and branches, which checkpoint and restore."""
    if STANDIN:
        raise Skip("without Triton it fails late")
    import torch._dynamo
    torch.manual_seed(0)
    w = torch.randn(64, 64, device="cuda", requires_grad=True)
    def f(x, flag):
        y = (x @ w).relu()
        if flag:
            y = y * 2 + 1
        return y.sin() + x
    c = torch.compile(f, mode="reduce-overhead", dynamic=False)
    with torch.no_grad():
        for i in range(24):
            flag, n = i % 3 == 0, (16, 32)[i % 2]
            x = torch.randn(n, 64, device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            first = c(x, flag)
            second = c(first.clone(), not flag)  # a path through the tree: its second node starts from the first's state
            want = f(f(x, flag), not flag)
            check(torch.allclose(second, want, atol=1e-4), f"round {i}: results differ")
            junk = [torch.full((200_000,), 5.0, device="cuda") for _ in range(5)]
            check(all(bool((j == 5).all()) for j in junk), "eager tensors are intact")
            del junk, first, second
    for i in range(6):  # and backward
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(32, 64, device="cuda")
        w.grad = None
        c(x, True).sum().backward()
        got = w.grad.clone()
        w.grad = None
        f(x, True).sum().backward()
        check(torch.allclose(got, w.grad, atol=1e-3), f"gradients of round {i} differ")
    from torch._inductor.cudagraph_trees import get_manager
    manager = get_manager(0, create_if_none_exists=False)
    check(manager is not None, "graphs were used")
    return f"{manager.new_graph_id().id} graphs"


@case(timeout=120)
def graph_replaced_on_new_streams():
    """Graphs that replace one another, each captured on another stream of PyTorch's, leave nothing behind."""
    x = torch.ones(1 * MiB, device="cuda")
    drain()
    torch.cuda.empty_cache()
    before = reserved()
    graph = y = None
    for i in range(100):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        new = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            new.capture_begin()
            z = (x + 1) * 2
            new.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        graph, y = new, z
        del new, z
        graph.replay()
        check(bool((y == 4).all()), f"replay {i}")
    del graph, y
    drain()
    torch.cuda.empty_cache()
    eq(reserved(), before, "bytes reserved after the last graph")


@case(timeout=120)
def graph_replaced_with_workspace():
    """A matrix product takes a workspace that outlives its graph. Later graphs on the stream take none of their own."""
    a, b = torch.randn(1024, 512, device="cuda"), torch.randn(512, 64, device="cuda")
    a @ b
    graph = y = None
    steady = None
    for i in range(100):
        new = torch.cuda.CUDAGraph()
        with torch.cuda.graph(new):
            z = a @ b
        graph, y = new, z
        del new, z
        graph.replay()
        drain()
        if i == 5:
            steady = reserved()
    check(bool(torch.allclose(y, a @ b, rtol=1e-3, atol=1e-3)), "the result of the last graph")
    eq(reserved(), steady, "bytes reserved after 100 graphs, against 6")


def grows_by(joined_first):
    """Bytes that a capture of 20 rounds takes, in each of which two streams use 32 MiB, or fewer, that are given back before or after
    the streams join, and whether its replays are right."""
    rounds = 20
    x = torch.ones(fewer(8 * MiB), device="cuda")
    side = torch.cuda.Stream()
    def f():
        total = torch.zeros(1, device="cuda")
        for i in range(rounds):
            main = torch.cuda.current_stream()
            a = x * (i + 1)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                s = a.sum()
            a.record_stream(side)
            if joined_first:
                main.wait_stream(side)
                del a
            else:
                del a
                main.wait_stream(side)
            s.record_stream(main)
            total += s
            del s
        return total
    f()
    drain()
    torch.cuda.empty_cache()
    before = reserved()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        y = f()
    grown = reserved() - before
    for i in range(3):
        x.fill_(i)
        g.replay()
        eq(float(y), float(i * rounds * (rounds + 1) // 2 * x.numel()), f"replay {i}")
    del g, y
    drain()
    torch.cuda.empty_cache()
    return grown


@case(env={"PYTORCH_ALLOC_CONF": "graph_capture_record_stream_reuse:True"})
def graph_record_stream_reuse():
    """With the setting a capture reuses memory of two streams once they have joined."""
    for joined_first in (True, False):
        grown = grows_by(joined_first)
        check(grown <= fewer(140 * MiB), f"joined before the free {joined_first}: 20 rounds took {grown / MiB:.0f} MiB")


@case()
def graph_record_stream_reuse_at_run_time():
    """Without the setting it does not; the setting counts from when the program gives it."""
    torch.cuda.init()
    grown = grows_by(True)
    check(grown >= fewer(500 * MiB), f"off: {grown / MiB:.0f} MiB")
    torch._C._accelerator_setAllocatorSettings("graph_capture_record_stream_reuse:True")
    grown = grows_by(True)
    check(grown <= fewer(140 * MiB), f"on: {grown / MiB:.0f} MiB")
    torch._C._accelerator_setAllocatorSettings("graph_capture_record_stream_reuse:False")
    grown = grows_by(True)
    check(grown >= fewer(500 * MiB), f"off again: {grown / MiB:.0f} MiB")
