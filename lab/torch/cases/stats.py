"""Statistics: every key, exact against hand counts."""
import random

from .base import MiB, bytes_on, cap, check, eq, in_thread, requested, reserved, round512, drain, stat, torch, case

KINDS = ("allocation", "segment", "active", "inactive_split",
         "allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes")
SINGLE = {"max_split_size", "num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"}


def native_keys():
    four = ("current", "peak", "allocated", "freed")
    keys = {f"{k}.{pool}.{f}" for k in KINDS for pool in ("all", "large_pool", "small_pool") for f in four}
    newer = {"num_oom_rejections"} if torch.__version__ >= "2.12" else set()
    return keys | {f"oversize_{k}.{f}" for k in ("allocations", "segments") for f in four} | SINGLE | newer


@case()
def stats_keys():
    torch.cuda.init()
    s = torch.cuda.memory_stats()
    eq(native_keys() - set(s), set(), "keys that are missing")
    eq(set(s) - native_keys(), set(), "keys that native does not have")
    check(all(isinstance(v, int) for v in s.values()), "all integers")
    nested = torch.cuda.memory_stats_as_nested_dict()
    eq(nested["requested_bytes"]["all"]["current"], 0, "nothing requested yet")


@case()
def stats_exact():
    sizes = [1, 511, 512, 513, 4096, 100_000, 3 * MiB, 20 * MiB + 7, 64 * MiB]
    held = [bytes_on(n) for n in sizes]
    s = torch.cuda.memory_stats()
    eq(s["allocation.all.current"], len(sizes), "allocations")
    eq(s["allocation.all.allocated"], len(sizes), "allocations ever")
    eq(s["requested_bytes.all.current"], sum(sizes), "requested")
    eq(s["allocated_bytes.all.current"], sum(map(round512, sizes)), "allocated")
    eq(s["active_bytes.all.current"], s["allocated_bytes.all.current"], "active")
    eq(torch.cuda.memory_allocated(), s["allocated_bytes.all.current"], "memory_allocated()")
    check(s["reserved_bytes.all.current"] >= s["active_bytes.all.current"], "reserved holds what is active")
    for kind in KINDS:
        for f in ("current", "allocated", "freed"):
            eq(s[f"{kind}.small_pool.{f}"] + s[f"{kind}.large_pool.{f}"], s[f"{kind}.all.{f}"], f"{kind}.{f}: small and large")
    gone = held.pop(6)
    del gone
    s = torch.cuda.memory_stats()
    eq(s["requested_bytes.all.current"], sum(sizes) - 3 * MiB, "requested after a free")
    eq(s["requested_bytes.all.freed"], 3 * MiB, "requested bytes freed")
    eq(s["allocation.all.freed"], 1, "frees")
    eq(s["allocation.all.current"], len(sizes) - 1, "allocations after a free")
    held.clear()
    drain()
    for key in ("requested_bytes", "allocated_bytes", "active_bytes", "allocation", "active"):
        eq(stat(f"{key}.all.current"), 0, key)
    check(reserved() > 0, "what was freed is cached")
    torch.cuda.empty_cache()
    eq(reserved(), 0, "nothing reserved after empty_cache")
    s = torch.cuda.memory_stats()
    eq(s["segment.all.current"], 0, "no segments after empty_cache")
    eq(s["segment.all.allocated"], s["segment.all.freed"], "as many segments freed as allocated")
    eq(s["reserved_bytes.all.allocated"], s["reserved_bytes.all.freed"], "as many bytes given back as taken")


@case()
def stats_device_calls():
    torch.cuda.init()
    before = stat("num_device_alloc")
    t = bytes_on(64 * MiB)
    check(stat("num_device_alloc") > before, "device allocations are counted")
    del t
    frees = stat("num_device_free")
    torch.cuda.empty_cache()
    check(stat("num_device_free") > frees, "device frees are counted")


@case()
def stats_peaks():
    a = bytes_on(10 * MiB)
    b = bytes_on(30 * MiB)
    del b
    eq(stat("requested_bytes.all.peak"), 40 * MiB, "peak requested")
    eq(torch.cuda.max_memory_allocated(), 40 * MiB, "max_memory_allocated")
    eq(stat("allocation.all.peak"), 2, "peak of allocations")
    check(torch.cuda.max_memory_reserved() >= 40 * MiB, "max_memory_reserved")
    torch.cuda.reset_peak_memory_stats()
    eq(stat("requested_bytes.all.peak"), 10 * MiB, "peak after a reset is what is held")
    eq(stat("allocation.all.peak"), 1, "peak of allocations after a reset")
    eq(torch.cuda.max_memory_reserved(), reserved(), "peak reserved after a reset")
    c = bytes_on(5 * MiB)
    eq(stat("requested_bytes.all.peak"), 15 * MiB, "peak counts on from there")
    del a, c
    eq(stat("requested_bytes.all.peak"), 15 * MiB, "a free leaves the peak")
    for f in (torch.cuda.reset_max_memory_allocated, torch.cuda.reset_max_memory_cached):
        f()
    eq(torch.cuda.max_memory_allocated(), 0, "reset_max_memory_allocated")


@case()
def stats_reset_accumulated():
    a = bytes_on(MiB)
    b = bytes_on(MiB)
    del b
    torch.cuda.reset_accumulated_memory_stats()
    s = torch.cuda.memory_stats()
    for key in ("allocation.all.allocated", "allocation.all.freed", "requested_bytes.all.allocated", "requested_bytes.all.freed",
                "reserved_bytes.all.allocated", "segment.all.allocated", "num_alloc_retries", "num_ooms"):
        eq(s[key], 0, key)
    eq(s["allocation.all.current"], 1, "what is held stays")
    eq(s["requested_bytes.all.current"], MiB, "bytes that are held stay")
    del a
    s = torch.cuda.memory_stats()
    eq(s["allocation.all.freed"], 1, "counts again")
    eq(s["requested_bytes.all.freed"], MiB, "counts bytes again")


@case()
def stats_random_walk():
    r = random.Random(5)
    held, now, peak, ever, calls = [], 0, 0, 0, 0
    for i in range(20_000):
        if held and (len(held) > 300 or r.random() < 0.5):
            n, t = held.pop(r.randrange(len(held)))
            del t
            now -= n
        else:
            n = int(2 ** r.uniform(0, 24))
            held.append((n, bytes_on(n)))
            now, ever, calls = now + n, ever + n, calls + 1
            peak = max(peak, now)
        if i % 97 == 0:
            s = torch.cuda.memory_stats()
            eq(s["requested_bytes.all.current"], now, f"requested at step {i}")
            eq(s["requested_bytes.all.peak"], peak, f"peak at step {i}")
            eq(s["requested_bytes.all.allocated"], ever, f"ever at step {i}")
            eq(s["allocation.all.current"], len(held), f"live at step {i}")
            eq(s["allocation.all.allocated"], calls, f"calls at step {i}")
            check(s["allocated_bytes.all.current"] >= sum(round512(n) for n, _ in held), "allocated holds the rounded sizes")
            check(s["active_bytes.all.current"] <= s["reserved_bytes.all.current"], "active within reserved")
            segments = sum(x["total_size"] for x in torch.cuda.memory_snapshot())
            eq(segments, s["reserved_bytes.all.current"], "segments of the snapshot add up to what is reserved")


@case()
def stats_threads():
    def work(seed):
        def body():
            r = random.Random(seed)
            held, ever = [], 0
            for _ in range(8000):
                if held and r.random() < 0.5:
                    held.pop(r.randrange(len(held)))
                else:
                    n = int(2 ** r.uniform(0, 22))
                    held.append(bytes_on(n))
                    ever += n
            return sum(t.numel() for t in held), ever, held
        return body
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(4) as pool:
        done = [f.result() for f in [pool.submit(work(i)) for i in range(4)]]
    eq(requested(), sum(d[0] for d in done), "requested")
    eq(stat("requested_bytes.all.allocated"), sum(d[1] for d in done), "requested ever")
    check(stat("requested_bytes.all.peak") >= requested(), "peak")
    done.clear()
    drain()
    eq(requested(), 0, "all given back")


@case()
def stats_zero_size():
    torch.cuda.init()
    before = torch.cuda.memory_stats()
    t = torch.empty(0, device="cuda")
    eq(t.data_ptr(), 0, "address of an empty tensor")
    eq(torch.cuda.memory_stats()["allocation.all.current"], before["allocation.all.current"], "counts nothing")
    eq((t + 1).numel(), 0, "arithmetic on it")


@case(guard=None)
def stats_before_cuda():
    eq(dict(torch.cuda.memory_stats()), {}, "before CUDA starts there are no statistics")
    eq(torch.cuda.memory_allocated(), 0, "memory_allocated")
    eq(torch.cuda.memory_reserved(), 0, "memory_reserved")
    torch.cuda.empty_cache()
    check(not torch.cuda.is_initialized(), "asking did not start CUDA")


@case()
def stats_summary():
    t = bytes_on(3 * MiB)
    text = torch.cuda.memory_summary()
    for part in ("PyTorch CUDA memory summary", "CUDA OOMs: 0", "cudaMalloc retries: 0", "Allocated memory", "Requested memory",
                 "GPU reserved memory", "Non-releasable memory", "from large pool", "from small pool"):
        check(part in text, f"memory_summary lacks {part!r}")
    check("3072 KiB" in text, "what is allocated is in the summary")
    check("from large pool" not in torch.cuda.memory_summary(abbreviated=True), "abbreviated")
    free, total = torch.cuda.mem_get_info()
    check(0 < free < total, "mem_get_info")
    del t


@case(gpu="NVML, which pynvml asks for processes")
def stats_processes():
    t = bytes_on(3 * MiB)
    check("GPU:" in torch.cuda.list_gpu_processes(), "list_gpu_processes")  # the number is NVML's
    del t


@case()
def stats_accelerator():
    a = torch.accelerator
    t = bytes_on(7 * MiB)
    eq(a.memory_allocated(), 7 * MiB, "memory_allocated")
    eq(a.max_memory_allocated(), 7 * MiB, "max_memory_allocated")
    eq(a.memory_reserved(), torch.cuda.memory_reserved(), "memory_reserved")
    eq(a.max_memory_reserved(), torch.cuda.max_memory_reserved(), "max_memory_reserved")
    s = a.memory_stats()
    eq(s["requested_bytes.all.current"], 7 * MiB, "memory_stats")
    del t
    a.reset_peak_memory_stats()
    eq(a.max_memory_allocated(), 0, "reset_peak_memory_stats")
    a.reset_accumulated_memory_stats()
    eq(a.memory_stats()["allocation.all.allocated"], 0, "reset_accumulated_memory_stats")
    a.empty_cache()
    eq(a.memory_reserved(), 0, "empty_cache")
    t = bytes_on(7 * MiB)
    free, total = a.get_memory_info()
    check(0 < free <= total - t.numel(), "get_memory_info")


@case()
def stats_bad_device():
    torch.cuda.init()
    for f in (torch.cuda.memory_stats, torch.cuda.reset_peak_memory_stats, torch.cuda.memory_allocated):
        try:
            f(99)
        except Exception as e:
            check("99" in str(e) or "nvalid device" in str(e), f"says which device: {e}")
        else:
            raise AssertionError(f"{f.__name__}(99) raised nothing")
    in_thread(lambda: bytes_on(10))
    eq(stat("num_ooms"), 0, "nothing went wrong")


@case()
def stats_active_while_in_use():
    side = torch.cuda.Stream()
    t = bytes_on(8 * MiB)
    with torch.cuda.stream(side):
        torch.cuda._sleep(600_000_000)
        t.record_stream(side)
    del t
    s = torch.cuda.memory_stats()
    eq(s["allocated_bytes.all.current"], 0, "it is no longer allocated")
    check(s["requested_bytes.all.current"] in (0, 8 * MiB), "no longer requested (native: until it can be reused)")
    eq(s["active_bytes.all.current"], 8 * MiB, "but active while the other stream uses it")
    eq(s["active.all.current"], 1, "as one block")
    torch.cuda.synchronize()
    u = bytes_on(512)  # an allocation notices what is done
    eq(stat("active_bytes.all.current"), 512, "then no longer active")
    del u


@case()
def stats_oom_counts():
    cap(1024 * MiB)
    t = bytes_on(600 * MiB)
    for _ in range(3):
        try:
            bytes_on(700 * MiB)
        except torch.OutOfMemoryError:
            pass
    eq(stat("num_ooms"), 3, "num_ooms")
    check(stat("num_alloc_retries") >= 0, "num_alloc_retries")
    eq(requested(), 600 * MiB, "a failed request counts nothing")
    eq(stat("allocation.all.current"), 1, "a failed request is no allocation")
    del t
