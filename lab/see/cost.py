"""What tracing, and attribution, cost a program that works.

    python cost.py [--workloads …] [--rounds 1] [--kinds plain,traced,stacks,again] [--allocators native,expandable,async]
    python cost.py --kinds cistern,history,native,python,both,sampled     Cistern's own history and stacks, for information

Two measurements, as neither is enough alone. What the tracer itself counts: the time for which it kept the program's threads
(`cistern inspect --json`, spent_ns), over the time of the steps; exact, but blind for what tracing does to caches and to the
linker. And the clock: the same work is done by several processes at once, a step of one at a time while the others rest,
without tracing, traced, traced with native stacks, and once more without ("again"). So all work under the same clocks,
temperature and neighbours. Of each step the ratio to the mean of the two without tracing is taken; the median of all steps
counts, with the interval that holds it in 95 of 100 resamplings; the ratio of the two without tracing says what such a figure
is worth. The first steps, in which the allocator gets its memory, are in both; importing PyTorch is in neither.

About 70 s for each workload under the clock and 30 s for each more allocator's count.
"""
import argparse
import os
import random
import sys
import time

import seen
from seen import common

# Steps under the clock, and for the count alone.
STEPS = {"gpt2_varlen": (24, 8), "generate_serving": (16, 6), "detection": (56, 14), "multistream_prefetch": (120, 40)}
BAR = 1.01

# How a kind is started: flags of trace, or settings of Cistern's.
TRACED = {"plain": None, "again": None, "traced": (), "stacks": ("--stacks=native",), "pystacks": ("--stacks=all",)}
HELD = {"cistern": "", "history": "history:1000000", "native": "history:1000000,stacks:native", "python": "history:1000000,stacks:python",
        "both": "history:1000000,stacks:all", "sampled": "history:1000000,stacks:all,stack_sample:1MiB"}
ALLOCATORS = {"native": None, "expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}
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
    """A process of one kind that does the work under one of PyTorch's allocators."""

    def __init__(self, script, name, kind, allocator, share, folder, n):
        argv = [sys.executable, os.path.abspath(__file__), "--child", script, name, repr(share)]
        mode, self.trace, more = "native", None, {"PYTHONWARNINGS": "ignore"}
        if kind in HELD:
            argv, mode = common.command("cistern", argv, HELD[kind]), "cistern"
        elif TRACED[kind] is not None:
            self.trace = os.path.join(folder, "%s-%s-%s-%d.cistern" % (name, allocator, kind, n))
            argv = seen.traced(argv, self.trace, TRACED[kind])
        if ALLOCATORS[allocator]:
            more["PYTORCH_ALLOC_CONF"] = ALLOCATORS[allocator]
        self.kind, self.times, self.start, self.retries = kind, [], None, 0
        self.talker = seen.Talker(argv, common.environment(mode, more))

    def ready(self, deadline):
        if self.talker.answer(max(1, deadline - time.monotonic())) is None:
            raise RuntimeError("%s: %s" % (self.kind, self.talker.why()))

    def ask(self, what, timeout):
        found = self.talker.ask(what, timeout)
        if found is None:
            raise RuntimeError("%s: %s" % (self.kind, self.talker.why()))
        return found

    def begin(self, timeout):
        self.start = self.ask("begin", timeout)["seconds"]

    def steps(self, n, timeout):
        found = self.ask(str(n), timeout)
        self.times.append(found["seconds"])
        self.retries = found["retries"]

    def end(self):
        rc = self.talker.end(60)
        if rc != 0:
            raise RuntimeError("%s: %s" % (self.kind, self.talker.why()))

    def counted(self):
        """What the tracer counted of itself: seconds, and of how many calls."""
        found = seen.summary(self.trace)
        return found["end"]["spent_ns"] / 1e9, sum(call["count"] for call in found["calls"])


def started(ones):
    """Waits until all of them have imported what they need."""
    deadline = time.monotonic() + 240
    for one in ones:
        one.ready(deadline)


def end_all(ones):
    for one in ones:
        if one.talker.process.poll() is None:
            one.talker.end(1)


def clock(script, name, kinds, rounds, share, steps, timeout):
    """For each round its processes, with the seconds of each of their steps."""
    folder = seen.folder("cost")
    all_ = [[One(script, name, k, "native", share, folder, n) for k in kinds] for n in range(rounds)]
    try:
        started([one for round_ in all_ for one in round_])
        for n, round_ in enumerate(all_):
            for one in round_:
                one.begin(timeout)
            for i in range(steps):
                k = (i + n) % len(round_)
                for one in round_[k:] + round_[:k]:
                    one.steps(1, timeout)
            for one in round_:
                one.end()
    finally:
        end_all([one for round_ in all_ for one in round_])
    return all_


def interval(ratios):
    """Their median, and the interval that holds the median of 95 of 100 resamplings."""
    r = random.Random(1)
    medians = sorted(common.median(r.choices(ratios, k=len(ratios))) for _ in range(2000))
    return common.median(ratios), medians[50], medians[1949]


def judge(c, name, kinds, rounds, rows):
    """The time of each step over the same step's of the first kind, or of the mean of it and its second process."""
    base = [k for k in ("plain", "again") if k in kinds] if kinds[0] == "plain" else [kinds[0]]
    ratios = {k: [] for k in kinds}
    for round_ in rounds:
        times = {one.kind: one.times for one in round_}
        for i in range(len(times[kinds[0]])):
            under = sum(times[k][i] for k in base) / len(base)
            for k in kinds:
                ratios[k].append(times[k][i] / (times[kinds[0]][i] if k in base else under))
    for kind in kinds:
        ones = [one for round_ in rounds for one in round_ if one.kind == kind]
        middle, low, high = interval(ratios[kind])
        rows.append([name, kind, len(ratios[kind]), "%.2f" % sum(sum(one.times) for one in ones), "%.4f" % middle, "%.4f to %.4f" % (low, high),
                     "%.2f" % common.median([one.start for one in ones]), sum(one.retries for one in ones)])
        if kind == kinds[0]:
            continue
        what = "%s, %s: the clock, time of a step over %s's" % (name, kind, kinds[0])
        got = "%+.2f %% (%+.2f to %+.2f)" % tuple(100 * (x - 1) for x in (middle, low, high))
        if kind in JUDGED:
            c.add(what, got, "not above +1 %", low <= BAR)
        else:
            c.add(what, got)


def account(c, name, allocator, ones, rows):
    """What the tracer counted, over the time of the steps."""
    for one in ones:
        if one.trace is None:
            continue
        spent, calls = one.counted()
        took = sum(one.times)
        rows.append([name, allocator, one.kind, "%.2f" % took, calls, "%.0f" % (1e9 * spent / max(1, calls)), "%.3f" % (1e3 * spent), "%.3f %%" % (100 * spent / took)])
        what = "%s, %s, %s: counted by the tracer, over the time of the steps" % (name, allocator, one.kind)
        got = "%.3f %%" % (100 * spent / took)
        if one.kind in JUDGED:
            c.add(what, got, "at most 1 %", spent <= (BAR - 1) * took)
        else:
            c.add(what, got)


def count(script, name, allocator, kinds, steps, timeout):
    """One process of each kind, one after the other, that are only counted."""
    folder = seen.folder("count")
    ones = [One(script, name, k, allocator, 0.9, folder, 0) for k in kinds]
    try:
        started(ones)
        for one in ones:
            one.begin(timeout)
            one.steps(steps, timeout)
            one.end()
    finally:
        end_all(ones)
    return ones


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
    p.add_argument("--kinds", default="plain,traced,stacks,again", help="the first is what the others are compared with; of %s" % ", ".join([*TRACED, *HELD]))
    p.add_argument("--allocators", default="native,expandable,async", help="the first is under the clock, the others are counted alone")
    p.add_argument("--rounds", type=int, default=1)
    p.add_argument("--starts", type=int, default=3, help="how often PyTorch is started with and without; 0: not")
    p.add_argument("--steps", type=int, help="other than the table's")
    p.add_argument("--name", default="see-cost")
    p.add_argument("--timeout", type=float, default=120, help="seconds for one piece of work")
    p.add_argument("--budget", type=float, default=480, help="seconds after which no workload is begun")
    p.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return child(args.child[0], args.child[1], float(args.child[2]))
    kinds, allocators = args.kinds.split(","), args.allocators.split(",")
    unknown = [k for k in kinds if k not in TRACED and k not in HELD] + [w for w in args.workloads.split(",") if w not in STEPS]
    unknown += [a for a in allocators if a not in ALLOCATORS]
    if unknown or allocators[0] != "native":
        p.error("%s: not known" % ", ".join(unknown) if unknown else "the first allocator is native")
    c, rows, counts, begin = common.Checks(args.name), [], [], time.monotonic()
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
        try:
            rounds = clock(script, name, kinds, args.rounds, 0.9 / len(kinds), args.steps or STEPS[name][0], args.timeout)
            judge(c, name, kinds, rounds, rows)
            account(c, name, "native", [one for round_ in rounds for one in round_], counts)
            traced = [k for k in kinds if TRACED.get(k) is not None]
            for allocator in allocators[1:] if traced else ():
                account(c, name, allocator, count(script, name, allocator, traced, args.steps or STEPS[name][1], args.timeout), counts)
        except RuntimeError as e:
            c.add(name, e, "runs", False)
            continue
        print("%s: %.0f s so far" % (name, time.monotonic() - begin), flush=True)
    if rows:
        print(common.table(["workload", "kind", "steps", "seconds", "over the first", "95 in 100", "start of CUDA", "retries"], rows))
    if counts:
        print(common.table(["workload", "allocator", "kind", "seconds", "calls", "ns a call", "ms in all", "of the time"], counts))
    return seen.finish(c)


if __name__ == "__main__":
    sys.exit(main())
