"""Collectives on memory that NCCL made: gradients of two GPUs summed in a pool that NCCL has registered.

NCCL is faster on buffers that it knows, and knows best those that it allocated itself. `upstream="nccl"` makes a
torch.cuda.MemPool of them: only what is allocated inside of the scope is of that kind, everything else stays as it was.

    python nccl_pool.py            two processes, one for each GPU
    python nccl_pool.py --gpus 1   one alone, where there is one GPU
"""
import argparse
import os
import subprocess
import sys
import tempfile

import cistern.torch


def train(rank, world, folder):
    cistern.torch.enable()  # before CUDA starts
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, device_id=device)

    pool = cistern.torch.MemPool(upstream="nccl", limit="4GiB")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).to(device)
    n = sum(p.numel() for p in model.parameters())
    with torch.cuda.use_mem_pool(pool):
        flat = torch.zeros(n, device=device)  # all gradients, one after the other
    at = 0
    for p in model.parameters():
        p.grad = flat[at:at + p.numel()].view_as(p)
        at += p.numel()

    backend = dist.group.WORLD._get_backend(device)
    backend.register_mem_pool(pool)  # what the pool holds now, and what it comes to hold
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator(device).manual_seed(100 + rank)  # each GPU has data of its own
    for step in range(20):
        flat.zero_()
        x = torch.randn(256, 1024, device=device, generator=data)
        loss = (model(x) - x).square().mean()
        loss.backward()
        dist.all_reduce(flat)  # in place, in registered memory
        flat /= world
        optimizer.step()
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.detach().item():.4f}", flush=True)

    # All GPUs have the same weights, as they summed the same gradients.
    mine = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum()
    all_of_them = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(all_of_them, mine)
    assert all(torch.equal(a, mine) for a in all_of_them), all_of_them
    if rank == 0:
        held = pool.cistern_stats()
        print(f"{world} GPU(s) agree; the pool of NCCL's memory holds {held['reserved'] >> 20} MiB, PyTorch all in all "
              f"{torch.cuda.memory_reserved() >> 20} MiB")
    backend.deregister_mem_pool(pool)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.rank is not None:
        return train(a.rank, a.gpus, a.folder)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [subprocess.Popen([sys.executable, os.path.abspath(__file__), "--gpus", str(a.gpus), "--rank", str(r),
                                   "--folder", folder], env={**os.environ, "LOCAL_RANK": str(r)}) for r in range(a.gpus)]
        return max(abs(p.wait()) for p in ranks)


if __name__ == "__main__":
    sys.exit(main())
