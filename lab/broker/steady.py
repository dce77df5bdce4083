"""What the broker costs while nothing lacks memory: nothing. Two processes with a broker and two without do the same loops of
allocations and releases in turn; no request asks the broker, and its CPU time is that of a process at rest.

    python steady.py [--rounds 15] [--n 400000] [--within 1] [--sim [MIB]]

The times are of pairs.c, through the C library. The shortest are compared, as other work on a machine makes any round longer
and none shorter; medians are shown too.
"""
import argparse
import sys

import shared
from shared import common, seen

COUNTS = ("gave_bytes", "got_bytes", "refaults", "missed")


def measure(node, broker, args):
    """{with a broker or without: {loop: times}}, CPU time of the broker, the time in which it was used, counts before and after."""
    kinds = {"broker": [node.holder(broker.setting) for _ in range(2)], "off": [node.holder("node:off") for _ in range(2)]}
    for group in kinds.values():
        for p in group:
            check(p.ask("loops", n=args.n // 4))
    mine = {p.talker.process.pid for p in kinds["broker"]}
    if not broker.until(lambda found: set(found) == mine):
        raise RuntimeError("the clients of the broker are %s, not the two processes: %s" % (sorted(broker.clients()), broker.said()))
    before, used, times = counts(broker), broker.used(), {k: {} for k in kinds}
    for i in range(args.rounds):
        for k in sorted(kinds, reverse=bool(i % 2)):
            for p in kinds[k]:  # both at once, so that the broker has two that work
                p.send("loops", n=args.n)
            for p in kinds[k]:
                for name, ns in check(p.answer())["ns"].items():
                    times[k].setdefault(name, []).append(ns)
    used = broker.used() - used
    return times, used, before, counts(broker)


def counts(broker):
    found = broker.clients().values()
    return {"questions": broker.metric("cistern_node_device_questions_total"), **{k: sum(e[k] for e in found) for k in COUNTS}}


def check(found):
    if "error" in found:
        raise RuntimeError(found["error"])
    return found


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--n", type=int, default=400_000, help="allocations of a loop")
    p.add_argument("--within", type=float, default=1, help="per cent")
    shared.arguments(p, 16 * shared.GiB)
    args = p.parse_args()
    c, rows = common.Checks("node-steady"), []
    with shared.Node("steady", args.sim) as node:
        try:
            times, used, before, after = measure(node, node.broker(), args)
        except RuntimeError as e:
            c.add("two processes with a broker and two without", str(e), "they work", False)
            return seen.finish(c)
    for name in times["off"]:
        on, off = sorted(times["broker"][name]), sorted(times["off"][name])
        more = [100 * (a / b - 1) for a, b in ((on[0], off[0]), (common.median(on), common.median(off)))]
        rows.append([name, *("%.1f" % v for v in (off[0], on[0], common.median(off), common.median(on))), *("%+.2f" % m for m in more)])
        c.add("%s: %% more with a broker, shortest of %d" % (name, len(on)), "%+.2f" % more[0], "" if args.sim else "at most %g" % args.within,
              None if args.sim else more[0] <= args.within)
    c.add("what was asked and given: " + ", ".join(before), "the same" if before == after else "%s, then %s" % (before, after), "the same", before == after)
    c.add("CPU time of the broker meanwhile, ms", "%.0f" % (1e3 * used))
    print(common.table(["loop", "off, shortest, ns", "broker, shortest", "off, median", "broker, median", "% more, shortest", "% more, median"], rows))
    return seen.finish(c)


if __name__ == "__main__":
    sys.exit(main())
