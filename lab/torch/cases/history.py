"""_record_memory_history: stacks, levels, the ring, what is skipped, annotations and metadata; trackers and observers."""
import ctypes

from .base import (ALLOC, FREE_COMPLETED, FREE_REQUESTED, MiB, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, bytes_on,
                   cap, case, check, drain, eq, fewer, fine, probe, torch, under_cistern)


def record(*args, **kw):
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(*args, **kw)


def trace():
    return torch.cuda.memory._snapshot()["device_traces"][0]


def of(size, action=None):
    return [e for e in trace() if e.get("size") == size and (action is None or e["action"] == action)]


def names(frames):
    return [f["name"] for f in frames]


def allocate_here(n):
    return bytes_on(n)


@case()
def history_events():
    record(max_entries=10_000)
    t = bytes_on(5 * MiB)
    address = t.data_ptr()
    del t
    events = [(e["action"], e["addr"]) for e in trace() if e.get("size") == 5 * MiB and not e["action"].startswith("segment")]
    eq(events, [("alloc", address), ("free_requested", address), ("free_completed", address)], "events of one tensor")
    kinds = {e["action"] for e in trace()}
    check(kinds & {"segment_alloc", "segment_map"}, "driver memory is in the history")
    e = of(5 * MiB, "alloc")[0]
    for key in ("stream", "time_us", "frames", "size", "addr", "action"):
        check(key in e, f"an event has {key}")
    import time
    check(abs(e["time_us"] / 1e6 - time.time()) < 600, "time is microseconds since 1970")
    times = [e["time_us"] for e in trace()]
    eq(times, sorted(times), "events are in order of time")
    torch.cuda.empty_cache()
    check({e["action"] for e in trace()} & {"segment_free", "segment_unmap"}, "memory given back is in the history")


@case()
def history_python_stacks():
    record(stacks="python")
    t = allocate_here(3 * MiB)
    frames = of(3 * MiB, "alloc")[0]["frames"]
    check("allocate_here" in names(frames), f"this function is among the frames: {names(frames)[:8]}")
    f = next(f for f in frames if f["name"] == "allocate_here")
    check(f["filename"].endswith("history.py") and f["line"] > 0, "with file and line")
    check(names(frames).index("allocate_here") < names(frames).index("history_python_stacks"), "innermost first")
    blocks = [b for s in torch.cuda.memory._snapshot()["segments"] for b in s["blocks"] if b["address"] == t.data_ptr()]
    check("allocate_here" in names(blocks[0]["frames"]), "the block has them too")


@case(timeout=150)
def history_cpp_stacks():
    record(stacks="all")
    t = allocate_here(3 * MiB)
    frames = of(3 * MiB, "alloc")[0]["frames"]
    check("allocate_here" in names(frames), "Python frames")
    check(any("::" in n for n in names(frames)), f"C++ frames: {names(frames)[:6]}")
    del t


@case()
def history_context_levels():
    for level, block, alloc, free in ((None, False, False, False), ("state", True, False, False),
                                      ("alloc", True, True, True), ("all", True, True, True)):  # the frees of "alloc" have the block's
        record(None)
        record(context=level, stacks="python", clear_history=True)
        t = allocate_here(3 * MiB)
        gone = allocate_here(4 * MiB)
        del gone
        s = torch.cuda.memory._snapshot()
        blocks = [b for x in s["segments"] for b in x["blocks"] if b["address"] == t.data_ptr()]
        eq(bool(blocks[0].get("frames")), block, f"context={level}: frames of a block")
        eq(bool(of(3 * MiB, "alloc")[0].get("frames")), alloc, f"context={level}: frames of an alloc")
        eq(bool(of(4 * MiB, "free_requested")[0].get("frames")), free, f"context={level}: frames of a free")
        del t


@case()
def history_state_only():
    record("state", stacks="python")
    t = allocate_here(3 * MiB)
    check(len(trace()) <= 1, f"enabled='state' keeps no history, got {len(trace())} events")
    blocks = [b for s in torch.cuda.memory._snapshot()["segments"] for b in s["blocks"] if b["address"] == t.data_ptr()]
    check("allocate_here" in names(blocks[0]["frames"]), "but the stack of what is held")


@case()
def history_max_entries():
    record(max_entries=50, context=None)
    for i in range(200):
        t = bytes_on((i + 1) * 512)
        del t
    events = trace()
    check(len(events) <= 51, f"at most max_entries events: {len(events)}")
    sizes = [e["size"] for e in events if e["action"] == "alloc"]
    check(sizes and max(sizes) == 200 * 512, "the last ones are kept")
    check(min(sizes) > 100 * 512, "and the first ones forgotten")
    eq(sizes, sorted(sizes), "in order although the ring wrapped")


@case()
def history_off_and_clear():
    record()
    t = bytes_on(3 * MiB)
    record(None)
    u = bytes_on(4 * MiB)
    eq(of(4 * MiB), [], "nothing is recorded once it is off")
    record(clear_history=True)
    eq(of(3 * MiB, "alloc"), [], "clear_history forgets")
    v = bytes_on(5 * MiB)
    eq(len(of(5 * MiB, "alloc")), 1, "and records on")
    del t, u, v


@case()
def history_skip_actions():
    record(skip_actions=["free_requested", "segment_alloc", "segment_map"])
    t = bytes_on(3 * MiB)
    del t
    eq(sorted({e["action"] for e in trace()} & {"free_requested", "segment_alloc", "segment_map"}), [], "skipped actions")
    eq(len(of(3 * MiB, "alloc")), 1, "others are kept")
    eq(len(of(3 * MiB, "free_completed")), 1, "others are kept")


@case()
def history_user_metadata():
    record()
    m = torch.cuda.memory
    m._set_memory_metadata("phase one")
    eq(m._get_memory_metadata(), "phase one", "read back")
    a = bytes_on(3 * MiB)
    m._set_memory_metadata("")
    b = bytes_on(4 * MiB)
    eq(of(3 * MiB, "alloc")[0].get("user_metadata"), "phase one", "on the event")
    check(not of(4 * MiB, "alloc")[0].get("user_metadata"), "and off again")
    del a, b


@case()
def history_annotations():
    record(global_record_annotations=True)
    with torch.profiler.record_function("my region"):
        t = bytes_on(3 * MiB)
    found = [a for a in torch.cuda.memory._snapshot()["external_annotations"] if "my region" in str(a)]
    check(len(found) >= 2, f"start and end of the region are annotated: {found}")
    record(None)
    del t


@case()
def history_compile_context():
    record()
    fine(probe().probe_compile_context(b"Torch-Compiled Region: 3/1"))
    t = bytes_on(3 * MiB)
    fine(probe().probe_compile_context(None))
    u = bytes_on(4 * MiB)
    eq(of(3 * MiB, "alloc")[0].get("compile_context"), "Torch-Compiled Region: 3/1", "on the event")
    check(of(4 * MiB, "alloc")[0].get("compile_context") != "Torch-Compiled Region: 3/1", "and off again")
    del t, u


@case(timeout=120)
def history_compiled_region():
    record(compile_context=True)
    @torch.compile(backend="eager")
    def f(x):
        return x + 1
    f(torch.ones(3 * MiB, dtype=torch.uint8, device="cuda"))
    f(torch.ones(3 * MiB, dtype=torch.uint8, device="cuda"))
    found = {e.get("compile_context") for e in of(3 * MiB, "alloc")}
    check(len(found) > 1, f"what a compiled region allocates says so: {found}")


@case()
def history_oom_event():
    record(max_entries=1000)
    cap(512 * MiB)
    try:
        bytes_on(900 * MiB)
    except torch.OutOfMemoryError:
        pass
    events = [e for e in trace() if e["action"] == "oom"]
    eq(len(events), 1, "one oom event")
    eq(events[0]["size"], 900 * MiB, "its size")
    check(events[0]["device_free"] > 0, "device_free")


@case()
def history_pool_ids():
    record()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        t = bytes_on(3 * MiB)
    segments = [s for s in torch.cuda.memory._snapshot()["segments"] if tuple(s["segment_pool_id"]) == tuple(pool.id)]
    check(any(b["address"] == t.data_ptr() for s in segments for b in s["blocks"]), "the block is in a segment of the pool")
    eq(tuple(of(3 * MiB, "alloc")[0].get("pool_id", pool.id)), tuple(pool.id), "pool of the event")


@case(timeout=90)
def history_many_events():
    record(max_entries=100_000, context=None)
    import threading
    def work():
        for i in range(20_000):
            bytes_on(512 + (i % 7) * 512)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    events = trace()
    check(99_000 <= len(events) <= 100_001, f"the ring is full: {len(events)}")
    times = [e["time_us"] for e in events]
    check(sum(b < a - 1000 for a, b in zip(times, times[1:])) == 0, "in order of time")


@case(native="it holds its lock over such callbacks, and deadlocks", timeout=90)
def history_callback_frees():
    """A free-memory callback frees, which wants a stack and so the interpreter's lock, that other threads hold while they free."""
    import threading
    torch.cuda.init()
    p = probe()
    cap(2048 * MiB)
    record(max_entries=10_000, context="all", stacks="python")
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            bytes_on(MiB)
    others = [threading.Thread(target=busy) for _ in range(2)]
    for t in others:
        t.start()
    try:
        for _ in range(100):
            fine(p.probe_hold(1500 * MiB))
            bytes_on(1200 * MiB)
    finally:
        stop.set()
        for t in others:
            t.join()
    check(p.probe_callback_runs() >= 100, "the callback gave memory back")
    mine = [e for e in trace() if e.get("size") == 1200 * MiB and e["action"] == "alloc"]
    check(mine and all("history_callback_frees" in names(e["frames"]) for e in mine), "each request has its own stack")


# ---- trackers and observers -----------------------------------------------------------------------------------------

@case()
def tracker_events():
    torch.cuda.init()
    p = probe()
    fine(p.probe_track())
    a = [bytes_on(3 * MiB) for _ in range(10)]
    eq(p.probe_tracked(ALLOC), 10, "allocations are announced")
    eq(p.probe_tracked_bytes(ALLOC), 30 * MiB, "with their bytes")
    check(p.probe_tracked(SEGMENT_ALLOC) + p.probe_tracked(SEGMENT_MAP) > 0, "driver memory is announced")
    for t in a:
        check(p.probe_known(t.data_ptr(), t.numel()), "a tensor lies in what was announced")
    a.clear()
    del t
    eq(p.probe_tracked(FREE_REQUESTED), 10, "frees are announced")
    eq(p.probe_tracked(FREE_COMPLETED), 10, "completed frees are announced")
    torch.cuda.empty_cache()
    check(p.probe_tracked(SEGMENT_FREE) + p.probe_tracked(SEGMENT_UNMAP) > 0, "what is given back is announced")
    eq(p.probe_unannounced(), 0, "nothing is unmapped that was not announced")
    eq(p.probe_known(0, 1), 0, "the test's own bookkeeping")


@case()
def tracker_keeps_pools():
    """What trackers know of a live pool stays when the cache is emptied, which one rank may do alone; the pool's end gives it back."""
    torch.cuda.init()
    p = probe()
    fine(p.probe_track())
    pool = torch.cuda.MemPool()
    def held():
        return sum(s["total_size"] for s in pool.snapshot())
    with torch.cuda.use_mem_pool(pool):
        t = bytes_on(30 * MiB)
    address = t.data_ptr()
    del t
    before = held()
    check(before >= 30 * MiB, "the pool caches")
    outside = bytes_on(50 * MiB)
    del outside
    drain()
    torch.cuda.empty_cache()
    eq(held(), before, "the pool's memory")
    check(p.probe_known(address, 30 * MiB), "trackers know it as before")
    eq(torch.cuda.memory_reserved(), before, "what no pool has went back")
    with torch.cuda.use_mem_pool(pool):
        t = bytes_on(30 * MiB)
    eq(t.data_ptr(), address, "and is used again")
    del t, pool
    drain()
    torch.cuda.empty_cache()
    eq(torch.cuda.memory_reserved(), 0, "the pool's end gives it back")
    eq(p.probe_unannounced(), 0, "nothing is unmapped that was not announced")


@case(timeout=90)
def tracker_pins():
    """What a tracker was notified of stays where it is, under pressure too, until the next notification."""
    import random
    torch.cuda.init()
    p = probe()
    fine(p.probe_track())
    cap(2048 * MiB)
    r, held = random.Random(3), []
    for i in range(3000):
        n = r.randrange(1, 400) * MiB
        while held and sum(t.numel() for t in held) + n > 1500 * MiB:
            held.pop(r.randrange(len(held)))
        try:
            held.append(bytes_on(n))
        except torch.OutOfMemoryError:
            held.clear()
            continue
        t = held[-1]
        check(p.probe_known(t.data_ptr(), t.numel()), f"step {i}: memory was handed out that no tracker knows")
    eq(p.probe_unannounced(), 0, "unmaps of what was not announced")
    return f"{p.probe_tracked(SEGMENT_MAP) + p.probe_tracked(SEGMENT_ALLOC)} mappings, {p.probe_tracked(SEGMENT_UNMAP) + p.probe_tracked(SEGMENT_FREE)} undone"


@case(native="a word of Cistern's", timeout=120, chunks="memory of the functions cannot be paused")
def tracker_pause_outside():
    """A thread pauses and resumes a pool, of which trackers hear, while others allocate near the limit: no thread waits for another
    in vain, no request fails, and after each resume trackers know what is there."""
    import cistern
    import threading
    import time
    torch.cuda.init()
    p = probe()
    fine(p.probe_track())
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        held = torch.full((600 * MiB,), 7, dtype=torch.uint8, device="cuda")
    cap(2048 * MiB)
    stop, slowest, failed = threading.Event(), [0.0], []

    def busy():
        while not stop.is_set():
            begin = time.monotonic()
            try:
                bytes_on(500 * MiB)
            except torch.OutOfMemoryError as e:
                failed.append(str(e))
            slowest[0] = max(slowest[0], time.monotonic() - begin)
            torch.cuda.empty_cache()
    others = [threading.Thread(target=busy) for _ in range(2)]
    for t in others:
        t.start()
    try:
        for i in range(fewer(50)):
            cistern.pause(pool=pool.id)
            cistern.resume(pool=pool.id)
            check(p.probe_known(held.data_ptr(), held.numel()), f"round {i}: memory is back of which no tracker knows")
    finally:
        stop.set()
        for t in others:
            t.join()
    eq(failed[:1], [], f"{len(failed)} requests failed")
    eq(p.probe_unannounced(), 0, "unmaps of what was not announced")
    eq(int(held[-1]), 7, "contents")
    return f"the slowest request took {slowest[0] * 1000:.0f} ms"


@case()
def oom_observer_cpp():
    torch.cuda.init()
    p = probe()
    fine(p.probe_observe_oom())
    cap(512 * MiB)
    t = bytes_on(100 * MiB)
    try:
        bytes_on(900 * MiB)
    except torch.OutOfMemoryError:
        pass
    eq(p.probe_ooms(), 1, "the observer was called once")
    eq(p.probe_oom_allocated(), 900 * MiB, "with the size asked for")
    # What may be used in all is the limit where there is one; what the device has free knows of none.
    check(abs(p.probe_oom_total() - 512 * MiB) < 8 * MiB, f"with the limit: {p.probe_oom_total()}")
    check(0 < p.probe_oom_free() <= torch.cuda.get_device_properties(0).total_memory, f"and the device's free memory: {p.probe_oom_free()}")
    del t


@case()
def oom_observer_python():
    torch.cuda.init()
    seen = []
    torch._C._cuda_attach_out_of_memory_observer(lambda device, size, total, free: seen.append((device, size, total, free)))
    cap(512 * MiB)
    try:
        bytes_on(900 * MiB)
    except torch.OutOfMemoryError:
        pass
    eq(len(seen), 1, "called once")
    eq(seen[0][:2], (0, 900 * MiB), "device and size")
    # An observer that takes a snapshot, which is what people do in one, must not deadlock.
    torch._C._cuda_attach_out_of_memory_observer(lambda *a: seen.append(len(torch.cuda.memory._snapshot()["segments"])))
    try:
        bytes_on(900 * MiB)
    except torch.OutOfMemoryError:
        pass
    eq(len(seen), 3, "both observers were called")


@case()
def base_and_cache_info():
    torch.cuda.init()
    p = probe()
    t = bytes_on(3 * MiB)
    base, n = ctypes.c_void_p(), ctypes.c_size_t()
    words = p.probe_base(t.data_ptr(), ctypes.byref(base), ctypes.byref(n))
    if under_cistern():  # as natively with expandable segments: mapped memory has no base; base_is_the_drivers has one
        check(words is not None and b"mapped chunks" in words, f"no base for mapped chunks: {words}")
    else:
        fine(words)
        check(base.value <= t.data_ptr() < base.value + n.value, "the base allocation holds the tensor")
        check(base.value + n.value >= t.data_ptr() + 3 * MiB, "all of it")
    largest = ctypes.c_size_t()
    fine(p.probe_cache_info(0, ctypes.byref(largest)))
    big = bytes_on(256 * MiB)
    del big
    fine(p.probe_cache_info(0, ctypes.byref(largest)))
    check(largest.value >= 256 * MiB, f"the largest block counts what is cached: {largest.value}")
    name = p.probe_name().decode()
    check(name, "the allocator has a name")
    count = ctypes.c_int64()
    fine(p.probe_expandable_sizes(0, ctypes.byref(count)))
    drain()
    if under_cistern():
        return f"allocator {name}, backend {torch.cuda.memory.get_allocator_backend()}"
    return name
