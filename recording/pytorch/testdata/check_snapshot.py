"""Loads a memory snapshot with nothing but pickle and asserts the shape that PyTorch's own tools rely on:
torch/cuda/_memory_viz.py (segsum, trace, memory, compare) and torch/utils/viz/MemoryViz.js. Prints what it holds."""
import bisect
import json
import pickle
import pickletools
import sys

# Opcodes of the viewer's own unpickler.
VIEWER = {
    "APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1", "LONG_BINGET",
    "MARK", "MEMOIZE", "PROTO", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE2", "APPEND", "NEWFALSE", "BINPUT",
    "BINUNICODE", "EMPTY_TUPLE", "NEWTRUE", "NONE", "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE3", "LONG_BINPUT", "LIST",
    "DICT", "SETITEM",
}
ACTIONS = {"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
           "segment_unmap", "snapshot", "oom", "annotate", "retry"}


def frames(fs):
    assert isinstance(fs, list), fs
    for f in fs:
        assert isinstance(f["filename"], str) and isinstance(f["name"], str) and isinstance(f["line"], int), f


def walk_back(s, device):
    """Goes back from the segments to the first event, as the viewer's "Allocator State History" does: it draws nothing
    of a snapshot in which a block lies in no segment, or a segment is got that is not there."""
    segments = sorted([seg["address"], seg["total_size"], seg["stream"]] for seg in s["segments"] if seg["device"] == device)
    blocks = {b["address"] for seg in s["segments"] if seg["device"] == device for b in seg["blocks"]
              if b["state"] != "inactive"}

    def held(addr, size, what):
        i = bisect.bisect(segments, [addr + 1]) - 1
        assert i >= 0 and addr + size <= segments[i][0] + segments[i][1], f"{what} of 0x{addr:x}, {size} bytes, in no segment"
        return i

    for b in blocks:
        held(b, 1, "a block at the end")
    for e in reversed(s["device_traces"][device]):
        action, addr, size = e["action"], e.get("addr"), e["size"]
        if action == "free_completed" or action == "free_requested" and addr not in blocks:
            blocks.add(addr)
            held(addr, 1, action)
        elif action == "alloc":
            blocks.discard(addr)
        elif action in ("segment_free", "segment_unmap"):
            i = bisect.bisect(segments, [addr])
            segments.insert(i, [addr, size, e["stream"]])
            for k in (i, i - 1):  # what was mapped side by side is one segment
                if action == "segment_unmap" and 0 <= k < len(segments) - 1 and segments[k + 1][2] == segments[k][2] and \
                        segments[k + 1][0] == sum(segments[k][:2]):
                    segments[k][1] += segments.pop(k + 1)[1]
        elif action == "segment_alloc":
            assert segments.pop(held(addr, size, action))[:2] == [addr, size], f"another segment at 0x{addr:x}"
        elif action == "segment_map":
            i = held(addr, size, action)
            first, length, stream = segments.pop(i)
            rest = [[first, addr - first, stream], [addr + size, first + length - addr - size, stream]]
            segments[i:i] = [x for x in rest if x[1] > 0]


def main(path):
    data = open(path, "rb").read()
    used = {op.name for op, _, _ in pickletools.genops(data)}
    assert used <= VIEWER, f"opcodes the viewer does not know: {used - VIEWER}"
    assert data[0] == 0x80 and 2 <= data[1] <= 4, "protocol the viewer refuses"
    s = pickle.loads(data)
    assert isinstance(s["segments"], list) and isinstance(s["device_traces"], list)
    assert isinstance(s["external_annotations"], list)
    environment = s.get("cistern", {})
    for key in ("torch", "cuda", "driver"):
        assert isinstance(environment.get(key, ""), str), environment
    assert all(isinstance(d, str) for d in environment.get("devices", {})), environment
    assert all(isinstance(n, int) for n in environment.get("total_memory", {}).values()), environment
    total = 0
    for seg in s["segments"]:
        for key in ("device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream"):
            assert isinstance(seg[key], int), (key, seg[key])
        assert seg["segment_type"] in ("small", "large")
        assert isinstance(seg["segment_pool_id"], tuple) and len(seg["segment_pool_id"]) == 2
        assert isinstance(seg["is_expandable"], bool)
        frames(seg["frames"])
        addr = seg["address"]
        for b in seg["blocks"]:
            assert b["address"] == addr, (b["address"], addr)
            assert b["state"] in ("active_allocated", "active_pending_free", "inactive"), b["state"]
            assert isinstance(b["size"], int) and isinstance(b["requested_size"], int)
            frames(b["frames"])
            addr += b["size"]
        # segsum asserts that the blocks make up the segment.
        assert addr == seg["address"] + seg["total_size"], "blocks do not cover the segment"
        active = [b for b in seg["blocks"] if b["state"] == "active_allocated"]
        assert seg["allocated_size"] == sum(b["size"] for b in active)
        total += seg["total_size"]
    events = 0
    for trace in s["device_traces"]:
        for e in trace:
            assert e["action"] in ACTIONS, e["action"]
            assert isinstance(e["device_free" if e["action"] == "oom" else "addr"], int)
            assert isinstance(e["size"], int) and isinstance(e["stream"], int) and isinstance(e["time_us"], int)
            if "frames" in e:
                frames(e["frames"])
            if "handle" in e:
                assert isinstance(e["handle"], int) and e["action"] in ("segment_map", "segment_unmap")
            events += 1
    for device in range(len(s["device_traces"])):
        walk_back(s, device)
    settings = s.get("allocator_settings")
    if settings is not None:
        assert isinstance(settings["PYTORCH_CUDA_ALLOC_CONF"], str)
        assert isinstance(settings["max_split_size"], int)
        assert isinstance(settings["expandable_segments"], bool)
        assert isinstance(settings["garbage_collection_threshold"], float)
    json.dump({"events": events, "devices": len(s["device_traces"]), "segments": len(s["segments"]),
               "reserved": total}, sys.stdout)


main(sys.argv[1])
