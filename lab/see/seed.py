"""The calls of the driver behind seed_script.py, the 60/70 KiB, MiB, GiB scenario under native PyTorch, as `cistern
trace` sees them:

  - one cuMemAlloc of 2 MiB for both KiB tensors, one for each MiB tensor, one for the 60 GiB;
  - where the device has 80 GiB: the 70 GiB call that fails, the frees, and the second try;
  - under expandable_segments the physical handles that are made and mapped.

    python seed.py [--free-gib 80]

PyTorch's own limit (set_per_process_memory_fraction) refuses a request before it asks the driver; in the experiment
that this follows the device itself had 80 GiB. So another process holds what this device has more. About 40 s.
"""
import argparse
import re
import sys
import time

import seen
from seen import GiB, MiB, common

PRINTED = re.compile(r"^allocated (\d+) B, requested_bytes\S* (\d+), reserved (\d+)", re.M)


def ballast(free):
    """Holds all but so many bytes of the device until its input ends."""
    driver = seen.Driver()
    now, total = driver.memory()
    size, held = (now - free) // seen.PAGE * seen.PAGE, 0
    while size > held:
        piece = min(size - held, 8 * GiB)
        if not driver.allocate(piece):
            break
        held += piece
    seen.answer(held=held, free=driver.memory()[0], total=total)
    sys.stdin.read()


def watch(script, cap, setting, out):
    """Runs the script under trace: what it printed of its reserved bytes, and the calls for device memory."""
    env = common.environment("native", {"PYTORCH_ALLOC_CONF": setting} if setting else None)
    argv = [sys.executable, script, "plain", "--cap-gib", repr(cap)]
    begin = time.monotonic()
    done = common.run(seen.traced(argv, out), env=env, timeout=150)
    said = [int(m[2]) for m in PRINTED.findall(done.out)]
    return done, said, seen.calls(out), time.monotonic() - begin


def words(calls):
    return "; ".join(map(repr, calls))


def native(c, done, said, calls, fails):
    plain = [q for q in calls if q.name in ("cuMemAlloc", "cuMemFree")]
    if not c.add("native: the script", "ok" if done.rc == 0 else done.why(), "ok", done.rc == 0):
        return
    got = [q.size for q in plain if q.name == "cuMemAlloc" and q.result == 0]
    want = [2 * MiB, 60 * MiB, 70 * MiB, 60 * GiB, 70 * GiB]
    c.add("native: cuMemAlloc that succeed", ", ".join(map(common.size, got)), ", ".join(map(common.size, want)), got == want)
    at = next((i for i, q in enumerate(plain) if q.result == seen.OUT_OF_MEMORY), None)
    if fails:
        ok = at is not None and plain[at].size == 70 * GiB
        c.add("native: the call that fails", repr(plain[at]) if at is not None else "none", "cuMemAlloc(70 GiB), out of memory", ok)
        behind = plain[at + 1:] if ok else []
        freed = [q for q in behind if q.name == "cuMemFree" and q.result == 0]
        made = {q.address: q.size for q in plain if q.name == "cuMemAlloc" and q.result == 0}
        sizes = sorted((made.get(q.address, 0) for q in freed), reverse=True)
        c.add("native: then the frees", ", ".join(map(common.size, sizes)) or "none", "all that is cached, 60 GiB first of all in size",
              sizes == sorted(want[:4], reverse=True))
        last = behind[-1] if behind else None
        c.add("native: and the second try", repr(last), "cuMemAlloc(70 GiB) = 0",
              last is not None and last.name == "cuMemAlloc" and last.size == 70 * GiB and last.result == 0 and behind.index(last) == len(freed))
    held, _ = seen.held(calls)
    c.add("native: held at the end by the trace, by PyTorch", "%d, %d" % (held, said[-1]), "equal", held == said[-1])


def expandable(c, done, said, calls):
    if not c.add("expandable: the script", "ok" if done.rc == 0 else done.why(), "ok", done.rc == 0):
        return
    made = [q for q in calls if q.name == "cuMemCreate" and q.result == 0]
    mapped = [q for q in calls if q.name == "cuMemMap" and q.result == 0]
    opened = [q for q in calls if q.name == "cuMemSetAccess" and q.result == 0]
    c.add("expandable: handles made, mapped", "%d, %d" % (len(made), len(mapped)), "as many, more than 0", len(made) == len(mapped) > 0)
    c.add("expandable: calls that open them", len(opened), "more than 0", len(opened) > 0)
    first = made[0].size if made else 0
    c.add("expandable: the handle of both KiB tensors", common.size(first), "2.00 MiB", first == 2 * MiB)
    sizes = {q.handle: q.size for q in made}
    c.add("expandable: each is mapped in its size", sum(sizes.get(q.handle) == q.size for q in mapped), len(mapped),
          all(sizes.get(q.handle) == q.size for q in mapped))
    plain = [q for q in calls if q.name == "cuMemAlloc" and q.result == 0 and q.size >= MiB]
    c.add("expandable: segments by cuMemAlloc", len(plain), "0", not plain)
    held, _ = seen.held(calls)
    c.add("expandable: held at the end by the trace, by PyTorch", "%d, %d" % (held, said[-1]), "equal", held == said[-1])


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--free-gib", type=float, default=80, help="what the device shall have left for the script")
    p.add_argument("--child-ballast", type=int, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child_ballast is not None:
        return ballast(args.child_ballast)
    c = common.Checks("see-seed")
    script = seen.script("seed_script.py", c)
    if not script:
        return 0
    folder = seen.folder("seed")
    # Held first and asked first: what the device has decides what is to be expected.
    holder = seen.Talker([sys.executable, __file__, "--child-ballast", str(int(args.free_gib * GiB))], common.environment("native"))
    try:
        there = holder.answer(90)
        if there is None:
            c.add("holding what is beyond %g GiB" % args.free_gib, holder.why(), "works", False)
            return seen.finish(c)
        print("the device has %s, of which another process holds %s; %s are free" % tuple(common.size(there[k]) for k in ("total", "held", "free")))
        cap = 0.999 * there["total"] / GiB  # PyTorch's own limit is as good as the whole device
        done, said, calls, took = watch(script, cap, "", folder + "/native.cistern")
        print("native, %.0f s: %s" % (took, words(q for q in calls if q.name in ("cuMemAlloc", "cuMemFree"))))
        native(c, done, said, calls, fails=there["free"] < 130 * GiB)
        if there["free"] < 71 * GiB:
            c.add("room for the script", common.size(there["free"]), "71 GiB", False)
        if there["free"] >= 130 * GiB:
            c.add("the device gives both", common.size(there["free"]), "less than 130 GiB free", False)
        done, said, calls, took = watch(script, cap, "expandable_segments:True", folder + "/expandable.cistern")
        print("expandable_segments, %.0f s: %d calls" % (took, len(calls)))
        expandable(c, done, said, calls)
    finally:
        holder.end(20)
    return seen.finish(c)


if __name__ == "__main__":
    sys.exit(main())
