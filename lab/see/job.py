"""A PyTorch program that says itself what it holds, and which of its functions asked for it.

    python job.py --cap 4 --fail     asks for more than there is, and prints its error and what it held
    python job.py --hold             allocates, prints what PyTorch says of it, and waits for the end of its input

Under `cistern run` its memory also bears tags.
"""
import argparse
import contextlib
import json
import os
import sys

import torch

MiB = 1 << 20


def tag(name):
    """A label of Cistern's where this process runs on it."""
    if os.environ.get("_CISTERN_INJECT") != "run":
        return contextlib.nullcontext()
    import cistern
    return cistern.tag(name)


def block(mib):
    return torch.empty(mib * MiB, dtype=torch.uint8, device="cuda")


def load_weights():
    with tag("weights"):
        return [block(128) for _ in range(8)]


def fill_cache():
    with tag("cache"):
        return [block(96) for _ in range(12)]


def take_step():
    return [block(64) for _ in range(10)]


def ask_for_too_much(mib):
    return block(mib)


def held(*groups):
    return sum(t.numel() for group in groups for t in group)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--cap", type=float, help="GiB that the process may have, as PyTorch limits it")
    p.add_argument("--fail", action="store_true")
    p.add_argument("--hold", action="store_true")
    args = p.parse_args()
    if args.cap:
        torch.cuda.set_per_process_memory_fraction(args.cap * 1024 * MiB / torch.cuda.get_device_properties(0).total_memory)
    weights, cache = load_weights(), fill_cache()
    del cache[::3]  # what is freed is cached
    step = take_step()
    error = ""
    if args.fail:
        try:
            ask_for_too_much(2048)
        except torch.OutOfMemoryError as e:
            error = str(e)
    torch.cuda.synchronize()
    s = torch.cuda.memory_stats()
    print(json.dumps({"pid": os.getpid(), "error": error, "asked": 2048 * MiB,
                      "held": {"load_weights": held(weights), "fill_cache": held(cache), "take_step": held(step)},
                      "tags": {"weights": held(weights), "cache": held(cache)},
                      "reserved": s["reserved_bytes.all.current"], "allocated": s["allocated_bytes.all.current"],
                      "peak": s["reserved_bytes.all.peak"]}), flush=True)
    if args.hold:
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
