"""Reports of out-of-memory: whether they name the holders, and whether what they recommend helps.

    python oom.py [--workload gpt2_varlen] [--steps 12] [--most 8] [--cap GiB]

holders    job.py knows what it holds, by function and tag, when it asks for too much: once on Cistern (cistern run
           --report), once under native PyTorch (cistern record). `cistern report` has to say the same.
remedies   A workload under a cap that native PyTorch cannot live with and other settings can, which replays of one
           uncapped run find. It runs out of memory natively, and on Cistern with settings that make it hold more; for both,
           `cistern report --json` recommends, and every setting that it does is tried: the same workload under the
           same cap has to get past the step in which it died.

The runs of a stage go side by side on the GPU, each within its cap. About 3 minutes.
"""
import argparse
import concurrent.futures
import glob
import json
import os
import sys
import time

import seen
from seen import GiB, common

# What makes Cistern hold more than it needs to: segments that never move, free memory that only its own stream and size class
# use, chunks that are seldom free as a whole.
HEAVY = ("backend:malloc", "stages:collect+grow", "chunk:4GiB")
TIMES_LIVE = (1.04, 1.03, 1.06, 1.02, 1.08, 1.10)


def python(script, *arguments):
    return [sys.executable, script, *map(str, arguments)]


def run_on_cistern(argv, conf, report=None, more=()):
    flags = ["--report", report, "--stacks", "python", "--stack-sample", "0"] if report else []
    return [common.cistern_command(), "run", *(["--conf", conf] if conf else []), *flags, *more, "--", *argv]


def record(argv, out):
    return [common.cistern_command(), "record", "-o", out, "--max-entries", "5000000", "--", *argv]


def start(argv, timeout, mode="native", env=None):
    return common.run(argv, env=common.environment(mode, {"PYTHONWARNINGS": "ignore", **(env or {})}), timeout=timeout)


def explain(path, budget):
    """What `cistern report --json` says of the last failure of a file; an error in words otherwise."""
    done = seen.cistern("report", "--json", "--budget", "%ds" % budget, path, timeout=3 * budget + 60)
    if done.rc != 0:
        return None, done.why()
    found = json.loads(done.out).get("reports") or []
    failures = [f for r in found for f in r["failures"]]
    searched = [f for f in failures if f["searched"]]
    return ((searched or failures or [None])[-1], "") if failures else (None, "it tells of no failure")


# ---- holders -------------------------------------------------------------------------------------------------------------

def by_function(shares, names):
    """Bytes of the stacks that go through a function."""
    return {n: sum(s["bytes"] for s in shares or [] if any(n in f for f in [s["name"], *(s.get("frames") or [])])) for n in names}


def holders(c, words, done, path, native, budget):
    knows = done.last_json()
    if not c.add("%s: the program that knows what it holds" % words, "ran out of memory" if knows and knows["error"] else done.why(),
                 "runs out of memory", bool(knows and knows["error"])):
        return
    lines = knows["error"].strip().splitlines()
    print("%s says:\n  %s" % (words, "\n  ".join(lines[:6])))
    if not path:
        c.add("%s: a file for the out-of-memory" % words, "none: " + done.err.strip()[-200:], "one", False)
        return
    report, why = explain(path, budget)
    if not c.add("%s: cistern report" % words, why or "works", "works", report is not None):
        return
    asked = report["requested_bytes"]
    c.add("%s: bytes asked for" % words, asked, knows["asked"], asked == knows["asked"])
    found = by_function(report["held"]["by_stack"], knows["held"])
    c.add("%s: holders by function, MiB" % words, in_mib(found), in_mib(knows["held"]), found == knows["held"])
    if not native:
        tags = {s["name"]: s["bytes"] for s in report["held"]["by_tag"] or [] if s["name"] in knows["tags"]}
        c.add("%s: holders by tag, MiB" % words, in_mib(tags), in_mib(knows["tags"]), tags == knows["tags"])
        c.add("%s: lines of the exception" % words, len(lines), "2 or 3", 2 <= len(lines) <= 3)
        c.add("%s: reclaim stages listed" % words, len(report["steps"] or []), "some", bool(report["steps"]))
        c.add("%s: the process itself among those on the device" % words,
              report["processes_unknown"] or any(p.get("self") for p in report["processes"] or []), "yes, or why not",
              bool(report["processes_unknown"]) or any(p.get("self") for p in report["processes"] or []))


def in_mib(sizes):
    return ", ".join("%s %g" % (k, v / seen.MiB) for k, v in sorted(sizes.items())) or "none"


# ---- a cap under which it matters ---------------------------------------------------------------------------------------

POLICIES = {"native": "torch:default", "expandable": "torch:expandable_segments:True", "cistern": "cistern", **{h: "cistern:" + h for h in HEAVY}}


def completes(path, cap):
    """Which policies finish a recorded run under a cap."""
    done = seen.cistern("replay", "--json", *(w for p in POLICIES.values() for w in ("--policy", p)), "--capacity", "%dMiB" % (cap >> 20), path, timeout=200)
    if done.rc != 0:
        raise RuntimeError(done.why())
    results = json.loads(done.out)["traces"][0]["results"]
    return {name: r["completed"] and r["ooms"] == 0 for name, r in zip(POLICIES, results)}


def cap_for(path, live):
    """The first cap under which the bad ones die and the good ones live, by replay; else what was found of each."""
    tried = []
    for times in TIMES_LIVE:
        cap = int(live * times) >> 20 << 20
        found = completes(path, cap)
        tried.append("%.2f: %s" % (times, ", ".join(n for n, ok in found.items() if ok) or "none"))
        if not found["native"] and found["expandable"] and found["cistern"]:
            return cap, found, tried
    return None, None, tried


# ---- remedies ------------------------------------------------------------------------------------------------------------

def remedy_command(remedy, argv):
    """How the program is started with a remedy, and in which environment; None where it is nothing to set."""
    env = remedy["environment"] or {}
    if remedy["command"].startswith("cistern run"):
        return run_on_cistern(argv, env.get("CISTERN_CONF", "")), "cistern", {}
    if "CISTERN_CONF" in env:
        return run_on_cistern(argv, env["CISTERN_CONF"]), "cistern", {k: v for k, v in env.items() if k != "CISTERN_CONF"}
    if remedy["policy"].startswith("torch") and env:
        return argv, "native", {k: v for k, v in env.items() if v}  # those to unset are not there
    return None, "", {}


def words_of(remedy):
    return " ".join((remedy["title"] or "").split())[:90]


def remedies(c, words, pool, report, script, name, steps, died, cap, most, timeout):
    """Tries every remedy that a report names."""
    c.add("%s: the failure happens in a replay too" % words, report["reproduced"], "true", bool(report["reproduced"]))
    all_ = report["remedies"] or []
    c.add("%s: settings recommended" % words, len(all_), "at least 1", bool(all_))
    planned = [(r, remedy_command(r, python(script, name, "--steps", min(steps, died + 1), "--cap", repr(cap / GiB)))) for r in all_[:most]]
    jobs = [(r, pool.submit(start, argv, timeout, mode, env)) for r, (argv, mode, env) in planned if argv]
    for r, (argv, _, _) in planned:
        if not argv:
            c.add("%s: %s" % (words, words_of(r)), "nothing that can be set here: not tried")
    rows = []
    for r, job in jobs:
        done = job.result()
        got = done.last_json()
        ok = done.rc == 0 and got is not None and got["ok"]
        c.add("%s: %s" % (words, words_of(r)), "survives" if ok else "dies in step %d" % (got["steps"] + 1) if got else done.why(),
              "survives the step in which it died", ok)
        rows.append([words_of(r), r["kind"], common.size(r["peak_reserved_bytes"]), common.size(r["headroom_bytes"]),
                     common.size(got["peak_reserved"]) if got else "?", "survives" if ok else "dies", got["retries"] if got else ""])
    if rows:
        print(common.table(["%s: tried" % words, "kind", "peak by replay", "room by replay", "peak reserved", "", "retries"], rows), flush=True)
    for n in report["not_tried"] or []:
        print("%s: not tried by the report: %s" % (words, n))
    if len(all_) > most:
        print("%s: %d more recommendations were not tried here" % (words, len(all_) - most))


def newest(pattern):
    found = sorted(glob.glob(pattern), key=os.path.getmtime)
    return found[-1] if found else None


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--workload", default="gpt2_varlen")
    p.add_argument("--steps", type=int, default=12)
    p.add_argument("--cap", type=float, help="GiB, in place of what replays find")
    p.add_argument("--most", type=int, default=8, help="recommendations of each report that are tried")
    p.add_argument("--at-once", type=int, default=3)
    p.add_argument("--budget", type=int, default=30, help="seconds for the replays of a report")
    p.add_argument("--only", choices=("holders", "remedies"))
    p.add_argument("--timeout", type=float, default=150, help="seconds for one run")
    args = p.parse_args()
    c, folder, begin = common.Checks("see-oom"), seen.folder("oom"), time.monotonic()
    done = seen.cistern("build-adapter", timeout=300, env=common.environment("native", {"CISTERN_PYTHON": sys.executable}))
    if done.rc != 0:
        c.add("the adapter", done.why(), "can be built", False)
        return seen.finish(c)
    script = None if args.only == "holders" else seen.script("workloads.py", c)
    job = os.path.join(seen.HERE, "job.py")

    def stage(name):
        print("%s: %.0f s so far" % (name, time.monotonic() - begin), flush=True)

    with concurrent.futures.ThreadPoolExecutor(args.at_once) as pool:
        ours = native = None
        if args.only != "remedies":
            ours = pool.submit(start, run_on_cistern(python(job, "--fail"), "limit:4GiB", folder + "/job"), args.timeout, "cistern")
            native = pool.submit(start, record(python(job, "--fail", "--cap", 4), folder + "/job.pickle.gz"), args.timeout)
        if script:
            base = pool.submit(start, record(python(script, args.workload, "--steps", args.steps), folder + "/base.pickle.gz"), args.timeout).result()
            stage("%s without a cap" % args.workload)
            whole = base.last_json()
            if not c.add("%s without a cap" % args.workload, "runs" if whole and whole["ok"] else base.why(), "runs", bool(whole and whole["ok"])):
                script = None
        if ours:
            holders(c, "on Cistern", ours.result(), newest(folder + "/job/oom-*.cistern"), False, args.budget)
            holders(c, "native", native.result(), newest(folder + "/job.oom*.pickle.gz"), True, args.budget)
            stage("holders")
        if script:
            if args.cap:
                cap, heavy = int(args.cap * GiB), HEAVY[0]
            else:
                cap, found, tried = cap_for(folder + "/base.pickle.gz", whole["peak_requested"])
                print("allocators that finish by replay under a cap of so many times what is live: " + "; ".join(tried))
                heavy = next((h for h in HEAVY if found and not found[h]), None)
            stage("the cap")
            if not c.add("a cap that native does not survive and others do", common.size(cap) if cap else "none", "one", bool(cap)):
                return seen.finish(c)
            argv = python(script, args.workload, "--steps", args.steps, "--cap", repr(cap / GiB))
            died = {"native": pool.submit(start, record(argv, folder + "/capped.pickle.gz"), args.timeout)}
            if heavy:
                print("on Cistern it runs with " + heavy)
                died["on Cistern"] = pool.submit(start, run_on_cistern(argv, heavy, folder + "/capped", ("--history", "5000000")), args.timeout, "cistern")
            else:
                c.add("settings with which Cistern does not survive it", "none of " + "; ".join(HEAVY), "one", False)
            died = {words: d.result() for words, d in died.items()}
            stage("runs that die")
            reports = {}
            for words, d in died.items():
                got = d.last_json()
                if not c.add("%s under %s: runs out of memory" % (words, common.size(cap)), "in step %d" % (got["steps"] + 1) if got and not got["ok"] else
                             "no: " + ("it finishes" if got else d.why()), "yes", bool(got and not got["ok"])):
                    continue
                path = newest(folder + ("/capped.oom*.pickle.gz" if words == "native" else "/capped/oom-*.cistern"))
                reports[words] = got["steps"], pool.submit(explain, path, args.budget) if path else None
            for words, (steps, r) in reports.items():
                report, why = r.result() if r else (None, "no file was written")
                stage("the report, %s" % words)
                if c.add("%s: cistern report" % words, why or "%d replays in %.0f s" % (report["replays"], report["took_s"]), "works", report is not None):
                    remedies(c, words, pool, report, script, args.workload, args.steps, steps, cap, args.most, args.timeout)
                    stage("remedies, %s" % words)
    return seen.finish(c)


if __name__ == "__main__":
    sys.exit(main())
