"""cistern.torch.MemPool: limits of pools, what they do when out of memory, stacks of adaptors, words that are refused, and
their statistics."""
import os
import tempfile
import threading

from .base import GUARD, GiB, MiB, bytes_on, cap, case, check, eq, fewer, raises, requested, reserved, round512, script, drain, stat, torch
from .upstreams import OURS, full, is_of, pool_of


# ---- limits, and what happens beyond ---------------------------------------------------------------------------------

@case(native=OURS)
def pool_limit():
    for name in (None, "device", "pinned"):
        pool = pool_of(name, limit="1GiB")
        with torch.cuda.use_mem_pool(pool):
            t = full(600 * MiB, 5)
            with raises(torch.OutOfMemoryError, "Tried to allocate"):
                bytes_on(600 * MiB)
            del t
            u = full(900 * MiB, 6)
        outside = bytes_on(2 * GiB)
        eq(int(u[-1]), 6, "what it caches is given up for a larger one")
        held = pool.cistern_stats()
        eq(held["limit"], GiB, "the limit")
        check(held["peak_reserved"] <= GiB, f"never beyond: {held}")
        del u, outside, pool
        drain()
        torch.cuda.empty_cache()


@case(native=OURS)
def pool_spills():
    """Beyond its limit, or when the device is full, the pool goes on with another upstream."""
    pool = pool_of("nccl", limit="256MiB", on_oom="pinned")
    with torch.cuda.use_mem_pool(pool):
        held = [full(100 * MiB, i) for i in range(5)]
    kinds = [is_of("pinned", t) for t in held]
    eq(kinds[:2], [False, False], "within the limit it is memory of NCCL's")
    check(all(kinds[3:]), f"beyond it is host memory: {kinds}")
    eq([int(t.sum()) for t in held], [i * 100 * MiB for i in range(5)], "contents")
    check(pool.cistern_stats()["spilled"] >= 200 * MiB, f"counted: {pool.cistern_stats()}")
    held.clear()
    del pool
    drain()
    torch.cuda.empty_cache()
    eq(reserved(), 0, "nothing stays")
    cap(1 * GiB)
    pool = pool_of(on_oom="host_numa")
    with torch.cuda.use_mem_pool(pool):
        a, b = full(700 * MiB, 1), full(700 * MiB, 2)
    eq((int(a[-1]), int(b[-1])), (1, 2), "a full device")
    with raises(torch.OutOfMemoryError):
        bytes_on(900 * MiB)
    return "beyond a limit, and of a full device"


def asked(history):
    cap(1 * GiB)
    keep, calls, threads = [], [], set()

    def on_oom(missing):
        calls.append(missing)
        threads.add(threading.get_ident())
        bytes_on(MiB)  # which is given no memory of the pool
        if not keep:
            return False
        keep.clear()
        return True
    pool = pool_of("device", on_oom=on_oom)
    stop = threading.Event()

    def busy():  # allocates and frees, which wants the interpreter's lock and the allocator's
        while not stop.is_set():
            t = bytes_on(MiB)
            del t
    other = threading.Thread(target=busy)
    other.start()
    if history:
        torch.cuda.memory._record_memory_history()
    try:
        for i in range(max(3, fewer(10))):
            keep.append(full(500 * MiB, 9))
            with torch.cuda.use_mem_pool(pool):
                t = full(600 * MiB, i)
                eq(int(t[-1]), i, "memory that the function gave back")
                with raises(torch.OutOfMemoryError):
                    bytes_on(900 * MiB)
            check(not keep and calls[-1] > 0, "it was asked for so many bytes")
            del t
        before = len(calls)
        with raises(torch.OutOfMemoryError):
            bytes_on(2 * GiB)
        eq(len(calls), before, "outside of the pool it is not asked")
        eq(threads, {threading.get_ident()}, "in the thread of the request")
    finally:
        stop.set()
        other.join()
        if history:
            torch.cuda.memory._record_memory_history(enabled=None)
    return f"asked {len(calls)} times"


@case(native=OURS, timeout=90)
def pool_asks():
    return asked(False)


@case(native=OURS, timeout=90)
def pool_asks_with_history():
    """As above while history is on, whose lock is held over every call."""
    return asked(True)


@case(native=OURS, guard=None)
def pool_asks_badly():
    """A function that fails counts as no help and is reported once; one that lies does not hang."""
    done = script("import torch, cistern.torch\n"
                  "torch.cuda.init()\n" + GUARD +
                  "def fails(missing):\n    raise RuntimeError('my own mistake')\n"
                  "for on_oom in (fails, lambda missing: True):\n"
                  "    pool = cistern.torch.MemPool(limit='64MiB', on_oom=on_oom)\n"
                  "    for _ in range(3):\n"
                  "        with torch.cuda.use_mem_pool(pool):\n"
                  "            try:\n"
                  "                torch.empty(100 << 20, dtype=torch.uint8, device='cuda')\n"
                  "                print('made')\n"
                  "            except torch.OutOfMemoryError:\n"
                  "                print('refused')\n", timeout=50)
    eq(done.rc, 0, done.why())
    eq(done.out.split(), ["refused"] * 6, "what became of the requests")
    eq(done.err.count("RuntimeError: my own mistake"), 1, "how often it was said")


@case(native=OURS)
def pool_bad_words():
    import cistern.torch
    for words, part in (("moon", "moon"), ("device:speed=9", "speed"), ("limiting:bytes=much|device", "much"), ("limiting:bytes=1GiB", ""),
                        ("host_numa:node=99", "99"), ("nccl:library=/no/such.so", "/no/such.so")):
        with raises(cistern.CisternError, part) as box:
            pool_of(words)
        check("\n" not in str(box[0]), f"one line: {box[0]}")
    with raises(ValueError, "moon"):
        pool_of(on_oom="moon")
    with raises(ValueError):
        pool_of(limit="2 apples")
    with raises(ValueError):
        pool_of("nccl", memory="ipc_legacy")
    pool = pool_of("device", use_on_oom=True, no_split=True)
    with torch.cuda.use_mem_pool(pool):
        held = [bytes_on(n) for n in (300, 3 * MiB, 3 * MiB)]
    eq(len(pool.snapshot()), len(held), "torch.cuda.MemPool's own arguments count too")


# ---- stacks ----------------------------------------------------------------------------------------------------------

@case(native=OURS)
def pool_stacks():
    """Adaptors over upstreams: a log of what was asked for, a limit, alignment, options of an asynchronous pool."""
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "pool.csv")
        pool = pool_of(f"logging:file={log}|limiting:bytes=1GiB|device")
        with torch.cuda.use_mem_pool(pool):
            t = full(100 * MiB, 1)
            with raises(torch.OutOfMemoryError):
                bytes_on(2 * GiB)
        del t, pool
        drain()
        torch.cuda.empty_cache()
        with open(log) as f:
            lines = f.read().split("\n")
        check(lines[0].startswith("Thread,Time,Action,Pointer,Size,Stream"), f"the head of the log: {lines[0]!r}")
        check(any(",allocate," in x for x in lines) and any(",free," in x for x in lines), f"the log: {lines[:4]}")
    for words in ("async:threshold=unlimited", "async:threshold=1GiB,initial=256MiB,handles=posix", "managed:prefetch=true", "prefetch|managed",
                  "alignment:bytes=64KiB|device", "statistics|tracking|nccl"):
        pool = pool_of(words)
        with torch.cuda.use_mem_pool(pool):
            t = full(30 * MiB, 3)
        eq(int(t.sum()), 90 * MiB, words)
        del t, pool
    drain()
    torch.cuda.empty_cache()
    eq(reserved(), 0, "nothing stays")


# ---- statistics ------------------------------------------------------------------------------------------------------

@case(native=OURS)
def pool_statistics():
    """One table: pools by their upstream, PyTorch by its name, to the byte."""
    import cistern
    import cistern.torch
    torch.cuda.init()
    zero = pool_of("pinned")
    eq(zero.cistern_stats()["reserved"], 0, "of a pool that is not used yet")
    before = requested()
    x = torch.randn(100, device="cuda")
    eq(requested() - before, 400, "100 float32")
    pool = pool_of("device", limit="3GiB")
    with torch.cuda.use_mem_pool(pool):
        y = bytes_on(3 * MiB)
        z = bytes_on(1000)
    eq((pool.cistern_stats()["requested"], pool.cistern_stats()["blocks"]), (3 * MiB + 1000, 2), "of the pool")
    eq(pool.cistern_stats(), cistern.torch.pool_stats(pool), "both ways of asking")
    eq(pool.cistern_stats(), cistern.torch.pool_stats(pool.id, "cuda:0"), "by number")
    eq(pool.cistern_stats()["allocated"], 3 * MiB + round512(1000), "rounded")
    device = cistern.stats()["devices"][0]
    libraries = {e["library"]: e for e in device["libraries"]}
    eq((libraries["torch"]["requested"], libraries["torch"]["blocks"]), (requested(), stat("allocation.all.current")), "PyTorch's share")
    mine = [p for p in device["pools"] if tuple(p["pool"]) == tuple(pool.id)]
    eq(len(mine), 1, "the pool is listed")
    check(mine[0]["upstream"].startswith("device") and mine[0]["limit"] == 3 * GiB, f"as {mine[0]}")
    del x, y, z
    drain()
    eq(pool.cistern_stats()["requested"], 0, "and then nothing")
