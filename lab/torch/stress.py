"""A million random tensor allocations and frees over eight streams and four threads, with pools and captures among them:
every block is filled by a kernel and checked by kernels before it is freed, on its own stream and on others. No byte
may ever be wrong.

    python stress.py [--ops 1000000] [--mode cistern|native|expandable] [--seed N] [--cap 12]
"""
import argparse
import ctypes
import json
import os
import random
import sys
import threading
import time

import common

# Word i of a block with a key; the bytes behind the last whole word have the word's first bytes.
KERNELS = r"""
typedef unsigned long long u64;
__device__ u64 word(u64 key, u64 i) {
  u64 z = (key + i * 0x9E3779B97F4A7C15ull) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
extern "C" __global__ void fill(u64 *p, u64 bytes, u64 key, u64 *) {
  u64 stride = (u64)gridDim.x * blockDim.x, words = bytes / 8;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i <= words; i += stride) {
    u64 w = word(key, i);
    if (i < words) p[i] = w;
    else for (u64 j = 0; j < bytes % 8; j++) ((unsigned char *)(p + i))[j] = (unsigned char)(w >> (8 * j));
  }
}
extern "C" __global__ void check(u64 *p, u64 bytes, u64 key, u64 *wrong) {
  u64 stride = (u64)gridDim.x * blockDim.x, words = bytes / 8, bad = 0;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i <= words; i += stride) {
    u64 w = word(key, i);
    if (i < words) bad += p[i] != w;
    else {
      bool differs = false;
      for (u64 j = 0; j < bytes % 8; j++) differs |= ((unsigned char *)(p + i))[j] != (unsigned char)(w >> (8 * j));
      bad += differs;
    }
  }
  if (bad) atomicAdd(wrong, bad);
}
"""

COUNTS = ("allocations", "frees", "checks", "crossings", "handed_over", "ooms", "emptied", "in_pools", "bytes")


def graphs(stop, failures, done):
    """Captures and replays beside the threads: results checked, pools shared, graphs that come and go."""
    import torch
    r = random.Random(11)
    alive = []
    try:
        stream = torch.cuda.Stream()
        while not stop.is_set():
            pool = alive[-1][0].pool() if alive and r.random() < 0.5 else None
            x = torch.full((r.randrange(1, 400_000),), 1.0, device="cuda")
            torch.cuda.current_stream().synchronize()
            g = torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                g.capture_begin(**({"pool": pool} if pool else {}), capture_error_mode="thread_local")
                a = x * 2
                b = torch.cat([a + 1, a])
                del a
                y = b.view(2, -1).sum(0)
                g.capture_end()
            torch.cuda.current_stream().wait_stream(stream)
            # Graphs of one pool may overwrite each other's memory, so each is replayed and read before the next.
            alive.append((g, x, y, b))
            for g, x, y, _ in r.sample(alive, min(3, len(alive))):
                value = r.randrange(100)
                x.fill_(value)
                g.replay()
                if not bool((y == 4.0 * value + 1).all()):
                    failures.append(f"a replay gave {float(y[0])} for {value}")
                done["replays"] += 1
            done["captures"] += 1
            if len(alive) > 6:
                alive.pop(r.randrange(len(alive)))
            p = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(p):
                t = torch.full((r.randrange(1, 3_000_000),), 7, dtype=torch.uint8, device="cuda")
            del p
            if not bool((t == 7).all()):
                failures.append("a tensor of a pool has other bytes")
            done["pools"] += 1
    except torch.OutOfMemoryError:
        done["graph_ooms"] += 1
        alive.clear()
        if not stop.is_set():
            graphs(stop, failures, done)
    except Exception as e:
        failures.append(f"graphs: {type(e).__name__}: {str(e)[:300]}")


def work(args):
    import torch
    torch.cuda.set_per_process_memory_fraction(args.cap * common.GiB / torch.cuda.get_device_properties(0).total_memory)
    lib = ctypes.CDLL(common.build("stress", os.path.dirname(torch.__file__)))
    lib.stress_start.restype = lib.stress_failure.restype = ctypes.c_char_p
    lib.stress_start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    lib.stress_run.restype = lib.stress_count.restype = ctypes.c_int64
    lib.stress_run.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    torch.ones(1, device="cuda")
    common.require_cistern()
    kernels = [torch.cuda._compile_kernel(KERNELS, name) for name in ("fill", "check")]
    words = lib.stress_start(kernels[0].func, kernels[1].func, args.streams)
    if words:
        raise SystemExit(f"stress: {words.decode()}")
    stop, failures, done = threading.Event(), [], {"captures": 0, "replays": 0, "pools": 0, "graph_ooms": 0}
    beside = threading.Thread(target=graphs, args=(stop, failures, done))
    begin = time.monotonic()
    if not args.no_graphs:
        beside.start()
    wrong = lib.stress_run(args.seed, args.threads, args.ops // args.threads, args.live)  # without the interpreter's lock
    took = time.monotonic() - begin
    stop.set()
    if not args.no_graphs:
        beside.join()
    torch.cuda.synchronize()
    failure = (lib.stress_failure() or b"").decode()
    result = {n: lib.stress_count(i) for i, n in enumerate(COUNTS)}
    held = torch.cuda.memory_stats()
    result.update(done, wrong=wrong, failure=failure, failures=failures[:5], sec=round(took, 2), left=held["requested_bytes.all.current"],
                  peak_reserved=held["reserved_bytes.all.peak"], retries=held["num_alloc_retries"], device_allocs=held["num_device_alloc"])
    print(json.dumps(result), flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--ops", type=int, default=1_000_000, help="allocations, each freed too")
    p.add_argument("--mode", choices=common.MODES, default="cistern")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--threads", type=int, default=4)
    p.add_argument("--streams", type=int, default=8)
    p.add_argument("--live", type=int, default=1500, help="blocks that each thread holds at most")
    p.add_argument("--cap", type=float, default=5, help="GiB; low enough that reclaim stages run")
    p.add_argument("--timeout", type=float, default=240)
    p.add_argument("--no-graphs", action="store_true")
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return work(args)
    done = common.child(args.mode, "stress.py", ["--child", *sys.argv[1:]], args.timeout)
    r, c = done.last_json(), common.Checks("stress")
    if r is None:
        print(done.out[-2000:], done.err[-4000:])
        c.add(f"stress under {args.mode}", done.why(), "runs", False)
        return c.finish()
    print(json.dumps(r))
    c.add("allocations, each freed", f"{r['allocations']:,}", f"{args.ops:,} asked for", r["allocations"] + r["ooms"] >= args.ops // args.threads * args.threads)
    c.add("checks by kernels", f"{r['checks']:,} over {common.size(r['bytes'])}")
    c.add("used by a second stream, handed to another thread", f"{r['crossings']:,}, {r['handed_over']:,}")
    c.add("captures, replays, pools beside; blocks in pools", f"{r['captures']:,}, {r['replays']:,}, {r['pools']:,}; {r['in_pools']:,}", "some",
          args.no_graphs or min(r["captures"], r["pools"], r["in_pools"]) > 0)
    c.add("out of memory, caught", f"{r['ooms']:,}")
    c.add("wrong words", r["wrong"], "0", r["wrong"] == 0)
    c.add("failures", "; ".join(filter(None, [r["failure"], *r["failures"]])) or "none", "none", not r["failure"] and not r["failures"])
    c.add("peak reserved", common.size(r["peak_reserved"]), f"at most {args.cap} GiB", r["peak_reserved"] <= args.cap * common.GiB)
    c.add("seconds", r["sec"])
    if done.rc != 0:
        c.add("end of the process", done.why(), "status 0", False)
    return c.finish()


if __name__ == "__main__":
    sys.exit(main())
