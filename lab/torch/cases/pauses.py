"""cistern.pause and resume: physical memory handed back to the device and got again, under tensors that keep their addresses."""
import ctypes
import os
import tempfile
import threading

import common
from .base import GiB, MiB, bytes_on, cap, case, check, drain, eq, fewer, raises, requested, reserved, sleep_gpu, stat, torch

OURS = "a word of Cistern's"


def device_free():
    return torch.cuda.mem_get_info()[0]


def model(seed=0, width=2048, layers=8):
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).cuda()


def paused_bytes():
    import cistern
    return cistern.stats()["devices"][0]["paused"]["current"]


@case(native=OURS, alone=True, timeout=90)
def pause_weights():
    """A model's weights by tag: the device has the memory meanwhile, and every bit comes back, from host memory and disk."""
    import cistern
    other = torch.full((100 * MiB,), 3, dtype=torch.uint8, device="cuda")
    with cistern.tag("weights"):
        m = model()
    x = torch.randn(64, 2048, device="cuda")
    with torch.no_grad():
        want = m(x)
        copies = [p.detach().cpu().clone() for p in m.parameters()]
    size = sum(p.numel() * p.element_size() for p in m.parameters())
    addresses = [p.data_ptr() for p in m.parameters()]
    drain()
    torch.cuda.empty_cache()
    for keep in ("host", "disk", "host"):
        allocated, held, free = torch.cuda.memory_allocated(), reserved(), device_free()
        report = cistern.pause(tag="weights", keep=keep, **({"dir": tempfile.gettempdir()} if keep == "disk" else {}))
        eq(report["blocks"], len(copies), "blocks")
        eq(report["bytes"] + report["shared"], sum((p.numel() * p.element_size() + 511) // 512 * 512 for p in m.parameters()), "their bytes")
        check(report["physical"] + report["shared"] >= size and report["shared"] <= 96 * MiB, f"nearly all of it went: {report}")
        eq(torch.cuda.memory_allocated(), allocated, "still allocated")
        eq(held - reserved(), report["physical"], "no longer reserved")
        check(device_free() - free >= report["physical"] - 4 * MiB, f"the device has it: {device_free() - free} bytes more")
        eq(paused_bytes(), report["bytes"], "counted as paused is what lives; what was free beside it is physical memory only")
        check(report["physical"] >= report["bytes"], f"whole chunks: {report}")
        again = cistern.pause(tag="weights")
        eq((again["blocks"], again["physical"]), (0, 0), "pausing again changes nothing")
        filler = torch.full((report["physical"],), 255, dtype=torch.uint8, device="cuda")  # others use the memory
        eq(int(other[-1]), 3, "memory that is not paused is untouched")
        del filler
        back = cistern.resume(tag="weights")
        eq(back["blocks"], report["blocks"], "all of it is back")
        check(size - report["shared"] <= back["physical"] <= report["physical"], f"no more than went: {back} after {report}")
        eq([p.data_ptr() for p in m.parameters()], addresses, "where it was")
        check(all(torch.equal(p.detach().cpu(), c) for p, c in zip(m.parameters(), copies)), "bit for bit")
        with torch.no_grad():
            check(torch.equal(m(x), want), "and computes the same")
        again = cistern.resume()
        eq((again["blocks"], again["physical"], paused_bytes()), (0, 0, 0), "resuming again changes nothing")
        torch.cuda.empty_cache()
    return f"{common.size(report['physical'])} of {common.size(size)}"


@case(native=OURS, timeout=60)
def pause_cache_dropped():
    """A key-value cache in a pool of its own: dropped, and usable again at the same addresses."""
    import cistern
    import cistern.torch
    for arguments in ({}, {"memory": "single_handle"}, {"upstream": "virtual"}, {"upstream": "host_numa"}):
        pool = cistern.torch.MemPool(**arguments)
        with torch.cuda.use_mem_pool(pool):
            cache = [torch.full((2, 16 * MiB), i, dtype=torch.uint8, device="cuda") for i in range(8)]
        outside = torch.full((16 * MiB,), 9, dtype=torch.uint8, device="cuda")
        addresses, held = [t.data_ptr() for t in cache], pool.cistern_stats()
        report = cistern.pause(pool=pool, keep="drop")
        eq((report["blocks"], report["kept"]), (8, 0), f"{arguments}: nothing is kept")
        check(report["physical"] >= 8 * 32 * MiB, f"all of it went: {report}")
        now = pool.cistern_stats()
        eq((now["requested"], now["allocated"]), (held["requested"], held["allocated"]), "still allocated")
        check(now["paused"] >= 8 * 32 * MiB and now["reserved"] <= held["reserved"] - 8 * 32 * MiB, f"paused: {now}")
        eq(int(outside.sum()), 9 * 16 * MiB, "others are untouched")
        cistern.resume(pool=pool.id)
        eq([t.data_ptr() for t in cache], addresses, "the same addresses")
        for i, t in enumerate(cache):
            t.fill_(100 + i)
        eq([int(t[1, -1]) for t in cache], [100 + i for i in range(8)], "usable")
        eq(pool.cistern_stats()["paused"], 0, "nothing is paused")
        del cache, t, outside, pool
        drain()
        torch.cuda.empty_cache()
        eq(reserved(), 0, "nothing stays")


@case(native=OURS, timeout=90)
def pause_optimizer():
    """Between steps the optimizer's state goes to disk: training goes on as if nothing had been."""
    import cistern

    def train(pause):
        m = model(1, 512, 4)
        opt = torch.optim.Adam(m.parameters(), lr=1e-3)
        x, losses = torch.randn(64, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(5)), []
        for i in range(12):
            loss = m(x).square().mean()
            loss.backward()
            if pause and i:
                cistern.resume(tag="optimizer")
            with cistern.tag("optimizer"):
                opt.step()
            opt.zero_grad(set_to_none=True)
            if pause:
                report = cistern.pause(tag="optimizer", keep=("disk", "host")[i % 2])
                check(report["blocks"] > 0, "the state is found by its tag")
            losses.append(float(loss))
        if pause:
            cistern.resume()
        return losses
    eq(train(True), train(False), "losses")


@case(native=OURS)
def pause_then_free():
    """What is freed while it is paused is gone, its memory is not got again, and the rest comes back."""
    import cistern
    with cistern.tag("t"):
        held = [torch.full((64 * MiB,), i, dtype=torch.uint8, device="cuda") for i in range(6)]
    before = requested()
    cistern.pause(tag="t")
    del held[::2]
    drain()
    eq(before - requested(), 3 * 64 * MiB, "freed at once")
    report = cistern.resume()
    eq(report["blocks"], 3, "what still lives came back")
    eq([int(t.sum()) for t in held], [i * 64 * MiB for i in (1, 3, 5)], "contents")
    more = [torch.full((64 * MiB,), 50 + i, dtype=torch.uint8, device="cuda") for i in range(6)]
    eq([int(t[-1]) for t in more + held], [50, 51, 52, 53, 54, 55, 1, 3, 5], "and others may have the rest")
    cistern.pause(tag="t")
    held.clear()
    del more
    drain()
    torch.cuda.empty_cache()
    eq((requested(), reserved(), paused_bytes()), (0, 0, 0), "nothing stays without a resume")


@case(native=OURS, timeout=60)
def pause_graph():
    """What a graph uses is refused by name; allowed, the graph is right after resume."""
    import cistern
    pool = torch.cuda.graph_pool_handle()
    x = torch.ones(16 * MiB, device="cuda")
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, pool=pool):
        y = x * 2
        z = (y + 1).sum()
    held = reserved()
    with raises(cistern.CisternError, "captur") as box:
        cistern.pause(pool=pool)
    check("\n" not in str(box[0]), f"one line: {box[0]}")
    eq(reserved(), held, "nothing was paused")
    x.fill_(2)
    g.replay()
    eq(float(z), 5.0 * 16 * MiB, "and the graph works")
    for keep in ("host", "drop"):
        report = cistern.pause(pool=pool, keep=keep, captured=True)
        check(report["physical"] >= 64 * MiB, f"its memory went: {report}")
        filler = torch.full((256 * MiB,), 77, dtype=torch.uint8, device="cuda")
        cistern.resume(pool=pool)
        if keep == "host":
            eq((float(y[-1]), float(z)), (4.0, 5.0 * 16 * MiB), "what it wrote last")
        for i in range(5):
            x.fill_(i)
            g.replay()
            eq((float(y[-1]), float(z)), (i * 2.0, (i * 2 + 1.0) * 16 * MiB), f"replay {i} after {keep}")
        check(bool((filler == 77).all()), "into unused memory")
        del filler
    g.reset()


@case(native=OURS)
def pause_waits_for_work():
    """Work that is queued on any stream is done before memory goes, and its results are kept."""
    import cistern
    side = torch.cuda.Stream()
    for i in range(5):
        with cistern.tag("t"):
            t = torch.zeros(64 * MiB, dtype=torch.uint8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            sleep_gpu(0.1)
            t.fill_(i + 1)
        cistern.pause(tag="t")
        cistern.resume(tag="t")
        eq(int(t.sum()), (i + 1) * 64 * MiB, f"round {i}")
        t.record_stream(side)
        del t


@case(native=OURS, timeout=60)
def pause_lacks_memory():
    """A resume that finds too little says what it lacks and leaves everything paused; later it succeeds."""
    import cistern
    cap(fewer(2 * GiB))
    with cistern.tag("t"):
        held = [torch.full((fewer(300 * MiB),), i + 1, dtype=torch.uint8, device="cuda") for i in range(4)]
    cistern.pause(tag="t")
    before = paused_bytes()
    other = torch.full((fewer(1500 * MiB),), 9, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        with raises(cistern.OutOfMemoryError):
            cistern.resume(tag="t")
        eq(paused_bytes(), before, "as it was")
        check(reserved() <= other.numel() + 64 * MiB, f"and nothing was kept of the attempt: {reserved()}")
    eq(int(other[-1]), 9, "others are untouched")
    del other
    cistern.resume(tag="t")
    check(all(bool((t == i + 1).all()) for i, t in enumerate(held)), "contents")  # a sum would need eight times their memory


@case(native=OURS)
def pause_refused_by_name():
    """Memory that must not go, and memory that cannot: one line that names it, and nothing is paused."""
    import cistern
    import cistern.torch
    for name in ("managed", "pinned", "nccl", "device", "async"):
        pool = cistern.torch.MemPool(upstream=name)
        with torch.cuda.use_mem_pool(pool):
            t = torch.full((8 * MiB,), 5, dtype=torch.uint8, device="cuda")
        held = cistern.torch.pool_stats(pool)["reserved"]
        with raises(cistern.CisternError, name) as box:
            cistern.pause(pool=pool)
        check("\n" not in str(box[0]), f"one line: {box[0]}")
        eq((cistern.torch.pool_stats(pool)["reserved"], int(t.sum())), (held, 5 * 8 * MiB), f"{name}: as it was")
        del t, pool
    with cistern.tag("sent"):
        t = torch.full((8 * MiB,), 6, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
    handle = t.untyped_storage()._share_cuda_()
    with raises(cistern.CisternError) as box:
        cistern.pause(tag="sent")
    check(handle and "\n" not in str(box[0]), f"one line: {box[0]}")
    eq(int(t.sum()), 6 * 8 * MiB, "as it was")
    said = str(box[0])
    for bad in (dict(keep="cloud"), dict(dir="/tmp"), dict(tag=""), dict(pool="x")):
        with raises((ValueError, TypeError)):
            cistern.pause(**bad)
    with cistern.tag("kept"):
        u = torch.full((8 * MiB,), 7, dtype=torch.uint8, device="cuda")
    with raises(cistern.CisternError, "/no/such/folder"):
        cistern.pause(tag="kept", keep="disk", dir="/no/such/folder")
    eq(int(u.sum()), 7 * 8 * MiB, "as it was")
    return said[:200]


@case(native=OURS, timeout=90)
def pause_beside_others():
    """Another thread allocates, computes and frees while memory is paused and resumed."""
    import cistern
    with cistern.tag("t"):
        held = [torch.full((32 * MiB,), i, dtype=torch.uint8, device="cuda") for i in range(8)]
    stop, wrong, rounds = threading.Event(), [], [0]

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                n, value = (rounds[0] % 30 + 1) * MiB, rounds[0] % 251
                u = torch.full((n,), value, dtype=torch.uint8, device="cuda")
                v = u.clone()
                if not bool((v == value).all()):
                    wrong.append(rounds[0])
                rounds[0] += 1
    thread = threading.Thread(target=work)
    thread.start()
    try:
        for i in range(max(7, fewer(30))):
            cistern.pause(tag="t", keep=("host", "disk")[i % 7 == 6])
            cistern.resume(tag="t")
            check(all(bool((t == j).all()) for j, t in enumerate(held)), f"round {i}")
    finally:
        stop.set()
        thread.join()
    eq(wrong, [], "the other thread")
    return f"{rounds[0]} rounds beside"


@case(native=OURS, timeout=60)
def pause_with_history():
    """History and snapshots tell of it, and their figures agree."""
    import cistern
    torch.cuda.memory._record_memory_history()
    with cistern.tag("t"):
        t = torch.full((64 * MiB,), 3, dtype=torch.uint8, device="cuda")
    cistern.pause(tag="t")
    stats, snapshot = torch.cuda.memory_stats(), torch.cuda.memory._snapshot()
    eq(sum(s["requested_size"] for s in snapshot["segments"]), stats["requested_bytes.all.current"], "requested")
    actions = [e["action"] for e in snapshot["device_traces"][0]]
    check(any(a in actions for a in ("segment_unmap", "segment_free")), f"the trace tells of memory that went: {set(actions)}")
    cistern.resume()
    with tempfile.TemporaryDirectory() as folder:
        cistern.snapshot(os.path.join(folder, "now.pickle"))
    eq(int(t.sum()), 3 * 64 * MiB, "contents")
    eq(torch.cuda.memory_stats()["reserved_bytes.all.current"], sum(s["total_size"] for s in torch.cuda.memory_snapshot()), "reserved")
    torch.cuda.memory._record_memory_history(enabled=None)


@case(native=OURS)
def pause_memory_of_c():
    """What C allocates in the same process is paused by its tag as well."""
    import cistern
    from cistern import _library
    torch.cuda.init()
    bytes_on(1)
    lib, cuda = _library.load(), common.cuda_driver()
    with cistern.tag("c"):
        p = lib.cistern_malloc(32 * MiB, 0, None)
    check(p, _library.last_error(lib))
    eq(cuda.cuMemsetD8_v2(ctypes.c_uint64(p), ctypes.c_ubyte(7), ctypes.c_size_t(32 * MiB)), 0, "memset")
    eq(cistern.pause(tag="c")["blocks"], 1, "found by its tag")
    cistern.resume(tag="c")
    back = ctypes.create_string_buffer(32 * MiB)
    eq(cuda.cuMemcpyDtoH_v2(back, ctypes.c_uint64(p), ctypes.c_size_t(32 * MiB)), 0, "copied")
    eq(back.raw, b"\x07" * (32 * MiB), "contents")
    lib.cistern_free(p, 0, 0, None)


@case(native=OURS, timeout=60)
def pause_everything():
    """With no selection all of the device is paused, pools and the default pool; a tensor of each comes back."""
    import cistern
    import cistern.torch
    pool = cistern.torch.MemPool()
    with torch.cuda.use_mem_pool(pool):
        a = torch.full((40 * MiB,), 1, dtype=torch.uint8, device="cuda")
    b, small = torch.full((40 * MiB,), 2, dtype=torch.uint8, device="cuda"), torch.full((100,), 3, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        c = torch.full((40 * MiB,), 4, dtype=torch.uint8, device="cuda")
    drain()
    torch.cuda.empty_cache()
    report = cistern.pause()
    eq(report["blocks"], stat("allocation.all.current"), "every block")
    eq((report["shared"], reserved()), (0, 0), "nothing is allocated")
    cistern.resume()
    eq([int(t.sum()) for t in (a, b, small, c)], [40 * MiB, 80 * MiB, 300, 160 * MiB], "contents")
