"""`cistern top --once --json` beside programs that hold memory: one on Cistern, one traced, one that is neither. What it
shows is what PyTorch says of each, and what nvidia-smi does.

    python top.py

About 40 s.
"""
import argparse
import json
import os
import subprocess
import sys
import time

import seen
from seen import MiB, common

KINDS = ("cistern", "traced", "other")


def look(*more):
    """What top shows."""
    done = seen.cistern("top", "--once", "--json", *more, timeout=60)
    if done.rc != 0:
        raise RuntimeError(done.why())
    return json.loads(done.out)


def smi():
    """{pid: MiB} as nvidia-smi shows them; None where it does not."""
    try:
        text = subprocess.run(["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20).stdout
        return {int(pid): int(mib) for pid, mib in (line.split(",") for line in text.splitlines() if "," in line)}
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def start(kind):
    argv = [sys.executable, os.path.join(seen.HERE, "job.py"), "--hold"]
    if kind == "cistern":
        argv = common.command("cistern", argv, "stacks:python")
    elif kind == "traced":
        argv = seen.traced(argv)
    return seen.Talker(argv, common.environment("cistern" if kind == "cistern" else "native", {"PYTHONWARNINGS": "ignore"}))


def judge(c, kind, row, own, driver):
    """One process: own is what it says of itself, driver what nvidia-smi says, in MiB."""
    if not c.add("%s: kind of process %d" % (kind, own["pid"]), row and row["kind"], kind, row is not None and row["kind"] == kind):
        return
    if kind != "other":
        got = row["reserved_bytes"]
        c.add("%s: reserved bytes" % kind, got, own["reserved"], got == own["reserved"])
        c.add("%s: most reserved" % kind, row["peak_reserved_bytes"], own["peak"], row["peak_reserved_bytes"] == own["peak"])
        c.add("%s: age of what it shows, s" % kind, row["age_s"], "at most 2", row["age_s"] is not None and row["age_s"] <= 2)
    if kind == "cistern":
        c.add("%s: allocated bytes" % kind, row["allocated_bytes"], own["allocated"], row["allocated_bytes"] == own["allocated"])
        details = [d["details"] for d in row["devices"] if d.get("details")]
        tags = {u["name"]: u["bytes"] for d in details for u in d["tags"]}
        c.add("%s: bytes by tag" % kind, ", ".join("%s %d" % (t, tags.get(t, 0)) for t in own["tags"]), ", ".join("%s %d" % i for i in own["tags"].items()),
              all(tags.get(t) == n for t, n in own["tags"].items()))
        stacks = [u for d in details for u in d["stacks"]]
        found = {f: sum(u["bytes"] for u in stacks if f in "\n".join(u["frames"])) for f in own["held"]}
        c.add("%s: bytes by function, of stacks" % kind, ", ".join("%s %d" % i for i in found.items()), ", ".join("%s %d" % i for i in own["held"].items()),
              found == own["held"])
    if driver is None:
        c.add("%s: used by the driver's number" % kind, row["used_bytes"], "nvidia-smi does not tell")
        return
    used = row["used_bytes"]
    c.add("%s: used, MiB; nvidia-smi" % kind, "%s; %d" % (None if used is None else used // MiB, driver), "equal", used is not None and abs(used // MiB - driver) <= 1)
    if kind != "other":
        c.add("%s: beside the reserved, MiB" % kind, (used or 0) // MiB - own["reserved"] // MiB, "0 or more: contexts and code",
              used is not None and used >= own["reserved"])


def main():
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    c = common.Checks("see-top")
    done = seen.cistern("build-adapter", timeout=300, env=common.environment("native", {"CISTERN_PYTHON": sys.executable}))
    if done.rc != 0:
        c.add("the adapter", done.why(), "can be built", False)
        return seen.finish(c)
    jobs = {kind: start(kind) for kind in KINDS}
    try:
        own = {}
        for kind, job in jobs.items():
            own[kind] = job.answer(120)
            if own[kind] is None:
                c.add("%s: the program" % kind, job.why(), "runs", False)
                return seen.finish(c)
        time.sleep(2.5)  # pages are brought up to date once a second
        shown, driver = look("--details"), smi()
        rows = {p["pid"]: p for p in shown["processes"]}
        inside = driver is not None and any(own[k]["pid"] in driver for k in KINDS)
        if not inside:
            print("nvidia-smi does not know these processes by the numbers that they have here: what it says is not compared")
        for kind in KINDS:
            if kind == "other" and not inside:
                continue
            judge(c, kind, rows.get(own[kind]["pid"]), own[kind], driver.get(own[kind]["pid"]) if inside else None)
        ours = [p for p in shown["processes"] if p["pid"] in (own["cistern"]["pid"], own["traced"]["pid"])]
        for g in shown["gpus"]:
            if g["uuid"] in [d["uuid"] for p in ours for d in p["devices"]]:
                want = own["cistern"]["reserved"], own["traced"]["reserved"]
                c.add("the GPU: reserved on Cistern, traced", "%d, %d" % (g["reserved_bytes"], g["traced_bytes"]), "%d, %d" % want,
                      (g["reserved_bytes"], g["traced_bytes"]) == want)
        for note in shown["notes"]:
            print("top says: " + note)
        begin = time.monotonic()
        look()
        c.add("one look, s", "%.2f" % (time.monotonic() - begin), "at most 5", time.monotonic() - begin <= 5)
        text = seen.cistern("top", "--once", env=dict(os.environ, COLUMNS="80"), timeout=60)
        widest = max(map(len, text.out.splitlines()), default=0)
        c.add("the view at 80 columns: its widest line", widest if text.rc == 0 else text.why(), "at most 80", text.rc == 0 and 0 < widest <= 80)
        print(text.out)
    finally:
        for job in jobs.values():
            job.end(20)
    gone = look()
    left = [p["pid"] for p in gone["processes"] if p["pid"] in [t["pid"] for t in own.values()]]
    c.add("shown after they ended", len(left), "0", not left)
    return seen.finish(c)


if __name__ == "__main__":
    sys.exit(main())
