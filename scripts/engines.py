#!/usr/bin/env python3
"""engines.py: what DuckDB, Spark, Dask and Ray answer to the questions in examples/fleet is compared with each other and with what
Cistern says of the same recordings. `make engines` runs it, under the Python of bin/engines. NAME...: these engines alone."""

import collections
import datetime
import json
import os
import pickle
import random
import re
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CISTERN = os.path.join(ROOT, "bin", "cistern")
ENGINES = ("duckdb", "spark", "dask", "ray")
GIB = 1 << 30
BEFORE, AFTER = "1a2b3c4", "5d6e7f8"
SUNDAY = 1_767_571_200 * 10**6  # 2026-01-05 00:00 UTC less a second is a Sunday
# Job, its commit, when it began, ranks, restarts, memory of its GPUs, what its largest rank reserved, requests that failed.
JOBS = (
    ("4711", BEFORE, SUNDAY - 1_000_000, 4, 1, 80, 21, 0),
    ("4712_3", AFTER, SUNDAY, 4, 2, 80, 30, 0),
    ("pre train/é=%1", AFTER, SUNDAY + 8 * 86400 * 10**6, 2, 1, 24, 9, 0),
    ("ran-out", BEFORE, SUNDAY + 86400 * 10**6, 2, 1, 80, 60, 2),
    ("fits-none", BEFORE, SUNDAY, 1, 1, 16, 15, 0),
)


def snapshot(rng, commit):
    """A snapshot of PyTorch's with some functions, one of which asks for memory at two lines."""
    moved = 0 if commit == BEFORE else 7
    functions = ["layer%d.forward" % i for i in range(12)] + ["loss é, \"x\""] + (["attention.cache"] if commit == AFTER else ["old.cache"])
    events, live, address = [], [], 1 << 33
    for i in range(400):
        if live and rng.random() < 0.45:
            freed = live.pop(rng.randrange(len(live)))
            for action in ("free_requested", "free_completed"):
                events.append(dict(freed, action=action))
            continue
        k = rng.randrange(len(functions))
        size = 512 * rng.randrange(1, 4000) * (3 if commit == AFTER and k in (2, 5) else 1)
        frames = [{"filename": "/src/%s/model.py" % commit, "name": functions[k], "line": 10 * k + rng.choice((1, 4)) + moved},
                  {"filename": "/src/%s/train.py" % commit, "name": "step", "line": 40 + moved}]
        event = {"addr": address, "size": size, "stream": 0, "frames": [] if rng.random() < 0.05 else frames}
        address += (size + 511) // 512 * 512
        live.append(event)
        events.append(dict(event, action="alloc"))
    for i, event in enumerate(events):
        event["time_us"] = SUNDAY + i
    segment = {"device": 0, "address": 1 << 33, "total_size": address - (1 << 33), "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
               "is_expandable": False, "frames": [], "blocks": []}
    at = 1 << 33
    for event in sorted(live, key=lambda e: e["addr"]):
        if event["addr"] > at:
            segment["blocks"].append({"address": at, "size": event["addr"] - at, "requested_size": 0, "state": "inactive", "frames": []})
        size = (event["size"] + 511) // 512 * 512
        segment["blocks"].append({"address": event["addr"], "size": size, "requested_size": event["size"], "state": "active_allocated", "frames": event["frames"]})
        at = event["addr"] + size
    if at < address:
        segment["blocks"].append({"address": at, "size": address - at, "requested_size": 0, "state": "inactive", "frames": []})
    grown = dict(action="segment_alloc", addr=1 << 33, size=segment["total_size"], stream=0, time_us=SUNDAY - 1, frames=[])
    return {"segments": [segment], "device_traces": [[grown] + events], "allocator_settings": {}}


def summary(rng, job, commit, began, rank, ranks, restart, restarts, gpu, reserved, ooms, recordings):
    variables = {"CISTERN_JOB": job, "CISTERN_COMMIT": commit, "TORCHELASTIC_RESTART_COUNT": str(restart)}
    if ranks > 1:
        variables.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    # `cistern fleet` is about the newest attempt, which has the peak here.
    most = int(reserved * GIB * (1 if rank == ranks - 1 else rng.uniform(0.5, 0.9)) * (1 if restart == restarts - 1 else 0.5))
    steps = collections.defaultdict(list, every=1)
    for n in range(1, 6):
        steps["step"].append(n)
        steps["time_us"].append(began + n * 10**6)
        for name in ("allocated", "peak_allocated", "reserved", "outside", "requested"):
            steps[name + "_bytes"].append(most // 2 + n)
        steps["requests"].append(n)
    outside = rng.randrange(GIB // 4, GIB // 2)
    return {"cistern_summary": 1, "cistern": "1.0", "allocator": "pytorch", "variables": variables, "host": "n%d" % (rank // 2), "pid": 100 + rank,
            "program": "train.py", "started_us": began, "updated_us": began + 10**7, "ended": "" if ooms else "exit", "marks": "optimizer", "steps": 5,
            "spent_us": 1, "recordings": recordings,
            "devices": [{"device": 0, "uuid": "GPU-%d" % rank, "name": "G", "total_bytes": gpu * 1019 << 20,  # as the driver gives of GPUs
                         "limit_bytes": 0,
                         "peak_allocated": {"bytes": most - rng.randrange(GIB)}, "peak_reserved": {"bytes": most}, "peak_outside": {"bytes": outside},
                         "retries": 0, "ooms": ooms if rank == 0 else 0, "steps": steps}]}


def make(folder):
    """Jobs as their processes leave them; the recordings of each commit."""
    rng = random.Random(1)
    recordings = {BEFORE: [], AFTER: []}
    for number, (job, commit, began, ranks, restarts, gpu, reserved, ooms) in enumerate(JOBS):
        place = os.path.join(folder, "job%d" % number)
        os.mkdir(place)
        for restart in range(restarts):
            for rank in range(ranks):
                name = "rank%05d-n-%d-%d" % (rank, restart, number)
                files = []
                for part in range({(0, 0): 2, (1, 0): 2, (2, 0): 0, (2, 1): 0}.get((number, rank), 1)):
                    files.append("%s.%d.pickle" % (name, part))
                    with open(os.path.join(place, files[-1]), "wb") as f:
                        pickle.dump(snapshot(rng, commit), f)
                    recordings[commit].append(f.name)
                with open(os.path.join(place, name + ".summary.json"), "w") as f:
                    json.dump(summary(rng, job, commit, began, rank, ranks, restart, restarts, gpu, reserved, ooms, files), f)
    return recordings


def cistern(*args):
    return subprocess.run([CISTERN] + list(args), check=True, stdout=subprocess.PIPE, universal_newlines=True).stdout


def grew(recordings):
    """What `cistern diff` says, by functions: the most of each commit, over its recordings."""
    most = {BEFORE: collections.Counter(), AFTER: collections.Counter()}
    pairs = max(len(recordings[BEFORE]), len(recordings[AFTER]))
    for i in range(pairs):
        a, b = (recordings[commit][i % len(recordings[commit])] for commit in (BEFORE, AFTER))
        for commit, side in ((BEFORE, "bytes_a"), (AFTER, "bytes_b")):
            held = collections.Counter()
            for stack in json.loads(cistern("diff", "--json", a, b))["devices"][0]["by_stack"]:
                if stack.get("frames"):
                    held["; ".join(re.sub(r" \S*/([^/\s]+):\d+$", r" \1", frame) for frame in stack["frames"])] += stack[side]
            most[commit] |= held  # the larger of both
    found = [{"functions": f, "grew_bytes": n - most[BEFORE][f]} for f, n in most[AFTER].items() if n > most[BEFORE][f]]
    return sorted(found, key=lambda row: (-row["grew_bytes"], row["functions"]))


def week(us):
    day = datetime.datetime.fromtimestamp(us / 1e6, datetime.timezone.utc).date()
    return str(day - datetime.timedelta(days=day.weekday()))


def fleet(runs):
    """What `cistern fleet` says of each job."""
    return {job[0]: json.loads(cistern("fleet", "--json", "--job", job[0], runs)) for job in JOBS}


def peaks(jobs):
    found = {}
    for job, answer in jobs.items():
        for rank in answer["ranks"]:
            with open(rank["file"]) as f:
                key = job, week(json.load(f)["started_us"])
            row = found.setdefault(key, {"job": job, "week": key[1], "allocated_bytes": 0, "reserved_bytes": 0})
            row["allocated_bytes"] = max(row["allocated_bytes"], rank["peak_allocated_bytes"])
            row["reserved_bytes"] = max(row["reserved_bytes"], rank["peak_reserved_bytes"])
    return [found[key] for key in sorted(found)]


def fits(jobs):
    rows = []
    for job, _, _, _, _, gpu, _, _ in sorted(JOBS):
        need = jobs[job]["need"]
        if not sum(rank["ooms"] for rank in jobs[job]["ranks"]) and 0 < need["recorded_gb"] < gpu:
            rows.append({"job": job, "needed_bytes": need["recorded_bytes"], "gpu_gb": need["recorded_gb"]})
    return rows


def answers(engine, dataset):
    program = os.path.join(ROOT, "examples", "fleet", "with_%s.py" % engine)
    began = time.monotonic()
    # As little as the data needs; Java takes names of files in the locale's encoding.
    env = dict(os.environ, LC_ALL="C.UTF-8", SPARK_LOCAL_IP="127.0.0.1", PYSPARK_PYTHON=sys.executable, RAY_USAGE_STATS_ENABLED="0",
               RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
               PYSPARK_SUBMIT_ARGS="--master local[2] --conf spark.sql.shuffle.partitions=2 --conf spark.ui.enabled=false pyspark-shell")
    done = subprocess.run([sys.executable, program, dataset, BEFORE, AFTER], env=env, timeout=1200, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          universal_newlines=True)
    if done.returncode:
        sys.exit("%s: exit status %d\n%s" % (engine, done.returncode, done.stderr[-4000:]))
    found = {"peaks": [], "fits": [], "grew": []}
    for line in done.stdout.splitlines():
        if line.startswith("["):
            question, row = json.loads(line)
            found[question].append(row)
    return found, time.monotonic() - began


def main(engines):
    with tempfile.TemporaryDirectory() as folder:
        runs, dataset = os.path.join(folder, "runs"), os.path.join(folder, "data set")
        os.mkdir(runs)
        recordings = make(runs)
        cistern("fleet", "export", "--shard", "1/2", runs, "-o", dataset)
        cistern("fleet", "export", "--shard", "2/2", runs, "-o", dataset)
        jobs = fleet(runs)
        want = {"peaks": peaks(jobs), "fits": fits(jobs), "grew": grew(recordings)}
        failed = False
        for engine in engines:
            found, took = answers(engine, dataset)
            print("%s: %s, %.1f s" % (engine, ", ".join("%d rows of %s" % (len(rows), question) for question, rows in found.items()), took), flush=True)
            for question, rows in found.items():
                if rows != want[question] or not rows:
                    failed = True
                    print("%s:\n  %s\nexpected\n  %s" % (question, json.dumps(rows), json.dumps(want[question])))
        sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:] or ENGINES)
