"""Jobs on one GPU in alternating phases, a trainer (gpt2_varlen) and a server (generate_serving), beside a ballast: a process that
leaves less memory than the sum of the peaks that the jobs request, and more than the largest sum of what they request at one moment.

    python colocated.py [--jobs 2] [--phases 6] [--minutes 20] [--max] [--variants without,native,expandable,off,broker] [--sim [MIB]]

First the jobs run without the ballast, on Cistern with a broker: that gives what they request, and the time to compare with. Then
with it: under native PyTorch, expandable_segments and Cistern with node:off, where a job is to fail, and on Cistern with a broker,
where all are to finish. --max adds a variant in which the broker's policy limits each job by `max`. --minutes makes the variant
with a broker and without limits go on for so long.

With --sim the jobs only allocate, and there is no PyTorch: those variants are left out.
"""
import argparse
import sys
import time

import shared
from shared import MiB, common, seen

NAMES = ("gpt2_varlen", "generate_serving")
STEPS = {"gpt2_varlen": 20, "generate_serving": 12}  # some seconds
VARIANTS = ("without", "native", "expandable", "off", "broker", "max")
WORDS = {"without": "Cistern, broker, no ballast", "native": "native PyTorch", "expandable": "expandable_segments", "off": "Cistern, node:off",
         "broker": "Cistern, broker", "max": "Cistern, broker with max"}
DIE = ("native", "expandable", "off")
LACKED = ("out of memory", "alloc_failed")
SLOWER = 10  # per cent
OVER = 1.1  # max, over the peak that a job requests: what it reserves is whole chunks


class Job:
    """A process that works in phases."""

    def __init__(self, node, number, mode, settings, args):
        self.name = NAMES[number % len(NAMES)]
        self.label = "%s-%d" % (self.name, number)
        self.steps = args.steps or STEPS[self.name]
        conf = node.conf(*settings, "node_label:" + self.label) if settings else None
        argv = [sys.executable, shared.HERE + "/turns.py", *(["--sim"] if node.sim else [args.script]), self.name, str(number + 1)]
        extra = {"CISTERN_LIBRARY": common.library(), "CISTERN_CONF": conf} if node.sim else {}
        if not node.sim:
            argv = common.command(mode, argv, conf)
        self.process = shared.Process(node.talker(argv, common.environment(mode, extra)), self.label)
        self.begun, self.phases = None, []

    def held(self, phase):
        """What it still requests after a phase; -1 is before the first."""
        return (self.phases[phase] if phase >= 0 else self.begun)["held"]

    def phase(self, timeout):
        """Works one phase; "" or why it did not."""
        try:
            found = self.process.ask("phase", steps=self.steps, timeout=timeout)
        except RuntimeError as e:
            return str(e)
        if "error" in found:
            return found["error"]
        self.phases.append(found)
        return ""


class Outcome:
    """What became of the jobs of a variant."""

    def __init__(self, jobs):
        self.jobs, self.died, self.rounds, self.times, self.minutes, self.left = jobs, "", 0, [], 0, None
        self.reserved, self.gave, self.refaults = {}, 0, 0

    @property
    def peaks(self):
        return [max(p["peak"] for p in j.phases) for j in self.jobs]

    @property
    def together(self):
        """The largest sum that was requested at one moment, at most: each phase's peak and what the other jobs held then."""
        most = 0
        for r in range(self.rounds):
            for i, j in enumerate(self.jobs):
                # Those before it have worked this phase already; the others hold what they held after the one before.
                others = sum(k.held(r if n < i else r - 1) for n, k in enumerate(self.jobs) if n != i)
                most = max(most, j.phases[r]["peak"] + others)
        return most


def run(node, variant, args, room=None, peaks=(), minutes=0):
    """The jobs of a variant, beside a ballast that leaves the room, of which the jobs have a part already."""
    broker, settings = None, ["node:off"]
    if variant in ("without", "broker", "max"):
        broker = node.broker(policy(peaks, args) if variant == "max" else None)
        settings = [broker.setting]
    mode = variant if variant in ("native", "expandable") else "cistern"
    jobs = [Job(node, n, mode, settings if mode == "cistern" else (), args) for n in range(args.jobs)]
    o = Outcome(jobs)
    for j in jobs:
        j.process.answer(300)
    for j in jobs:
        j.begun = j.process.ask("start", timeout=120)
        if "error" in j.begun:
            raise RuntimeError("%s before the ballast: %s" % (j.label, j.begun["error"]))
    if room is not None:
        has = sum(j.begun["reserved"] for j in jobs)
        found = node.ballast().ask("fill", leave=max(0, room - has), near=shared.NEAR)
        if "error" in found:
            raise RuntimeError("the ballast: " + found["error"])
        o.left = found["free"] + has
    start = time.monotonic()
    end = start + 60 * minutes
    while not o.died and (o.rounds < args.phases or time.monotonic() < end):
        for j in jobs:
            why = j.phase(args.timeout)
            if why:
                o.died = "%s in phase %d: %s" % (j.label, o.rounds + 1, why)
                break
            if broker and node.sim and room is not None:
                # Such a phase is shorter than the time in which a process says anew what it has; a real one is longer.
                broker.until(lambda c: any(e.get("label") == j.label and e["reserved_bytes"] >= j.phases[-1]["peak"] for e in c.values()), 10)
            if broker:
                note(o, broker)
        else:
            o.rounds += 1
            o.times.append(sum(j.phases[-1]["sec"] for j in jobs))
    o.minutes = (time.monotonic() - start) / 60
    if o.died and broker:
        print("%s: %s\nits broker: %s" % (WORDS[variant], o.died, broker.said()), flush=True)
    for j in jobs:
        j.process.end()
    return o


def note(o, broker):
    """The most that each job had reserved, and what moved, by the broker's count."""
    entries = [e for e in broker.clients().values() if e.get("label")]
    for e in entries:
        o.reserved[e["label"]] = max(o.reserved.get(e["label"], 0), e["reserved_bytes"])
    o.gave, o.refaults = sum(e["gave_bytes"] for e in entries), sum(e["refaults"] for e in entries)


def limits(peaks):
    """max of each job: above the peak that it requests by as much as chunks and rounding take."""
    return [int(OVER * p) // MiB * MiB + 64 * MiB for p in peaks]


def policy(peaks, args):
    labels = ["%s-%d" % (NAMES[n % len(NAMES)], n) for n in range(args.jobs)]
    return "".join("[rule]\nlabel = %s\nmax = %dMiB\n" % (label, most // MiB) for label, most in zip(labels, limits(peaks)))


def judge(c, variant, o, without, args, minutes):
    """Adds what is wanted of a variant with the ballast."""
    name, most, total = WORDS[variant], without.together, sum(without.peaks)
    c.add(name + ": left for the jobs", common.size(o.left), "between %s and %s" % (common.size(most), common.size(total)), most < o.left < total)
    if variant in DIE:
        # A job that failed for another reason than memory is no failure of the allocator.
        c.add(name + ": what became of it", o.died or "all finished", "a job runs out of memory", any(w in o.died.lower() for w in LACKED))
        return
    c.add(name + ": what became of it", o.died or "all finished %d phases" % o.rounds, "all finish", not o.died)
    if o.died:
        return
    first, compared = sum(o.times[:without.rounds]), sum(without.times)
    more = 100 * (first / compared - 1)
    c.add("%s: %% longer than without a ballast, %d phases" % (name, without.rounds), "%+.1f" % more, "" if args.sim else "at most %d" % SLOWER,
          None if args.sim else more <= SLOWER)
    later = without.rounds - without.rounds // 2
    more = 100 * (sum(o.times[later:without.rounds]) / sum(without.times[later:]) - 1) if without.rounds > 1 else None
    c.add("%s: %% longer in the later half of them" % name, "%+.1f" % more if more is not None else "?")
    c.add(name + ": moved between the jobs", common.size(o.gave), "more than nothing", o.gave > 0)
    if minutes:
        c.add(name + ": minutes", "%.2f" % o.minutes, "at least %g" % minutes, o.minutes >= minutes)
    if variant == "max":
        for j, most in zip(o.jobs, limits(without.peaks)):
            c.add("%s: most that %s reserved" % (name, j.label), common.size(o.reserved.get(j.label)), "at most " + common.size(most),
                  0 < o.reserved.get(j.label, 0) <= most)


def row(variant, o):
    return [WORDS[variant], common.size(o.left) if o.left is not None else "", "a job failed" if o.died else "all finished", o.rounds,
            "%.2f" % sum(o.times) if not o.died else "", common.size(o.gave), o.refaults, o.died[:160]]


def measure(c, args, variants):
    """Every variant in turn; the table's rows."""
    rows, without, room = [], None, None
    for variant in variants:
        minutes = args.minutes if variant == "broker" else 0
        with shared.Node("colocated", args.sim) as node:
            try:
                o = run(node, variant, args, room, without.peaks if without else (), minutes)
            except RuntimeError as e:
                c.add(WORDS[variant], str(e), "it can be measured", False)
                continue
        rows.append(row(variant, o))
        if variant != "without":
            judge(c, variant, o, without, args, minutes)
            continue
        if o.died:
            c.add(WORDS[variant], o.died, "all finish", False)
            break
        without, total, most = o, sum(o.peaks), o.together
        room = int(most + args.room * (total - most))
        c.add("requested by the jobs: sum of the peaks, largest sum at a moment", "%s, %s" % (common.size(total), common.size(most)), "they differ", total > most)
        c.add("what the ballast is to leave", common.size(room))
    return rows


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--jobs", type=int, default=2)
    p.add_argument("--phases", type=int, default=6, help="phases of each job that are compared")
    p.add_argument("--steps", type=int, default=0, help="of a phase (default by workload)")
    p.add_argument("--minutes", type=float, default=0)
    p.add_argument("--max", action="store_true", help="one more variant, with max in the policy")
    p.add_argument("--variants", default="without,native,expandable,off,broker")
    p.add_argument("--room", type=float, default=0.75, help="what the ballast leaves, as a part of the way from the largest sum to the sum of the peaks")
    p.add_argument("--timeout", type=float, default=300, help="seconds of a phase")
    p.add_argument("--name", default="node-colocated", help="of the results")
    shared.arguments(p, 4 * shared.GiB)
    args = p.parse_args()
    c = common.Checks(args.name)
    variants = args.variants.split(",") + (["max"] if args.max else [])
    unknown = set(variants) - set(VARIANTS)
    if unknown or variants[0] != "without":
        p.error("--variants: want `without` first, then any of %s" % ", ".join(VARIANTS[1:]))
    args.script = None
    if args.sim:
        variants = [v for v in variants if v not in ("native", "expandable")]
    else:
        args.script = seen.script("workloads.py", c)
        if not args.script:
            return 0
    rows = measure(c, args, variants)
    print(common.table(["variant", "left by the ballast", "result", "phases", "seconds", "moved", "refaults", "what failed"], rows))
    return seen.finish(c)


if __name__ == "__main__":
    sys.exit(main())
