"""What recording summaries costs (`cistern run --record`, `cistern record --max-entries 0`): CPU time of training with and without it, and
the recorder's own, which is to be at most 1 % of the time of the steps.

    python record_cost.py [--workloads gpt2_varlen,detection] [--rounds 3]    on a GPU, over workloads.py (CISTERN_GPU_SCRIPTS)
    python record_cost.py --standin VERSION                                   without a GPU (standin/__init__.py): steps of 20 ms
                                                                              with 300 requests each, of PROGRAM below

The recorder's own CPU time is in its summaries. The rest of the difference, if there is one, is noise, or what recording does to others.
"""
import argparse
import json
import os
import resource
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import common
import standin

STEPS = {"gpt2_varlen": 40, "detection": 40, "multistream_prefetch": 200}
MOST = 0.01
KINDS = ("cistern", "cistern, recorded", "cistern, recorded with history", "native", "native, recorded")

# Steps of a length that the host does not fill, as where the GPU works.
PROGRAM = """
import json, random, time, torch
steps, length, r = 200, 0.02, random.Random(1)
weights = torch.nn.Parameter(torch.zeros(1 << 10, device="cuda"))
weights.grad = torch.zeros_like(weights)
optimizer = torch.optim.SGD([weights], lr=0.1)
begin = time.monotonic()
for step in range(steps):
    live = []
    for _ in range(300):
        live.append(torch.empty(r.choice((512, 4096, 100_000, 3 << 20, 40 << 20)), dtype=torch.uint8, device="cuda"))
        if len(live) > 20:
            live.pop(r.randrange(20))
    optimizer.step()
    del live
    if step == 0:
        begin = time.monotonic()
    time.sleep(max(0, begin + step * length - time.monotonic()))
print(json.dumps({"steps": steps, "sec_after_first_step": time.monotonic() - begin, "error": ""}))
"""


def command(kind, folder, argv):
    if kind == "native":
        return argv
    options = ["--record", folder] if "recorded" in kind else []
    if kind.startswith("native"):
        return [common.cistern_command(), "record", "--max-entries", "0", "-o", folder + "/", "--", *argv]
    return [common.cistern_command(), "run", *options, *(["--history", "1000000"] if "history" in kind else []), "--", *argv]


def measure(kind, argv):
    """CPU time of the program, the time of its steps, and the CPU time and marks of its recorder."""
    with tempfile.TemporaryDirectory(prefix="cistern-cost-") as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = common.run(command(kind, folder, argv), env=common.environment("native" if kind.startswith("native") else "cistern"), timeout=400)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        said = done.last_json()
        if done.rc != 0 or said is None or said.get("error"):
            raise SystemExit(f"{kind}: {done.why()}\n{done.err[-3000:]}")
        found = {"kind": kind, "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
                 "steps": said["steps"], "sec": said["sec_after_first_step"], "own": 0.0, "marks": 0}
        for name in os.listdir(folder):
            if name.endswith(".summary.json"):
                with open(os.path.join(folder, name)) as f:
                    summary = json.load(f)
                found["own"] += summary["spent_us"] / 1e6
                found["marks"] += summary["steps"]
        if ("recorded" in kind) != (found["marks"] > 0):
            raise SystemExit(f"{kind}: {found['marks']} steps are in its summaries\n{done.err[-3000:]}")
        return found


def run_all(work, rounds, kinds):
    checks, results = common.Checks("record-cost"), []
    for name, argv in work:
        runs = [dict(measure(kind, argv), work=name) for _ in range(rounds) for kind in kinds]
        results += runs
        rows = []
        for kind in kinds:
            mine = [r for r in runs if r["kind"] == kind]
            middle = {k: common.median([r[k] for r in mine]) for k in ("cpu", "sec", "own", "marks")}
            steps = mine[0]["steps"]
            rows.append([kind, f"{middle['cpu']:.2f}", f"{1e3 * middle['sec'] / (steps - 1):.1f}"]
                        + ([f"{1e6 * middle['own'] / middle['marks']:.0f}", f"{100 * middle['own'] / middle['sec']:.2f} %"] if middle["marks"] else ["", ""]))
            if middle["marks"] and "history" not in kind:
                share = middle["own"] / middle["sec"]
                checks.add(f"{name}, {kind}: recorder's CPU time over the time of steps", f"{100 * share:.3f} %", "at most 1 %", share <= MOST)
        print(f"\n{name}, the median of {rounds}\n\n" + common.table(["", "CPU time, s", "a step, ms", "recorder a step, µs", "of the step"], rows), flush=True)
    common.write_results("record-cost.jsonl", results)
    print()
    return checks.finish()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workloads", default="gpt2_varlen,detection")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", default=";".join(KINDS), help="of " + "; ".join(KINDS))
    parser.add_argument("--standin", metavar="VERSION", help="over that PyTorch of PyPI, without a GPU")
    args = parser.parse_args()
    kinds = [k.strip() for k in args.kinds.split(";")]
    if args.standin:
        with tempfile.TemporaryDirectory(prefix="cistern-standin-") as folder:
            os.environ.update(standin.environment(args.standin, folder))
            return run_all([("steps of 20 ms", [sys.executable, "-c", PROGRAM])], args.rounds, kinds)
    scripts = common.scripts_folder()
    if scripts is None:
        print("record_cost: no workloads.py: CISTERN_GPU_SCRIPTS names no folder")
        return 2
    script = os.path.join(scripts, "workloads.py")
    return run_all([(n, [sys.executable, script, n, "--steps", str(STEPS[n])]) for n in args.workloads.split(",")], args.rounds, kinds)


if __name__ == "__main__":
    sys.exit(main())
