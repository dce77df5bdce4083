"""Writes a snapshot again in every way that picklers write plain data. Usage: repickle.py IN.pickle.gz OUTDIR"""
import gzip
import os
import pickle
import pickletools
import struct
import sys


def torch_style(obj):
    """As torch's C++ pickler writes (torch/csrc/jit/serialization/pickler.cpp, _memory_snapshot_pickled): protocol 2,
    a whole list or dict between one MARK and one APPENDS or SETITEMS, strings memoised, 8-byte integers."""
    out = bytearray(b"\x80\x02")
    memo = {}

    def put():
        n = len(memo_ids)
        memo_ids.append(n)
        out.extend(b"q" + bytes([n]) if n < 256 else b"r" + struct.pack("<I", n))
        return n

    memo_ids = []

    def walk(x):
        if isinstance(x, bool):
            out.extend(b"\x88" if x else b"\x89")
        elif isinstance(x, int):
            if 0 <= x < 256:
                out.extend(b"K" + bytes([x]))
            elif 0 <= x < 65536:
                out.extend(b"M" + struct.pack("<H", x))
            elif -2**31 <= x < 2**31:
                out.extend(b"J" + struct.pack("<i", x))
            else:
                out.extend(b"\x8a\x08" + struct.pack("<q", x))
        elif isinstance(x, float):
            out.extend(b"G" + struct.pack(">d", x))
        elif isinstance(x, str):
            if x in memo:
                n = memo[x]
                out.extend(b"h" + bytes([n]) if n < 256 else b"j" + struct.pack("<I", n))
            else:
                b = x.encode()
                out.extend(b"X" + struct.pack("<I", len(b)) + b)
                memo[x] = put()
        elif isinstance(x, tuple):
            for y in x:
                walk(y)
            out.extend({1: b"\x85", 2: b"\x86", 3: b"\x87"}[len(x)])
        elif isinstance(x, list):
            out.extend(b"](")
            for y in x:
                walk(y)
            out.extend(b"e")
        elif isinstance(x, dict):
            out.extend(b"}(")
            for k, v in x.items():
                walk(k)
                walk(v)
            out.extend(b"u")
        else:
            raise TypeError(type(x))

    walk(obj)
    out.extend(b".")
    return bytes(out)


def main(src, dst):
    snap = pickle.load(gzip.open(src))

    def write(name, data):
        with open(os.path.join(dst, name), "wb") as f:
            f.write(data)

    for protocol in (2, 3, 4, 5):
        write(f"protocol{protocol}", pickle.dumps(snap, protocol))
    write("python", pickle._dumps(snap, 4))  # the pickler in Python: other frames, same opcodes
    write("optimized", pickletools.optimize(pickle.dumps(snap, 4)))
    write("optimized2", pickletools.optimize(pickle.dumps(snap, 2)))
    import io
    out = io.BytesIO()
    fast = pickle.Pickler(out, 4)
    fast.fast = True  # no memo: every string and stack again
    fast.dump(snap)
    write("fast", out.getvalue())
    write("torch", torch_style(snap))
    # Other orders and more keys than we know, as newer versions have.
    order = {"host_traces": [[{"action": "alloc", "addr": 1, "size": 2, "frames": []}], []], "host_segments": [],
             "nothing": {}, "pairs": [(1, 2), (), (1,), (1, 2, 3), (1, 2, 3, 4)], "blob": b"bytes", "none": None,
             "big": 1 << 200, "small": -(1 << 200)}
    for key in ("external_annotations", "device_traces", "allocator_settings", "segments"):
        order[key] = snap[key]
        order["after " + key] = {"segments": [{"a": 1}], "device_traces": {"deep": [[{"action": "oom"}]]}}
    for t in order["device_traces"]:
        for i, e in enumerate(t):
            t[i] = {"category": "unknown", "extra": {"x": [1, {"frames": []}]}, **dict(reversed(list(e.items())))}
    write("reordered", pickle.dumps(order, 4))


main(sys.argv[1], sys.argv[2])
