"""Streams: what another stream still uses is not overwritten, and what it is done with comes back."""
import ctypes
import random

from .base import MiB, bytes_on, case, check, eq, fine, probe, requested, reserved, drain, stat, torch

N = 4 * MiB


@case(timeout=90)
def record_stream_contents():
    """A slow kernel on a side stream must read its input, although it was freed and others asked for memory."""
    side = torch.cuda.Stream()
    main = torch.cuda.current_stream()
    for i in range(60):
        a = torch.full((N,), i % 251, dtype=torch.uint8, device="cuda")
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.cuda._sleep(8_000_000)
            out = a + 0
            a.record_stream(side)
        address = a.data_ptr()
        del a
        b = torch.full((N,), 255, dtype=torch.uint8, device="cuda")  # would overwrite it
        check(b.data_ptr() != address or side.query(), "reused while the other stream was busy")
        side.synchronize()
        check(bool((out == i % 251).all()), f"round {i}: the side stream read something else")
        out.record_stream(main)
        del b, out
    drain()


@case(timeout=90)
def record_stream_many():
    """Several streams use one tensor; random order, checked contents."""
    r = random.Random(1)
    streams = [torch.cuda.Stream() for _ in range(6)]
    results = []
    for i in range(300):
        owner = r.choice(streams)
        with torch.cuda.stream(owner):
            t = torch.full((r.randrange(1, 64) * 4096,), i % 250, dtype=torch.uint8, device="cuda")
        for s in r.sample(streams, 3):
            s.wait_stream(owner)
            with torch.cuda.stream(s):
                if r.random() < 0.3:
                    torch.cuda._sleep(2_000_000)
                results.append((i, (t != i % 250).sum()))
            t.record_stream(s)
        del t
    torch.cuda.synchronize()
    wrong = [i for i, n in results if int(n)]
    eq(wrong, [], "rounds that read other bytes")


@case()
def stream_order_reuse():
    """On its own stream memory is reusable at once; on another only when that is safe."""
    a = torch.full((N,), 1, dtype=torch.uint8, device="cuda")
    address = a.data_ptr()
    del a
    b = bytes_on(N)
    eq(b.data_ptr(), address, "reused at once on the same stream")
    held = reserved()
    for _ in range(100):
        t = bytes_on(N)
        del t
    check(reserved() <= held + 32 * MiB, "a loop does not grow")


@case(timeout=90)
def side_stream_contents():
    """Tensors made, used and freed on several streams without record_stream, as the rules allow: no byte is wrong."""
    r = random.Random(2)
    streams = [torch.cuda.Stream() for _ in range(5)] + [torch.cuda.default_stream()]
    bad = []
    for i in range(2000):
        with torch.cuda.stream(r.choice(streams)):
            n = int(2 ** r.uniform(8, 22))
            t = torch.full((n,), i % 251, dtype=torch.uint8, device="cuda")
            if r.random() < 0.05:
                torch.cuda._sleep(1_000_000)
            bad.append((t != i % 251).any())
            del t
    torch.cuda.synchronize()
    eq(sum(int(b) for b in bad), 0, "wrong tensors")


@case()
def stream_destroyed():
    """External streams come and go; handles are used again for others."""
    p = probe()
    torch.cuda.init()
    for i in range(40):
        handle = ctypes.c_void_p()
        eq(p.probe_stream_create(ctypes.byref(handle)), 0, "cudaStreamCreate")
        s = torch.cuda.ExternalStream(handle.value)
        with torch.cuda.stream(s):
            t = torch.full((N,), i, dtype=torch.uint8, device="cuda")
            u = t + 1
        s.synchronize()
        check(bool((u == i + 1).all()), "contents")
        del t, u
        torch.cuda.synchronize()
        del s
        eq(p.probe_stream_destroy(handle), 0, "cudaStreamDestroy")
    t = bytes_on(64 * MiB)
    del t
    torch.cuda.empty_cache()
    eq(requested(), 0, "nothing is left")
    check(reserved() <= 64 * MiB, f"memory of streams that are gone is given back: {reserved()}")


@case()
def stream_destroyed_while_recorded():
    p = probe()
    for i in range(20):
        handle = ctypes.c_void_p()
        eq(p.probe_stream_create(ctypes.byref(handle)), 0, "cudaStreamCreate")
        s = torch.cuda.ExternalStream(handle.value)
        t = torch.full((N,), i, dtype=torch.uint8, device="cuda")
        s.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s):
            u = t + 1
        t.record_stream(s)
        u.record_stream(torch.cuda.current_stream())
        s.synchronize()
        del t, u
        eq(p.probe_stream_destroy(handle), 0, "cudaStreamDestroy")
    for _ in range(50):
        bytes_on(N)
    torch.cuda.synchronize()
    bytes_on(512)
    eq(stat("active_bytes.all.current"), 0, "nothing stays in use")


@case()
def async_copies():
    """Pinned memory, copies both ways on a side stream, freed early."""
    side = torch.cuda.Stream()
    for i in range(50):
        h = torch.full((N,), i, dtype=torch.uint8).pin_memory()
        with torch.cuda.stream(side):
            d = h.to("cuda", non_blocking=True)
            back = torch.empty(N, dtype=torch.uint8, pin_memory=True)
            back.copy_(d + 1, non_blocking=True)
        side.synchronize()
        eq(int(back[-1]), i + 1, "contents")
        torch.cuda.current_stream().wait_stream(side)
        e = d * 1
        d.record_stream(torch.cuda.current_stream())
        del d
        check(bool((e == i).all()), "contents after the copy")


@case()
def record_stream_frees_later():
    side = torch.cuda.Stream()
    for _ in range(20):
        t = bytes_on(32 * MiB)
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
        t.record_stream(side)
        del t
    torch.cuda.synchronize()
    bytes_on(512)
    eq(stat("active_bytes.all.current"), 0, "all came back")
    torch.cuda.empty_cache()
    eq(reserved(), 0, "and went back")


@case()
def recorded_on_own_stream():
    t = bytes_on(N)
    address = t.data_ptr()
    t.record_stream(torch.cuda.current_stream())
    del t
    eq(bytes_on(N).data_ptr(), address, "recording the own stream changes nothing")


@case()
def raw_allocation():
    """torch.cuda.caching_allocator_alloc and _delete, and their C++ forms."""
    torch.cuda.init()
    a = torch.cuda.caching_allocator_alloc(5 * MiB)
    side = torch.cuda.Stream()
    b = torch.cuda.caching_allocator_alloc(6 * MiB, stream=side)
    c = torch.cuda.caching_allocator_alloc(7 * MiB, 0, side.cuda_stream)
    eq(requested(), 18 * MiB, "requested")
    check(all(x % 512 == 0 for x in (a, b, c)), "aligned")
    for x in (a, b, c):
        torch.cuda.caching_allocator_delete(x)
    eq(requested(), 0, "given back")
    p, out = probe(), ctypes.c_void_p()
    fine(p.probe_raw_alloc_stream(3 * MiB, side.cuda_stream, ctypes.byref(out)))
    eq(requested(), 3 * MiB, "raw_alloc_with_stream")
    fine(p.probe_raw_delete(out))
    fine(p.probe_raw_alloc(0, ctypes.byref(out)))
    eq(out.value, None, "no bytes are no address")
    fine(p.probe_raw_delete(None))
    words = p.probe_raw_delete(0x7f0000000200)
    check(words is not None, "an unknown address is an error")
    eq(requested(), 0, "and changes nothing")
    return words.decode(errors="replace").splitlines()[0][:120]
