"""`cistern trace` and `top` of programs on two GPUs.

    python two.py

trace  The traced peak of each device against what PyTorch says it reserved there, of a program that uses both and copies between
       them, of one that sees the second GPU alone (CUDA_VISIBLE_DEVICES=1), and of a launcher whose processes each see another one.
top    What it shows of three programs at once: one on Cistern on both GPUs, one on Cistern that sees the second alone, one traced
       on both; each beside what PyTorch says in it.

Nothing else may use the GPUs meanwhile. About a minute.
"""
import argparse
import json
import os
import subprocess
import sys
import time

import seen
from seen import MiB, common

SECOND = {"CUDA_VISIBLE_DEVICES": "1"}


# ---- a program on all GPUs that it sees --------------------------------------------------------------------------------

def work(hold):
    """Memory of another size on each GPU, of which some is freed again, and what PyTorch says of it."""
    import torch
    tensors = []
    for d in range(torch.cuda.device_count()):
        with torch.cuda.device(d):
            tensors.append([torch.full((64 * MiB,), d + n, dtype=torch.uint8, device="cuda") for n in range(4 + 8 * d)])
            peak = torch.empty(900 * MiB * (d + 1), dtype=torch.uint8, device="cuda")
            del peak, tensors[d][::2]
    for d, held in enumerate(tensors):
        there = "cuda:%d" % ((d + 1) % len(tensors))
        for t in held:
            value = int(t[0])
            if not bool((t.to(there) == value).all()):
                raise SystemExit("a copy from GPU %d is wrong" % d)
    del t
    for d in range(len(tensors)):
        torch.cuda.synchronize(d)
    devices = []
    for d in range(len(tensors)):
        s = torch.cuda.memory_stats(d)
        devices.append({"uuid": "GPU-%s" % torch.cuda.get_device_properties(d).uuid, "reserved": s["reserved_bytes.all.current"],
                        "allocated": s["allocated_bytes.all.current"], "peak": s["reserved_bytes.all.peak"]})
    seen.answer(pid=os.getpid(), devices=devices)
    if hold:
        sys.stdin.read()
    return 0


def launch():
    """Two processes in turn that see one GPU each."""
    for gpu in ("1", "0"):
        done = subprocess.run(argv(), env=dict(os.environ, CUDA_VISIBLE_DEVICES=gpu), stdout=subprocess.PIPE, text=True)
        sys.stdout.write(done.stdout)
        if done.returncode != 0:
            return done.returncode
    return 0


def argv(*more):
    return [sys.executable, os.path.abspath(__file__), "--child", *more]


# ---- trace -------------------------------------------------------------------------------------------------------------

def trace(c, name, env, wanted):
    out = os.path.join(seen.folder("two"), "trace.cistern")
    done = common.run(seen.traced(argv(), out), env=common.environment("native", env), timeout=120)
    own = done.last_json()
    if done.rc != 0 or own is None:
        c.add(name, done.why(), "runs", False)
        return
    found = seen.summary(out)["devices"]
    c.add("%s: GPUs of the program" % name, len(own["devices"]), wanted, len(own["devices"]) == wanted)
    for d, device in enumerate(own["devices"]):
        rows = [f for f in found if f["device"] == d]
        peak = rows[0]["peak_held_bytes"] if len(rows) == 1 else 0
        c.add("%s: GPU %d: traced peak, reserved by PyTorch" % (name, d), "%d, %d" % (peak, device["peak"]), "within 2 MiB",
              abs(peak - device["peak"]) <= seen.PAGE)
        uuid = rows[0].get("uuid") if rows else None
        c.add("%s: GPU %d: its UUID" % (name, d), uuid, device["uuid"], uuid == device["uuid"])
    print(seen.cistern("inspect", out).out)


def launched(c):
    """Of a launcher whose processes each see one GPU as their first."""
    out = os.path.join(seen.folder("two"), "trace.cistern")
    done = common.run(seen.traced([sys.executable, os.path.abspath(__file__), "--launch"], out), env=common.environment("native"), timeout=120)
    own = [json.loads(line)["devices"][0] for line in done.out.splitlines() if line.startswith("{")]
    if done.rc != 0 or len(own) != 2:
        c.add("launched", done.why(), "runs", False)
        return
    found = {f.get("uuid"): f["peak_held_bytes"] for f in seen.summary(out)["devices"]}
    for device in own:
        peak = found.get(device["uuid"], 0)
        c.add("launched: %s: traced peak, reserved by PyTorch" % device["uuid"], "%d, %d" % (peak, device["peak"]), "within 2 MiB",
              abs(peak - device["peak"]) <= seen.PAGE)


# ---- top ---------------------------------------------------------------------------------------------------------------

def start(kind, env):
    line = common.command("cistern", argv("--hold")) if kind == "cistern" else seen.traced(argv("--hold"))
    return seen.Talker(line, common.environment("cistern" if kind == "cistern" else "native", env))


def shows(c, name, kind, own, row):
    """One program: row is top's, own is what it says of itself."""
    if not c.add("%s: kind" % name, row and row["kind"], kind, row is not None and row["kind"] == kind):
        return
    by = {d["uuid"]: d for d in row["devices"]}
    c.add("%s: its GPUs" % name, sorted(by), "those of the program", sorted(by) == sorted(d["uuid"] for d in own["devices"]))
    for d, device in enumerate(own["devices"]):
        shown = by.get(device["uuid"], {})
        what, want = [shown.get("reserved_bytes"), shown.get("peak_reserved_bytes")], [device["reserved"], device["peak"]]
        if kind == "cistern":
            what.append(shown.get("allocated_bytes")), want.append(device["allocated"])
        c.add("%s: GPU %d: reserved, peak, allocated" % (name, d), what, want, what == want)


def top(c):
    kinds = {"on Cistern": ("cistern", {}), "on Cistern, second GPU": ("cistern", SECOND), "traced": ("traced", {})}
    jobs = {name: start(*of) for name, of in kinds.items()}
    try:
        own = {name: job.answer(120) for name, job in jobs.items()}
        for name, job in jobs.items():
            if own[name] is None:
                c.add("%s: the program" % name, job.why(), "runs", False)
        if None in own.values():
            return
        time.sleep(2.5)  # pages are brought up to date once a second
        done = seen.cistern("top", "--once", "--json", timeout=60)
        if done.rc != 0:
            c.add("top", done.why(), "runs", False)
            return
        shown = json.loads(done.out)
        rows = {p["pid"]: p for p in shown["processes"]}
        for name, (kind, _) in kinds.items():
            shows(c, name, kind, own[name], rows.get(own[name]["pid"]))
        for g in shown["gpus"]:
            for word, kind in (("reserved_bytes", "cistern"), ("traced_bytes", "traced")):
                want = sum(d["reserved"] for name, of in kinds.items() if of[0] == kind for d in own[name]["devices"] if d["uuid"] == g["uuid"])
                c.add("GPU %d: %s" % (g["index"], word), g[word], want, g[word] == want)
        c.add("GPUs", [g["index"] for g in shown["gpus"]], [0, 1], [g["index"] for g in shown["gpus"]] == [0, 1])
        print(seen.cistern("top", "--once", env=dict(os.environ, COLUMNS="80"), timeout=60).out)
    finally:
        for job in jobs.values():
            job.end(20)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return work(args.hold)
    if args.launch:
        return launch()
    c = common.Checks("see-two")
    trace(c, "traced on both", {}, 2)
    trace(c, "traced on the second", SECOND, 1)
    launched(c)
    top(c)
    return seen.finish(c)


if __name__ == "__main__":
    sys.exit(main())
