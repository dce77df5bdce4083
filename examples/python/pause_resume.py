"""Pause and resume: a model trains and generates in turns on a GPU whose memory is too small for both at once.

Generation needs the weights and a large key-value cache, training needs the weights, gradients and the optimizer's state.
What the other phase needs is paused: its physical memory goes back to the device, its addresses stay, so that nothing that
points there has to be built anew. Paused weights are kept in page-locked host memory, the cache is dropped.

    python pause_resume.py
"""
import time

import cistern.torch

cistern.torch.enable()  # before CUDA starts
import torch  # noqa: E402

GiB = 1 << 30


def held(what):
    torch.cuda.synchronize()
    allocated, physical = torch.cuda.memory_allocated() / GiB, torch.cuda.memory_reserved() / GiB
    print(f"{what:<44} allocated {allocated:6.2f} GiB, physical {physical:6.2f} GiB", flush=True)


def timed(what, call, *arguments, **named):
    begin = time.perf_counter()
    report = call(*arguments, **named)
    took = time.perf_counter() - begin
    # Physical memory is whole chunks and, for a pause, also what the cache held free beside: the gradients' memory, for one.
    print(f"  {what}: {report['bytes'] / GiB:.2f} GiB of tensors, {report['physical'] / GiB:.2f} GiB physical, in {took * 1e3:.0f} ms"
          + (f"; contents at {report['kept'] / took / 1e9:.0f} GB/s" if report["kept"] else ""), flush=True)


def main(width=4096, layers=16, rounds=3):
    torch.manual_seed(0)
    with cistern.tag("weights"):
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers))).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    x = torch.randn(64, width, device="cuda")

    cache_pool = cistern.torch.MemPool()
    with torch.cuda.use_mem_pool(cache_pool):
        cache = torch.zeros(8, GiB // 8, dtype=torch.uint8, device="cuda")
    address = cache.data_ptr()
    held("a model and its cache")
    cistern.pause_buffers("4GiB")  # page-locked memory for paused contents, allocated once
    timed("the cache is paused, dropped", cistern.pause, pool=cache_pool, keep="drop")

    for i in range(rounds):
        for _ in range(2):  # training
            loss = (model(x) - x).square().mean()
            loss.backward()
            with cistern.tag("optimizer"):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        held(f"round {i + 1}: trained, loss {loss.detach().item():.5f}")
        del loss
        timed("the optimizer's state is paused", cistern.pause, tag="optimizer")
        torch.cuda.empty_cache()
        timed("the cache is resumed", cistern.resume, pool=cache_pool)
        assert cache.data_ptr() == address

        with torch.no_grad():  # generation
            cache.zero_()
            y = x
            for step in range(8):
                y = torch.tanh(model(y))
                cache[step].fill_(step + 1)
            assert [int(row[-1]) for row in cache] == list(range(1, 9))
        held(f"round {i + 1}: generated")
        timed("the cache is paused, dropped", cistern.pause, pool=cache_pool, keep="drop")
        timed("the optimizer's state is resumed", cistern.resume, tag="optimizer")

    # Between jobs everything is paused: another process may have the GPU.
    before = [p.detach().clone().cpu() for p in model.parameters()]
    timed("everything is paused", cistern.pause)
    held("paused")
    timed("everything is resumed", cistern.resume)
    assert all(torch.equal(a, p.detach().cpu()) for a, p in zip(before, model.parameters()))
    held("resumed, every bit where it was")


if __name__ == "__main__":
    main()
