"""Whether `cistern trace` sees all of a program's device memory.

    python agree.py [--workloads gpt2_varlen,…] [--modes native,expandable,async] [--only segments] [--no-cupy]

memory    The traced peak against the fall in free memory that the driver reports, within 1 %, over the workloads of
          workloads.py under PyTorch's three allocators, and a CuPy program. Two things make that exact. Loaded code
          takes memory without any call that allocates: so modules are loaded eagerly, and the same work is done once
          before, after which nothing is loaded any more. And the moment of the peak need not be caught: these
          allocators give nothing back before they run out or are asked to, so that what is held at the end of the work
          is the most that was held in it. Free memory is read there, and where nothing but what is in use is held; the
          difference, with what the calls say is held at the latter point, is the fall.
segments  The traced calls against the segments in PyTorch's own snapshot of the same run: each segment_alloc is a
          cuMemAlloc, each segment_free a cuMemFree, each segment_map the handles made and mapped there, each
          segment_unmap those unmapped and released; with addresses, sizes and in order.

Nothing else may use the GPU meanwhile. About 15 s for each workload and mode, 3 minutes for all.
"""
import argparse
import gc
import os
import pickle
import sys
import time

import seen
from seen import common

STEPS = {"gpt2_varlen": 8, "generate_serving": 5, "detection": 6, "multistream_prefetch": 20}
MODES = {"native": "", "expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}
BAR = 0.01


# ---- in the traced process ---------------------------------------------------------------------------------------------

class Device:
    """What the driver says of device 0, asked in the context that the libraries use."""

    def __init__(self):
        self.driver = seen.Driver()

    def look(self):
        """Now, free bytes, and what the device's default pool holds."""
        import ctypes
        pool, held = ctypes.c_void_p(), ctypes.c_uint64()
        if self.driver.code("cuDeviceGetDefaultMemPool", ctypes.byref(pool), 0) == 0:
            self.driver.code("cuMemPoolGetAttribute", pool, 5, ctypes.byref(held))  # RESERVED_MEM_CURRENT
        free, total = self.driver.memory()
        return {"ns": time.time_ns(), "free": free, "total": total, "pool": held.value}


def with_torch(script, name, steps, snapshot):
    """The steps of a workload twice, and what was seen between."""
    import runpy
    import torch
    workloads = runpy.run_path(script, run_name="workloads")["WORKLOADS"]
    device = Device()
    if snapshot:
        torch.cuda.memory._record_memory_history(max_entries=3_000_000, context=None)

    def work():
        for loss in workloads[name](steps, 1):
            float(loss)
        torch.cuda.synchronize()
        return device.look()

    first = work()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    quiet = device.look()
    second = work()
    found = {"first": first, "quiet": quiet, "second": second, "reserved": torch.cuda.max_memory_reserved(), "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0)}
    if snapshot:
        found["ns"] = time.time_ns()
        with open(snapshot, "wb") as f:
            pickle.dump(torch.cuda.memory._snapshot(), f)
    return found


def with_cupy(steps):
    """Arrays, products, sorting and transforms of CuPy's, in its own pool, twice."""
    import cupy
    device = Device()

    def work():
        rng = cupy.random.default_rng(1)
        kept = []
        for i in range(steps):
            n = 1024 * (1 + i % 4)
            a, b = rng.standard_normal((n, n)), rng.standard_normal((n, n))
            product = a @ b
            values = cupy.sort(product.ravel())
            spectrum = cupy.fft.fft(a, axis=0)
            kept.append(values[:: 7] + cupy.abs(spectrum).sum())
            float(kept[-1][0])
        cupy.cuda.Device().synchronize()
        return device.look()

    first = work()
    gc.collect()
    cupy.fft.config.get_plan_cache().clear()
    cupy.get_default_memory_pool().free_all_blocks()
    quiet = device.look()
    second = work()
    return {"first": first, "quiet": quiet, "second": second, "reserved": cupy.get_default_memory_pool().total_bytes(), "retries": 0}


def child(script, name, steps, snapshot):
    if name == "cupy":
        import cupy  # noqa: F401
    else:
        import gate
        gate.prepare(name)
    seen.answer(ready=True)
    if sys.stdin.readline().strip() != "go":
        return 0
    seen.answer(**(with_cupy(steps) if name == "cupy" else with_torch(script, name, steps, snapshot)))
    return 0


# ---- comparing -----------------------------------------------------------------------------------------------------------

def fall(found, calls):
    """How far free memory fell between nothing held and the end of the work, and what calls say was held at the quiet
    point."""
    held, _ = seen.held(calls, until=found["quiet"]["ns"])
    held += found["quiet"]["pool"]
    return found["quiet"]["free"] + held - min(found["first"]["free"], found["second"]["free"]), held


def segment_events(snapshot):
    with open(snapshot, "rb") as f:
        taken = pickle.load(f)
    return [(e["action"], e["addr"], e["size"]) for e in taken["device_traces"][0] if e["action"].startswith("segment_")]


WANTED = {"segment_alloc": "cuMemAlloc", "segment_free": "cuMemFree", "segment_map": "cuMemMap", "segment_unmap": "cuMemUnmap"}


def compare(events, calls):
    """Walks through PyTorch's events, each of which has to be the next of the traced calls that is not another
    library's. Returns how many were found, the first that was not, and the traced calls beside them."""
    left = [q for q in calls if q.result == 0 and q.name in WANTED.values()]
    sizes = {}  # of plain memory, by address: a free says none
    beside, at = [], 0
    for n, (action, address, size) in enumerate(events):
        want, end = WANTED[action], address + size
        while address < end:
            while at < len(left) and not (left[at].name == want and left[at].address == address):
                beside.append(left[at])
                at += 1
            if at == len(left):
                return n, events[n], beside
            q = left[at]
            at += 1
            if want == "cuMemAlloc":
                sizes[address] = q.size
            got = sizes.pop(address, 0) if want == "cuMemFree" else q.size
            if got > end - address or got == 0 or got < size and want in ("cuMemAlloc", "cuMemFree"):
                return n, events[n], beside
            address += got
    return len(events), None, beside + left[at:]


def handles(calls):
    """Whether every mapping is of a handle that was made, in its size, and every handle that was unmapped was released."""
    made, references, mapped = {}, {}, {}
    for q in calls:
        if q.result != 0:
            continue
        if q.name == "cuMemCreate":
            made[q.handle], references[q.handle] = q.size, 1
        elif q.name == "cuMemMap":
            if made.get(q.handle) != q.size:
                return "mapped in another size: %r" % q
            mapped[q.address] = q.handle
        elif q.name == "cuMemUnmap":
            handle = mapped.pop(q.address, None)
            if handle is None:
                return "unmapped and never mapped: %r" % q
        elif q.name == "cuMemRelease":
            references[q.handle] = references.get(q.handle, 0) - 1
            if references[q.handle] < 0:
                return "released and never made: %r" % q
    kept = [h for h, n in references.items() if n > 0]
    return "" if set(kept) == set(mapped.values()) else "%d handles are held and %d are mapped" % (len(kept), len(mapped))


class One:
    """One workload under one allocator: its traced process and what came of it."""

    def __init__(self, script, name, mode, steps, folder):
        self.name, self.mode = name, mode
        self.words = name if mode == "cupy" else "%s, %s" % (name, mode)
        self.trace = os.path.join(folder, "%s-%s.cistern" % (name, mode))
        self.snapshot = os.path.join(folder, "%s-%s.pickle" % (name, mode)) if mode in ("native", "expandable") else ""
        env = common.environment("native", {"CUDA_MODULE_LOADING": "EAGER", "PYTHONWARNINGS": "ignore"})
        if MODES.get(mode):
            env["PYTORCH_ALLOC_CONF"] = MODES[mode]
        argv = [sys.executable, os.path.abspath(__file__), "--child", script or "-", name, str(steps), self.snapshot or "-"]
        self.talker = seen.Talker(seen.traced(argv, self.trace), env)

    def work(self, timeout):
        if self.talker.answer(180) is None:
            return None
        found = self.talker.ask("go", timeout)
        return found if self.talker.end(60) == 0 else None

    def memory(self, c, found, calls):
        peak = seen.peak_held(seen.summary(self.trace))
        fell, quiet = fall(found, calls)
        off = abs(peak - fell) / fell if fell > 0 else 1.0
        c.add("%s: traced peak, fall in free memory" % self.words, "%s, %s: %.3f %% apart" % (common.size(peak), common.size(fell), 100 * off),
              "within 1 %", off <= BAR)
        if found["second"]["pool"] == 0 and found["first"]["pool"] == 0:
            _, counted = seen.held(calls)
            c.add("%s: the peak counted anew from the calls" % self.words, counted, peak, counted == peak)
        if found["retries"]:
            c.add("%s: PyTorch gave memory back while it worked" % self.words, found["retries"], "no: free some of the GPU", False)
        return {"peak": peak, "fall": fell, "quiet": quiet, "pytorch": found["reserved"]}

    def segments(self, c, found, calls):
        events = segment_events(self.snapshot)
        os.unlink(self.snapshot)  # it is large
        same, first, beside = compare(events, [q for q in calls if q.time <= found["ns"]])
        c.add("%s: PyTorch's segment events that are traced calls" % self.words, "%d of %d%s" % (same, len(events), "; then %s of %s at %#x" % (
            first[0], common.size(first[2]), first[1]) if first else ""), "all, in order", bool(events) and same == len(events))
        other = sum(q.size for q in beside if q.name == "cuMemAlloc")
        c.add("%s: calls beside PyTorch's" % self.words, "%d, %s" % (len(beside), common.size(other)))
        if self.mode == "expandable":
            wrong = handles(calls)
            c.add("%s: handles" % self.words, wrong or "as made", "made, mapped, unmapped, released as one", not wrong)


def others():
    """The other users of the GPU, in words; empty where there are none, or it is not known."""
    found = common.device_processes()
    return ", ".join("process %d with %s" % (pid, common.size(n)) for pid, n in (found or {}).items())


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--workloads", default=",".join(STEPS))
    p.add_argument("--modes", default=",".join(MODES))
    p.add_argument("--only", choices=("memory", "segments"))
    p.add_argument("--no-cupy", action="store_true")
    p.add_argument("--only-cupy", action="store_true")
    p.add_argument("--steps", type=int, help="other than the table's")
    p.add_argument("--name", default="see-agree")
    p.add_argument("--timeout", type=float, default=120, help="seconds for the work of one process")
    p.add_argument("--budget", type=float, default=480, help="seconds after which nothing is begun")
    p.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        script, name, steps, snapshot = args.child
        return child(script, name, int(steps), "" if snapshot == "-" else snapshot)
    c, results = common.Checks(args.name), []
    planned = []
    if not args.only_cupy:
        script = seen.script("workloads.py", c)
        planned = [(script, n, m) for n in args.workloads.split(",") for m in args.modes.split(",") if script and (args.only != "segments" or m != "async")]
        for _, n, m in planned:
            if n not in STEPS or m not in MODES:
                p.error("%s, %s: choose among %s and %s" % (n, m, ", ".join(STEPS), ", ".join(MODES)))
    if not args.no_cupy and args.only != "segments":
        planned.append(("", "cupy", "cupy"))
    if not planned:
        return 0
    if others():
        print("other processes use this GPU, which makes free memory say little: " + others())
    folder = seen.folder(args.name)
    ahead, end = [], time.monotonic() + args.budget
    try:
        for n, (script, name, mode) in enumerate(planned):
            if time.monotonic() > end:
                for _, name, mode in planned[n:]:
                    c.add("%s, %s" % (name, mode), "not begun, no time was left", "measured", False)
                break
            # Two import while one works.
            while len(ahead) < min(3, len(planned) - n):
                s, a, m = planned[n + len(ahead)]
                ahead.append(One(s, a, m, args.steps or STEPS.get(a, 12), folder))
            one = ahead.pop(0)
            begin = time.monotonic()
            found = one.work(args.timeout)
            if found is None:
                c.add(one.words, one.talker.why(), "runs", False)
                one.talker.end(1)
                continue
            calls = seen.calls(one.trace)
            row = {"workload": name, "mode": mode, "calls": len(calls)}
            if args.only != "segments":
                row.update(one.memory(c, found, calls))
            if one.snapshot and args.only != "memory":
                one.segments(c, found, calls)
            results.append(row)
            print("%s: %.0f s, %d calls" % (one.words, time.monotonic() - begin, len(calls)), flush=True)
    finally:
        for one in ahead:
            one.talker.end(1)
    if any("peak" in r for r in results):
        print(common.table(["workload", "allocator", "calls", "traced peak", "fall in free memory", "held at the quiet point", "PyTorch's or CuPy's own peak"],
                           [[r["workload"], r["mode"], r["calls"], *(common.size(r[k]) for k in ("peak", "fall", "quiet", "pytorch"))] for r in results if "peak" in r]))
    common.write_results("%s.jsonl" % args.name, results)
    return seen.finish(c)


if __name__ == "__main__":
    sys.exit(main())
