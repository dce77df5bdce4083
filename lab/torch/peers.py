"""Cistern beside other allocators in one run, on the same work: PyTorch's three, RMM's pool under PyTorch and alone, and
torch_memory_saver.

    python peers.py [--rounds 3] [--peers native,rmm,cistern] [--workload gpt2_varlen] [--steps 10] [--budget 280]

Each measurement of each peer in each round is a process of its own. The processes of a round import at the same time and
then work one after the other; the order of the peers changes from round to round. Packages of peers that are not installed
come from the wheels in the folder that CISTERN_PEERS names, or in ../wheels; they are unpacked into a folder that only
those processes see. Prints one table of medians and writes peers.json.
"""
import argparse
import contextlib
import ctypes
import glob
import importlib.metadata
import io
import json
import os
import platform
import random
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import zipfile

import common
import gate
from workloads_bench import Sampler, turned

MiB, GiB = common.MiB, common.GiB
SIZES = (1, 4, 16)  # GiB that are paused
PIECES = 4          # tensors for each GiB
MEASURES = ("alloc", "alone", "workload", "pause")


class Peer:
    """An allocator, what is measured of it, and the package that it needs, by its name in the index of packages."""

    def __init__(self, words, measures, package=None, mode="native", env=None):
        self.words, self.measures, self.package, self.mode, self.env = words, measures, package, mode, env or {}


PEERS = {
    "native": Peer("PyTorch native", ("alloc", "workload")),
    "expandable": Peer("expandable_segments", ("alloc", "workload"), mode="expandable"),
    "async": Peer("cudaMallocAsync", ("alloc", "workload"), env={"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}),
    "rmm": Peer("RMM pool under PyTorch", ("alloc", "workload"), "rmm-cu13"),
    "rmm-alone": Peer("RMM pool alone", ("alone",), "rmm-cu13"),
    "tms": Peer("torch_memory_saver", ("pause",), "torch_memory_saver"),
    "cistern": Peer("Cistern", ("alloc", "workload", "pause"), mode="cistern"),
    "cistern-alone": Peer("Cistern alone", ("alone",)),
}
LEFT_OUT = {"kvcached": "its package is source only, to be built against torch, and vLLM or SGLang create its KV caches"}


def script(name):
    """The path of one of the scripts; None where it is not there."""
    path = os.path.join(common.scripts_folder() or "", name)
    return path if os.path.isfile(path) else None


# ---- in the process of a peer ------------------------------------------------------------------------------------------

def prepare(measure, peer, workload):
    """Imports what the measurement needs, without touching the GPU."""
    if measure == "alone":
        return
    import torch  # noqa: F401
    if measure == "alloc":
        import torch.utils.cpp_extension  # noqa: F401
    elif measure == "workload":
        gate.prepare(workload)
    if peer == "tms":
        preload()


def preload():
    """Starts this program again with torch_memory_saver's hooks preloaded, as that library demands."""
    import torch_memory_saver
    if "torch_memory_saver" not in os.environ.get("LD_PRELOAD", ""):
        with torch_memory_saver.configure_subprocess():
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def rmm_pool(counted):
    """Sets RMM's pool as the device's resource. The pool starts small: its default size is half of the GPU, which says
    nothing about the work. Counters, above it and below, only where memory is measured."""
    import rmm.mr
    upstream = rmm.mr.CudaMemoryResource()
    if counted:
        upstream = rmm.mr.StatisticsResourceAdaptor(upstream)
    pool = rmm.mr.PoolMemoryResource(upstream, initial_pool_size=MiB)
    top = rmm.mr.StatisticsResourceAdaptor(pool) if counted else pool
    rmm.mr.set_current_device_resource(top)
    return upstream, top


def install(peer, counted=False):
    """Has PyTorch use the peer; returns a function that says (peak requested, peak reserved)."""
    import torch
    if peer == "rmm":
        upstream, top = rmm_pool(counted)
        from rmm.allocators.torch import rmm_torch_allocator
        torch.cuda.memory.change_current_allocator(rmm_torch_allocator)
        return lambda: (top.allocation_counts.peak_bytes, upstream.allocation_counts.peak_bytes)
    torch.cuda.init()
    torch.cuda.current_stream()
    common.require_cistern()
    backend = torch.cuda.get_allocator_backend()
    if (backend == "cudaMallocAsync") != (peer == "async"):
        raise SystemExit(f"{peer}: PyTorch uses {backend}")

    def peaks():
        s = torch.cuda.memory_stats()
        # cudaMallocAsync counts no requested bytes.
        return s.get("requested_bytes.all.peak") or None, s["reserved_bytes.all.peak"]
    return peaks


def alloc(peer, path):
    """bench_alloc.py as it is, in this process."""
    install(peer)
    printed, argv = io.StringIO(), sys.argv
    sys.argv = [path, peer]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = argv
    import torch
    return {**json.loads(printed.getvalue().strip().splitlines()[-1]), **torch_tails(torch)}


def pairs():
    """The loops of pairs.c, compiled once."""
    source, target = os.path.join(common.HERE, "pairs.c"), os.path.join(common.build_folder(), "libpairs.so")
    if not os.path.exists(target) or os.path.getmtime(target) < os.path.getmtime(source):
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or "gcc"
        temporary = f"{target}.{os.getpid()}"
        done = common.run([compiler, "-std=gnu11", "-O2", "-fPIC", "-shared", source, "-o", temporary, "-lm"], timeout=60)
        if done.rc != 0:
            raise SystemExit(f"pairs.c does not compile: {done.why()}")
        os.replace(temporary, target)
    lib = ctypes.CDLL(target)
    for f in (lib.pair_ns, lib.churn_ns):
        f.restype, f.argtypes = ctypes.c_double, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]
    lib.tail_ns.restype = ctypes.c_double
    lib.tail_ns.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.POINTER(ctypes.c_double)]
    return lib


TAILS = ("median", "p99", "p99.9", "longest")
TAIL_LIVE, TAIL_REQUESTS = 2000, 100_000


def tails(times):
    """The figures of times in nanoseconds: the median, those that 99 and 99.9 of 100 do not exceed, the longest; in us."""
    times, n = sorted(times), len(times)
    places = (n - 1) // 2, (n * 99 + 99) // 100 - 1, (n * 999 + 999) // 1000 - 1, n - 1
    return {f"request_{name}": round(times[i] / 1000, 2) for name, i in zip(TAILS, places)}


def torch_tails(torch):
    """The time of one allocation each through PyTorch's allocator, whichever it is, from an empty cache on. The call from Python
    is part of each, the same for every allocator."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    pick, blocks, times = random.Random(1), [0] * TAIL_LIVE, []
    for _ in range(TAIL_REQUESTS):
        i, size = pick.randrange(TAIL_LIVE), int(2 ** pick.uniform(9, 23))
        if blocks[i]:
            torch.cuda.caching_allocator_delete(blocks[i])
        begin = time.perf_counter_ns()
        blocks[i] = torch.cuda.caching_allocator_alloc(size)
        times.append(time.perf_counter_ns() - begin)
    for p in filter(None, blocks):
        torch.cuda.caching_allocator_delete(p)
    return tails(times)


def alone(peer):
    """The same loops through the C functions of the allocator: those of RMM's adapter for PyTorch, and Cistern's."""
    if peer == "rmm-alone":
        rmm_pool(counted=False)
        import rmm.librmm
        lib = ctypes.CDLL(os.path.join(os.path.dirname(rmm.librmm.__file__), "_torch_allocator.so"))
        functions = lib.allocate, lib.deallocate
    else:
        lib = ctypes.CDLL(common.library())
        functions = lib.cistern_malloc, lib.cistern_free
    addresses, loops, result = [ctypes.cast(f, ctypes.c_void_p) for f in functions], pairs(), {}
    for size in (512, MiB, 20 * MiB):
        result[f"pair_{size}"] = round(loops.pair_ns(*addresses, size, 200_000), 1)
    result["churn_2000"] = round(loops.churn_ns(*addresses, 2000, 100_000), 1)
    found = (ctypes.c_double * len(TAILS))()
    result["tail"] = loops.tail_ns(*addresses, TAIL_LIVE, TAIL_REQUESTS, found)
    if min(result.values()) < 0:
        raise SystemExit(f"{peer}: an allocation failed: {result}")
    del result["tail"]
    return {**result, **{f"request_{name}": round(ns / 1000, 2) for name, ns in zip(TAILS, found)}}


def workload(peer, path, name, steps):
    """Steps of one workload of workloads.py; times without the first step."""
    import torch
    peaks, losses, marks = install(peer, counted=True), [], []
    for loss in runpy.run_path(path)["WORKLOADS"][name](steps, 1):
        losses.append(round(float(loss), 4))
        marks.append(time.perf_counter())
    torch.cuda.synchronize()
    requested, reserved = peaks()
    return {"sec": round(marks[-1] - marks[0], 4), "steps": len(losses), "peak_requested": requested, "peak_reserved": reserved,
            "losses": losses[-5:]}


def pausing(peer):
    """(region, pause, resume) of the library: region(contents) marks what is allocated in it."""
    if peer == "cistern":
        import cistern
        return (lambda contents: cistern.tag(str(contents)),
                lambda contents: cistern.pause(tag=str(contents), keep="host" if contents else "drop"),
                lambda contents: cistern.resume(tag=str(contents)))
    from torch_memory_saver import torch_memory_saver as saver
    return (lambda contents: saver.region(tag=str(contents), enable_cpu_backup=contents),
            lambda contents: saver.pause(tag=str(contents)), lambda contents: saver.resume(tag=str(contents)))


def cycle(torch, pause, resume, contents, bytes):
    """Milliseconds that one pause and one resume take; fails where the pause does not return the memory to the GPU."""
    torch.cuda.synchronize()
    free, begin = torch.cuda.mem_get_info()[0], time.perf_counter()
    pause(contents)
    torch.cuda.synchronize()
    middle = time.perf_counter()
    returned, again = torch.cuda.mem_get_info()[0] - free, time.perf_counter()
    resume(contents)
    torch.cuda.synchronize()
    end = time.perf_counter()
    if returned < bytes - 64 * MiB:
        raise SystemExit(f"a pause of {common.size(bytes)} returned {common.size(returned)} to the GPU")
    return (middle - begin) * 1e3, (end - again) * 1e3


def pause(peer):
    """Pauses and resumes growing amounts, dropped and with contents: the first time and once more."""
    import torch
    install(peer)
    region, stop, go = pausing(peer)
    result = {}
    for contents in (False, True):
        held = []
        for n in SIZES:
            with region(contents):
                for i in range(len(held), PIECES * n):
                    held.append(torch.full((GiB // PIECES,), i + 1, dtype=torch.uint8, device="cuda"))
            word = "kept" if contents else "dropped"
            for time_of in ("first", "again"):
                times = cycle(torch, stop, go, contents, n * GiB)
                for what, ms in zip(("pause", "resume"), times):
                    result[f"{what}_{word}_{n}_{time_of}"] = round(ms / n, 3)
            if contents and not all(bool((t == i + 1).all()) for i, t in enumerate(held)):
                raise SystemExit(f"{peer}: contents differ after a pause of {n} GiB")
    return result


def work(measure, peer, args):
    """The process of a peer: it imports, says READY, waits for a line, measures, and prints one JSON line."""
    prepare(measure, peer, args.workload)
    print("READY", flush=True)
    if not sys.stdin.readline().strip():
        return  # it is not needed any more
    if measure == "alloc":
        result = alloc(peer, script("bench_alloc.py"))
    elif measure == "workload":
        result = workload(peer, script("workloads.py"), args.workload, args.steps)
    else:
        result = {"alone": alone, "pause": pause}[measure](peer)
    print("\n" + json.dumps(result), flush=True)
    os._exit(0)  # RMM's pool may be destroyed before the tensors that lie in it


# ---- the packages ------------------------------------------------------------------------------------------------------

def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def unpack(wheels, folder):
    """Unpacks the wheels of packages that are not installed. A wheel is a zip file with what belongs into site-packages;
    pip and venv may be missing where PyTorch is installed by other means."""
    for name in sorted(os.listdir(wheels)) if wheels and os.path.isdir(wheels) else []:
        if name.endswith(".whl") and version(name.split("-")[0]) is None:
            with zipfile.ZipFile(os.path.join(wheels, name)) as z:
                z.extractall(folder)
    sys.path.append(folder)
    importlib.invalidate_caches()


def cuda_libraries():
    """The folders of CUDA's run-time library among Python's packages, where the linker does not look for what a preloaded
    library needs."""
    roots = dict.fromkeys([sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], *sys.path])
    return [os.path.dirname(f) for r in roots for f in glob.glob(os.path.join(glob.escape(r), "nvidia/*/lib/libcudart.so.*"))]


def environment(peer, packages, conf):
    """The environment of the peer's processes."""
    p = PEERS[peer]
    extra = {"BENCH_BUILD_DIR": os.path.join(common.build_folder(), "bench_alloc"), **p.env}
    if not shutil.which("ninja"):
        extra["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
    if p.package:
        extra["PYTHONPATH"] = os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))
    if peer == "cistern-alone" and conf:
        extra["CISTERN_CONF"] = conf
    if peer == "tms":
        extra["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (os.environ.get("LD_LIBRARY_PATH"), *cuda_libraries())))
    return common.environment(p.mode, extra)


# ---- the rounds --------------------------------------------------------------------------------------------------------

class Worker:
    """A process of a peer that has imported what it needs, or is about to."""

    def __init__(self, measure, peer, args, packages):
        self.measure, self.peer, self.lines, self.ready = measure, peer, [], threading.Event()
        argv = [sys.executable, os.path.join(common.HERE, "peers.py"), "--work", measure, "--peers", peer, "--workload", args.workload,
                "--steps", str(args.steps)]
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(common.command(PEERS[peer].mode, argv, args.conf), env=environment(peer, packages, args.conf),
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, start_new_session=True)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if line.startswith("READY"):
                self.ready.set()
        self.ready.set()

    def go(self, timeout):
        """Has it measure and returns the figures; {"why": ...} when it did not end well."""
        self.ready.wait(90)
        # Questions about the device's memory would disturb the other measurements.
        sampler = Sampler(common.descendants(self.process.pid)) if self.measure == "workload" else None
        if sampler:
            sampler.start()
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.close()
            status = f"status {self.process.wait(timeout)}"
        except subprocess.TimeoutExpired:
            status = f"did not end within {timeout:.0f} s"
        except OSError:  # it has ended before
            status = f"status {self.process.wait(10)}"
        peak = sampler.end() if sampler else None
        self.reader.join(10)
        found = next((line for line in reversed(self.lines) if line.startswith("{")), None)
        if status == "status 0" and found:
            return {**json.loads(found), "device_peak": peak}
        self.errors.seek(0)
        words = self.errors.read().decode(errors="replace").strip()
        return {"why": f"{status}: {(words.splitlines() or ['no output'])[-1][:200]}", "tail": words[-3000:]}

    def drop(self):
        common.end_session(self.process)
        self.errors.close()


def one_round(number, peers, args, packages, end):
    """All measurements once: the processes import together, then work in turn. Nothing begins after the end."""
    jobs = [(m, p) for m in MEASURES if m in args.measures for p in turned(peers, number) if m in PEERS[p].measures]
    workers = []
    try:
        workers += [Worker(m, p, args, packages) for m, p in jobs]
        for w in workers:
            w.ready.wait(90)  # those that still import would disturb those that measure
        for w in workers:
            left = end - time.monotonic()
            slow = w.measure == "alloc" and number == 0  # the first compiles
            found = w.go(150 if slow else min(90, left + 20)) if left > 0 else {"why": "not begun, no time was left"}
            row = {"round": number, "peer": w.peer, "measure": w.measure, **found}
            print(json.dumps({k: v for k, v in row.items() if k != "tail"}), flush=True)
            if "tail" in row:
                print(row["tail"], flush=True)
            yield row
    finally:
        for w in workers:
            w.drop()


# ---- the table ---------------------------------------------------------------------------------------------------------

def medians(rows, peer):
    """The median of each figure of the peer, over its rounds."""
    found = {}
    for r in rows:
        if r["peer"] == peer and "why" not in r:
            for k, v in r.items():
                if k != "round" and isinstance(v, (int, float)):
                    found.setdefault((r["measure"] if r["measure"] != "alone" else "alloc", k), []).append(v)
    return {k: common.median(v) for k, v in found.items()}


ALLOC = (("pair_512", "pair, 512 B, ns"), (f"pair_{MiB}", "pair, 1 MiB, ns"), (f"pair_{20 * MiB}", "pair, 20 MiB, ns"),
         ("churn_2000", "churn, 2,000 live, ns"))


def lines(figures):
    """The table's rows: (words, figure of a peer's medians, decimals)."""
    requested = figures.get("native", {}).get(("workload", "peak_requested"))
    for k, words in ALLOC:
        yield words, lambda f, k=k: f.get(("alloc", k)), 0
    for name in TAILS:
        yield f"one request, {name}, us", lambda f, k=f"request_{name}": f.get(("alloc", k)), 2
    if requested:
        yield "peak reserved / requested", lambda f: f.get(("workload", "peak_reserved"), 0) / requested or None, 3
    yield "peak use of the device, GB", lambda f: (f.get(("workload", "device_peak")) or 0) / 1e9 or None, 2
    yield "workload, s", lambda f: f.get(("workload", "sec")), 3
    for kept in ("dropped", "kept"):
        for n in SIZES:
            for what in ("pause", "resume"):
                yield f"{what} {n} GiB, contents {kept}, ms/GiB", lambda f, k=f"{what}_{kept}_{n}_again": f.get(("pause", k)), 2
        for what in ("pause", "resume"):
            yield f"first {what} of 1 GiB, contents {kept}, ms", lambda f, k=f"{what}_{kept}_1_first": f.get(("pause", k)), 2


def show(rows, peers):
    figures = {p: medians(rows, p) for p in peers}
    figures = {p: f for p, f in figures.items() if f}
    body = []
    for words, get, decimals in lines(figures):
        values = [get(f) for f in figures.values()]
        if any(v is not None for v in values):
            body.append([words, *("-" if v is None else f"{v:.{decimals}f}" for v in values)])
    print(common.table(["median", *(PEERS[p].words for p in figures)], body))
    return figures


def machine():
    """What the figures were measured on and with."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    gpu = common.run(query, timeout=20).out.strip() if shutil.which(query[0]) else ""
    own = runpy.run_path(os.path.join(common.package_folder(), "cistern", "_version.py"))["version"]
    packages = {p: version(p) for p in ("torch", "transformers", "rmm-cu13", "librmm-cu13", "torch_memory_saver", "cuda-bindings")}
    return {"gpu": gpu.splitlines(), "python": platform.python_version(), "system": platform.platform(), "cpus": len(os.sched_getaffinity(0)),
            "cistern": own, **{k: v for k, v in packages.items() if v}}


def present(args):
    """The peers that can run here; those that cannot are named. What is missing of Cistern or PyTorch shows when it runs."""
    found = []
    for p in args.peers:
        if PEERS[p].package and not version(PEERS[p].package):
            print(f"left out: {PEERS[p].words}, the package {PEERS[p].package} is not installed and no wheel of it is in {args.wheels}")
        else:
            found.append(p)
    for name, why in LEFT_OUT.items():
        print(f"left out: {name}, {why}")
    return found


def save(args, facts, rows, figures):
    path = os.path.join(common.out_folder(), "peers.json")
    with open(path, "w") as f:
        table = {p: {f"{m}.{k}": v for (m, k), v in found.items()} for p, found in figures.items()}
        json.dump({"machine": facts, "workload": args.workload, "steps": args.steps, "left_out": LEFT_OUT, "medians": table,
                   "rounds": rows}, f, indent=1)
    print(path)


def arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--peers", default=",".join(PEERS), help="names joined by commas")
    p.add_argument("--measures", default=",".join(MEASURES))
    p.add_argument("--workload", default="gpt2_varlen")
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--budget", type=float, default=280, help="seconds after which no measurement begins")
    p.add_argument("--conf", help="settings of Cistern, as in CISTERN_CONF")
    p.add_argument("--work", help=argparse.SUPPRESS)
    args = p.parse_args()
    args.peers, args.measures = ([n for n in names.split(",") if n] for names in (args.peers, args.measures))
    if set(args.peers) - set(PEERS):
        p.error(f"unknown peer: expected some of {', '.join(PEERS)}")
    args.wheels = os.environ.get("CISTERN_PEERS") or os.path.join(common.HERE, "../wheels")
    return args


def main():
    args = arguments()
    if args.work:
        return work(args.work, args.peers[0], args)
    missing = [s for m, s in (("alloc", "bench_alloc.py"), ("workload", "workloads.py")) if m in args.measures and not script(s)]
    if missing:
        print(f"peers: skipped, there is no {missing[0]}: CISTERN_GPU_SCRIPTS names its folder")
        return 0
    lock = os.path.join(common.build_folder(), "bench_alloc", "lock")
    os.makedirs(os.path.dirname(lock), exist_ok=True)
    if os.path.exists(lock):  # of a build that was killed; torch would wait for it for ever
        os.unlink(lock)
    # Where this is ended for its time there is still the table of what was measured.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    end, rows = time.monotonic() + args.budget, []
    with tempfile.TemporaryDirectory(prefix="cistern-peers-") as packages:
        unpack(args.wheels, packages)
        peers = present(args)
        facts = machine()
        print(json.dumps(facts), flush=True)
        try:
            for number in range(args.rounds if peers else 0):
                if time.monotonic() < end:
                    for row in one_round(number, peers, args, packages, end):
                        rows.append(row)
        except SystemExit as e:
            print(e, flush=True)
        figures = show(rows, peers)
        save(args, facts, rows, figures)
    return judge(rows, peers, args)


def judge(rows, peers, args):
    checks = common.Checks("peers")
    for p in peers:
        for m in [m for m in PEERS[p].measures if m in args.measures]:
            mine = [r for r in rows if (r["peer"], r["measure"]) == (p, m)]
            good = sum("why" not in r for r in mine)
            why = next((r["why"] for r in mine if "why" in r), "")
            wanted = min(3, args.rounds)
            checks.add(f"{PEERS[p].words}: {m}", f"{good} rounds{'; ' + why if why else ''}", f"{wanted} or more", good >= wanted)
    return checks.finish()


if __name__ == "__main__":
    sys.exit(main())
