"""No driver call and no synchronisation in steady state: a training loop, a serving loop and a loop over several streams,
warmed up, then watched through Cistern's own counters and PyTorch's.

    python steady.py [--steps 200]
"""
import argparse
import json
import sys
import time

import common

NONE = ("device_allocs", "device_frees", "remaps", "stream_syncs", "retries", "by_collect", "by_remap", "by_grow", "by_lend", "by_callback")


def training():
    import torch
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True), 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(i):
        loss = model(torch.randn(8 + i % 3, 64 + 32 * (i % 4), 256, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


def serving():
    import torch
    weight, live = torch.randn(1024, 1024, device="cuda"), []

    def step(i):
        cache = torch.empty(4 + i % 5, 300 + 64 * (i % 7), 1024, device="cuda")
        for _ in range(8):
            cache = torch.cat([cache[:, 1:], (cache[:, -1:] @ weight)], 1)
        live.append(cache)
        if len(live) > 5:
            live.pop(i % 5)
    return step


def streams():
    import torch
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()

    def step(i):
        with torch.cuda.stream(side):
            x = torch.ones((i % 4 + 1) * 500_000, device="cuda")
        main.wait_stream(side)
        y = x * 2
        x.record_stream(main)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            z = y.sum()
        y.record_stream(side)
        del x, y, z
        main.wait_stream(side)
        if i % 4 == 3:
            main.synchronize()  # so that the host does not run away from the device; the program's own wait
    return step


LOOPS = {f.__name__: f for f in (training, serving, streams)}


def counters():
    import cistern
    d = cistern.stats()["devices"][0]
    return {k: v for k, v in d.items() if isinstance(v, int)} | {"allocations": d["allocations"]["all"]["added"]}


def work(name, steps):
    import torch
    step = LOOPS[name]()
    for i in range(2 * 420):  # a multiple of every period in the loops, twice
        step(i)
    torch.cuda.synchronize()
    common.require_cistern()
    before, torch_before, begin = counters(), torch.cuda.memory_stats(), time.perf_counter()
    for i in range(steps):
        step(i)
    torch.cuda.synchronize()
    took, after, torch_after = time.perf_counter() - begin, counters(), torch.cuda.memory_stats()
    print(json.dumps({"loop": name, "steps": steps, "sec": round(took, 3), "counters": {k: after[k] - before[k] for k in before},
                      "torch": {k: torch_after[k] - torch_before[k] for k in ("num_device_alloc", "num_device_free", "num_sync_all_streams", "segment.all.allocated")}}))


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--steps", type=int, default=420)
    p.add_argument("--child", choices=LOOPS, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return work(args.child, args.steps)
    c = common.Checks("steady")
    for name in LOOPS:
        done = common.child("cistern", "steady.py", ["--child", name, "--steps", str(args.steps)], 60)
        r = done.last_json()
        if r is None or done.rc != 0:
            print(done.err[-3000:])
            c.add(name, done.why(), "runs", False)
            continue
        print(json.dumps(r))
        found = {k: r["counters"][k] for k in NONE if r["counters"].get(k)}
        found.update({k: v for k, v in r["torch"].items() if v})
        missing = [k for k in NONE if k not in r["counters"]]
        if missing:
            c.add(f"{name}: counters that are missing", " ".join(missing), "none", False)
        allowed = {"by_collect"} if name == "streams" else set()  # frees of other streams are collected, without a wait
        bad = {k: v for k, v in found.items() if k not in allowed}
        c.add(f"{name}: driver calls and waits in {r['counters']['allocations']:,} allocations", ", ".join(f"{k} {v}" for k, v in found.items()) or "none", "none", not bad)
    return c.finish()


if __name__ == "__main__":
    sys.exit(main())
