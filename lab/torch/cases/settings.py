"""PyTorch's allocation settings under Cistern: honoured where they mean something, said where they do not."""
import os

from .base import GUARD, MiB, bytes_on, cap, case, check, eq, raises, requested, reserved, script, drain, stat, torch, under_cistern

LOOK = "import torch\nt = torch.ones(1000, device='cuda')\nprint('sum', int(t.sum()), torch.cuda.memory.get_allocator_backend())\n" + GUARD


def program(**env):
    done = script(LOOK, env=env)
    eq(done.rc, 0, done.why())
    check("sum 1000" in done.out, done.out)
    return done


@case(guard=None, native="Cistern says what it does with them")
def settings_said():
    """Settings that mean nothing here are named, once, on standard error."""
    done = program(PYTORCH_ALLOC_CONF="expandable_segments:True,max_split_size_mb:128,garbage_collection_threshold:0.8")
    for key in ("max_split_size_mb", "garbage_collection_threshold"):
        check(key in done.err, f"{key} is reported: {done.err[-500:]!r}")
        eq(done.err.count(key), 1, f"{key} is reported once")
    return " / ".join(line for line in done.err.splitlines() if "istern" in line)[:300]


@case(guard=None)
def settings_none_is_silent():
    """Without settings a program under Cistern says nothing of its own."""
    done = program()
    eq([line for line in done.err.splitlines() if "istern" in line.lower()], [], "standard error")


@case(guard=None)
def settings_old_name():
    program(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64")


@case(guard=None, native="the async backend is native's own")
def settings_backend():
    """backend:cudaMallocAsync is not available together with Cistern; a line says so."""
    done = script(LOOK, env={"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"})
    check("backend" in done.err, f"the backend is reported: status {done.rc}, {done.err[-400:]!r}")
    eq(done.rc, 0, done.why())


@case(env={"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.01"})
def settings_fraction():
    total = torch.cuda.get_device_properties(0).total_memory
    with raises(torch.OutOfMemoryError):
        bytes_on(int(total * 0.012))
    eq(bytes_on(int(total * 0.005)).numel(), int(total * 0.005), "below it")
    check(abs(torch.cuda.get_per_process_memory_fraction() - 0.01) < 1e-6, "and it is read back")


@case(env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
def settings_no_caching():
    """Nothing is cached: what is freed is the device's again."""
    for i in range(20):
        t = torch.full((50 * MiB,), i, dtype=torch.uint8, device="cuda")
        check(int(t[-1]) == i, "contents")
        del t
    check(reserved() <= 4 * MiB, f"{reserved()} bytes are cached")


@case(env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, alone=True)
def settings_no_caching_device():
    torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    t = bytes_on(1000 * MiB)
    held, _ = torch.cuda.mem_get_info()
    check(free - held >= 1000 * MiB, "taken")
    del t
    torch.cuda.synchronize()
    after, _ = torch.cuda.mem_get_info()
    check(after >= free - 4 * MiB, f"{free - after} bytes are missing after the free")


@case()
def settings_caching_off_and_on():
    torch.cuda.init()
    torch.cuda.caching_allocator_enable(False)
    t = torch.full((50 * MiB,), 3, dtype=torch.uint8, device="cuda")
    eq(int(t[-1]), 3, "works without the cache")
    torch.cuda.caching_allocator_enable(True)
    u = torch.full((50 * MiB,), 4, dtype=torch.uint8, device="cuda")
    del t
    eq(int(u[-1]), 4, "and with it again")
    del u
    drain()
    torch.cuda.empty_cache()
    eq(requested(), 0, "nothing is left")


@case()
def settings_at_run_time():
    torch.cuda.init()
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:100")
    t = bytes_on(MiB)
    eq(t.numel(), MiB, "works on")
    s = torch.cuda.memory._snapshot()["allocator_settings"]
    check("expandable_segments" in s, f"the snapshot has the settings: {s}")
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:9999999")


@case()
def settings_backend_name():
    torch.cuda.init()
    name = torch.cuda.memory.get_allocator_backend()
    check(isinstance(name, str) and name, "a name")
    return name


@case(env={"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:4"})
def settings_roundup():
    """Sizes rounded up, or the setting said to mean nothing; never wrong statistics."""
    t = bytes_on(1_200_000)
    eq(requested(), 1_200_000, "requested")
    check(stat("allocated_bytes.all.current") >= 1_200_000, "allocated")
    del t
    eq(requested(), 0, "and freed")
    return str(stat("allocated_bytes.all.peak"))


@case(conf="limit:1GiB", native="a setting of Cistern's")
def settings_cistern_limit():
    bytes_on(900 * MiB)
    with raises(torch.OutOfMemoryError):
        bytes_on(1100 * MiB)
    torch.cuda.set_per_process_memory_fraction(1.0)


@case(guard=None, native="a setting of Cistern's")
def settings_cistern_bad():
    """A bad CISTERN_CONF is one clear line, not a crash."""
    done = script("import torch\nprint(torch.ones(3, device='cuda').sum())\n", env={"CISTERN_CONF": "nonsense:1"})
    check("nonsense" in done.err, f"the key is named: status {done.rc}, {done.err[-400:]!r}")
    check(done.rc not in (-11, -6, None), f"status {done.rc}")
    return next((line for line in done.err.splitlines() if "nonsense" in line), "")[:200]


@case(conf="history:1000", native="a setting of Cistern's")
def settings_cistern_history():
    t = bytes_on(3 * MiB)
    cap(1024 * MiB)
    del t
    check(under_cistern() and os.environ.get("CISTERN_CONF", "history").find("history") >= 0, "the setting is there")
    import cistern
    import tempfile
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "s.pickle")
        cistern.snapshot(path)
        import pickle
        with open(path, "rb") as f:
            s = pickle.load(f)
    check(any(e["action"] == "alloc" and e["size"] == 3 * MiB for e in s["device_traces"][0]), "Cistern's own history has the allocation")
