"""Tensors shared with other processes by torch.multiprocessing, and memory for code that needs an address of the old kind."""
import ctypes
import os
import pickle
import sys
import time

import common
from .base import PYTHON, GiB, MiB, bytes_on, cap, case, check, drain, eq, fewer, fine, probe, raises, requested, reserved, torch

TIMEOUT = 60


# Targets of processes: at the top of the module, so that spawned children find them.

def add_one(get, put):
    while (t := get.get()) is not None:
        value = int(t.view(-1)[-1])
        t += 1
        torch.cuda.synchronize()
        put.put((value, list(t.shape)))
        del t
    put.put("done")


def read_all(get, put):
    tensors = get.get()
    put.put([(t.numel(), int(t.view(-1)[0]), int(t.view(-1)[-1]), bool((t == t.view(-1)[0]).all())) for t in tensors])
    for t in tensors:
        t.fill_(99)
    for d in {t.device.index for t in tensors}:
        torch.cuda.synchronize(d)
    put.put("written")
    get.get()
    del tensors, t
    drain()
    put.put(torch.cuda.memory_allocated())


def send_and_wait(put, get):
    held = [torch.full((3 * MiB,), i, dtype=torch.uint8, device="cuda") for i in range(3)]
    put.put(held)
    get.get()
    put.put([int(t[-1]) for t in held])
    get.get()


def send_and_exit(put, get):
    t = torch.full((30 * MiB,), 6, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    put.put(t)
    get.get()  # the other has it
    os._exit(0)


def wait_event(get, put):
    t, handle = get.get()
    e = torch.cuda.Event.from_ipc_handle(t.device, handle)
    e.wait()
    put.put(int((t + 0)[-1]))


class Peer:
    """A spawned process with a queue to it and one from it."""

    def __init__(self, target, from_it_first=False):
        mp = torch.multiprocessing.get_context("spawn")
        mp.set_executable(PYTHON)
        self.to, self.back = mp.Queue(), mp.Queue()
        self.process = mp.Process(target=target, args=(self.back, self.to) if from_it_first else (self.to, self.back), daemon=True)
        self.process.start()

    def get(self):
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                return self.back.get(timeout=0.5)
            except Exception as e:
                if type(e).__name__ != "Empty":
                    raise
                if not self.process.is_alive() and self.back.empty():
                    raise AssertionError(f"the other process ended with {self.process.exitcode}") from None
                check(time.monotonic() < deadline, "the other process says nothing")

    def end(self):
        self.process.join(20)
        eq(self.process.exitcode, 0, "the other process")


def shared_and_back(tensors, values):
    """Another process reads the tensors, each of one value, overwrites them and drops them."""
    for d in {t.device.index for t in tensors}:
        torch.cuda.synchronize(d)
    peer = Peer(read_all)
    peer.to.put(tensors)
    eq(peer.get(), [(t.numel(), v, v, True) for t, v in zip(tensors, values)], "what the other process read")
    eq(peer.get(), "written", "")
    check(all(bool((t == 99).all()) for t in tensors), "what it wrote")
    peer.to.put("drop")
    eq(peer.get(), 0, "what the other process still counts after dropping them")
    peer.end()


@case(timeout=120)
def share_both_ways():
    peer = Peer(add_one)
    for i, shape in enumerate([(10,), (3 * MiB,), (100, 1000), (1,)]):
        t = torch.full(shape, i + 5, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        peer.to.put(t)
        eq(peer.get(), (i + 5, list(shape)), "what the other process read")
        eq(int(t.view(-1)[-1]), i + 6, "what it wrote")
    view = torch.arange(0, 1000, dtype=torch.uint8, device="cuda")[100:200]
    peer.to.put(view)
    eq(peer.get(), (199, [100]), "a view")
    peer.to.put(None)
    eq(peer.get(), "done", "")
    peer.end()


@case(timeout=120)
def share_hundred():
    shared_and_back([torch.full((1000 + 5000 * i,), i, dtype=torch.uint8, device="cuda") for i in range(100)], range(100))


@case(timeout=150)
def share_large():
    """A tensor of several gigabytes over many chunks."""
    pieces = [bytes_on(fewer(n * MiB)) for n in (100, 700, 300, 64, 900, 33)]
    del pieces
    shared_and_back([torch.full((fewer(3 * GiB) + 12345,), 8, dtype=torch.uint8, device="cuda")], [8])


@case(native="upstreams by name are Cistern's", timeout=120)
def share_pooled():
    """Tensors of a stream-ordered pool of the driver's. One without handles refuses."""
    torch.cuda.init()
    import cistern.torch
    pool = cistern.torch.MemPool(upstream="async:handles=posix")
    with torch.cuda.use_mem_pool(pool):
        tensors = [torch.full((n,), i, dtype=torch.uint8, device="cuda") for i, n in enumerate((10, 3 * MiB, 50 * MiB))]
        # Here an error of the export is the case's; the thread of the queue would only print it.
        torch.ones(MiB, dtype=torch.uint8, device="cuda").untyped_storage()._share_cuda_()
    shared_and_back(tensors, range(3))
    plain = cistern.torch.MemPool(upstream="async")
    with torch.cuda.use_mem_pool(plain):
        t = torch.ones(MiB, dtype=torch.uint8, device="cuda")
    with raises(RuntimeError, "handles=posix"):
        t.untyped_storage()._share_cuda_()
    check(bool((t == 1).all()), "it is as it was")


@case(timeout=120)
def share_from_child():
    """The child exports, the parent reads and writes."""
    peer = Peer(send_and_wait, from_it_first=True)
    tensors = peer.get()
    eq([int(t[-1]) for t in tensors], [0, 1, 2], "what was sent")
    for t in tensors:
        t += 10
    torch.cuda.synchronize()
    peer.to.put("go on")
    eq(peer.get(), [10, 11, 12], "what the sender sees")
    del tensors, t
    drain()
    torch.cuda.ipc_collect()
    peer.to.put("end")
    peer.end()


@case(timeout=120)
def share_exporter_exits():
    """The exporter is gone: the importer neither crashes nor hangs."""
    peer = Peer(send_and_exit, from_it_first=True)
    t = peer.get()
    eq(int(t[-1]), 6, "what was sent")
    peer.to.put("I have it")
    peer.process.join(30)
    time.sleep(0.5)
    u = t + 1
    value = int(u[-1])
    del t, u
    drain()
    torch.cuda.ipc_collect()
    bytes_on(MiB)
    return f"read {value} after the exporter's exit"


@case(timeout=120)
def share_event():
    t = torch.zeros(MiB, dtype=torch.uint8, device="cuda")
    e = torch.cuda.Event(interprocess=True)
    peer = Peer(wait_event)
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    t.fill_(7)
    e.record()
    peer.to.put((t, e.ipc_handle()))
    eq(peer.get(), 7, "the other process waited for the kernel")
    peer.end()


@case(timeout=90)
def share_freed_by_importer():
    """Memory that a peer still holds is not handed out again before it lets go."""
    peer = Peer(read_all)
    t = torch.full((50 * MiB,), 3, dtype=torch.uint8, device="cuda")
    address = t.data_ptr()
    torch.cuda.synchronize()
    peer.to.put([t])
    del t
    eq(peer.get(), [(50 * MiB, 3, 3, True)], "what the other process read")
    u = torch.full((50 * MiB,), 44, dtype=torch.uint8, device="cuda")
    check(u.data_ptr() != address, "the memory is not reused while the other holds it")
    eq(peer.get(), "written", "")
    check(bool((u == 44).all()), "and the other's writes do not reach it")
    peer.to.put("drop")
    peer.get()
    peer.end()
    torch.cuda.ipc_collect()


@case(timeout=120, native="a handle in Cistern's format")
def share_with_native_peer():
    """A peer without Cistern gets one line that says so."""
    from multiprocessing.reduction import ForkingPickler
    t = torch.full((3 * MiB,), 3, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    data = bytes(ForkingPickler.dumps(t))
    text = ("import sys, pickle, torch\n"
            "torch.cuda.init()\n"
            "try:\n"
            "    t = pickle.loads(sys.stdin.buffer.read())\n"
            "    print('READ', int(t[-1]))\n"
            "except Exception as e:\n"
            "    print('REFUSED', type(e).__name__, str(e).splitlines()[0])\n")
    done = common.run([sys.executable, "-c", text], env=common.native_environment(), stdin=data, timeout=90)
    check(done.rc == 0, f"the peer ended with {done.why()}")
    line = next((x for x in done.out.splitlines() if x.startswith(("READ", "REFUSED"))), "nothing")
    check(line.startswith("REFUSED") and "istern" in line, f"the peer says: {line}")
    return line[:200]


@case(timeout=120, native="a handle in Cistern's format")
def share_from_native_peer():
    """What a peer without Cistern sends is refused with one line, or read."""
    text = ("import sys, time, torch\n"
            "from multiprocessing.reduction import ForkingPickler\n"
            "t = torch.full((3 << 20,), 5, dtype=torch.uint8, device='cuda'); torch.cuda.synchronize()\n"
            "data = bytes(ForkingPickler.dumps(t))\n"
            "sys.stdout.buffer.write(len(data).to_bytes(4, 'little') + data); sys.stdout.buffer.flush()\n"
            "sys.stdin.read()\n")
    import subprocess
    p = subprocess.Popen([sys.executable, "-c", text], env=common.native_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        # Not until the end: what the peer started (torch_shm_manager) may hold its output open.
        data = p.stdout.read(int.from_bytes(p.stdout.read(4), 'little'))
        torch.cuda.init()
        try:
            t = pickle.loads(data)
            eq(int(t[-1]), 5, "read")
            said = "read"
            del t
        except AssertionError:
            raise
        except Exception as e:
            said = f"refused: {str(e).splitlines()[0]}"
            check("istern" in said, f"one line that says why: {said}")
        eq(int(torch.ones(3, device="cuda").sum()), 3, "and work goes on")
    finally:
        p.kill()
        p.wait()
    return said[:200]


@case(timeout=90)
def share_fork_before_cuda():
    """fork with the file_system strategy of CPU tensors, before CUDA starts: as without Cistern."""
    mp = torch.multiprocessing.get_context("fork")
    q = mp.Queue()
    read = mp.Event()
    p = mp.Process(target=lambda: (q.put(torch.ones(5)), read.wait(30)), daemon=True)
    p.start()
    eq(q.get(timeout=30).tolist(), [1.0] * 5, "a CPU tensor")
    read.set()
    p.join(10)
    eq(p.exitcode, 0, "the child")
    eq(int(torch.ones(3, device="cuda").sum()), 3, "and CUDA starts here")


# ---- addresses of the old kind ---------------------------------------------------------------------------------------

def ipc_handle_fails_or(want):
    torch.cuda.init()
    held = [bytes_on(n) for n in (100, 5000, 3 * MiB, 200 * MiB)]
    codes = [probe().probe_ipc_get(t.data_ptr()) for t in held]
    eq(codes, [want] * len(held), "cudaIpcGetMemHandle on the address of each tensor")
    for t in held:
        t.fill_(1)
    torch.cuda.synchronize()
    return held


@case(conf="ipc:legacy")
def base_is_the_drivers():
    """getBaseAllocation gives what the driver handed out, where a handle of cudaIpcGetMemHandle begins, so that the handle
    and ptr - base name the tensor."""
    torch.cuda.init()
    held = [bytes_on(n) for n in (100, 5000, 3 * MiB, 3 * MiB, 200 * MiB)]
    inside = 0
    for t in held:
        base, n = ctypes.c_void_p(), ctypes.c_size_t()
        fine(probe().probe_base(t.data_ptr(), ctypes.byref(base), ctypes.byref(n)))
        first, size = ctypes.c_uint64(), ctypes.c_size_t()
        eq(common.cuda_driver().cuMemGetAddressRange_v2(ctypes.byref(first), ctypes.byref(size), ctypes.c_void_p(t.data_ptr())), 0,
           "cuMemGetAddressRange")
        eq((base.value, n.value), (first.value, size.value), "the base allocation and the driver's")
        inside += t.data_ptr() != base.value
    check(inside > 0, "some tensors lie behind the beginning of their segment")


@case()
def ipc_handle_native_kind():
    """What cudaIpcGetMemHandle says of an ordinary tensor (natively it succeeds; Cistern's chunks are of the other kind)."""
    torch.cuda.init()
    t = bytes_on(3 * MiB)
    return f"cudaIpcGetMemHandle returns {probe().probe_ipc_get(t.data_ptr())}"


@case(native="a setting of Cistern's", conf="ipc:legacy")
def ipc_legacy():
    held = ipc_handle_fails_or(0)
    del held
    drain()
    torch.cuda.empty_cache()
    eq(reserved(), 0, "given back")
    eq(requested(), 0, "nothing requested")


@case(native="a setting of Cistern's", conf="ipc:legacy", timeout=120)
def ipc_legacy_shares():
    shared_and_back([torch.full((3 * MiB,), 4, dtype=torch.uint8, device="cuda")], [4])


@case(native="a word of Cistern's")
def ipc_legacy_pool():
    """One pool of the old kind; the rest of the process is as it was."""
    import cistern.torch
    pool = cistern.torch.MemPool("ipc_legacy")
    with torch.cuda.use_mem_pool(pool):
        inside = [bytes_on(n) for n in (100, 3 * MiB, 90 * MiB)]
    outside = bytes_on(3 * MiB)
    eq([probe().probe_ipc_get(t.data_ptr()) for t in inside], [0, 0, 0], "cudaIpcGetMemHandle inside")
    check(probe().probe_ipc_get(outside.data_ptr()) != 0, "and outside, where memory is mapped from chunks, it fails")
    for t in inside:
        t.fill_(1)
    torch.cuda.synchronize()
    inside.clear()
    del t, pool
    drain()
    torch.cuda.empty_cache()
    eq(requested(), 3 * MiB, "given back")


@case(native="a setting of Cistern's", conf="single_handle:true")
def single_handle():
    """Each tensor lies in one physical handle, as RDMA registration wants."""
    cuda = common.cuda_driver()
    # Fragments first, so that nothing comes in one piece by chance.
    pieces = [bytes_on(n * MiB) for n in (30, 70, 10, 64, 5, 3)]
    del pieces[1::2]
    pieces.clear()
    for n in (100, 3 * MiB, 200 * MiB, 777 * MiB):
        t = bytes_on(n)
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        rc = cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(t.data_ptr()))
        eq(rc, 0, "cuMemGetAddressRange")
        handles = []
        for address in (t.data_ptr(), t.data_ptr() + n - 1):
            h = ctypes.c_uint64()
            rc = cuda.cuMemRetainAllocationHandle(ctypes.byref(h), ctypes.c_void_p(address))
            if rc == 0:
                handles.append(h.value)
                cuda.cuMemRelease(h)
        check(len(handles) in (0, 2) and len(set(handles)) <= 1, f"{n} bytes lie in one handle: {handles}")
        fd = ctypes.c_int(-1)
        page = 65536
        start = t.data_ptr() // page * page
        length = (t.data_ptr() + n - start + page - 1) // page * page
        rc = cuda.cuMemGetHandleForAddressRange(ctypes.byref(fd), ctypes.c_uint64(start), ctypes.c_size_t(length), 1, ctypes.c_ulonglong(0))
        if rc == 0:
            os.close(fd.value)
        elif rc != 801 and rc != 1:
            raise AssertionError(f"cuMemGetHandleForAddressRange of {n} bytes: CUresult {rc}")
        t.fill_(1)
        said = "as dma-buf too" if rc == 0 else f"this driver makes no dma-buf ({rc})"
    return said


@case(native="a setting of Cistern's", conf="single_handle:true", timeout=90)
def single_handle_works():
    """Everyday work on memory of single handles."""
    for i in range(300):
        t = torch.full(((i % 17 + 1) * 700_000,), i % 251, dtype=torch.uint8, device="cuda")
        check(int(t[-1]) == i % 251, "contents")
        del t
    torch.cuda.empty_cache()
    eq(reserved(), 0, "given back")


@case(native="a setting of Cistern's", conf="backend:malloc", timeout=90)
def backend_malloc_works():
    for i in range(300):
        t = torch.full(((i % 17 + 1) * 700_000,), i % 251, dtype=torch.uint8, device="cuda")
        check(int(t[-1]) == i % 251, "contents")
        del t
    torch.cuda.empty_cache()
    eq(reserved(), 0, "given back")
    cap(1 * GiB)
    with raises(torch.OutOfMemoryError):
        bytes_on(2 * GiB)


# ---- two devices ----------------------------------------------------------------------------------------------------

@case(gpus=2, timeout=90)
def peer_copies():
    """Copies between two devices, both ways, of tensors mapped before and after access was enabled."""
    early = torch.full((5 * MiB,), 3, dtype=torch.uint8, device="cuda:0")
    back = torch.full((5 * MiB,), 4, dtype=torch.uint8, device="cuda:1")
    for i in range(5):
        a = torch.full((fewer(64 * MiB) + i,), i, dtype=torch.uint8, device="cuda:0")
        b = a.to("cuda:1")
        check(bool((b == i).all()), "0 to 1")
        c = (b + 1).to("cuda:0")
        check(bool((c == i + 1).all()), "1 to 0")
        del a, b, c
    eq(int(early.to("cuda:1").sum()), 3 * 5 * MiB, "mapped before access was enabled")
    eq(int(back.to("cuda:0").sum()), 4 * 5 * MiB, "mapped before access was enabled")
    access = torch.cuda.can_device_access_peer(0, 1)
    big = torch.full((fewer(700 * MiB),), 9, dtype=torch.uint8, device="cuda:1")
    eq(int(big.to("cuda:0", non_blocking=True)[-1]), 9, "mapped afterwards")
    for d in (0, 1):
        torch.cuda.empty_cache()
        s = torch.cuda.memory_stats(d)
        eq(s["requested_bytes.all.current"], {0: 5 * MiB, 1: 5 * MiB + big.numel()}[d], f"statistics of device {d}")
    return f"peer access {'possible' if access else 'not possible'}"


@case(gpus=2, timeout=90)
def peer_events_and_streams():
    s0, s1 = torch.cuda.Stream("cuda:0"), torch.cuda.Stream("cuda:1")
    for i in range(50):
        with torch.cuda.stream(s0):
            a = torch.full((4 * MiB,), i, dtype=torch.uint8, device="cuda:0")
        s1.wait_stream(s0)
        with torch.cuda.stream(s1):
            b = torch.empty(4 * MiB, dtype=torch.uint8, device="cuda:1")
            b.copy_(a, non_blocking=True)
        a.record_stream(s1)
        del a
        with torch.cuda.stream(s0):
            junk = torch.full((4 * MiB,), 255, dtype=torch.uint8, device="cuda:0")
        s1.synchronize()
        check(bool((b == i).all()), f"round {i}")
        del b, junk


@case(gpus=2)
def device_two_only():
    """The second device alone: statistics, out of memory, pools."""
    torch.cuda.set_device(1)
    t = bytes_on(5 * MiB)
    eq(torch.cuda.memory_allocated(1), 5 * MiB, "on device 1")
    eq(torch.cuda.memory_allocated(0), 0, "on device 0")
    cap(1 * GiB, 1)
    with raises(torch.OutOfMemoryError, "GPU 1"):
        bytes_on(2 * GiB)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        u = bytes_on(3 * MiB)
    eq({s["device"] for s in pool.snapshot()}, {1}, "the pool's device")
    del t, u


@case(gpus=2, timeout=120)
def share_second_device():
    """A tensor of the second device, sent to a process whose current device is the first."""
    shared_and_back([torch.full((3 * MiB,), 7 + d, dtype=torch.uint8, device=f"cuda:{d}") for d in (1, 0)], [8, 7])
