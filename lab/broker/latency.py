"""How long a request takes that another process's unused cache meets: cistern_malloc of 1 GiB while the driver has nothing,
because the cache of an idle process and a ballast hold everything.

    python latency.py [--rounds 32] [--cache 8192] [--chunks 32,2] [--size 1024] [--sim [MIB]]

The victim caches so much in chunks of one size, and is left alone until it would give that: what it used recently stays with it,
so it has a little more. Then the asker requests one GiB after the other, until the cache is gone; it returns all, and the victim
caches anew. Both keep 4 GiB from the beginning on, as a process with less has smaller chunks; those of more are half as large as the
setting chunk allows.
"""
import argparse
import sys

import shared
from shared import MiB, common, seen

MORE = 64 * MiB
KEPT = 4 * shared.GiB
GOALS = {32: 5, 2: 25}  # ms of the median, by MiB of a chunk, for 1 GiB


def rounds(node, broker, chunk, args):
    """The times of requests in ms, and what the victim gave meanwhile by the broker's count."""
    chunks = "chunk:%dMiB" % (chunk if args.sim or chunk == 2 else 2 * chunk)
    victim, asker, ballast = node.holder(chunks, broker.setting), node.holder(chunks, broker.setting), node.ballast()
    number, size, times, gave = victim.talker.process.pid, args.size * MiB, [], 0
    each = max(1, args.cache // args.size)
    if not args.sim:
        met(victim.ask("keep", bytes=KEPT), "the victim")
        met(asker.ask("keep", bytes=KEPT), "the asker")
    while len(times) < args.rounds:
        met(victim.ask("hold", bytes=each * size, each=size), "the victim")
        met(victim.ask("hold", bytes=MORE, each=MORE), "the victim")
        if not times:
            met(asker.ask("hold", bytes=2 * MiB, each=2 * MiB), "the asker")
            met(asker.ask("drop"), "the asker")
            met(ballast.ask("fill", leave=args.leave * MiB, near=shared.NEAR), "the ballast")
        if args.written and not args.sim:
            met(victim.ask("write"), "the victim")
        met(victim.ask("drop"), "the victim")
        if not broker.until(lambda c: number in c and c[number]["reserved_bytes"] - c[number]["floor_bytes"] >= each * size):
            raise RuntimeError("the victim would not give its cache 30 s after its last use: %s" % broker.clients().get(number))
        before = broker.clients()[number]["gave_bytes"]
        for _ in range(min(each, args.rounds - len(times))):
            times.append(met(asker.ask("ask", bytes=size), "request %d" % (len(times) + 1))["ms"])
        gave += broker.clients()[number]["gave_bytes"] - before
        met(asker.ask("drop"), "the asker")
        met(asker.ask("trim"), "the asker")
    for p in (victim, asker, ballast):
        p.end()
    return times, gave


def met(found, who):
    if "error" in found:
        raise RuntimeError("%s: %s" % (who, found["error"]))
    return found


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--rounds", type=int, default=32)
    p.add_argument("--cache", type=int, default=8 * 1024, help="MiB that the victim caches")
    p.add_argument("--size", type=int, default=1024, help="MiB of a request")
    p.add_argument("--unwritten", dest="written", action="store_false", help="the victim does not write to its memory before it is cached")
    p.add_argument("--leave", type=int, default=64, help="MiB that the driver keeps free, for tables of its own")
    p.add_argument("--chunks", default="32,2", help="MiB of a chunk, one table row each")
    shared.arguments(p, 12 * shared.GiB)
    args = p.parse_args()
    c, rows = common.Checks("node-latency"), []
    for chunk in map(int, args.chunks.split(",")):
        name, goal = "chunks of %d MiB" % chunk, GOALS.get(chunk) if args.size == 1024 else None
        with shared.Node("latency", args.sim) as node:
            try:
                times, gave = rounds(node, node.broker(), chunk, args)
            except RuntimeError as e:
                c.add(name, str(e), "%d requests that are met" % args.rounds, False)
                continue
        times.sort()
        middle, most = common.median(times), times[-1]
        p99 = times[(len(times) * 99 + 99) // 100 - 1]
        rows.append([name, len(times), *("%.2f" % t for t in (times[0], middle, p99, most)), goal or ""])
        # The driver had less than this for the first request of each cache, and nothing for the others.
        wanted = len(times) * args.size * MiB - -(-len(times) // max(1, args.cache // args.size)) * (args.leave * MiB + shared.NEAR)
        c.add(name + ": given by the victim", common.size(gave), "at least " + common.size(wanted), gave >= wanted)
        c.add(name + ": ms, median of %d" % len(times), "%.2f" % middle, "at most %d" % goal if goal and not args.sim else "",
              middle <= goal if goal and not args.sim else None)
        c.add(name + ": ms, p99 and maximum", "%.2f, %.2f" % (p99, most))
    print(common.table(["cache of the victim", "requests", "least, ms", "median", "p99", "maximum", "goal of the median"], rows))
    return seen.finish(c)


if __name__ == "__main__":
    sys.exit(main())
