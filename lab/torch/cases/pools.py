"""torch.cuda.MemPool: scopes, sharing of the last bytes, custom allocators, threads."""
import ctypes
import threading

from .base import GiB, MiB, bytes_on, cap, case, check, eq, fine, in_thread, probe, raises, requested, reserved, drain, stat, torch, usable


def within(pool, t):
    """Whether the tensor lies in a segment of the pool."""
    return any(s["address"] <= t.data_ptr() < s["address"] + s["total_size"] for s in pool.snapshot())


def use_count(pool):
    n = ctypes.c_int()
    fine(probe().probe_pool_use_count(0, *pool.id, ctypes.byref(n)))
    return n.value


def custom(which):
    """A MemPool allocator out of probe.cpp."""
    a = torch.cuda.memory.CUDAPluggableAllocator(probe().path, f"probe_custom_alloc_{which}", f"probe_custom_free_{which}")
    return a


@case()
def pool_scope():
    pool = torch.cuda.MemPool()
    before = bytes_on(3 * MiB)
    with torch.cuda.use_mem_pool(pool):
        a = bytes_on(3 * MiB)
        s = bytes_on(700)
    after = bytes_on(3 * MiB)
    eq([within(pool, t) for t in (before, a, s, after)], [False, True, True, False], "what lies in the pool")
    a.fill_(7)
    eq(int(a.sum()), 7 * 3 * MiB, "usable")
    address = a.data_ptr()
    del a
    outside = [bytes_on(3 * MiB) for _ in range(20)]
    check(address not in [t.data_ptr() for t in outside], "what is freed in the pool serves the pool")
    with torch.cuda.use_mem_pool(pool):
        b = bytes_on(3 * MiB)
    eq(b.data_ptr(), address, "again")


@case()
def pool_nested():
    p, q = torch.cuda.MemPool(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(p):
        a = bytes_on(3 * MiB)
        with torch.cuda.use_mem_pool(q):
            b = bytes_on(3 * MiB)
        c = bytes_on(3 * MiB)
    d = bytes_on(3 * MiB)
    eq([within(p, t) for t in (a, b, c, d)], [True, False, True, False], "the outer pool")
    eq([within(q, t) for t in (a, b, c, d)], [False, True, False, False], "the inner pool")


@case()
def pool_exception_leaves_scope():
    pool = torch.cuda.MemPool()
    with raises(ValueError):
        with torch.cuda.use_mem_pool(pool):
            raise ValueError
    eq(within(pool, bytes_on(3 * MiB)), False, "outside after an exception")


@case()
def pool_use_count():
    pool = torch.cuda.MemPool()
    first = use_count(pool)
    eq(pool.use_count(), first, "both ways of asking")
    with torch.cuda.use_mem_pool(pool):
        eq(use_count(pool), first + 1, "in use")
    eq(use_count(pool), first, "no longer")


@case()
def pool_deleted():
    """A pool that is gone gives its memory back; what lives on in it stays valid."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        a = torch.full((3 * MiB,), 5, dtype=torch.uint8, device="cuda")
        b = bytes_on(200 * MiB)
    del b, pool
    drain()
    torch.cuda.empty_cache()
    check(reserved() < 100 * MiB, f"what was free in it is given back: {reserved()} held")
    eq(int(a.sum()), 5 * 3 * MiB, "what lives on is intact")
    del a
    drain()
    torch.cuda.empty_cache()
    eq(reserved(), 0, "and then goes too")
    eq(requested(), 0, "nothing requested")


@case(native="empty_cache inside a pool does nothing", timeout=60)
def pool_empty_cache_inside():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        t = bytes_on(2 * GiB)
        keep = torch.full((3 * MiB,), 4, dtype=torch.uint8, device="cuda")
        del t
        check(reserved() >= 2 * GiB, "cached")
        torch.cuda.empty_cache()
        check(reserved() < 256 * MiB, f"given back inside the scope: {reserved()} held")
    eq(int(keep.sum()), 4 * 3 * MiB, "what lives in the pool is intact")


@case(native="empty_cache inside a pool does nothing", alone=True)
def pool_empty_cache_device():
    torch.cuda.init()
    free, _ = torch.cuda.mem_get_info()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        t = bytes_on(4 * GiB)
        del t
        torch.cuda.empty_cache()
        eq(reserved(), 0, "reserved")
        after, _ = torch.cuda.mem_get_info()
    check(after >= free - 4 * MiB, f"the device has it again: {free - after} bytes are missing")


@case(native="dies: release and retry is skipped inside a pool scope")
def pool_oom_uses_own_cache():
    """60 % freed in the pool, then 70 % asked for in it (pytorch #159674)."""
    cap(10 * GiB)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        t = bytes_on(6 * GiB)
        del t
        u = bytes_on(7 * GiB)
    usable(u)
    eq(stat("num_ooms"), 0, "no failure")


@case(native="dies: release and retry is skipped inside a pool scope")
def pool_oom_uses_other_caches():
    """What the default pool and another pool cache is given up for a pool."""
    cap(10 * GiB)
    t = bytes_on(4 * GiB)
    del t
    other = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(other):
        t = bytes_on(4 * GiB)
        del t
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        u = bytes_on(9 * GiB)
    usable(u)
    eq(requested(), 9 * GiB, "requested")


@case(native="a live pool never gives segments back")
def pool_cache_serves_default():
    """What a live pool caches is given up for a request outside of it."""
    cap(10 * GiB)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        t = bytes_on(7 * GiB)
        del t
    u = bytes_on(8 * GiB)
    usable(u)


@case()
def pool_use_on_oom():
    cap(2 * GiB)
    pool = torch.cuda.MemPool(use_on_oom=True)
    with torch.cuda.use_mem_pool(pool):
        t = bytes_on(1500 * MiB)
        del t
    u = bytes_on(1400 * MiB)
    u.fill_(1)
    eq(int(u[-1]), 1, "outside the pool, its memory was used rather than fail")
    del u
    with torch.cuda.use_mem_pool(pool):
        v = bytes_on(1500 * MiB)
    eq(v.numel(), 1500 * MiB, "and the pool has it again")


@case()
def pool_use_on_oom_throws():
    """The allocator of a pool that may be used rather than fail throws: that is no failure of the program's, then or later."""
    p = probe()
    a = torch.cuda.memory.CUDAPluggableAllocator(p.path, "probe_custom_alloc_once", "probe_custom_free_0")
    pool = torch.cuda.MemPool(a.allocator(), use_on_oom=True)
    with torch.cuda.use_mem_pool(pool):
        t = bytes_on(20 * MiB)
    cap(1 * GiB)
    torch.cuda.reset_accumulated_memory_stats()
    for i in range(3):
        with raises(torch.OutOfMemoryError, "Tried to allocate 2.00 GiB"):
            bytes_on(2 * GiB)
        eq(stat("num_ooms"), i + 1, "failures")
    del t, pool
    with raises(torch.OutOfMemoryError, "Tried to allocate 2.00 GiB"):
        bytes_on(2 * GiB)


@case()
def pool_no_split():
    pool = torch.cuda.MemPool(no_split=True)
    with torch.cuda.use_mem_pool(pool):
        held = [bytes_on(n) for n in (300, 3 * MiB, 3 * MiB, 30 * MiB)]
    segments = pool.snapshot()
    owners = [s["address"] for t in held for s in segments if s["address"] <= t.data_ptr() < s["address"] + s["total_size"]]
    eq(len(set(owners)), len(held), "each allocation is a segment of its own")
    for s in segments:
        eq(len([b for b in s["blocks"] if b["state"] == "active_allocated"]), 1, "one block in a segment")
    for t in held:
        check(any(s["address"] == t.data_ptr() for s in segments), "at the beginning of its segment")
    held.clear()
    del t
    drain()


@case()
def pool_custom_allocator():
    """Memory of a pool with an allocator of its own comes from it and goes back to it, and nothing else does."""
    p = probe()
    a0, a1 = custom(0), custom(1)
    pool0, pool1 = torch.cuda.MemPool(a0.allocator()), torch.cuda.MemPool(a1.allocator())
    with torch.cuda.use_mem_pool(pool0):
        x = torch.full((5 * MiB,), 1, dtype=torch.uint8, device="cuda")
        small = bytes_on(100)
    with torch.cuda.use_mem_pool(pool1):
        y = torch.full((50 * MiB,), 2, dtype=torch.uint8, device="cuda")
    z = torch.full((5 * MiB,), 3, dtype=torch.uint8, device="cuda")
    eq([p.probe_custom_owns(0, t.data_ptr()) for t in (x, small, y, z)], [1, 1, 0, 0], "the first allocator's")
    eq([p.probe_custom_owns(1, t.data_ptr()) for t in (x, small, y, z)], [0, 0, 1, 0], "the second's")
    eq([int(t.sum()) for t in (x, y, z)], [5 * MiB, 100 * MiB, 15 * MiB], "contents")
    check(within(pool0, x) and within(pool1, y) and not within(pool0, z), "snapshots")
    eq(requested(), 60 * MiB + 100, "statistics count them")
    def drop():
        torch.cuda.synchronize()
    del x, y, small
    in_thread(drop)
    with torch.cuda.use_mem_pool(pool0):
        again = bytes_on(5 * MiB)
    check(p.probe_custom_owns(0, again.data_ptr()), "reused in its pool")
    del again, pool0, pool1
    drain()
    torch.cuda.empty_cache()
    for which in (0, 1):
        allocs, frees, wrong, live = (p.probe_custom(which, i) for i in range(4))
        check(allocs > 0, "the allocator was asked")
        eq((frees, wrong, live), (allocs, 0, 0), f"allocator {which}: all given back, to the right one, in one piece")
    eq(int(z.sum()), 15 * MiB, "the others' memory is untouched")


@case()
def pool_custom_freed_elsewhere():
    """Tensors of a custom pool die after the scope, in another thread and after the pool object."""
    p = probe()
    a0 = custom(0)
    pool = torch.cuda.MemPool(a0.allocator())
    with torch.cuda.use_mem_pool(pool):
        held = [torch.full((4 * MiB,), i, dtype=torch.uint8, device="cuda") for i in range(8)]
    def use():
        for i, t in enumerate(held):
            assert int(t[-1]) == i
        held.clear()
    in_thread(use)
    del pool
    drain()
    torch.cuda.empty_cache()
    eq(p.probe_custom(0, 3), 0, "nothing lives")
    eq(p.probe_custom(0, 2), 0, "no wrong free")
    eq(requested(), 0, "nothing requested")


@case()
def pool_custom_allocator_raw():
    """A pool's custom allocator, and out of memory in the middle of it."""
    p = probe()
    a0 = custom(0)
    pool = torch.cuda.MemPool(a0.allocator())
    cap(1 * GiB)
    with torch.cuda.use_mem_pool(pool):
        t = bytes_on(600 * MiB)
        with raises(torch.OutOfMemoryError):
            bytes_on(200 * GiB)
        u = bytes_on(10 * MiB)
    check(p.probe_custom_owns(0, u.data_ptr()), "still from its allocator")
    del t, u


@case()
def pool_in_threads():
    """Each thread its own pool, at once."""
    wrong = []
    def work(i):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            held = [torch.full(((j % 5 + 1) * 300_000,), i * 30 + j, dtype=torch.uint8, device="cuda") for j in range(20)]
            inside = [within(pool, t) for t in held]
            torch.cuda.current_stream().synchronize()
        if not all(inside) or any(int(t[-1]) != i * 30 + j for j, t in enumerate(held)):
            wrong.append(i)
        if within(pool, bytes_on(300_000)):
            wrong.append(("outside", i))
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    eq(wrong, [], "threads whose memory was not in their pool")


@case()
def pool_other_thread_outside():
    """A scope covers its thread only."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        t = in_thread(lambda: bytes_on(3 * MiB))
        u = bytes_on(3 * MiB)
    eq((within(pool, t), within(pool, u)), (False, True), "in the pool")


@case()
def pool_autograd():
    """Training inside a scope: right gradients, exact statistics, nothing lost."""
    def train(scope):
        torch.manual_seed(3)
        m = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)).cuda()
        opt = torch.optim.SGD(m.parameters(), lr=0.1)
        losses = []
        for i in range(10):
            with scope():
                loss = m(torch.full((64, 256), 0.01 * i, device="cuda")).square().mean()
                loss.backward()
            opt.step()
            opt.zero_grad(set_to_none=True)
            losses.append(float(loss))
        return losses
    import contextlib
    plain = train(contextlib.nullcontext)
    pool = torch.cuda.MemPool()
    pooled = train(lambda: torch.cuda.use_mem_pool(pool))
    check(max(abs(a - b) for a, b in zip(plain, pooled)) < 1e-6, f"losses {pooled} instead of {plain}")
    segments = torch.cuda.memory_snapshot()
    eq(sum(s["requested_size"] for s in segments), requested(), "snapshot and statistics agree")


@case()
def pool_record_stream():
    side = torch.cuda.Stream()
    pool = torch.cuda.MemPool()
    for i in range(30):
        with torch.cuda.use_mem_pool(pool):
            a = torch.full((4 * MiB,), i, dtype=torch.uint8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(4_000_000)
            out = a + 0
        a.record_stream(side)
        del a
        with torch.cuda.use_mem_pool(pool):
            b = torch.full((4 * MiB,), 255, dtype=torch.uint8, device="cuda")
        side.synchronize()
        check(bool((out == i).all()), f"round {i}: overwritten")
        del b, out


@case()
def pool_for_graph():
    """A graph captured into a MemPool."""
    pool = torch.cuda.MemPool()
    x = torch.ones(MiB, device="cuda")
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, pool=pool.id):
        y = x * 2
    x.fill_(4)
    g.replay()
    eq(float(y.sum()), 8.0 * MiB, "replayed")
    check(within(pool, y), "its output lies in the pool")


@case(native="refuses a second scope of one pool")
def pool_scope_around_graph():
    """A graph captured into the pool whose scope the thread has open: the end of the capture leaves the scope open."""
    pool = torch.cuda.MemPool()
    x = torch.ones(MiB, device="cuda")
    g = torch.cuda.CUDAGraph()
    with torch.cuda.use_mem_pool(pool):
        a = bytes_on(3 * MiB)
        with torch.cuda.graph(g, pool=pool.id):
            y = x * 2
        b = bytes_on(3 * MiB)
    c = bytes_on(3 * MiB)
    eq([within(pool, t) for t in (a, y, b, c)], [True, True, True, False], "what lies in the pool")
    eq(use_count(pool), 2, "its users: the object and the graph")
    x.fill_(4)
    g.replay()
    eq(float(y.sum()), 8.0 * MiB, "replayed")
    g.reset()
    eq(use_count(pool), 1, "its user")


@case(native="refuses a second scope of one pool")
def pool_graph_in_another_thread():
    """One thread has the pool's scope open while another captures into the pool: each ends its own."""
    pool = torch.cuda.MemPool()
    x = torch.ones(MiB, device="cuda")
    torch.cuda.synchronize()
    def work():
        g = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            g.capture_begin(pool=pool.id, capture_error_mode="thread_local")
            y = x * 2
            g.capture_end()
            outside = bytes_on(3 * MiB)
        return g, y, outside
    with torch.cuda.use_mem_pool(pool):
        g, y, outside = in_thread(work)
        a = bytes_on(3 * MiB)
    b = bytes_on(3 * MiB)
    eq([within(pool, t) for t in (y, outside, a, b)], [True, False, True, False], "what lies in the pool")
    x.fill_(4)
    g.replay()
    eq(float(y.sum()), 8.0 * MiB, "replayed")


@case(native="dies: the end of a MemPool empties its cache, which asserts that no capture is under way")
def pool_ends_during_a_capture():
    """A pool whose last user is a scope of another thread, on a stream that is being captured, ends with the capture."""
    x = torch.ones(MiB, device="cuda")
    drain()
    before = reserved()
    def work():
        s, side = torch.cuda.Stream(), torch.cuda.Stream()
        pool = torch.cuda.MemPool()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.stream(s):
            g.capture_begin(capture_error_mode="thread_local")
            side.wait_stream(s)
            with torch.cuda.stream(side), torch.cuda.use_mem_pool(pool):
                y = x * 3  # the first request of that stream: its capture is the pool's
            del pool
            s.wait_stream(side)
            z = y + 1
            g.capture_end()
            g.replay()
            s.synchronize()
            return float(z[0])
    eq(in_thread(work), 4.0, "replayed")
    drain()
    torch.cuda.empty_cache()
    eq(reserved(), before, "the pool's memory and the graph's went back")


@case(timeout=90)
def pools_come_and_go():
    for i in range(200):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            t = torch.full((2 * MiB,), i % 251, dtype=torch.uint8, device="cuda")
        del pool
        eq(int(t[-1]), i % 251, "contents")
        del t
    drain()
    torch.cuda.empty_cache()
    eq(reserved(), 0, "nothing stays")
