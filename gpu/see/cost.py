"""What tracing, and attribution, cost a program that works.

    python cost.py [--workloads …] [--rounds 2] [--kinds plain,traced,stacks,pystacks]
    python cost.py --kinds cistern,history,native,python,both,sampled     Cistern's own history and stacks, for information

The same work is done by several processes at once, a few steps of one at a time while the others rest: without tracing,
traced, traced with native stacks, and, for information, with Python's too. So all work under the same clocks, temperature and neighbours, and a difference of
one in a hundred can be seen although whole runs, one after the other, differ by ten. Each round has new processes. Of the
rounds' times for the same steps the shortest counts; their sums are compared. The first steps, in which the allocator gets its
memory, are in it; importing PyTorch and the start of CUDA are not, and are looked at apart.

About a minute for each workload with two rounds of four kinds.
"""
import argparse
import os
import sys
import time

import seen
from seen import common

# Steps in all, and at a time.
STEPS = {"gpt2_varlen": (16, 2), "generate_serving": (8, 1), "detection": (14, 2), "multistream_prefetch": (40, 4)}
BAR = 1.01

# How a kind is started: flags of trace, or settings of Cistern's.
TRACED = {"plain": None, "traced": (), "stacks": ("--stacks=native",), "pystacks": ("--stacks=native+python",)}
HELD = {"cistern": "", "history": "history:1000000", "native": "history:1000000,stacks:native", "python": "history:1000000,stacks:python",
        "both": "history:1000000,stacks:native+python", "sampled": "history:1000000,stacks:native+python,stack_sample:1MiB"}
JUDGED = ("traced", "stacks")


def child(script, name, share):
    """Answers to "begin", and to a number of steps, with the seconds that they took."""
    import gate
    gate.prepare(name)
    import runpy
    import torch
    workloads = runpy.run_path(script, run_name="workloads")["WORKLOADS"]
    seen.answer(ready=True)
    work = None
    for line in sys.stdin:
        if line.strip() == "begin":
            begin = time.perf_counter()
            torch.cuda.set_per_process_memory_fraction(share)
            torch.empty(1, device="cuda")
            torch.cuda.synchronize()
            common.require_cistern()
            work = workloads[name](1 << 30, 1)
            seen.answer(seconds=time.perf_counter() - begin)
            continue
        begin = time.perf_counter()
        for _ in range(int(line)):
            float(next(work))
        torch.cuda.synchronize()
        seen.answer(seconds=time.perf_counter() - begin, retries=torch.cuda.memory_stats().get("num_alloc_retries", 0))
    return 0


class One:
    """A process of one kind that does the work."""

    def __init__(self, script, name, kind, share, folder, n):
        argv = [sys.executable, os.path.abspath(__file__), "--child", script, name, repr(share)]
        if kind in HELD:
            argv, mode = common.command("cistern", argv, HELD[kind]), "cistern"
        else:
            mode = "native"
            if TRACED[kind] is not None:
                argv = seen.traced(argv, os.path.join(folder, "%s-%s-%d.cistern" % (name, kind, n)), TRACED[kind])
        self.kind, self.times, self.start, self.retries = kind, [], None, 0
        self.talker = seen.Talker(argv, common.environment(mode, {"PYTHONWARNINGS": "ignore"}))

    def ask(self, what, timeout):
        found = self.talker.ask(what, timeout)
        if found is None:
            raise RuntimeError("%s: %s" % (self.kind, self.talker.why()))
        return found


def measure(script, name, kinds, rounds, share, steps, timeout):
    """For each kind a list for each round of the seconds of each chunk; and what starting CUDA took."""
    folder, (total, chunk) = seen.folder("cost"), steps
    times, starts, retries = {k: [] for k in kinds}, {k: [] for k in kinds}, 0
    waiting = [[One(script, name, k, share, folder, n) for k in kinds] for n in range(rounds)]
    try:
        deadline = time.monotonic() + 240
        for one in (o for r in waiting for o in r):
            if one.talker.answer(max(1, deadline - time.monotonic())) is None:
                raise RuntimeError("%s: %s" % (one.kind, one.talker.why()))
        for n, round_ in enumerate(waiting):
            for one in round_:
                starts[one.kind].append(one.ask("begin", timeout)["seconds"])
            for i in range(total // chunk):
                k = (i + n) % len(round_)
                for one in round_[k:] + round_[:k]:
                    found = one.ask(str(chunk), timeout)
                    one.times.append(found["seconds"])
                    retries += found["retries"] if i == total // chunk - 1 else 0
            for one in round_:
                times[one.kind].append(one.times)
                rc = one.talker.end(60)
                if rc != 0:
                    raise RuntimeError("%s: %s" % (one.kind, one.talker.why()))
    finally:
        for one in (o for r in waiting for o in r):
            if one.talker.process.poll() is None:
                one.talker.end(1)
    return times, starts, retries


def least(rounds):
    """Of each chunk the shortest time of all rounds."""
    return [min(column) for column in zip(*rounds)]


def spread(rounds):
    """How far the rounds of one kind are apart, as the median over the chunks of longest over shortest, less one."""
    return common.median([max(column) / min(column) - 1 for column in zip(*rounds)]) if len(rounds) > 1 else None


def judge(c, name, kinds, times, starts, retries, rows):
    base = least(times[kinds[0]])
    for kind in kinds:
        mine = least(times[kind])
        ratio, steady = sum(mine) / sum(base), common.median([a / b for a, b in zip(mine, base)])
        apart = spread(times[kind])
        rows.append([name, kind, "%.3f" % sum(mine), "%.4f" % ratio, "%.4f" % steady, "?" if apart is None else "%.1f %%" % (100 * apart),
                     "%.2f" % common.median(starts[kind]), retries])
        if kind == kinds[0]:
            continue
        got = "%+.2f %% (the median of equal steps %+.2f %%)" % (100 * (ratio - 1), 100 * (steady - 1))
        if kind in JUDGED:
            c.add("%s, %s: time over %s" % (name, kind, kinds[0]), got, "at most +1 %", ratio <= BAR)
        else:
            c.add("%s, %s: time over %s" % (name, kind, kinds[0]), got)


def starting(c, times):
    """What tracing adds to a program that imports PyTorch and starts CUDA, for information."""
    code = "import torch; torch.empty(1, device='cuda'); torch.cuda.synchronize()"
    argv, env = [sys.executable, "-c", code], common.environment("native")
    walls = {"plain": [], "traced": []}
    for n in range(times + 1):
        for kind in ("plain", "traced") if n % 2 else ("traced", "plain"):
            done = common.run(seen.traced(argv) if kind == "traced" else argv, env=env, timeout=120)
            if done.rc != 0:
                c.add("starting PyTorch and CUDA, %s" % kind, done.why(), "works", False)
                return
            if n:  # the first brings files into memory
                walls[kind].append(done.wall)
    plain, traced = (common.median(walls[k]) for k in ("plain", "traced"))
    c.add("starting PyTorch and CUDA: seconds, traced", "%.2f, %.2f" % (plain, traced))


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--workloads", default=",".join(STEPS))
    p.add_argument("--kinds", default="plain,traced,stacks,pystacks", help="the first is what the others are compared with; of %s" % ", ".join([*TRACED, *HELD]))
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--starts", type=int, default=3, help="how often PyTorch is started with and without; 0: not")
    p.add_argument("--steps", type=int, help="other than the table's")
    p.add_argument("--name", default="see-cost")
    p.add_argument("--timeout", type=float, default=120, help="seconds for one piece of work")
    p.add_argument("--budget", type=float, default=480, help="seconds after which no workload is begun")
    p.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return child(args.child[0], args.child[1], float(args.child[2]))
    kinds = args.kinds.split(",")
    unknown = [k for k in kinds if k not in TRACED and k not in HELD] + [w for w in args.workloads.split(",") if w not in STEPS]
    if unknown:
        p.error("%s: not known" % ", ".join(unknown))
    c, rows, begin = common.Checks(args.name), [], time.monotonic()
    script = seen.script("workloads.py", c)
    if not script:
        return 0
    if any(k in HELD for k in kinds):
        done = seen.cistern("build-adapter", timeout=300, env=common.environment("native", {"CISTERN_PYTHON": sys.executable}))
        print(done.out.strip() or done.why())
    if args.starts:
        starting(c, args.starts)
    for name in args.workloads.split(","):
        if time.monotonic() - begin > args.budget:
            c.add(name, "not begun, no time was left", "measured", False)
            continue
        steps = (args.steps, min(args.steps, STEPS[name][1])) if args.steps else STEPS[name]
        try:
            times, starts, retries = measure(script, name, kinds, args.rounds, 0.9 / len(kinds), steps, args.timeout)
        except RuntimeError as e:
            c.add(name, e, "runs", False)
            continue
        judge(c, name, kinds, times, starts, retries, rows)
        print("%s: %.0f s so far" % (name, time.monotonic() - begin), flush=True)
    if rows:
        print(common.table(["workload", "kind", "seconds", "over the first", "steps alone", "rounds apart", "start of CUDA", "retries"], rows))
    return seen.finish(c)


if __name__ == "__main__":
    sys.exit(main())
