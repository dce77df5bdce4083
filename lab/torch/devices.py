"""Several GPUs in one process: peer access to pools with upstreams, also of memory that was mapped before access was enabled;
allocation on any device from any thread; a device that fails, of which Cistern makes nothing worse than CUDA itself does.

    python devices.py
"""
import argparse
import json
import random
import sys
import threading
import time

import common

UPSTREAMS = (None, "device", "virtual", "async", "managed", "pinned", "host_numa", "nccl")
MiB, GiB = common.MiB, common.GiB


def peers():
    """Pools on both devices, filled before and after access was enabled, reached from the other by copies and by kernels."""
    import cistern.torch
    import torch
    for d in (0, 1):
        torch.ones(1, device=f"cuda:{d}")
    early, pools = {}, {}
    for name in UPSTREAMS:
        for d in (0, 1):
            with torch.cuda.device(d):
                pools[name, d] = cistern.torch.MemPool(upstream=name)
                with torch.cuda.use_mem_pool(pools[name, d]):
                    early[name, d] = torch.full((3 * MiB,), 5.0, device=f"cuda:{d}")
    access = torch.cuda.can_device_access_peer(0, 1)

    def both_ways(held, what):
        for (name, d), t in held.items():
            mine, theirs = f"cuda:{d}", f"cuda:{1 - d}"
            t.fill_(5.0)
            assert bool((t.to(theirs) == 5).all()), f"{what}: {name} on {mine} copied to the other device"
            t.copy_(torch.full_like(t, 6.0, device=theirs))
            assert bool((t == 6).all()), f"{what}: {name} on {mine} written by a copy"
            # Of another type, a kernel of the source's device writes into the other's memory where there is access.
            t.copy_(torch.full(t.shape, 7, dtype=torch.int32, device=theirs))
            assert bool((t == 7).all()), f"{what}: {name} on {mine} written by the other's kernel"
            back = torch.empty(t.shape, dtype=torch.int32, device=theirs)
            back.copy_(t)
            assert bool((back == 7).all()), f"{what}: {name} on {mine} read by a kernel into the other"
    both_ways(early, "before access was enabled")
    late = {}
    for (name, d), pool in pools.items():
        with torch.cuda.device(d), torch.cuda.use_mem_pool(pool):
            late[name, d] = torch.full((40 * MiB,), 5.0, device=f"cuda:{d}")
    both_ways(late, "after access was enabled")
    early.clear(), late.clear(), pools.clear()
    for d in (0, 1):
        torch.cuda.synchronize(d)
    torch.cuda.empty_cache()
    left = [torch.cuda.memory_reserved(d) for d in (0, 1)]
    assert max(left) <= 64 * MiB, f"held after all: {left}"
    return f"access {'possible' if access else 'not possible'}, {len(UPSTREAMS)} kinds of memory on each"


def threads():
    """Eight threads allocate on both devices, whatever device is current, and free each other's tensors."""
    import torch
    shelf, mutex, wrong, rounds = [], threading.Lock(), [], [0]
    stop = time.monotonic() + 8

    def work(seed):
        r = random.Random(seed)
        try:
            while time.monotonic() < stop:
                torch.cuda.set_device(r.randrange(2))
                d, n, value = r.randrange(2), r.randrange(1, 3_000_000), r.randrange(251)
                t = torch.full((n,), value, dtype=torch.uint8, device=f"cuda:{d}")
                if t.device.index != d:
                    wrong.append("on another device than asked for")
                u = t.to(f"cuda:{1 - d}") if r.random() < 0.2 else t
                torch.cuda.current_stream(d).synchronize()
                with mutex:
                    shelf.append((u, value))
                    old, want = shelf.pop(r.randrange(len(shelf))) if len(shelf) > 60 else (None, 0)
                    rounds[0] += 1
                if old is not None and not bool((old == want).all()):
                    wrong.append(f"seed {seed}: overwritten")
                del t, u, old
        except Exception as e:
            wrong.append(f"seed {seed}: {e!r}")
    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong, wrong[:3]
    for d in (0, 1):
        torch.cuda.synchronize(d)
        want = sum(t.numel() for t, _ in shelf if t.device.index == d)
        got = torch.cuda.memory_stats(d)["requested_bytes.all.current"]
        assert got == want, f"device {d} says {got} bytes are requested, {want} are"
    shelf.clear()
    return f"{rounds[0]} tensors"


def pools_everywhere():
    """One pool used on both devices; each has its own memory of it, and its own limit."""
    import cistern.torch
    import torch
    torch.cuda.set_device(0)
    pool = cistern.torch.MemPool(upstream="device", limit="512MiB")
    held = {}
    for d in (0, 1):
        with torch.cuda.device(d), torch.cuda.use_mem_pool(pool, device=d):
            held[d] = torch.full((400 * MiB,), d, dtype=torch.uint8, device=f"cuda:{d}")
            try:
                torch.empty(400 * MiB, dtype=torch.uint8, device=f"cuda:{d}")
                raise AssertionError(f"the limit does not hold on device {d}")
            except torch.OutOfMemoryError:
                pass
    assert [s["device"] for s in pool.snapshot()] == [0, 1], pool.snapshot()
    assert [cistern.torch.pool_stats(pool, d)["requested"] for d in (0, 1)] == [400 * MiB] * 2
    assert all(bool((t == d).all()) for d, t in held.items())
    for d in (0, 1):  # another scope, the same pool
        with torch.cuda.device(d), torch.cuda.use_mem_pool(pool, device=d):
            try:
                torch.empty(400 * MiB, dtype=torch.uint8, device=f"cuda:{d}")
                raise AssertionError(f"the limit of device {d} is forgotten")
            except torch.OutOfMemoryError:
                pass
    cistern.pause(pool=(0, 0), device=1)
    cistern.resume(device=1)
    return "a limit on each"


def failure(mistake):
    """A kernel on device 1 fails: what each device says then, and whether memory can be given back all the same."""
    import torch

    def said_by(fn):
        try:
            fn()
            return "works"
        except RuntimeError as e:
            return str(e).splitlines()[0]
    held = [torch.full((64 * MiB,), 3 + d, dtype=torch.uint8, device=f"cuda:{d}") for d in (0, 1)]
    for d in (0, 1):
        held[d].to(f"cuda:{1 - d}")  # with access to each other
        torch.cuda.synchronize(d)

    def wrong():
        mistake(torch)
        torch.cuda.synchronize(1)

    def go_on():
        for i in range(50):
            t = torch.full(((i % 9 + 1) * 7 * MiB,), i, dtype=torch.uint8, device="cuda:0")
            assert int(t[-1]) == i, "a tensor of the sound device"
        assert int(held[0].sum()) == 3 * 64 * MiB, "what it held before"
        big = torch.full((2 * GiB,), 9, dtype=torch.uint8, device="cuda:0")
        assert int(big[-1]) == 9
        torch.cuda.synchronize(0)
    out = {"the mistake": said_by(wrong), "the other device": said_by(go_on), "statistics": said_by(torch.cuda.memory_stats)}
    held.clear()
    out["requested"] = [torch.cuda.memory_stats(d)["requested_bytes.all.current"] for d in (0, 1)]
    out["empty_cache"] = said_by(torch.cuda.empty_cache)
    return out


def no_worse(native, ours):
    """What Cistern made worse, in words: drivers differ in whether a device that fails takes the process's others down."""
    if ours["the mistake"] == "works":
        return "the mistake went unnoticed"
    if ours["the mistake"] != native["the mistake"]:
        return f"natively it says {native['the mistake']!r}"
    for what in ("the other device", "statistics", "empty_cache"):
        if ours[what] not in ("works", native[what], ours["the mistake"] if native[what] != "works" else "works"):
            return f"{what}: natively {native[what]!r}"
    if ours["requested"] != [0, 0]:
        return "what was freed still counts as requested"
    return None


def failed_assertion():
    def mistake(torch):
        x = torch.zeros(4, device="cuda:1")
        x[torch.tensor([1000], device="cuda:1")] += 1
    return failure(mistake)


def failed_address():
    def mistake(torch):
        with torch.cuda.device(1):  # a kernel on memory that is not allocated
            s = torch._C._construct_storage_from_data_pointer(1 << 20, torch.device("cuda:1"), 4 * MiB)
            torch.empty(0, dtype=torch.uint8, device="cuda:1").set_(s, 0, (4 * MiB,), (1,)).add_(1)
    return failure(mistake)


CHILDREN = {f.__name__: f for f in (peers, threads, pools_everywhere, failed_assertion, failed_address)}
NATIVE = ("threads", "failed_assertion", "failed_address")


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--only", choices=CHILDREN)
    p.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        import torch
        if torch.cuda.device_count() < 2:
            print(json.dumps({"skip": f"{torch.cuda.device_count()} GPU"}))
            return 0
        said = CHILDREN[args.child]()
        common.require_cistern()
        print(json.dumps({"said": said}), flush=True)
        return 0
    c = common.Checks("devices")
    for name in [args.only] if args.only else CHILDREN:
        natively = None
        for mode in (("native", "cistern") if name in NATIVE else ("cistern",)):
            done = common.child(mode, "devices.py", ["--child", name], 90)
            r = done.last_json()
            if r is not None and "skip" in r:
                print(f"devices: skipped, this machine has {r['skip']}")
                return 0
            said = r["said"] if r else ""
            failed = name.startswith("failed")
            right = r is not None and done.rc == 0
            if failed and natively is not None and natively[1] is not None and r is not None and mode == "cistern":
                # After such an error PyTorch may end a process badly by itself.
                worse = no_worse(natively[1], said) or ("" if done.rc in (0, natively[0]) else f"natively it ends with {natively[0]}")
                right, said = not worse, f"{worse}; {said}" if worse else said
            if not right:
                print(done.out[-1500:], done.err[-4000:])
            print(json.dumps({name: said, "mode": mode, "rc": done.rc, "sec": round(done.wall, 1)}))
            if mode == "native":
                natively = (done.rc, said or None)
                c.add(f"{name} under native", f"{said or done.why()}; {done.wall:.0f} s", "", None)
            else:
                c.add(name, f"{said or done.why()}; {done.wall:.0f} s", "no worse than native" if failed else "right", right)
    return c.finish()


if __name__ == "__main__":
    sys.exit(main())
