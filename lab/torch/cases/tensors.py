"""What programs do with tensors: sizes, layouts, cuDNN, the profiler, libraries that take addresses, training."""
import json
import os
import tempfile

from .base import GiB, KiB, MiB, STANDIN, Skip, case, check, drain, eq, fewer, requested, reserved, stat, torch


@case()
def tensor_sizes():
    """Every size around the borders, all live at once: aligned, apart from each other, right contents."""
    sizes = sorted({max(1, b + d) for b in (1, 512, 4 * KiB, 256 * KiB, MiB, 2 * MiB, 10 * MiB, 20 * MiB, 32 * MiB, 100 * MiB) for d in (-1, 0, 1, 513)})
    held = [torch.full((n,), i, dtype=torch.uint8, device="cuda") for i, n in enumerate(sizes)]
    eq([t.data_ptr() % 512 for t in held], [0] * len(held), "alignment")
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.numel()) for t in held)
    check(all(a[1] <= b[0] for a, b in zip(ranges, ranges[1:])), "no two overlap")
    eq([int(t[0]) for t in held], list(range(len(held))), "first bytes")
    eq([int(t[-1]) for t in held], list(range(len(held))), "last bytes")


@case(timeout=90, gpu="10 GiB of memory")
def tensor_large():
    """More than 2^32 bytes in one tensor."""
    if STANDIN:
        raise Skip("the host may have less")
    t = torch.zeros(5 * GiB + 3, dtype=torch.uint8, device="cuda")
    t[-1] = 7
    t[4 * GiB] = 9
    eq((int(t[-1]), int(t[4 * GiB]), int(t[4 * GiB - 1])), (7, 9, 0), "contents")
    u = t.clone()
    check(torch.equal(t, u), "a copy")


@case(timeout=90)
def tensor_many_small():
    n = fewer(50_000)
    held = [torch.full((1 + i % 300,), i % 251, dtype=torch.uint8, device="cuda") for i in range(n)]
    eq([int(held[i][-1]) for i in range(0, n, 97)], [i % 251 for i in range(0, n, 97)], "contents")
    check(reserved() < fewer(200 * MiB), f"{n} small tensors hold {reserved()} bytes")
    held.clear()
    drain()
    torch.cuda.empty_cache()
    eq(reserved(), 0, "given back")


@case()
def tensor_resize():
    """Storages that shrink to nothing and grow again, as sharded training does."""
    t = torch.full((5 * MiB,), 4, dtype=torch.uint8, device="cuda")
    s = t.untyped_storage()
    for _ in range(20):
        s.resize_(0)
        eq(requested(), 0, "nothing is allocated")
        s.resize_(5 * MiB)
        t.fill_(6)
        eq(int(t.sum()), 30 * MiB, "and again")
    u = torch.ones(10, device="cuda")
    u.resize_(1000)
    eq(u.numel(), 1000, "resize_")
    v = t.view(-1)[100:200]
    del t, s
    eq(int(v.sum()), 600, "a view keeps its storage")


@case(timeout=120, gpu="cuDNN's convolutions")
def tensor_cudnn_benchmark():
    """cudnn.benchmark asks how much memory a trial may take (cacheInfo)."""
    torch.backends.cudnn.benchmark = True
    conv = torch.nn.Conv2d(16, 32, 3, padding=1).cuda()
    for n in (8, 16):
        x = torch.randn(n, 16, 64, 64, device="cuda", requires_grad=True)
        y = conv(x)
        y.square().mean().backward()
        check(torch.isfinite(y).all() and torch.isfinite(x.grad).all(), "finite")
        want = torch.nn.functional.conv2d(x.double(), conv.weight.double(), conv.bias.double(), padding=1)
        check(torch.allclose(y.double(), want, atol=1e-2), "right")


@case(timeout=90, gpu="cuSOLVER, cuFFT and cuSPARSE")
def tensor_libraries():
    """cuBLAS, cuSOLVER, cuFFT, cuSPARSE, sorting: their workspaces come from the allocator."""
    torch.manual_seed(0)
    a = torch.randn(300, 300, device="cuda", dtype=torch.float64)
    check(torch.allclose(torch.linalg.inv(a) @ a, torch.eye(300, device="cuda", dtype=torch.float64), atol=1e-6), "inverse")
    check(torch.allclose(torch.fft.ifft(torch.fft.fft(a)).real, a), "fft")
    x = torch.randn(1_000_000, device="cuda")
    s, i = x.sort()
    check(bool((s[1:] >= s[:-1]).all()) and torch.equal(x[i], s), "sort")
    m = (torch.rand(500, 500, device="cuda") > 0.95).float()
    check(torch.allclose(m.to_sparse_csr() @ a.float()[:, :10].repeat(2, 1)[:500], m @ a.float()[:, :10].repeat(2, 1)[:500], atol=1e-3), "sparse")
    check(bool((x.topk(10).values == s[-10:].flip(0)).all()), "topk")


@case(timeout=90, gpu="kernels of attention")
def tensor_attention():
    q = torch.randn(2, 8, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    y.float().square().mean().backward()
    check(torch.isfinite(q.grad.float()).all(), "finite")


@case(timeout=120)
def profiler_memory():
    """torch.profiler with profile_memory: bytes per operator, events with totals, export."""
    from torch.profiler import ProfilerActivity, profile
    torch.ones(1, device="cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True, record_shapes=True, with_stack=True) as p:
        a = torch.empty(3 * MiB, dtype=torch.uint8, device="cuda")
        b = torch.empty(5 * MiB, dtype=torch.uint8, device="cuda")
        del a
    events = {e.key: e for e in p.key_averages()}
    eq(events["aten::empty"].self_device_memory_usage, 8 * MiB, "bytes of aten::empty")
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "trace.json")
        p.export_chrome_trace(path)
        with open(path) as f:
            memory = [e for e in json.load(f)["traceEvents"] if e.get("name") == "[memory]" and e["args"].get("Device Type") == 1]
        eq(sorted(e["args"]["Bytes"] for e in memory), sorted([3 * MiB, 5 * MiB, -3 * MiB]), "allocations and frees")
        last = max(memory, key=lambda e: float(e["ts"]))["args"]
        eq(last["Total Allocated"], torch.cuda.memory_allocated(), "total allocated")
        eq(last["Total Reserved"], reserved(), "total reserved")
    del b


@case(timeout=120)
def profiler_timeline():
    import warnings
    warnings.simplefilter("ignore")
    from torch.profiler import ProfilerActivity, profile
    m = torch.nn.Linear(512, 512).cuda()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True, record_shapes=True, with_stack=True) as p:
        for _ in range(2):
            m(torch.randn(64, 512, device="cuda")).sum().backward()
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "timeline.json")
        p.export_memory_timeline(path, device="cuda:0")
        with open(path) as f:
            times, sizes = json.load(f)
        check(len(times) > 2 and max(sum(x) for x in sizes) > MiB, "the timeline has memory in it")


@case()
def tensor_interchange():
    """Addresses for other libraries: DLPack, the CUDA array interface, CuPy where it is installed."""
    t = torch.arange(1000, device="cuda")
    u = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(t))
    eq(u.data_ptr(), t.data_ptr(), "the same memory")
    eq(t.__cuda_array_interface__["data"][0], t.data_ptr(), "CUDA array interface")
    try:
        import cupy
    except ImportError:
        return "no CuPy here"
    c = cupy.from_dlpack(t)
    eq(int(c.sum()), 499_500, "CuPy reads it")
    c += 1
    cupy.cuda.Device().synchronize()
    eq(int(t.sum()), 500_500, "and writes it")
    del c


@case(timeout=90)
def tensor_training():
    """A small model trains to the same numbers in every run: nothing depends on what memory held before."""
    torch.use_deterministic_algorithms(True)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    def train():
        torch.manual_seed(7)
        m = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.LayerNorm(256), torch.nn.GELU(), torch.nn.Linear(256, 10)).cuda()
        opt = torch.optim.AdamW(m.parameters())
        losses = []
        for i in range(30):
            x = torch.randn(16 + i, 64, device="cuda")
            loss = m(x).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(float(loss))
        return losses
    first = train()
    torch.cuda.empty_cache()
    eq(train(), first, "losses of the second run")


@case()
def tensor_save_load():
    t = torch.randn(1000, 1000, device="cuda")
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "t.pt")
        torch.save({"t": t}, path)
        u = torch.load(path, map_location="cuda")["t"]
    check(torch.equal(t, u), "saved and loaded")


@case(timeout=150, gpu="NCCL's collectives")
def nccl_single():
    """NCCL over one GPU, with the hook that registers the allocator's segments with it."""
    import torch.distributed as dist
    if not dist.is_nccl_available():
        raise Skip("torch without NCCL")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000),
                      TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK="1")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1)
    for n in (10, MiB, 40 * MiB):
        t = torch.ones(n, device="cuda")
        dist.all_reduce(t)
        out = torch.empty(n, device="cuda")
        dist.all_gather_into_tensor(out, t)
        check(bool((out == 1).all()), f"{n} elements")
        del t, out
    torch.cuda.empty_cache()
    t = torch.ones(100 * MiB, device="cuda")
    dist.all_reduce(t)
    eq(float(t[-1]), 1.0, "after giving memory back")
    dist.destroy_process_group()


@case()
def steady_loop_makes_no_calls():
    """A loop whose memory is cached asks the driver for nothing and waits for nothing."""
    x = torch.ones(1000, 1000, device="cuda")
    def step(i):
        y = (x @ x).relu()
        z = [torch.empty((j + 1) * 700_000, dtype=torch.uint8, device="cuda") for j in range(10)]
        return (y * 2).sum() + z[i % 10].numel()
    for i in range(20):
        step(i)
    before = torch.cuda.memory_stats()
    for i in range(fewer(200)):
        step(i)
    after = torch.cuda.memory_stats()
    for key in ("num_device_alloc", "num_device_free", "num_sync_all_streams", "segment.all.allocated", "segment.all.freed", "num_alloc_retries"):
        eq(after[key] - before[key], 0, key)
    eq(after["reserved_bytes.all.peak"], before["reserved_bytes.all.peak"], "peak reserved")
    eq(stat("num_ooms"), 0, "num_ooms")
