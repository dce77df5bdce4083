"""A broker of two GPUs: memory moves on the GPU where it is short, and on that alone.

    python two.py [--sim [MIB]]

A process caches memory on both GPUs, and a ballast holds the rest of the second. Two processes then ask for memory there, one that
sees both and one that sees the second alone, as its device 0 (CUDA_VISIBLE_DEVICES=1): the cache of the second meets them, and that
of the first GPU stays. A request on the first GPU is met by the driver.
"""
import argparse
import sys

import shared
from shared import GiB, MiB, common, seen

CACHES = [4 * GiB, 6 * GiB]  # of the first process, on each GPU
LEAVE = 64 * MiB


def met(found, who):
    if "error" in found:
        raise RuntimeError("%s: %s" % (who, found["error"]))
    return found


def judge(c, node):
    broker = node.broker()
    victim, both, ballast = node.holder(broker.setting), node.holder(broker.setting), node.ballast()
    second = {"device": 1} if node.sim else {}  # a simulated device cannot be hidden
    alone = node.holder(broker.setting, **{} if node.sim else {"CUDA_VISIBLE_DEVICES": "1"})
    for p, on in ((both, {"device": 1}), (alone, second)):  # with their contexts, which take memory too
        met(p.ask("hold", bytes=2 * MiB, each=2 * MiB, **on), "a process that begins")
        met(p.ask("drop"), "a process that begins")
    for d, cache in enumerate(CACHES):
        met(victim.ask("hold", bytes=cache, each=GiB, device=d), "the victim")
    number = victim.talker.process.pid

    def mine():
        """The victim's entries; what it caches tells which GPU is meant."""
        return [e for e in broker.entries() if e["pid"] == number]

    def held(e):
        return min(range(2), key=lambda d: abs(e["reserved_bytes"] - CACHES[d]))

    if not broker.until(lambda _: sorted(e["reserved_bytes"] for e in mine()) == CACHES):
        raise RuntimeError("the ledger has %s of the victim" % mine())
    uuid = {held(e): e["device"] for e in mine()}
    c.add("GPUs in the ledger", len(set(uuid.values())), 2, len(set(uuid.values())) == 2)
    met(ballast.ask("fill", leave=LEAVE, near=shared.NEAR, device=1), "the ballast")
    met(victim.ask("drop"), "the victim")

    def of(device):
        return next(e for e in mine() if e["device"] == uuid[device])

    if not broker.until(lambda _: of(1)["floor_bytes"] <= GiB):
        raise RuntimeError("the victim keeps its cache 30 s after its last use: %s" % of(1))
    times = [met(p.ask("ask", bytes=GiB, **on), "a request on the second GPU")["ms"] for p, on in ((both, {"device": 1}), (alone, second)) for _ in range(2)]
    wanted = 4 * GiB - LEAVE - shared.NEAR
    c.add("requests on the second GPU, ms", ["%.1f" % t for t in times])
    c.add("given there", common.size(of(1)["gave_bytes"]), "at least " + common.size(wanted), of(1)["gave_bytes"] >= wanted)
    met(both.ask("ask", bytes=GiB, device=0), "a request on the first GPU")
    first = of(0)
    c.add("given on the first", first["gave_bytes"], 0, first["gave_bytes"] == 0)
    c.add("cached there", common.size(first["reserved_bytes"]), common.size(CACHES[0]), first["reserved_bytes"] == CACHES[0])
    where = [e["device"] for e in broker.entries() if e["pid"] == alone.talker.process.pid and e["reserved_bytes"]]
    c.add("the GPU of the process that sees one", where, [uuid[1]], where == [uuid[1]])
    for p in (victim, both, alone, ballast):
        p.end()


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    shared.arguments(p, 12 * GiB)
    args = p.parse_args()
    c = common.Checks("node-two")
    with shared.Node("two", args.sim, 2) as node:
        try:
            judge(c, node)
        except RuntimeError as e:
            c.add("two GPUs", str(e), "runs", False)
    return seen.finish(c)


if __name__ == "__main__":
    sys.exit(main())
