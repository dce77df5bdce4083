"""What one allocation and free costs the host, by bench_alloc.py, under native PyTorch, expandable_segments and Cistern,
interleaved; medians and ratios.

    python alloc_bench.py [--runs 3] [--modes native,expandable,cistern]
"""
import argparse
import json
import os
import shutil
import sys
import time

import common

# figure: (in words, at most so many times native's)
WANTED = {"pair_512": ("pair, 512 B", 0.8), "pair_1048576": ("pair, 1 MiB", 0.8), "pair_20971520": ("pair, 20 MiB", 0.8),
          "churn_2000": ("churn, 2,000 live", 0.6), "churn_20000": ("churn, 20,000 live", 0.6), "threads_4": ("four threads, 1 MiB", 0.5),
          "sparse_alloc_300us": ("one after a pause of 300 us", None), "python_empty": ("Python torch.empty(1024)", None)}


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--runs", type=int, default=3)
    p.add_argument("--modes", default=",".join(common.MODES))
    p.add_argument("--budget", type=float, default=500)
    args = p.parse_args()
    modes = [m for m in args.modes.split(",") if m]
    if set(modes) - set(common.MODES):
        p.error(f"unknown mode: choose among {', '.join(common.MODES)}")
    folder = common.scripts_folder()
    script = folder and os.path.join(folder, "bench_alloc.py")
    if not script or not os.path.isfile(script):
        print("alloc_bench: skipped, there is no bench_alloc.py: CISTERN_GPU_SCRIPTS names its folder")
        return 0
    build = os.path.join(common.build_folder(), "bench_alloc")
    os.makedirs(build, exist_ok=True)
    lock = os.path.join(build, "lock")
    if os.path.exists(lock):  # of a build that was killed; torch would wait for it for ever
        os.unlink(lock)
    checks, rows, begin = common.Checks("alloc_bench"), {m: [] for m in modes}, time.monotonic()
    extra = {"BENCH_BUILD_DIR": build}
    if not shutil.which("ninja"):
        extra["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
    for run in range(args.runs):
        for mode in [*modes[run % len(modes):], *modes[:run % len(modes)]]:
            if time.monotonic() - begin > args.budget:
                print(f"{mode} run {run}: not begun, no time was left")
                continue
            argv = common.command(mode, [sys.executable, script, mode])
            done = common.run(argv, env=common.environment(mode, extra), timeout=240 if run == 0 else 90)
            r = done.last_json()
            if r is None or done.rc != 0:
                print(f"{mode} run {run}: FAILED, {done.why()}\n{done.err[-2000:]}", flush=True)
                checks.add(f"{mode}, run {run}", done.why(), "runs", False)
                continue
            rows[mode].append(r)
            print(json.dumps(r), flush=True)
    common.write_results("alloc_bench.jsonl", [dict(r, mode=m) for m in modes for r in rows[m]])
    medians = {m: {k: common.median([r[k] for r in rows[m]]) for k in WANTED} for m in modes if rows[m]}
    print(common.table(["nanoseconds, median", *medians, *(f"{m}/native" for m in medians if m != "native" and "native" in medians)],
                       [[WANTED[k][0], *(f"{medians[m][k]:.0f}" for m in medians),
                         *(f"{medians[m][k] / medians['native'][k]:.2f}" for m in medians if m != "native" and "native" in medians)] for k in WANTED]))
    if "cistern" in medians and "native" in medians:
        for k, (words, limit) in WANTED.items():
            ratio = medians["cistern"][k] / medians["native"][k]
            checks.add(f"{words}, over native's", f"{ratio:.2f}", f"at most {limit}" if limit else "", ratio <= limit if limit else None)
    return checks.finish()


if __name__ == "__main__":
    sys.exit(main())
