"""A training loop that catches torch.OutOfMemoryError, halves its batch and goes on, a thousand times, must not leak a
byte: of PyTorch's statistics, of the device, of host memory.

    python oomloop.py [--times 1000] [--mode cistern|native|expandable] [--cap 2]
"""
import argparse
import gc
import json
import sys
import time

import common


def work(args):
    import torch
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(args.cap * common.GiB / total)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    common.require_cistern()

    def step(batch):
        loss = model(torch.randn(batch, 1024, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def look():
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        s = torch.cuda.memory_stats()
        return {"requested": s["requested_bytes.all.current"], "allocations": s["allocation.all.current"], "active": s["active_bytes.all.current"],
                "reserved": s["reserved_bytes.all.current"], "device": common.device_use(), "resident": common.resident()}

    too_large = int(args.cap * common.GiB // (4096 * 4))  # its hidden layer alone takes the whole limit
    caught, steps, begin, first, look_after = 0, 0, time.monotonic(), None, 50
    while caught < args.times:
        batch = too_large
        while True:
            try:
                step(batch)
                steps += 1
                break
            except torch.OutOfMemoryError:
                caught += 1
                batch //= 2
        if first is None and caught >= look_after:  # libraries have loaded what they need
            first = look()
    last = look()
    print(json.dumps({"caught": caught, "steps": steps, "sec": round(time.monotonic() - begin, 2), "first": first, "last": last,
                      "ooms": torch.cuda.memory_stats()["num_ooms"]}), flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--times", type=int, default=1000)
    p.add_argument("--mode", choices=common.MODES, default="cistern")
    p.add_argument("--cap", type=float, default=2, help="GiB")
    p.add_argument("--timeout", type=float, default=170)
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return work(args)
    done = common.child(args.mode, "oomloop.py", ["--child", *sys.argv[1:]], args.timeout)
    r, c = done.last_json(), common.Checks("oomloop")
    if r is None or done.rc != 0:
        print(done.out[-1000:], done.err[-4000:])
        c.add(f"the loop under {args.mode}", done.why(), "runs", False)
        return c.finish()
    print(json.dumps(r))
    a, b = r["first"], r["last"]
    c.add("out of memory, caught; steps done", f"{r['caught']:,}; {r['steps']:,} in {r['sec']} s", f"{args.times:,}", r["caught"] >= args.times)
    for key in ("requested", "allocations", "active", "reserved"):
        c.add(f"{key}, at the end against the {50}th", f"{b[key]:,} against {a[key]:,}", "equal", a[key] == b[key])
    if a["device"] is not None and b["device"] is not None:
        c.add("device memory of the process", f"{b['device'] - a['device']:+,} B", "0", b["device"] == a["device"])
    c.add("host memory of the process", f"{b['resident'] - a['resident']:+,} B", "less than 8 MiB more", b["resident"] - a["resident"] < 8 * common.MiB)
    return c.finish()


if __name__ == "__main__":
    sys.exit(main())
