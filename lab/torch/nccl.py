"""Collectives on pools of NCCL's memory, on two GPUs: cistern.torch.MemPool(upstream="nccl") registered with ProcessGroupNCCL,
eager and in CUDA graphs, with memory that comes and goes while it is registered; the same for pools of single handles.

    python nccl.py [--kinds nccl,single_handle,virtual]

Each kind runs in two processes of its own, one for each GPU. NVLink multicast is left off.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import common

WORLD = 2
SIZES = (1000, 262_144, 16 * 1024 * 1024 + 4)  # elements
LIMIT = 100  # seconds for a kind


def pool_of(kind):
    import cistern.torch
    return cistern.torch.MemPool("single_handle") if kind == "single_handle" else cistern.torch.MemPool(upstream=kind)


def collectives(torch, dist, pool, rank, n, dtype, i):
    """All four, once, on tensors of the pool that are made for it and dropped after it."""
    peer = 1 - rank
    with torch.cuda.use_mem_pool(pool):
        t = torch.full((n,), rank + 1 + i, device="cuda", dtype=dtype)
        gathered = torch.empty(WORLD * n, device="cuda", dtype=dtype)
        spread = torch.full((WORLD * n,), rank + i, device="cuda", dtype=dtype)
        spread[n:] += 10
        part = torch.empty(n, device="cuda", dtype=dtype)
        word = torch.full((n,), rank * 7 + i, device="cuda", dtype=dtype)
    dist.all_gather_into_tensor(gathered, t)
    assert bool((gathered[rank * n:(rank + 1) * n] == rank + 1 + i).all()), "all_gather: the own part"
    assert bool((gathered[peer * n:(peer + 1) * n] == peer + 1 + i).all()), "all_gather: the other's part"
    dist.all_reduce(t)
    assert bool((t == 3 + 2 * i).all()), "all_reduce"
    dist.reduce_scatter_tensor(part, spread)
    assert bool((part == 1 + 2 * i + 20 * rank).all()), "reduce_scatter"
    dist.broadcast(word, src=1)
    assert bool((word == 7 + i).all()), "broadcast"


def graphs(torch, dist, pool, rank, inside):
    """Collectives captured into a graph, replayed with other contents; inside: the graph's own memory is the pool's too."""
    n = 300_000
    with torch.cuda.use_mem_pool(pool):
        x = torch.zeros(n, device="cuda")
        gathered = torch.zeros(WORLD * n, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # NCCL connects at the first use
        for _ in range(2):
            dist.all_reduce(x)
            dist.all_gather_into_tensor(gathered, x)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, capture_error_mode="thread_local", **({"pool": pool.id} if inside else {})):
        y = x * 2
        dist.all_reduce(y)
        dist.all_gather_into_tensor(gathered, y)
        z = gathered.sum() + y[0]
    for i in range(20):
        x.fill_(rank + i)
        junk = torch.full((n,), 99.0, device="cuda")
        g.replay()
        want = 2.0 * (2 * i + 1)
        assert bool((y == want).all()) and bool((gathered == want).all()), f"replay {i}"
        assert float(z) > want and bool((junk == 99).all()), f"replay {i}"
    torch.cuda.synchronize()
    g.reset()


def work(kind, rank, folder):
    import torch
    import torch.distributed as dist
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD, device_id=device)
    common.require_cistern()
    import cistern
    said = {"rank": rank, "nccl": ".".join(map(str, torch.cuda.nccl.version())), "done": []}

    def step(name, fn, *arguments):
        begin = time.monotonic()
        print(f"rank {rank}: {name}", flush=True)
        fn(*arguments)
        torch.cuda.synchronize()
        dist.barrier(device_ids=[rank])
        said["done"].append(f"{name} {time.monotonic() - begin:.1f} s")
        with open(f"{folder}/said-{rank}", "w") as f:
            json.dump(said, f)
    pool = pool_of(kind)
    backend = dist.group.WORLD._get_backend(device)
    with torch.cuda.use_mem_pool(pool):
        early = torch.full((1 << 20,), rank + 1.0, device="cuda")

    def first():
        dist.all_reduce(early)  # before it is registered
        assert bool((early == 3).all())
    step("before", first)
    step("register", backend.register_mem_pool, pool)
    for n in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            step(f"{n} x {str(dtype)[6:]}", lambda: [collectives(torch, dist, pool, rank, n, dtype, i) for i in range(5)])
    early.fill_(rank + 1.0)
    step("registered", first)

    def alone():  # one rank empties its cache: what is registered stays, so that the ranks still agree
        before = sorted((s["address"], s["total_size"]) for s in pool.snapshot())
        if rank == 0:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        after = sorted((s["address"], s["total_size"]) for s in pool.snapshot())
        assert before and before == after, f"{before} became {after}"
        collectives(torch, dist, pool, rank, 3_000_000, torch.float32, 1)
    step("one rank empties its cache", alone)

    def churn():  # the pool grows while it is registered
        for i in range(10):
            collectives(torch, dist, pool, rank, 3_000_000 + 500_000 * i, torch.float32, i)
            torch.cuda.synchronize()
            dist.barrier(device_ids=[rank])
            torch.cuda.empty_cache()
    step("churn", churn)
    step("graph", graphs, torch, dist, pool, rank, False)

    def refused(**more):
        try:
            cistern.pause(pool=pool, **more)
        except cistern.CisternError as e:
            said["pause"].append(str(e))
        else:
            raise AssertionError("memory that NCCL knows was paused")
    if kind == "nccl":  # which has blocks, and is no graph's
        said["pause"] = []
        step("pause", refused)
    step("graph in the pool", graphs, torch, dist, pool, rank, True)
    if kind == "nccl":  # and not either where graphs are no reason
        step("pause what graphs use", lambda: refused(captured=True))
        step("as it was", lambda: collectives(torch, dist, pool, rank, 100_000, torch.float32, 2))
    step("deregister", backend.deregister_mem_pool, pool)
    step("after", lambda: collectives(torch, dist, pool, rank, 100_000, torch.float32, 1))
    del early, pool
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_reserved()
    assert left <= 32 * common.MiB, f"{left} bytes stay"  # beside what torch.distributed keeps for barriers
    step("end", lambda: None)
    dist.destroy_process_group()
    return 0


def run_kind(kind):
    """Both processes; what they said, and how they ended in words, None where all was right."""
    with tempfile.TemporaryDirectory() as folder:
        env = common.environment("cistern", {"NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
                                             "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"})
        files, processes = [], []
        for rank in range(WORLD):
            argv = [sys.executable, os.path.join(common.HERE, "nccl.py"), "--child", kind, "--rank", str(rank), "--folder", folder]
            f = open(os.path.join(folder, f"output-{rank}"), "w+", errors="replace")
            files.append(f)
            processes.append(subprocess.Popen(common.command("cistern", argv), env={**env, "LOCAL_RANK": str(rank)}, stdout=f,
                                              stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True))
        deadline, wrong = time.monotonic() + LIMIT, None
        while wrong is None and any(p.poll() is None for p in processes):
            time.sleep(0.1)
            bad = [r for r, p in enumerate(processes) if p.poll() not in (None, 0)]
            if bad:
                time.sleep(2)  # the other may have more to say
                wrong = f"rank {bad[0]} ended with {processes[bad[0]].returncode}"
            elif time.monotonic() > deadline:
                wrong = f"not done within {LIMIT} s"
        for p in processes:
            common.end_session(p)
        if wrong is None and any(p.returncode != 0 for p in processes):
            wrong = f"ended with {[p.returncode for p in processes]}"
        said, texts = [], []
        for rank, f in enumerate(files):
            f.seek(0)
            texts.append(f.read())
            f.close()
            try:
                with open(os.path.join(folder, f"said-{rank}")) as s:
                    said.append(json.load(s))
            except (OSError, ValueError):
                said.append({})
        if wrong is not None:
            for rank, text in enumerate(texts):
                print(f"--- {kind}, rank {rank}:\n{text[-5000:]}", flush=True)
            words = [line for text in texts for line in text.splitlines() if "Error" in line or "rror:" in line]
            wrong += f": {words[-1][:200]}" if words else ""
        return said, wrong


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--kinds", default="nccl,single_handle,virtual")
    p.add_argument("--child", help=argparse.SUPPRESS)
    p.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    p.add_argument("--folder", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return work(args.child, args.rank, args.folder)
    done = common.run([sys.executable, "-c", "import torch; print(torch.cuda.device_count())"], env=common.environment("native"), timeout=120)
    if done.rc == 0 and int(done.out.split()[-1]) < WORLD:
        print(f"nccl: skipped, this machine has {done.out.split()[-1]} GPU")
        return 0
    c = common.Checks("nccl")
    for kind in args.kinds.split(","):
        begin = time.monotonic()
        said, wrong = run_kind(kind)
        last = (said[0].get("done") or ["nothing"])[-1]
        took = f"{time.monotonic() - begin:.0f} s, NCCL {said[0].get('nccl', '?')}"
        print(json.dumps({kind: said}))
        # What NCCL takes beside its own memory is NCCL's affair: it is printed here, and must not be wrong.
        required = kind == "nccl" or wrong is None or "AssertionError" in wrong
        c.add(f"collectives on a registered pool, {kind}", f"right; {took}" if wrong is None else f"{wrong}; after {last}; {took}",
              "right" if kind == "nccl" else "", wrong is None if required else None)
        if kind == "nccl" and wrong is None:
            words = said[0].get("pause", [])
            c.add("pausing it", "; ".join(words) or "nothing was said", "refused by name", len(words) == 2 and all("nccl" in w.lower() for w in words))
    return c.finish()


if __name__ == "__main__":
    sys.exit(main())
