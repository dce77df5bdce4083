"""The workloads of workloads.py under native PyTorch and Cistern, interleaved: losses, memory, time; then under
expandable_segments, and Cistern once more with little more memory than native's peak requested.

    python workloads_bench.py [--runs 5] [--workloads gpt2_varlen,detection] [--modes native,cistern] [--budget 500]
    python workloads_bench.py --merge FILE...     the tables of runs that were made before, no run

Memory of a run is the larger of Cistern's peak of reserved bytes and the process's own use of the device less its
context, over native's peak of requested bytes for that seed. The context is what a process holds beside the allocator's
memory: measured under native PyTorch at the end of the same work (its use of the device less what it has reserved there),
so that the code which libraries load is in it; the context before any work is in the table too.
"""
import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time

import common

STEPS = {"gpt2_varlen": 40, "generate_serving": 20, "detection": 40, "multistream_prefetch": 200}
CAP = 1.02


class Sampler(threading.Thread):
    """The most that all processes on the device used together, every few milliseconds."""

    def __init__(self, pids):
        super().__init__(daemon=True)
        self.pids, self.peak, self.samples, self.ended = pids, 0, 0, threading.Event()

    def run(self):
        while not self.ended.wait(0.005):
            found = common.device_processes()
            if found:
                # Numbers of another process namespace than ours say nothing: then all that there are, on a device that is ours.
                mine = [v for p, v in found.items() if p in self.pids] or list(found.values())
                self.peak, self.samples = max(self.peak, sum(mine)), self.samples + 1

    def end(self):
        self.ended.set()
        self.join()
        return self.peak if self.samples and self.peak else None


class Waiting:
    """A process that has imported what it needs and waits at its gate."""

    def __init__(self, script, name, mode):
        self.name, self.mode, self.lines, self.ready = name, mode, [], threading.Event()
        argv = common.command(mode, [sys.executable, os.path.join(common.HERE, "gate.py"), script, name])
        self.errors = open(os.path.join(common.out_folder(), f".gate-{os.getpid()}-{id(self)}"), "w+b")
        self.process = subprocess.Popen(argv, env=common.environment(mode), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
                                        text=True, start_new_session=True)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if line.startswith("READY"):
                self.ready.set()
        self.ready.set()

    def wait(self, timeout):
        return self.ready.wait(timeout) and "READY" in self.lines

    def go(self, argv, timeout):
        """Lets it work and returns what it measured; {"why": …} when it did not end well."""
        sampler = Sampler(common.descendants(self.process.pid))
        sampler.start()
        begin = time.monotonic()
        try:
            self.process.stdin.write(json.dumps({"argv": argv}) + "\n")
            self.process.stdin.close()
            rc = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            rc = None
        except OSError:
            rc = self.process.wait(10)
        peak, wall = sampler.end(), time.monotonic() - begin
        self.reader.join(10)
        result = {"rc": rc, "wall": round(wall, 2), "device_peak": peak}
        for line in self.lines:
            for word in ("CONTEXT", "END"):
                if line.startswith(word + " "):
                    result[word.lower()] = json.loads(line[len(word) + 1:])
            if line.startswith("{"):
                result.update(json.loads(line))
        if rc != 0 or "end" not in result:
            self.errors.seek(0)
            words = self.errors.read().decode(errors="replace").strip()
            result["why"] = f"status {rc}" if rc is not None else f"did not end within {timeout:.0f} s"
            result["tail"] = words[-3000:]
            result["why"] += ": " + (words.splitlines() or ["no words"])[-1][:200]
        return result

    def drop(self):
        common.end_session(self.process)
        self.errors.close()
        os.unlink(self.errors.name)


def batch(script, name, plan, run, peak_requested, steps, timeout, end):
    """Runs of a workload one after the other, (mode, capped) each, whose processes import at the same time. Nothing is
    begun after the end, and nothing lasts a minute longer."""
    waiting = [Waiting(script, name, m) for m, _ in plan]
    try:
        deadline = time.monotonic() + 180
        for w in waiting:
            if not w.wait(max(1, deadline - time.monotonic())):
                print(f"{name}: a process under {w.mode} did not get ready", flush=True)
        for (mode, cap), w in zip(plan, waiting):
            left = end - time.monotonic()
            argv = [name, "--steps", str(steps)]
            row = {"workload": name, "mode": mode, "run": run, "steps_wanted": steps, "cap": None}
            if left <= 0 or cap and not peak_requested:
                print(f"{name} {mode}{' capped' if cap else ''} run {run}: not begun, " +
                      ("no time was left" if left <= 0 else "native's peak is not known"), flush=True)
                continue
            if cap:
                row["cap"] = CAP * peak_requested
                argv += ["--cap", repr(row["cap"] / common.GiB)]
            row.update(w.go(argv, min(timeout, left + 60)))
            say(row)
            yield row
    finally:
        for w in waiting:
            w.drop()


def turned(modes, run):
    """The modes in another order each time, so that none is always the first; those next to each other stay so."""
    return [*modes[run % len(modes):], *modes[:run % len(modes)]]


def batches(names, modes, runs, capped_runs, expandable_runs):
    """What is run, most important first: native and Cistern in turn, then Cistern capped and expandable_segments."""
    main = [m for m in modes if m != "expandable"]
    for run in range(runs if main else 0):
        for name in names:
            yield name, run, [(m, False) for m in turned(main, run)]
    for run in range(max(capped_runs, expandable_runs)):
        for name in names:
            plan = [("cistern", True)] if "cistern" in modes and run < capped_runs else []
            plan += [("expandable", False)] if "expandable" in modes and run < expandable_runs else []
            if plan:
                yield name, run, plan


def say(r):
    if r.get("why"):
        print(f"{r['workload']} {r['mode']}{' capped' if r['cap'] else ''} run {r['run']}: FAILED, {r['why']}", flush=True)
        return
    print(f"{r['workload']} {r['mode']}{' capped' if r['cap'] else ''} run {r['run']}: {r['sec_after_first_step']} s, requested {r['peak_requested'] / 1e9:.3f} GB, "
          f"reserved {r['peak_reserved'] / 1e9:.3f} GB, device {common.size(r['device_peak'])}, steps {r['steps']}, retries {r['retries']}"
          + (f", error {r['error'][:120]}" if r["error"] else ""), flush=True)


# ---- judging ---------------------------------------------------------------------------------------------------------

def whole(r):
    return not r.get("why") and r.get("ok") and r["steps"] == r["steps_wanted"]


def beside(r):
    """What the process held at its end beside the allocator's memory."""
    own = r["end"]["own"] or r["end"]["taken"]
    return own - r["end"]["reserved"]


def losses_fit(native, rows):
    """Whether each of the last losses lies within native's own spread, widened by its width on each side. With one run
    of native a spread is not known: then only equal losses are an answer."""
    columns = list(zip(*(r["losses"] for r in native)))
    verdicts = []
    for r in rows:
        for column, x in zip(columns, r["losses"]):
            low, high = min(column), max(column)
            width = high - low
            verdicts.append(low - width <= x <= high + width)
    if not verdicts:
        return None
    return True if all(verdicts) else None if len(native) < 3 else False


def judge(rows, checks):
    table = []
    for name in [n for n in STEPS if any(r["workload"] == n for r in rows)]:
        mine = [r for r in rows if r["workload"] == name]
        by = {m: [r for r in mine if r["mode"] == m and not r["cap"]] for m in common.MODES}
        capped = [r for r in mine if r["cap"]]
        native = [r for r in by["native"] if whole(r)]
        if not native:
            checks.add(f"{name}: native", (by["native"] or [{"why": "no run"}])[0].get("why", "did not finish"), "runs", False)
            continue
        requested = max(r["peak_requested"] for r in native)
        seconds = common.median([r["sec_after_first_step"] for r in native])
        context = common.median([beside(r) for r in native])
        for mode in common.MODES:
            for what, found in ((mode, by[mode]), (f"{mode} capped", capped if mode == "cistern" else [])):
                if not found:
                    continue
                good = [r for r in found if whole(r)]
                if not good:
                    table.append([name, what, f"0/{len(found)}", *[""] * 7])
                    continue
                sec = common.median([r["sec_after_first_step"] for r in good])
                reserved = max(r["peak_reserved"] for r in good)
                device = [r["device_peak"] - context for r in good if r["device_peak"]]
                strict = [r["device_peak"] - r["context"]["own"] for r in good if r["device_peak"] and r["context"]["own"]]
                table.append([name, what, f"{len(good)}/{len(found)}", f"{reserved / requested:.4f}", f"{max(device) / requested:.4f}" if device else "?",
                              f"{max(strict) / requested:.4f}" if strict else "?", f"{sec:.3f}", f"{sec / seconds:.4f}",
                              max(r["retries"] for r in good), max(r["device_allocs"] for r in good)])
        cistern = [r for r in by["cistern"] if whole(r)]
        if by["cistern"]:
            checks.add(f"{name}: runs that finish", f"{len(cistern)} of {len(by['cistern'])}", "all", len(cistern) == len(by["cistern"]))
        if cistern:
            fit = losses_fit(native, cistern)
            checks.add(f"{name}: last losses", {True: "within native's spread", False: "outside of native's spread", None: "differ; native's spread is not known"}[fit],
                       f"within the spread of {len(native)} native runs", fit)
            reserved = max(r["peak_reserved"] for r in cistern)
            device = [r["device_peak"] - context for r in cistern if r["device_peak"]]
            ratio = max([reserved, *device]) / requested
            checks.add(f"{name}: memory over native's peak requested" + ("" if device else " (reserved only: no figure of the device)"), f"{ratio:.4f}", "at most 1.03",
                       ratio <= 1.03 if device or ratio > 1.03 else None)
            time_ratio = common.median([r["sec_after_first_step"] for r in cistern]) / seconds
            checks.add(f"{name}: time over native's, median of {len(cistern)}", f"{time_ratio:.4f}", "at most 1.02", time_ratio <= 1.02)
        if capped:
            good = [r for r in capped if whole(r)]
            checks.add(f"{name}: capped at {CAP} x requested, runs that finish", f"{len(good)} of {len(capped)}", "all", len(good) == len(capped))
            if good:
                ratio = common.median([r["sec_after_first_step"] for r in good]) / seconds
                checks.add(f"{name}: capped, time over native's uncapped", f"{ratio:.4f}", "at most 1.03", ratio <= 1.03)
                fit = losses_fit(native, good)
                checks.add(f"{name}: capped, last losses", {True: "within", False: "outside", None: "differ; spread not known"}[fit], "within native's spread", fit)
    print(common.table(["workload", "allocator", "whole", "reserved/req", "device/req", "less first context", "sec", "over native", "retries", "device allocs"], table))
    print("device/req: the process's peak use of the device less what native holds beside its allocator at the end, over native's peak requested")


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--runs", type=int, default=5)
    p.add_argument("--workloads", default=",".join(STEPS), help="names joined by commas")
    p.add_argument("--modes", default=",".join(common.MODES))
    p.add_argument("--expandable-runs", type=int, default=None, help="runs under expandable_segments (default as many)")
    p.add_argument("--capped-runs", "--cap-runs", type=int, default=None, help="capped runs (default as many)")
    p.add_argument("--steps", type=int, default=None, help="other than the table's, for a quick look")
    p.add_argument("--budget", type=float, default=500, help="seconds after which nothing is begun")
    p.add_argument("--timeout", type=float, default=150, help="seconds for one run")
    p.add_argument("--merge", nargs="+", metavar="FILE", help="workloads.jsonl of earlier calls: only tables")
    args = p.parse_args()
    checks, rows = common.Checks("workloads"), []
    if args.merge:
        for path in args.merge:
            with open(path) as f:
                rows += [json.loads(line) for line in f]
        judge(rows, checks)
        return checks.finish()
    names = [n for n in args.workloads.split(",") if n]
    if set(names) - set(STEPS):
        p.error(f"unknown workload {sorted(set(names) - set(STEPS))}: choose among {', '.join(STEPS)}")
    modes = [m for m in args.modes.split(",") if m]
    if set(modes) - set(common.MODES):
        p.error(f"unknown mode: choose among {', '.join(common.MODES)}")
    folder = common.scripts_folder()
    script = folder and os.path.join(folder, "workloads.py")
    if not script or not os.path.isfile(script):
        print("workloads: skipped, there is no workloads.py: CISTERN_GPU_SCRIPTS names its folder")
        return 0
    # Where this is ended for its time there are still the tables of what was run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    end, peak = time.monotonic() + args.budget, {}
    path = os.path.join(common.out_folder(), "workloads.jsonl")
    capped, expandable = (args.runs if n is None else n for n in (args.capped_runs, args.expandable_runs))
    try:
        with open(path, "a") as f:
            for name, run, plan in batches(names, modes, args.runs, capped, expandable):
                if time.monotonic() > end:
                    print(f"{name} run {run}: not begun, no time was left", flush=True)
                    continue
                for row in batch(script, name, plan, run, peak.get(name), args.steps or STEPS[name], args.timeout, end):
                    rows.append(row)
                    f.write(json.dumps(row) + "\n")
                    f.flush()
                    if row["mode"] == "native" and whole(row):
                        peak[name] = max(peak.get(name, 0), row["peak_requested"])
    except SystemExit as e:
        print(e, flush=True)
    judge(rows, checks)
    return checks.finish()


if __name__ == "__main__":
    sys.exit(main())
