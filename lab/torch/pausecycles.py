"""Ten thousand pauses and resumes leave the device's memory, the host's and the descriptors where they were, and how fast they
are: contents kept, against a plain copy from page-locked memory; contents dropped, a GiB.

    python pausecycles.py [--cycles 10000] [--gigabytes 8]
"""
import argparse
import json
import os
import sys
import tempfile
import time

import common

MiB, GiB = common.MiB, common.GiB


def state(torch):
    torch.cuda.synchronize()
    return {"device": torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0], "own": common.device_use(), "host": common.resident(),
            "fds": len(os.listdir("/proc/self/fd")), "reserved": torch.cuda.memory_reserved(), "allocated": torch.cuda.memory_allocated(),
            "threads": len(os.listdir("/proc/self/task")), "maps": sum(1 for _ in open("/proc/self/maps"))}


def cycles(n):
    import cistern
    import torch
    with cistern.tag("t"):
        held = [torch.full((4 * MiB,), i + 1, dtype=torch.uint8, device="cuda") for i in range(8)]
    other = torch.full((4 * MiB,), 77, dtype=torch.uint8, device="cuda")
    common.require_cistern()

    def right():
        return all(bool((t == i + 1).all()) for i, t in enumerate(held)) and bool((other == 77).all())

    def cycle(i):
        keep = "drop" if i % 10 == 9 else "disk" if i % 50 == 25 else "host"
        cistern.pause(tag="t", keep=keep, dir=tempfile.gettempdir() if keep == "disk" else None)
        cistern.resume(tag="t")
        if keep == "drop":
            for j, t in enumerate(held):
                t.fill_(j + 1)
    for i in range(2500):  # until the library's collector has run, which starts a thread for each core
        cycle(i)
    assert right()
    before, begin = state(torch), time.perf_counter()
    for i in range(n):
        cycle(i)
        if i % 1000 == 999:
            assert right(), f"contents after {i + 1} cycles"
    took = time.perf_counter() - begin
    assert right(), "contents"
    print(json.dumps({"cycles": n, "sec": round(took, 1), "before": before, "after": state(torch)}))


def speed(gigabytes):
    import cistern
    import torch
    n = gigabytes * GiB
    with cistern.tag("t"):
        held = [torch.full((GiB // 4,), i % 251, dtype=torch.uint8, device="cuda") for i in range(4 * gigabytes)]
    common.require_cistern()
    out = {"bytes": n}
    pinned = torch.empty(2 * GiB, dtype=torch.uint8, pin_memory=True)
    plain = torch.empty(2 * GiB, dtype=torch.uint8, device="cuda")
    for name, target, source in (("copy out", pinned, plain), ("copy in", plain, pinned)):
        best = 0.0
        for _ in range(4):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            best = max(best, 2 * GiB / (time.perf_counter() - begin) / 1e9)
        out[name] = round(best, 1)
    del plain, pinned, target, source
    torch.cuda.empty_cache()

    def once(keep):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        report = cistern.pause(tag="t", keep=keep)
        middle = time.perf_counter()
        cistern.resume(tag="t")
        end = time.perf_counter()
        assert report["bytes"] == n, report
        return middle - begin, end - middle
    out["first pause"] = [round(n / t / 1e9, 1) for t in once("host")]  # page-locked memory is got on the way
    begin = time.perf_counter()
    cistern.pause_buffers(n)
    out["buffers_sec"] = round(time.perf_counter() - begin, 2)
    kept = [once("host") for _ in range(4)]
    out["pause"], out["resume"] = (round(n / min(x) / 1e9, 1) for x in zip(*kept))
    assert all(int(t[-1]) == i % 251 and bool((t == i % 251).all()) for i, t in enumerate(held)), "contents"
    dropped = [once("drop") for _ in range(4)]
    out["drop_ms_per_GiB"] = [round(min(x) * 1e3 / gigabytes, 2) for x in zip(*dropped)]
    print(json.dumps(out))


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--cycles", type=int, default=10_000)
    p.add_argument("--gigabytes", type=int, default=8)
    p.add_argument("--child", choices=("cycles", "speed"), help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return cycles(args.cycles) if args.child == "cycles" else speed(args.gigabytes)
    c = common.Checks("pausecycles")
    done = common.child("cistern", "pausecycles.py", ["--child", "speed", "--gigabytes", str(args.gigabytes)], 120)
    r = done.last_json()
    if r is None or done.rc != 0:
        print(done.out[-1000:], done.err[-4000:])
        c.add("speed", done.why(), "measured", False)
    else:
        print(json.dumps(r))
        for what, plain in (("pause", "copy out"), ("resume", "copy in")):
            c.add(f"{what} of {args.gigabytes} GiB, contents kept", f"{r[what]} GB/s, a plain pinned copy {r[plain]}; the first time {r['first pause']}",
                  "at least 0.9 x", r[what] >= 0.9 * r[plain])
        c.add("pause and resume, contents dropped", f"{r['drop_ms_per_GiB'][0]} and {r['drop_ms_per_GiB'][1]} ms a GiB", "less than 10 ms",
              max(r["drop_ms_per_GiB"]) < 10)
    done = common.child("cistern", "pausecycles.py", ["--child", "cycles", "--cycles", str(args.cycles)], 240)
    r = done.last_json()
    if r is None or done.rc != 0:
        print(done.out[-1000:], done.err[-4000:])
        c.add("cycles", done.why(), "right", False)
        return c.finish()
    print(json.dumps(r))
    b, a = r["before"], r["after"]
    c.add(f"{r['cycles']:,} cycles of 32 MiB", f"right, {r['sec']} s", "right", True)
    c.add("device memory, by the driver", f"{(a['device'] - b['device']) / MiB:+.1f} MiB", "within 4 MiB", abs(a["device"] - b["device"]) <= 4 * MiB)
    if a["own"] is not None and b["own"] is not None:
        c.add("device memory of the process, by NVML", f"{(a['own'] - b['own']) / MiB:+.1f} MiB", "within 4 MiB", abs(a["own"] - b["own"]) <= 4 * MiB)
    c.add("host memory", f"{(a['host'] - b['host']) / MiB:+.1f} MiB", "less than 32 MiB more", a["host"] - b["host"] < 32 * MiB)
    for what, slack in (("fds", 0), ("threads", 4), ("maps", 50), ("reserved", 0), ("allocated", 0)):
        c.add(what, f"{b[what]} before, {a[what]} after", "the same" if not slack else f"at most {slack} more", a[what] - b[what] <= slack)
    return c.finish()


if __name__ == "__main__":
    sys.exit(main())
