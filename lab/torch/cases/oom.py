"""Out of memory: the exception, its words, what is tried first, and that life goes on after it."""
import ctypes
import re
import threading

from .base import GiB, MiB, bytes_on, cap, case, check, eq, fine, probe, raises, requested, reserved, drain, stat, torch, under_cistern


@case()
def oom_type_and_message():
    torch.cuda.init()
    with raises(torch.OutOfMemoryError, "Tried to allocate 800000000.00 GiB") as box:
        torch.empty(1024 * 1024 * 1024 * 800000000, dtype=torch.int8, device="cuda")
    e = box[0]
    check(torch.cuda.OutOfMemoryError is torch.OutOfMemoryError, "one class under both names")
    check(isinstance(e, RuntimeError), "which is a RuntimeError")
    text = " ".join(str(e).split())
    for form in (r"CUDA out of memory\. Tried to allocate [0-9.]+ GiB\.", r"GPU 0 has a total capacity of [0-9.]+ GiB of which [0-9.]+ [KMG]iB is free",
                 r"Of the allocated memory [0-9.]+ [a-zA-Z]+ is allocated by PyTorch, and [0-9.]+ [a-zA-Z]+ is reserved by PyTorch but unallocated"):
        check(re.search(form, text), f"the message has PyTorch's form {form!r}: {text[:500]}")
    if under_cistern():
        check("istern" in text, f"and what Cistern found: {text}")
    return text[:160]


@case()
def oom_says_what_is_allowed():
    cap(512 * MiB)
    with raises(torch.OutOfMemoryError, "Tried to allocate 900.00 MiB", "allowed"):
        bytes_on(900 * MiB)
    with raises(torch.OutOfMemoryError, "Tried to allocate"):
        torch.ones(900 * MiB, device="cuda")
    x = torch.ones(4, device="cuda")
    eq(float((x * 2).sum()), 8.0, "work goes on")


@case()
def oom_recovers():
    """The next request that fits succeeds, and nothing leaks, however often."""
    cap(1 * GiB)
    keep = bytes_on(300 * MiB)
    for i in range(200):
        with raises(torch.OutOfMemoryError):
            bytes_on(900 * MiB)
        t = bytes_on(600 * MiB)
        eq(requested(), 900 * MiB, f"requested, round {i}")
        del t
    check(torch.cuda.max_memory_reserved() <= 1 * GiB, "the limit held")
    del keep
    drain()
    eq(requested(), 0, "nothing is left")


@case()
def oom_frees_cache_first():
    """What is cached in other sizes and on other streams is given up before a request fails."""
    cap(2 * GiB)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        a = [bytes_on(100 * MiB) for _ in range(9)]
    b = [bytes_on(3 * MiB) for _ in range(300)]
    del a, b
    t = bytes_on(1900 * MiB)
    t.fill_(3)
    eq(int(t[-1]), 3, "and it is usable")
    eq(stat("num_ooms"), 0, "no request failed")


@case()
def oom_in_backward():
    """In an autograd thread it arrives in the caller as the same exception."""
    cap(2 * GiB)
    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1
        @staticmethod
        def backward(ctx, g):
            bytes_on(4 * GiB)
            return g
    x = torch.ones(10, device="cuda", requires_grad=True)
    with raises(torch.OutOfMemoryError, "Tried to allocate 4.00 GiB"):
        Greedy.apply(x).sum().backward()
    (x * 2).sum().backward()
    eq(x.grad.tolist(), [2.0] * 10, "backward works after that")


@case()
def oom_in_threads():
    cap(1 * GiB)
    caught = []
    def work():
        for _ in range(50):
            try:
                t = bytes_on(700 * MiB)
                del t
            except torch.OutOfMemoryError:
                caught.append(1)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    drain()
    eq(requested(), 0, "nothing is left")
    eq(stat("num_ooms"), len(caught), "each failure was an exception and was counted")
    return f"{len(caught)} of 200 failed"


@case()
def memory_fraction():
    total = torch.cuda.get_device_properties(0).total_memory
    eq(torch.cuda.get_per_process_memory_fraction(), 1.0, "before it is set")
    torch.cuda.set_per_process_memory_fraction(0.01)
    check(abs(torch.cuda.get_per_process_memory_fraction() - 0.01) < 1e-6, "what was set is read back")
    with raises(torch.OutOfMemoryError):
        bytes_on(int(total * 0.011))
    t = bytes_on(int(total * 0.008))
    del t
    torch.cuda.set_per_process_memory_fraction(1.0)
    eq(torch.cuda.get_per_process_memory_fraction(), 1.0, "unset")
    t = bytes_on(int(total * 0.011))
    for bad in (-0.1, 1.5):
        with raises(ValueError):
            torch.cuda.set_per_process_memory_fraction(bad)
    with raises(TypeError):
        torch.cuda.set_per_process_memory_fraction(1)


@case()
def memory_fraction_zero():
    torch.cuda.set_per_process_memory_fraction(0.0)
    with raises(torch.OutOfMemoryError):
        bytes_on(100)
    torch.cuda.set_per_process_memory_fraction(0.5)
    eq(bytes_on(100).numel(), 100, "and afterwards")


@case()
def free_memory_callbacks():
    """PyTorch's own free-memory callbacks are a reclaim stage: one that frees memory saves the request."""
    p = probe()
    cap(1 * GiB)
    torch.cuda.init()
    fine(p.probe_hold(700 * MiB))
    t = bytes_on(600 * MiB)
    check(p.probe_callback_runs() >= 1, "the callback was asked")
    eq(requested(), 600 * MiB, "and what it held is free")
    runs = p.probe_callback_runs()
    with raises(torch.OutOfMemoryError):
        bytes_on(600 * MiB)
    check(p.probe_callback_runs() > runs, "asked again before the failure")
    del t


@case()
def ipc_collect_runs():
    torch.cuda.init()
    torch.cuda.ipc_collect()
    t = bytes_on(MiB)
    torch.cuda.ipc_collect()
    del t


@case(alone=True, timeout=90)
def oom_of_the_device():
    """Without a limit, the device itself runs out."""
    warm = bytes_on(1024)  # what the kernels used below take when they are first loaded belongs to no cache
    warm[-1:].fill_(9)
    int(warm[-1])
    del warm
    free, _ = torch.cuda.mem_get_info()
    keep = bytes_on(free // 2)
    with raises(torch.OutOfMemoryError, "Tried to allocate"):
        bytes_on(free)
    t = bytes_on(free // 3)
    t[-1:].fill_(9)
    eq(int(t[-1]), 9, "a request that fits")
    del t, keep
    torch.cuda.empty_cache()
    after, _ = torch.cuda.mem_get_info()
    check(after > free - 64 * MiB, f"all of it is given back: {free - after} bytes are missing")


@case(alone=True, timeout=90)
def empty_cache_gives_back():
    torch.cuda.init()
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    t = [bytes_on(1 * GiB) for _ in range(8)]
    small = [bytes_on(1000) for _ in range(5000)]
    held, _ = torch.cuda.mem_get_info()
    check(free - held >= 8 * GiB, "it is really taken")
    del t, small
    check(reserved() >= 8 * GiB, "and cached")
    torch.cuda.empty_cache()
    eq(reserved(), 0, "reserved after empty_cache")
    after, _ = torch.cuda.mem_get_info()
    check(after >= free - 4 * MiB, f"the device has it again: {free - after} bytes are missing")


@case()
def oom_message_in_pool():
    pool = torch.cuda.MemPool()
    cap(512 * MiB)
    with torch.cuda.use_mem_pool(pool):
        with raises(torch.OutOfMemoryError, "Tried to allocate 900.00 MiB"):
            bytes_on(900 * MiB)
        t = bytes_on(100 * MiB)
    eq(t.numel(), 100 * MiB, "and the scope goes on")


@case()
def oom_of_any_size():
    """Whichever function asks, and however much."""
    torch.cuda.init()
    for n in (1 << 59, 1 << 60, 1 << 62):
        with raises(torch.OutOfMemoryError, "Tried to allocate"):
            torch.cuda.caching_allocator_alloc(n)
    out = ctypes.c_void_p()
    words = probe().probe_raw_alloc(1 << 63, ctypes.byref(out))
    check(words is not None and b"CUDA out of memory. Tried to allocate" in words, f"2^63 bytes: {words}")
    eq(requested(), 0, "nothing is taken")
