"""What `cistern trace` costs programs that do not use CUDA: under a millisecond for each that starts, no thread, and nothing
that can be distinguished: output and status are as without.

    python idle.py [--times 200]

One traced process starts each program with tracing and without, in turn; of many runs the shortest is compared, as a
machine that does other work as well makes any run longer and none shorter. About 30 s; needs no GPU.
"""
import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time

import seen
from seen import common

THREADS = "import os; print(len(os.listdir('/proc/self/task')))"
RUST = ("uv", "rg", "fd", "bat", "ruff", "cargo", "hyperfine", "pixi")


def programs():
    """Programs by what they are, as far as they are here."""
    found = {"true": ["/bin/true"], "a shell that fails": ["/bin/sh", "-c", "echo out; echo error >&2; exit 3"], "python": [sys.executable, "-S", "-c", THREADS],
             "python -m json.tool": [sys.executable, "-m", "json.tool", "--help"], "go": [common.cistern_command(), "version"]}
    if shutil.which("bash"):
        found["bash"] = [shutil.which("bash"), "-c", "for i in 1 2 3; do (exit $i); done; echo $?"]
    rust = next(filter(None, map(shutil.which, RUST)), None)
    if rust:
        found["rust: " + os.path.basename(rust)] = [rust, "--version"]
    return found


def run(argv, env):
    begin = time.perf_counter()
    done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    return time.perf_counter() - begin, (done.returncode, done.stdout, done.stderr)


def child(times):
    """In the traced process: every program in turn, as it is and with the variables of tracing left out."""
    traced = dict(os.environ)
    plain = {k: v for k, v in traced.items() if k not in ("LD_AUDIT", "CISTERN_AUDIT")}
    if "LD_AUDIT" not in traced:
        raise SystemExit("this process is not traced")
    for name, argv in programs().items():
        walls, said = {"plain": [], "traced": []}, {"plain": set(), "traced": set()}
        n = times if name != "python -m json.tool" else max(3, times // 2)
        for i in range(n + 2):
            for kind, env in (("plain", plain), ("traced", traced)) if i % 2 else (("traced", traced), ("plain", plain)):
                wall, what = run(argv, env)
                if i > 1:
                    walls[kind].append(wall)
                said[kind].add(repr(what))
        seen.answer(name=name, plain=statistics.median(walls["plain"]), traced=statistics.median(walls["traced"]),
                    least=[min(walls["plain"]), min(walls["traced"])], same=len(said["plain"]) == 1 and said["plain"] == said["traced"],
                    said=min(said["traced"])[:100])
    return 0


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--times", type=int, default=200)
    p.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return child(args.child)
    c, rows = common.Checks("see-idle"), []
    done = common.run(seen.traced([sys.executable, os.path.abspath(__file__), "--child", str(args.times)]), env=common.environment("native"), timeout=500)
    found = [r for r in map(as_json, done.out.splitlines()) if r]
    c.add("programs tried", len(found) if done.rc == 0 else done.why(), len(programs()), done.rc == 0 and len(found) == len(programs()))
    for r in found:
        more = 1e3 * (r["least"][1] - r["least"][0])
        rows.append([r["name"], *("%.3f" % (1e3 * v) for v in (r["plain"], r["traced"], *r["least"]))])
        c.add("%s: ms more when traced, shortest of %d runs" % (r["name"], args.times), "%.3f" % more, "less than 1", more < 1)
        c.add("%s: output and status" % r["name"], "the same" if r["same"] else "differ: " + r["said"], "the same", r["same"])
        if r["name"] == "python":
            c.add("python: threads when traced", r["said"].split("'")[1].replace("\\n", ""), "1", "b'1\\n'" in r["said"])
    c.add("nothing of it was seen as CUDA's", "yes" if "no call of the driver" in done.err else done.err.strip()[-200:], "yes", "no call of the driver" in done.err)
    print(common.table(["program", "plain, ms", "traced, ms", "shortest plain", "shortest traced"], rows))
    return seen.finish(c)


def as_json(line):
    import json
    try:
        return json.loads(line)
    except ValueError:
        return None


if __name__ == "__main__":
    sys.exit(main())
