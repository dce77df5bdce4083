"""cistern.torch.MemPool: pools whose memory is of a special kind, and that all of it goes home.

Native PyTorch has pools with an allocator of the program's own, which pools.py compares; the words here are Cistern's."""
import ctypes
import threading

import common
from .base import (GUARD, GiB, MiB, bytes_on, cap, case, check, eq, in_thread, probe, raises, requested, reserved, script, drain,
                   sleep_gpu, stat, torch, usable)
from .plain import plain
from .pools import within

OURS = "upstreams by name are Cistern's"
# The name, whether the processor can read and write the memory at its address, and whether it is surely the device's own.
UPSTREAMS = {
    "device": (False, True), "virtual": (False, True), "async": (False, True), "managed": (True, False), "pinned": (True, False),
    "host_numa": (True, False), "nccl": (False, True),
}


def pool_of(upstream=None, **more):
    import cistern.torch
    return cistern.torch.MemPool(upstream=upstream, **more)


def full(n, value):
    return torch.full((n,), value, dtype=torch.uint8, device="cuda")


def attribute(t, which, kind=ctypes.c_uint64):
    """cuPointerGetAttribute, None where it fails."""
    value = kind()
    rc = common.cuda_driver().cuPointerGetAttribute(ctypes.byref(value), which, ctypes.c_uint64(t.data_ptr()))
    return value.value if rc == 0 else None


MEMORY_TYPE, IS_MANAGED, MEMPOOL = 2, 8, 17
HOST_MEMORY = 1


def retained(t):
    """Whether the address lies in memory that cuMemCreate made."""
    cuda, h = common.cuda_driver(), ctypes.c_uint64()
    if cuda.cuMemRetainAllocationHandle(ctypes.byref(h), ctypes.c_void_p(t.data_ptr())) != 0:
        return False
    cuda.cuMemRelease(h)
    return True


def is_of(name, t):
    """Whether the tensor's memory is what the upstream of this name gives, by the driver's own account."""
    if name == "device":
        return probe().probe_ipc_get(t.data_ptr()) == 0
    if name == "async":
        return bool(attribute(t, MEMPOOL))
    if name == "managed":
        return bool(attribute(t, IS_MANAGED, ctypes.c_uint))
    if name == "pinned":
        return attribute(t, MEMORY_TYPE, ctypes.c_uint) == HOST_MEMORY
    return retained(t)


def each(fn):
    """A case for each upstream, fn(name)."""
    for name in UPSTREAMS:
        def one(name=name):
            return fn(name)
        one.__name__, one.__doc__, one.__module__ = f"{fn.__name__}_{name}", fn.__doc__, fn.__module__
        by_driver = name == "nccl" and fn.__name__ in ("upstream_holds", "upstream_in_graph")
        case(native=OURS, timeout=90, gpu="NCCL's memory, by the driver's account" if by_driver else None)(one)
    return fn


# ---- each upstream ---------------------------------------------------------------------------------------------------

@each
def upstream_holds(name):
    """Tensors in memory of that kind: kernels and the processor see the same, statistics count it, and it goes home."""
    host, _ = UPSTREAMS[name]
    (torch.ones(300, 300, device="cuda") @ torch.ones(300, 300, device="cuda")).sum()  # cuBLAS keeps a workspace
    drain()
    base = requested()
    pool = pool_of(name)
    before = bytes_on(3 * MiB)
    with torch.cuda.use_mem_pool(pool):
        x = full(5 * MiB, 7)
        a = torch.randn(300, 300, device="cuda")
        small = bytes_on(700)
        b = a @ a
    after = bytes_on(3 * MiB)
    eq([within(pool, t) for t in (before, x, a, small, b, after)], [False, True, True, True, True, False], "what lies in the pool")
    eq([is_of(name, t) for t in (x, a, small)], [True] * 3, f"what the driver says of memory of {name}")
    check(x.is_cuda and x.device.index == 0, "a tensor of the device")
    eq(int(x.sum()), 7 * 5 * MiB, "filled by a kernel")
    check(torch.allclose(b.cpu(), a.cpu() @ a.cpu(), atol=1e-3), "multiplied")
    x += 1
    copy = x.clone()
    check(bool((copy == 8).all()), "copied by the device")
    if host:
        torch.cuda.synchronize()
        eq(ctypes.string_at(x.data_ptr(), 5 * MiB), b"\x08" * (5 * MiB), "read by the processor")
        ctypes.memset(x.data_ptr(), 9, 5 * MiB)
        eq(int((x + 0).sum()), 9 * 5 * MiB, "written by the processor, read by a kernel")
    held = pool.cistern_stats()
    eq((held["requested"], held["blocks"]), (5 * MiB + 2 * 300 * 300 * 4 + 700, 4), "requested of the pool")
    check(held["reserved"] >= held["allocated"] >= held["requested"], f"the pool's figures: {held}")
    snapshot = pool.snapshot()
    eq(sum(s["total_size"] for s in snapshot), held["reserved"], "the snapshot's bytes")
    eq(sum(s["requested_size"] for s in snapshot), held["requested"], "the snapshot's requests")
    eq(sum(s["requested_size"] for s in torch.cuda.memory_snapshot()), requested(), "all of them")
    address = x.data_ptr()
    del x
    with torch.cuda.use_mem_pool(pool):
        again = bytes_on(5 * MiB)
    eq(again.data_ptr(), address, "what was freed in the pool serves the pool")
    del a, b, small, again
    drain()
    torch.cuda.empty_cache()
    eq(pool.cistern_stats()["reserved"], 0, "empty_cache gives back")
    del pool, snapshot
    drain()
    torch.cuda.empty_cache()
    eq(requested() - base, 3 * MiB + 5 * MiB + 3 * MiB, "what is still requested, outside")


@each
def upstream_outlives_handle(name):
    """The pool object is gone while tensors live in it; they die in another thread, inside of another pool."""
    pool = pool_of(name)
    with torch.cuda.use_mem_pool(pool):
        held = [full(4 * MiB, i) for i in range(6)]
        junk = bytes_on(100 * MiB)
    del junk, pool
    drain()
    torch.cuda.empty_cache()
    eq([int(t.sum()) for t in held], [i * 4 * MiB for i in range(6)], "contents")
    other = pool_of("device")

    def use():
        with torch.cuda.use_mem_pool(other):
            inside = full(4 * MiB, 99)
            held.clear()
            assert int(inside[-1]) == 99
    in_thread(use)
    del other
    drain()
    torch.cuda.empty_cache()
    eq((requested(), reserved()), (0, 0), "nothing stays")


@each
def upstream_reuses_in_order(name):
    """A block that another stream still reads is not overwritten, whatever stream is current when it is freed."""
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    pool = pool_of(name)
    for i in range(12):
        with torch.cuda.stream(one):
            with torch.cuda.use_mem_pool(pool):
                a = full(4 * MiB, i)
            sleep_gpu(0.004)
            out = a + 0
        with torch.cuda.stream(two):
            del a  # made on one, freed while two is current
            with torch.cuda.use_mem_pool(pool):
                b = full(4 * MiB, 255)
        torch.cuda.synchronize()
        check(bool((out == i).all()) and bool((b == 255).all()), f"round {i}: overwritten")
        del b, out
        with torch.cuda.stream(one):
            with torch.cuda.use_mem_pool(pool):
                c = full(4 * MiB, i)
        two.wait_stream(one)
        with torch.cuda.stream(two):
            sleep_gpu(0.004)
            out = c + 0
        c.record_stream(two)
        del c
        with torch.cuda.stream(one), torch.cuda.use_mem_pool(pool):
            d = full(4 * MiB, 255)
        torch.cuda.synchronize()
        check(bool((out == i).all()), f"round {i}: overwritten on a stream that was recorded")
        del d, out


@each
def upstream_uses_caches(name):
    """A pool out of memory gives back what it and others cache, and the others what the pool caches."""
    cap(6 * GiB)
    device = UPSTREAMS[name][1]
    pool = pool_of(name, **({} if device else {"limit": 6 * GiB}))
    t = bytes_on(4 * GiB)
    del t
    with torch.cuda.use_mem_pool(pool):
        t = bytes_on(2 * GiB)
        del t
        t = bytes_on(3 * GiB)
        usable(t)
        if device:
            with raises(torch.OutOfMemoryError):
                bytes_on(5 * GiB)
        del t
    u = bytes_on(5 * GiB)
    u[-1:].fill_(4)
    eq(int(u[-1]), 4, "what the pool caches is given up for others")
    return f"{stat('num_ooms')} failures that were wanted"


@each
def upstream_in_graph(name):
    """A graph captured into the pool: replayed with other contents, while others allocate."""
    pool = pool_of(name)
    x = torch.ones(MiB, device="cuda")
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, pool=pool.id):
        y = x * 2
        z = (y + 1).sum()
    check(within(pool, y), "its output lies in the pool")
    eq(is_of(name, y), True, "in memory of its kind")
    for i in range(8):
        junk = [full(4 * MiB, 99) for _ in range(4)]
        x.fill_(i)
        g.replay()
        eq(float(z), (i * 2 + 1.0) * MiB, f"replay {i}")
        check(all(bool((j == 99).all()) for j in junk), "eager tensors are intact")
        del junk
        torch.cuda.empty_cache()
    g.reset()
    del g, y, z, pool
    drain()
    torch.cuda.empty_cache()
    check(requested() - 4 * MiB < 1024, f"only the input is left, and the graph's random state: {requested()}")


# ---- scopes, threads, streams ----------------------------------------------------------------------------------------

@case(native=OURS, timeout=90)
def upstreams_nested():
    """Scopes inside of each other: each tensor in memory of the innermost."""
    p, q, r = pool_of("device"), pool_of("pinned"), pool_of("managed")
    with torch.cuda.use_mem_pool(p):
        a = full(3 * MiB, 1)
        with torch.cuda.use_mem_pool(q):
            b = full(3 * MiB, 2)
            with torch.cuda.use_mem_pool(r):
                c = full(3 * MiB, 3)
                with raises(ValueError):
                    with torch.cuda.use_mem_pool(p):
                        d = full(3 * MiB, 4)
                        raise ValueError
                e = full(3 * MiB, 5)
            f = full(3 * MiB, 6)
        g = full(3 * MiB, 7)
    h = full(3 * MiB, 8)
    eq([[within(pool, t) for t in (a, b, c, d, e, f, g, h)] for pool in (p, q, r)],
       [[True, False, False, True, False, False, True, False], [False, True, False, False, False, True, False, False],
        [False, False, True, False, True, False, False, False]], "which lies where")
    eq([is_of("pinned", t) for t in (b, f)] + [is_of("managed", t) for t in (c, e)], [True] * 4, "kinds")
    eq([int(t[-1]) for t in (a, b, c, d, e, f, g, h)], list(range(1, 9)), "contents")


@case(native=OURS, timeout=120)
def upstreams_in_threads():
    """Threads, each with pools of its own kind and a stream of its own, that free each other's tensors."""
    names, wrong, shelf, mutex = ["device", "virtual", "async", "pinned", "managed", "nccl"], [], [], threading.Lock()

    def work(i):
        try:
            pool, stream = pool_of(names[i]), torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for j in range(60):
                    with torch.cuda.use_mem_pool(pool):
                        t = full((j % 7 + 1) * 300_000, (i * 60 + j) % 251)
                    outside = full(200_000, 77)
                    stream.synchronize()
                    if not within(pool, t) or within(pool, outside) or int(t[-1]) != (i * 60 + j) % 251 or int(outside[0]) != 77:
                        wrong.append((names[i], j))
                    with mutex:
                        shelf.append(t)
                        if len(shelf) > 20:
                            shelf.pop(j % 20)
                    del t, outside
        except Exception as e:
            wrong.append((names[i], repr(e)))
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(names))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    eq(wrong, [], "what was in the wrong pool, or overwritten")
    shelf.clear()
    drain()
    torch.cuda.empty_cache()
    eq((requested(), reserved()), (0, 0), "nothing stays")


@case(native=OURS, timeout=90)
def upstream_autograd():
    """Backward inside and outside of the scope, whose thread is autograd's: gradients are right, and nothing stays."""
    import contextlib

    def train(scope, backward_inside):
        torch.manual_seed(3)
        m = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)).cuda()
        opt, losses = torch.optim.SGD(m.parameters(), lr=0.1), []
        for i in range(10):
            with scope():
                loss = m(torch.full((64, 256), 0.01 * i, device="cuda")).square().mean()
                if backward_inside:
                    loss.backward()
            if not backward_inside:
                loss.backward()
            opt.step()
            opt.zero_grad(set_to_none=True)
            losses.append(float(loss.detach()))
        return losses
    plain = train(contextlib.nullcontext, True)
    for name in ("device", "managed", "pinned", "nccl"):
        pool = pool_of(name)
        for inside in (True, False):
            pooled = train(lambda: torch.cuda.use_mem_pool(pool), inside)
            check(max(abs(a - b) for a, b in zip(plain, pooled)) < 1e-6, f"{name}: losses {pooled} instead of {plain}")
        del pool
        drain()
    eq(sum(s["requested_size"] for s in torch.cuda.memory_snapshot()), requested(), "snapshot and statistics agree")


# ---- the program's own functions -------------------------------------------------------------------------------------

@case(native="pool_custom_allocator is its counterpart", timeout=90)
def external_library():
    """C functions of a shared library, as CUDAPluggableAllocator takes them: each segment goes home, once."""
    import cistern.torch
    p = probe()
    pools = [pool_of(cistern.torch.External.library(p.path, f"probe_custom_alloc_{i}", f"probe_custom_free_{i}")) for i in (0, 1)]
    with torch.cuda.use_mem_pool(pools[0]):
        x, small = full(5 * MiB, 1), bytes_on(100)
        with torch.cuda.use_mem_pool(pools[1]):
            y = full(50 * MiB, 2)
    z = full(5 * MiB, 3)
    eq([p.probe_custom_owns(0, t.data_ptr()) for t in (x, small, y, z)], [1, 1, 0, 0], "the first's")
    eq([p.probe_custom_owns(1, t.data_ptr()) for t in (x, small, y, z)], [0, 0, 1, 0], "the second's")
    eq([int(t.sum()) for t in (x, y, z)], [5 * MiB, 100 * MiB, 15 * MiB], "contents")
    held = [x, y, small]
    del x, y, small

    def drop():
        with torch.cuda.use_mem_pool(pools[1]):
            held.clear()
    in_thread(drop)
    pools.clear()
    drain()
    torch.cuda.empty_cache()
    for which in (0, 1):
        allocs, frees, wrong, live = (p.probe_custom(which, i) for i in range(4))
        check(allocs > 0, "it was asked")
        eq((frees, wrong, live), (allocs, 0, 0), f"library {which}: all given back, to the right one, in one piece")


@case(native=OURS, timeout=90)
def external_python():
    """Functions written in Python, behind ctypes, called from threads that hold the interpreter's lock and that do not."""
    import gc
    import weakref

    import cistern.torch
    from cistern._pools import ALLOC, FREE
    torch.cuda.init()
    torch.cuda.synchronize()
    cuda, out = common.cuda_driver(), {}

    class Owner:
        pass

    @ALLOC
    def alloc(ctx, size, device, stream):
        p = ctypes.c_uint64()
        if size > GiB or cuda.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(size)) != 0:
            return None
        out[p.value] = size
        return p.value

    @FREE
    def free(ctx, ptr, size, device, stream):
        assert out.pop(ptr) == size
        assert cuda.cuMemFree_v2(ctypes.c_uint64(ptr)) == 0
    owner = Owner()
    gone = weakref.ref(owner)
    pool = pool_of(cistern.torch.External(alloc, free, keep=owner))
    del owner
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            bytes_on(MiB)
    other = threading.Thread(target=busy)
    other.start()
    try:
        torch.cuda.memory._record_memory_history()
        for i in range(40):
            with torch.cuda.use_mem_pool(pool):
                t = full(3 * MiB, i)
            eq(int(t[-1]), i, "contents")
            check(any(p <= t.data_ptr() < p + n for p, n in out.items()), "in memory of its own")
            with torch.cuda.use_mem_pool(pool), raises(torch.OutOfMemoryError):
                bytes_on(2 * GiB)
            del t
            torch.cuda.empty_cache()
        torch.cuda.memory._record_memory_history(enabled=None)
    finally:
        stop.set()
        other.join()
    with torch.cuda.use_mem_pool(pool):
        t = full(3 * MiB, 5)
    del pool
    gc.collect()
    check(gone() is not None, "kept while a tensor lives")
    del t
    drain()
    torch.cuda.empty_cache()
    eq(out, {}, "all given back")
    check(gone() is None, "and then released")


# ---- coming and going -------------------------------------------------------------------------------------------------

def warm(names):
    """What the device keeps of a first use: the code of the kernels (90 MiB on an H200), and what the driver has for each upstream."""
    for name in names:
        pool = pool_of(name)
        with torch.cuda.use_mem_pool(pool):
            eq(int(full(MiB, 1)[-1]), 1, "usable")
        del pool
    drain()
    torch.cuda.empty_cache()


@case(native=OURS, alone=True)
def host_pools_take_no_device_memory():
    warm(("pinned", "host_numa"))
    for name in ("pinned", "host_numa"):
        pool = pool_of(name)
        free, _ = torch.cuda.mem_get_info()
        with torch.cuda.use_mem_pool(pool):
            t = full(GiB, 1)
        now, _ = torch.cuda.mem_get_info()
        check(free - now < 64 * MiB, f"{name}: a GiB took {free - now} bytes of the device")
        check(reserved() >= GiB, "it is counted as reserved all the same")
        del t, pool
        drain()
        torch.cuda.empty_cache()


@case(native=OURS, alone=True)
def upstream_gives_back_to_device():
    """What a pool cached is the device's again after empty_cache, inside of its scope and after it."""
    warm(("device", "virtual", "async", "nccl"))
    for name in ("device", "virtual", "async", "nccl"):
        pool = pool_of(name)
        free, _ = torch.cuda.mem_get_info()
        with torch.cuda.use_mem_pool(pool):
            t = full(2 * GiB, 1)
            del t
            torch.cuda.empty_cache()
            now, _ = torch.cuda.mem_get_info()
            check(free - now < 64 * MiB, f"{name}: {free - now} bytes of the device are missing inside of the scope")
        del pool
        drain()


@case(native=OURS, timeout=90)
def upstreams_come_and_go():
    """Hundreds of pools: nothing of them stays, in Python or in the process."""
    import gc

    from cistern import _pools
    torch.cuda.init()
    bytes_on(1)
    for i in range(200):
        pool = pool_of(("device", "virtual", "pinned", "async")[i % 4], on_oom=lambda missing: False)
        with torch.cuda.use_mem_pool(pool):
            t = full(2 * MiB, i % 251)
        del pool
        eq(int(t[-1]), i % 251, "contents")
        del t
    gc.collect()
    drain()
    torch.cuda.empty_cache()
    eq((reserved(), len(_pools._kept)), (0, 0), "nothing stays")


@case(native=OURS, timeout=90, guard=None)
def upstream_program_ends():
    """A program that ends with tensors in pools of every kind, and functions of its own under some, ends quietly."""
    done = script("import torch, cistern.torch, threading\n"
                  "torch.cuda.init()\n" + GUARD +
                  "from cistern._pools import ALLOC, FREE\n"
                  "import ctypes\n"
                  "cuda = ctypes.CDLL('libcuda.so.1')\n"
                  "@ALLOC\n"
                  "def alloc(ctx, size, device, stream):\n"
                  "    p = ctypes.c_uint64()\n"
                  "    return p.value if cuda.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(size)) == 0 else None\n"
                  "@FREE\n"
                  "def free(ctx, ptr, size, device, stream):\n"
                  "    cuda.cuMemFree_v2(ctypes.c_uint64(ptr))\n"
                  "held = []\n"
                  f"for u in {list(UPSTREAMS)!r} + [cistern.torch.External(alloc, free)]:\n"
                  "    pool = cistern.torch.MemPool(upstream=u, on_oom=lambda missing: False)\n"
                  "    with torch.cuda.use_mem_pool(pool):\n"
                  "        held.append((pool, torch.ones(1 << 20, device='cuda')))\n"
                  "print(sum(float(t.sum()) for _, t in held))\n", timeout=80)
    eq(done.rc, 0, done.why())
    eq(float(done.out.split()[-1]), (len(UPSTREAMS) + 1) * float(MiB), "the program's own work")
    eq([line for line in done.err.splitlines() if line.strip()], [], "what it says at its end")


@case(native=OURS, timeout=90, guard=None)
def upstream_daemon_ends():
    """A daemon thread is in a function of the program's own when the interpreter ends: it stays there, and the program ends as
    it would without."""
    for where in ("alloc", "ask"):
        done = script("import sys, threading, time\nimport torch, cistern.torch\n"
                      "torch.cuda.init()\n" + GUARD +
                      "from cistern._pools import ALLOC, FREE\n"
                      "inside = threading.Event()\n"
                      "def wait():\n"
                      "    inside.set()\n"
                      "    while True:\n"
                      "        time.sleep(0.001)\n"
                      "@ALLOC\n"
                      "def alloc(ctx, size, device, stream):\n"
                      "    wait()\n"
                      "@FREE\n"
                      "def free(ctx, ptr, size, device, stream):\n"
                      "    pass\n"
                      + ("pool = cistern.torch.MemPool(upstream=cistern.torch.External(alloc, free))\n" if where == "alloc" else
                         "pool = cistern.torch.MemPool(limit=64 << 20, on_oom=lambda missing: wait())\n") +
                      "def work():\n"
                      "    with torch.cuda.use_mem_pool(pool):\n"
                      "        torch.empty(100 << 20, dtype=torch.uint8, device='cuda')\n"
                      "threading.Thread(target=work, daemon=True).start()\n"
                      "inside.wait()\n"
                      "print(int(torch.ones(1000, device='cuda').sum()))\n", timeout=80)
        eq(done.rc, 0, f"{where}: {done.why()}")
        eq(done.out.split()[-1:], ["1000"], f"{where}: the program's own work")
        eq([line for line in done.err.splitlines() if line.strip()], [], f"{where}: what it says at its end")


@plain()
def plain_refuses_upstreams():
    """Without the adapter such pools are refused with the reason."""
    import cistern
    eq(int(torch.ones(3, device="cuda").sum()), 3, "PyTorch works")
    with raises(cistern.CisternError, "adapter"):
        pool_of("nccl")
