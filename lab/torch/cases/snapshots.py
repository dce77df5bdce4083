"""Snapshots: sums, one pool, PyTorch's own viewer, Cistern's readers."""
import os
import pickle
import tempfile

import common
from .base import MiB, bytes_on, case, check, eq, raises, reserved, requested, stat, torch


def some_work():
    keep = [bytes_on(n) for n in (700, 3 * MiB, 40 * MiB, 100_000)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        keep.append(bytes_on(6 * MiB))
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        keep.append(bytes_on(9 * MiB))
    gone = [bytes_on(n) for n in (MiB, 50 * MiB)]
    del gone
    return keep, pool


@case()
def snapshot_sums():
    keep, pool = some_work()
    s = torch.cuda.memory._snapshot()
    for key in ("segments", "device_traces", "allocator_settings", "external_annotations"):
        check(key in s, f"the snapshot has {key}")
    segments = s["segments"]
    blocks = [b for x in segments for b in x["blocks"]]
    eq(sum(x["total_size"] for x in segments), reserved(), "segments add up to reserved")
    eq(sum(x["allocated_size"] for x in segments), torch.cuda.memory_allocated(), "allocated_size adds up")
    eq(sum(x["active_size"] for x in segments), stat("active_bytes.all.current"), "active_size adds up")
    eq(sum(x["requested_size"] for x in segments), requested(), "requested_size adds up")
    eq(sum(b["size"] for b in blocks), reserved(), "blocks add up to reserved")
    live = {b["address"]: b for b in blocks if b["state"] == "active_allocated"}
    eq(len(live), len(keep), "live blocks")
    for t in keep:
        check(t.data_ptr() in live, "each tensor is a block")
        eq(live[t.data_ptr()]["requested_size"], t.numel(), "with the bytes asked for")
    for x in segments:
        for key in ("device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream", "segment_type",
                    "segment_pool_id", "is_expandable", "blocks"):
            check(key in x, f"a segment has {key}")
        check(x["segment_type"] in ("small", "large"), "segment_type")
        eq(sum(b["size"] for b in x["blocks"]), x["total_size"], "blocks fill their segment")
        at = x["address"]
        for b in x["blocks"]:
            check(b["state"] in ("active_allocated", "active_pending_free", "active_awaiting_free", "inactive"), b["state"])
            eq(b["address"], at, "blocks follow each other")
            at += b["size"]
    eq(len({x["address"] for x in segments if x["address"]}), len([x for x in segments if x["address"]]), "no segment twice")


@case()
def snapshot_one_pool():
    keep, pool = some_work()
    inside = [t for t in keep if t.numel() == 9 * MiB]
    segments = pool.snapshot()
    check(segments, "the pool has segments")
    check(all(tuple(s["segment_pool_id"]) == tuple(pool.id) for s in segments), "only of this pool")
    live = [b["address"] for s in segments for b in s["blocks"] if b["state"] == "active_allocated"]
    eq(live, [t.data_ptr() for t in inside], "what lives in the pool")
    eq(torch.cuda.memory_snapshot(pool.id), segments, "the same by id")
    check(len(torch.cuda.memory_snapshot(include_traces=False)) > len(segments), "without an id: everything")


@case(timeout=120)
def snapshot_viewer():
    from torch.cuda import _memory_viz as viz
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(stacks="python")
    keep, pool = some_work()
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "s.pickle")
        torch.cuda.memory._dump_snapshot(path)
        with open(path, "rb") as f:
            s = pickle.load(f)
    check(f"segments: {len(s['segments'])}" in viz.segsum(s), "segsum draws the segments")
    check("Device 0" in viz.trace(s) and "del " in viz.trace(s), "trace lists the events")
    for f in (viz.trace_plot, viz.segment_plot):
        html = f(s)
        check("<html" in html.lower() or "script" in html.lower(), f"{f.__name__} makes a page")
    viz.segments(s, format_flamegraph=lambda lines: check(lines, "segments has lines"))
    viz.memory(s, format_flamegraph=lambda lines: check(lines, "memory has lines"))
    viz.compare(s["segments"], s["segments"], format_flamegraph=lambda lines: None)
    eq(sum(viz.calc_active(x) for x in s["segments"]), torch.cuda.memory_allocated(), "what the viewer counts as active")
    left = [e for e in viz.filter_alloc_free_pairs(s)["device_traces"][0] if e["action"] == "alloc"]
    eq(len(left), len(keep), "what lives is what was not freed")


@case(timeout=120)
def snapshot_cistern_reads():
    """The command reads what PyTorch dumped: inspect, replay."""
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(stacks="python")
    keep, pool = some_work()
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "s.pickle")
        torch.cuda.memory._dump_snapshot(path)
        for argv in (["inspect", path], ["replay", "--policy", "torch", "--policy", "cistern", path]):
            done = common.run([common.cistern_command(), *argv], timeout=60)
            eq(done.rc, 0, f"cistern {argv[0]}: {done.why()}")


@case(native="cistern.snapshot", timeout=120, conf="history:100000")
def snapshot_cistern_writes():
    import cistern
    keep, pool = some_work()
    with tempfile.TemporaryDirectory() as d:
        for name in ("s.pickle", "s.pickle.gz"):
            path = os.path.join(d, name)
            cistern.snapshot(path)
            done = common.run([common.cistern_command(), "inspect", path], timeout=60)
            eq(done.rc, 0, f"cistern inspect {name}: {done.why()}")
        with open(os.path.join(d, "s.pickle"), "rb") as f:
            s = pickle.load(f)
        eq(sum(x["total_size"] for x in s["segments"]), reserved(), "segments add up to reserved")
        with raises(Exception):
            cistern.snapshot(os.path.join(d, "no", "such", "folder", "s.pickle"))


@case(native="cistern.stats and cistern.tag", timeout=60)
def cistern_stats_and_tags():
    import cistern
    with cistern.tag("weights"):
        a = bytes_on(10 * MiB)
        with cistern.tag("inner"):
            b = bytes_on(2 * MiB)
    device = cistern.stats()["devices"][0]
    eq(device["reserved"]["all"]["current"], reserved(), "reserved, as torch reports it")
    eq(device["requested"]["all"]["current"], requested(), "requested, as torch reports it")
    eq({t["name"]: t["requested"] for t in device["tags"]}, {"weights": 10 * MiB, "inner": 2 * MiB}, "bytes under each tag")
    del a
    eq({t["name"]: t["requested"] for t in cistern.stats()["devices"][0]["tags"] if t["requested"]}, {"inner": 2 * MiB}, "after a free")
    del b
    with cistern.tag("late"):
        pass
    bytes_on(MiB)
    eq([t for t in cistern.stats()["devices"][0]["tags"] if t["requested"]], [], "nothing is labelled outside")
    cistern.trim()
    eq(reserved(), 0, "cistern.trim() gives back")


@case()
def snapshot_while_working():
    """Snapshots in one thread while others allocate."""
    import threading
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=1000, stacks="python")
    stop = threading.Event()
    def work():
        held = []
        while not stop.is_set():
            held.append(bytes_on((len(held) % 9 + 1) * 300_000))
            if len(held) > 40:
                del held[::2]
    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    try:
        for _ in range(30):
            s = torch.cuda.memory._snapshot()
            check(all(sum(b["size"] for b in x["blocks"]) == x["total_size"] for x in s["segments"]), "consistent")
            torch.cuda.memory_stats()
    finally:
        stop.set()
        for t in threads:
            t.join()
