"""Predicted and observed survival: a workload is recorded once without a limit, `cistern tune` and `cistern replay` say from
the recording with which limits it should complete, and the workload is run again with those limits.

    python survival.py record  [--workloads gpt2_varlen,detection]     recordings, into the results folder
    python survival.py predict [--folder FOLDER]                       limits, into limits.json there; needs no GPU
    python survival.py try LIMITS.json [--seconds 300] [--memory 70]  runs with these limits; table and survival.jsonl

Limits are those that tune recommends for PyTorch's default settings, for the best settings and for Cistern, and for the
default settings those at which the odds over 32 draws come nearest to 5, 50 and 95 %. `try` begins every limit once, then
every one a second time, and so on until the time is over. Two runs of a workload need not ask for the same: the peak of
requested bytes, which is in the table where it differs from the recording's, tells.
"""
import argparse
import concurrent.futures
import json
import os
import sys
import time

import common

STEPS = {"gpt2_varlen": 12, "generate_serving": 12, "detection": 12, "multistream_prefetch": 60}
ODDS = (0.05, 0.5, 0.95)
STEP = 2 * common.MiB  # PyTorch gets memory in such pieces
CONTEXT = common.GiB  # what a process has on the GPU beside the allocator's memory, and more
TOGETHER = 8  # runs at a time, at most
LOOKS = 9  # replays for each of ODDS


def workload(name, mode, extra, arguments, timeout=180):
    """One run of a workload under that allocator; its line of JSON."""
    script = os.path.join(common.scripts_folder(), "workloads.py")
    argv = common.command(mode, [sys.executable, script, name, "--steps", str(STEPS[name]), *arguments])
    done = common.run(argv, env=common.environment(mode, extra), timeout=timeout)
    return done.last_json() or {"why": done.why()}


def record(names):
    for name in names:
        result = workload(name, "native", {}, ["--out", os.path.join(common.out_folder(), name + ".pickle.gz")])
        print(name, json.dumps(result), flush=True)
        if not result.get("ok"):
            return 1
    return 0


# ---- predicting ------------------------------------------------------------------------------------------------------

def answer(*arguments):
    """What a command of cistern says of one recording, as JSON."""
    done = common.run([common.cistern_command(), *arguments, "--ndjson"], timeout=900)
    if done.rc != 0:
        raise SystemExit(f"survival.py: cistern {arguments[0]}: {done.why()}")
    return done.last_json()


class Odds:
    """The share of draws in which a recorded run completes at a limit under its own settings."""

    def __init__(self, path):
        self.path, self.known = path, {}

    def at(self, limit):
        if limit not in self.known:
            odds = answer("replay", "--policy", "torch", "--capacity", str(limit), self.path)["results"][0]["odds"]
            self.known[limit] = odds["survived"] / odds["replays"]
        return self.known[limit]

    def nearest(self, wanted, low, high):
        """The limit between two others with odds nearest to those wanted, and its odds: halving, as if odds only rose."""
        for _ in range(LOOKS):
            middle = (low + high) // 2 // STEP * STEP
            if self.at(middle) < wanted:
                low = middle
            else:
                high = middle
        best = min(self.known, key=lambda limit: abs(self.known[limit] - wanted))
        return best, self.known[best]


def predict(folder):
    cells = []
    for name in sorted(STEPS):
        path = os.path.join(folder, name + ".pickle.gz")
        if not os.path.isfile(path):
            print(f"{name}: no recording in {folder}")
            continue
        tuned = answer("tune", "--budget", "5m", path)
        peak = tuned["peak_live_bytes"]
        floors = {f["who"]: f for f in tuned["floors"]}
        for who, floor in floors.items():
            odds = floor["odds"]
            cells.append({"workload": name, "who": who, "policy": floor["policy"], "conf": floor["alloc_conf"], "limit": floor["capacity_bytes"],
                          "peak": peak, "predicted": odds["survived"] / odds["replays"]})
        odds = Odds(path)
        for wanted in ODDS:
            limit, share = odds.nearest(wanted, peak, floors["own"]["capacity_bytes"])
            cells.append({"workload": name, "who": f"{wanted:.0%}", "policy": "torch", "conf": "", "limit": limit, "peak": peak, "predicted": share})
        print(common.table(["workload", "limit of", "settings", "GiB", "predicted"], [
            [c["workload"], c["who"], c["conf"] or c["policy"], f"{c['limit'] / common.GiB:.3f}", f"{c['predicted']:.0%}"]
            for c in cells if c["workload"] == name]), flush=True)
    with open(os.path.join(folder, "limits.json"), "w") as f:
        json.dump(cells, f, indent=1)
    return 0 if cells else 1


# ---- trying ----------------------------------------------------------------------------------------------------------

def attempt(cell):
    mode = "cistern" if cell["policy"] == "cistern" else "native"
    extra = {"PYTORCH_ALLOC_CONF": cell["conf"]} if mode == "native" and cell["conf"] else {}
    return workload(cell["workload"], mode, extra, ["--cap", repr(cell["limit"] / common.GiB)])


def startable(cells, free):
    """The cell with the fewest runs that the free memory can take; none that is two runs ahead of another, since small ones
    would leave no room for large ones."""
    least = min(cell["begun"] for cell in cells)
    fit = [cell for cell in cells if cell["begun"] <= least + 1 and cell["limit"] + CONTEXT <= free]
    return min(fit, key=lambda cell: cell["begun"], default=None)


def tries(cells, seconds, memory):
    """Every cell again and again until the time is over; (cell, result) as they end. Runs go on side by side as far as their
    limits fit into the memory, so that only a limit can fail one."""
    end = time.monotonic() + seconds
    with concurrent.futures.ThreadPoolExecutor(TOGETHER) as pool:
        running = {}
        while running or time.monotonic() < end:
            while len(running) < TOGETHER and time.monotonic() < end:
                cell = startable(cells, memory - sum(c["limit"] + CONTEXT for c in running.values()))
                if cell is None:
                    break
                cell["begun"] += 1
                running[pool.submit(attempt, cell)] = cell
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for run in done:
                yield running.pop(run), run.result()


def try_all(path, seconds, memory):
    with open(path) as f:
        cells = json.load(f)
    large = [cell["workload"] for cell in cells if cell["limit"] + CONTEXT > memory]
    if large:
        raise SystemExit(f"survival.py: limits of {', '.join(sorted(set(large)))} do not fit into --memory {memory / common.GiB:g}")
    for cell in cells:
        cell.update(begun=0, ran=0, survived=0, failed=[], peaks=[])
    for cell, result in tries(cells, seconds, memory):
        if "ok" not in result:
            cell["failed"].append(result["why"])
            continue
        cell["ran"] += 1
        cell["survived"] += result["ok"]
        cell["peaks"].append(result["peak_requested"])
    print(common.table(["workload", "limit of", "settings", "GiB", "predicted", "observed", "runs", "requested beside the recording's"], [
        [c["workload"], c["who"], c["conf"] or c["policy"], f"{c['limit'] / common.GiB:.3f}", f"{c['predicted']:.0%}",
         f"{c['survived'] / c['ran']:.0%}" if c["ran"] else "", c["ran"], other(c)] for c in cells]))
    for c in cells:
        for why in c["failed"]:
            print(f"{c['workload']}, {c['who']}: {why}")
    common.write_results("survival.jsonl", cells)
    return 1 if any(c["failed"] or not c["ran"] for c in cells) else 0


def other(cell):
    """How much more or less than the recorded run the runs asked for, where they did."""
    if not cell["peaks"]:
        return ""
    low, high = ((p - cell["peak"]) / common.MiB for p in (min(cell["peaks"]), max(cell["peaks"])))
    return "" if max(abs(low), abs(high)) < 1 else f"{low:+.0f} to {high:+.0f} MiB"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(dest="what", required=True)
    p = sub.add_parser("record")
    p.add_argument("--workloads", default=",".join(STEPS))
    p = sub.add_parser("predict")
    p.add_argument("--folder", default=common.out_folder())
    p = sub.add_parser("try")
    p.add_argument("limits")
    p.add_argument("--seconds", type=float, default=300)
    p.add_argument("--memory", type=float, default=70, help="GiB of the GPU that the runs may have together")
    a = parser.parse_args()
    if a.what == "record":
        return record(a.workloads.split(","))
    if a.what == "predict":
        return predict(a.folder)
    return try_all(a.limits, a.seconds, int(a.memory * common.GiB))


if __name__ == "__main__":
    sys.exit(main())
