"""Two GPUs of one host: copies both ways, memory mapped before and after access was enabled, out of memory on one of
them, tensors sent to a process on the other, and bandwidth against native's.

    python peer.py [--modes native,cistern]
"""
import argparse
import json
import os
import sys
import time

import common

CASES = ("peer_copies", "peer_events_and_streams", "device_two_only", "share_second_device", "share_both_ways", "share_event")


def work():
    import torch
    if torch.cuda.device_count() < 2:
        print(json.dumps({"skip": f"{torch.cuda.device_count()} GPU"}))
        return
    out = {"access": torch.cuda.can_device_access_peer(0, 1), "GB_per_s": {}}
    early = torch.full((256 * common.MiB,), 5, dtype=torch.uint8, device="cuda:0")  # mapped before there is access
    common.require_cistern()
    for n in (common.MiB, 256 * common.MiB, common.GiB):
        a = torch.full((n,), 1, dtype=torch.uint8, device="cuda:0")
        b = torch.empty(n, dtype=torch.uint8, device="cuda:1")
        for source, target, way in ((a, b, "0 to 1"), (b, a, "1 to 0")):
            target.copy_(source)
            for d in (0, 1):
                torch.cuda.synchronize(d)
            begin, times = time.perf_counter(), max(3, min(200, int(common.GiB // n)))
            for _ in range(times):
                target.copy_(source, non_blocking=True)
            for d in (0, 1):
                torch.cuda.synchronize(d)
            out["GB_per_s"][f"{common.size(n)}, {way}"] = round(n * times / (time.perf_counter() - begin) / 1e9, 1)
            assert bool((target == 1).all())
    copy = early.to("cuda:1")
    assert bool((copy == 5).all()), "memory mapped before access was enabled"
    copy += 1
    early.copy_(copy)
    assert bool((early == 6).all()), "and back into it"
    for i in range(200):  # memory that moves between two devices while it is copied
        n = (i * 7919 % 97 + 1) * 300_000
        x = torch.full((n,), i % 251, dtype=torch.uint8, device=f"cuda:{i % 2}")
        y = x.to(f"cuda:{1 - i % 2}", non_blocking=True)
        del x
        assert bool((y == i % 251).all()), i
    print(json.dumps(out))


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--modes", default="native,cistern")
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return work()
    c, found = common.Checks("peer"), {}
    for mode in args.modes.split(","):
        done = common.child(mode, "peer.py", ["--child"], 90)
        r = done.last_json()
        if r is not None and "skip" in r:
            print(f"peer: skipped, this machine has {r['skip']}")
            return 0
        if r is None or done.rc != 0:
            print(done.out[-1000:], done.err[-4000:])
            c.add(f"copies under {mode}", done.why(), "right", False if mode == "cistern" else None)
            continue
        found[mode] = r
        print(json.dumps({mode: r}))
        c.add(f"copies under {mode}", f"right; peer access {'possible' if r['access'] else 'not possible'}", "right", True)
    if len(found) == 2:
        for what, native in found["native"]["GB_per_s"].items():
            got = found["cistern"]["GB_per_s"][what]
            c.add(f"{what}", f"{got} GB/s, native {native}", "at least 0.95 x", got >= 0.95 * native if native > 1 and "MiB" not in what.split(",")[0] else None)
    env = common.environment("native", {"OUT": os.path.join(common.out_folder(), "peer-cases")})
    only = [word for name in CASES for word in ("--only", name)]
    done = common.run([sys.executable, os.path.join(common.HERE, "fidelity.py"), "-v", "--jobs", "3", *only], env=env, timeout=170)
    for name in CASES:  # one run for all: what each needs most is PyTorch's import
        said = next((x for x in done.out.splitlines() if x.split()[:2] in (["FAIL", name], ["skip", name + ":"], ["pass", name])), None)
        passed = said is not None and said.startswith("pass")
        c.add(f"fidelity: {name}", "pass" if passed else said or f"nothing was said: {done.why()}", "pass", passed)
    return c.finish()


if __name__ == "__main__":
    sys.exit(main())
