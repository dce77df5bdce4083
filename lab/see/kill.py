"""A traced program that is killed by SIGKILL at any moment, a hundred times: each time there is a file that can be read,
and it has every call that the program had written down itself, and no other but the one that each thread was in.

    python kill.py [--times 100] [--at-once 4] [--seed N]

In a quarter of the cases the tracer is killed too, before the program: what it had written by then, up to a second
earlier, is there. The program is churn.c. About 60 s on one GPU.
"""
import argparse
import concurrent.futures
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time

import seen
from seen import common

HEAD, ENTRY, ENTRIES, THREADS = struct.Struct("=IIQ48x"), struct.Struct("=IiQQQ"), 1 << 15, 2
OPS = {1: "cuMemAlloc", 2: "cuMemFree", 3: "cuMemCreate", 4: "cuMemMap", 5: "cuMemUnmap", 6: "cuMemRelease"}
WRITTEN_EVERY = 1.0  # seconds; the tracer writes ten times as often


def program():
    """churn: beside this folder in the bundle, else compiled."""
    there = os.path.join(seen.HERE, "../churn")
    if os.access(there, os.X_OK):
        return os.path.realpath(there)
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise SystemExit("see-kill: there is no churn in the bundle, and no C compiler")
    out = os.path.join(common.build_folder(), "churn")
    done = common.run([compiler, "-std=gnu11", "-O2", "-pthread", os.path.join(seen.HERE, "churn.c"), "-o", out, "-ldl"], timeout=60)
    if done.rc != 0:
        raise SystemExit("see-kill: churn.c does not compile: " + done.why())
    return out


def logs(path):
    """For each thread of the program: its number and what it wrote down, (function, result, address, size, ns)."""
    with open(path, "rb") as f:
        data = f.read()
    found, size = [], HEAD.size + ENTRIES * ENTRY.size
    for n in range(len(data) // size):
        _, tid, count = HEAD.unpack_from(data, n * size)
        entries = [ENTRY.unpack_from(data, n * size + HEAD.size + i * ENTRY.size) for i in range(count)]
        found.append((tid, [(OPS[op], result, address, length, ns) for op, result, address, length, ns in entries]))
    return found


def counts(path):
    """The program's number and how many calls each thread has written down, without reading all."""
    found, pid = [], 0
    try:
        with open(path, "rb") as f:
            for n in range(THREADS):
                f.seek(n * (HEAD.size + ENTRIES * ENTRY.size))
                head = f.read(HEAD.size)
                if len(head) < HEAD.size:
                    return 0, []
                pid, _, count = HEAD.unpack(head)
                found.append(count)
    except FileNotFoundError:
        pass
    return pid, found


def disagreement(path, calls, killed_at, whole):
    """What of the program's own log is not in the trace, or the other way round; "" where nothing."""
    for tid, entries in logs(path):
        mine = [q for q in calls if q.thread == tid and q.name in OPS.values()]
        for i, (name, result, address, size, ns) in enumerate(entries):
            if i == len(mine):
                if whole or (killed_at - ns) / 1e9 > WRITTEN_EVERY:
                    return "of %d calls the trace has %d; the next ended %.3f s before the kill" % (len(entries), i, (killed_at - ns) / 1e9)
                break
            q = mine[i]
            if (q.name, q.result) != (name, result) or result == 0 and (
                    address and q.address != address or name in ("cuMemAlloc", "cuMemCreate", "cuMemMap") and q.size != size):
                return "call %d is %s(%#x, %d) = %d by the program, %s(%#x, %d) = %d in the trace" % (
                    i, name, address, size, result, q.name, q.address, q.size, q.result)
        if len(mine) > len(entries) + 1:
            return "the trace has %d calls, the program made %d or one more" % (len(mine), len(entries))
    return ""


def once(n, churn, folder, wait, tracer_too, timeout=60):
    """Traces, kills, reads: {"calls", "seconds", "wrong"}."""
    log, out = os.path.join(folder, "%d.log" % n), os.path.join(folder, "%d.cistern" % n)
    tracer = subprocess.Popen(seen.traced([churn, log], out), env=common.environment("native"), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, start_new_session=True)
    try:
        end, pid, made = time.monotonic() + timeout, 0, []
        while not made or not all(made):
            pid, made = counts(log)
            if time.monotonic() > end or tracer.poll() is not None:
                tracer.kill()
                return {"wrong": "the program did not begin: " + tracer.communicate()[1].decode(errors="replace").strip()[-300:]}
            time.sleep(0.002)
        time.sleep(wait)
        killed_at = time.time_ns()
        if tracer_too:
            tracer.kill()
            tracer.wait()
        os.kill(pid, signal.SIGKILL)
        words = tracer.communicate(timeout=timeout)[1].decode(errors="replace")
        wrong = ""
        if not tracer_too and tracer.returncode != 128 + signal.SIGKILL:
            wrong = "the status of cistern trace is %d, wanted 137: %s" % (tracer.returncode, words.strip()[-200:])
        try:
            calls = seen.calls(out)
        except RuntimeError as e:
            return {"wrong": "the file cannot be read: %s" % e}
        return {"wrong": wrong or disagreement(log, calls, killed_at, not tracer_too), "calls": len(calls), "wait": wait, "tracer": tracer_too}
    finally:
        common.end_session(tracer)
        for path in (log, out):
            if os.path.exists(path):
                os.unlink(path)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--times", type=int, default=100)
    p.add_argument("--at-once", type=int, default=4)
    p.add_argument("--longest", type=float, default=0.4, help="seconds after its first calls by which a program is killed")
    p.add_argument("--seed", type=int, default=int(time.time()))
    args = p.parse_args()
    c, churn, folder = common.Checks("see-kill"), program(), seen.folder("kill")
    rng = random.Random(args.seed)
    print("seed %d" % args.seed)
    jobs = [(n, churn, folder, rng.random() * args.longest, n % 4 == 3) for n in range(args.times)]
    with concurrent.futures.ThreadPoolExecutor(args.at_once) as pool:
        found = list(pool.map(lambda j: once(*j), jobs))
    os.rmdir(folder)
    read = [f for f in found if "calls" in f]
    wrong = [f["wrong"] for f in found if f["wrong"]]
    c.add("killed, and a file that can be read", len(read), args.times, len(read) == args.times)
    c.add("where the trace agrees with the program's own log", args.times - len(wrong), args.times, not wrong)
    for words in wrong[:5]:
        print(words)
    if read:
        sizes = sorted(f["calls"] for f in read)
        c.add("calls in a file: least, median, most", "%d, %d, %d" % (sizes[0], sizes[len(sizes) // 2], sizes[-1]))
    return seen.finish(c)


if __name__ == "__main__":
    sys.exit(main())
