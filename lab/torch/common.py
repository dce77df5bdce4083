"""What the programs in this folder share: where Cistern is, how a program is started under an allocator, what the
device and the process hold, and tables.

Nothing here imports torch: a driver that starts other processes must stay cheap and must not touch the GPU.
"""
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
MODES = ("native", "expandable", "cistern")
KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30


# ---- where things are ---------------------------------------------------------------------------------------------

def cistern_command():
    """The cistern command: CISTERN_COMMAND, or the one of the bundle (../bin) or the tree (../../bin)."""
    named = os.environ.get("CISTERN_COMMAND")
    for path in filter(None, (named, os.path.join(HERE, "../bin/cistern"), os.path.join(HERE, "../../bin/cistern"))):
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return os.path.realpath(path)
    return named or os.path.join(HERE, "../bin/cistern")


def package_folder():
    """The folder that holds the Python package cistern, for programs that import it without `cistern run`."""
    for path in (os.path.join(HERE, ".."), os.path.join(HERE, "../../python")):
        if os.path.isfile(os.path.join(path, "cistern", "__init__.py")):
            return os.path.realpath(path)
    return os.path.realpath(os.path.join(HERE, ".."))


def library():
    """libcistern.so: CISTERN_LIBRARY, or the one of the bundle or the tree."""
    for path in filter(None, (os.environ.get("CISTERN_LIBRARY"), os.path.join(HERE, "../lib/libcistern.so"),
                              os.path.join(HERE, "../../lib/libcistern.so"))):
        if os.path.isfile(path):
            return os.path.realpath(path)
    return os.path.realpath(os.path.join(HERE, "../lib/libcistern.so"))


def scripts_folder():
    """The folder of the workloads and the allocation benchmark: CISTERN_GPU_SCRIPTS, or the one that the bundle carries."""
    for path in filter(None, (os.environ.get("CISTERN_GPU_SCRIPTS"), os.path.join(HERE, "../scripts"))):
        if os.path.isdir(path):
            return os.path.realpath(path)
    return None


def out_folder():
    path = os.environ.get("OUT") or os.path.join(HERE, "../results")
    os.makedirs(path, exist_ok=True)
    return os.path.realpath(path)


def build_folder():
    """Where the test's own C++ is compiled to; one per user and Python."""
    tag = f"cistern-gpu-tests-{os.getuid()}-{sys.version_info[0]}{sys.version_info[1]}"
    path = os.environ.get("CISTERN_GPU_BUILD") or os.path.join(tempfile.gettempdir(), tag)
    os.makedirs(path, exist_ok=True)
    return path


# ---- starting programs ----------------------------------------------------------------------------------------------

CLEARED = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "CISTERN_CONF", "CUDA_LAUNCH_BLOCKING")


def environment(mode, extra=None):
    """The environment of a program under that allocator."""
    env = {k: v for k, v in os.environ.items() if k not in CLEARED}
    env["PYTHONUNBUFFERED"] = "1"
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    env["CISTERN_TEST_MODE"] = mode
    env["CISTERN_TEST_PYTHONPATH"] = os.environ.get("PYTHONPATH", "")  # what a child without Cistern gets back
    for loopback in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        env.setdefault(loopback, "lo")  # machines without a network
    if mode == "expandable":
        env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    env.update(extra or {})
    if "TMPDIR" in env:
        os.makedirs(env["TMPDIR"], exist_ok=True)
    return env


def command(mode, argv, conf=None):
    """argv under that allocator, with the settings of the run and its own."""
    if mode != "cistern":
        return list(argv)
    conf = ",".join(c for c in (os.environ.get("CISTERN_TEST_CONF"), conf) if c)
    return [cistern_command(), "run", *(["--conf", conf] if conf else []), "--", *argv]


def native_environment():
    """The environment of a child of a program under `cistern run` that shall not use Cistern."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CISTERN", "_CISTERN")) or k.startswith(("CISTERN_TEST", "CISTERN_COMMAND"))}
    path = env.pop("CISTERN_TEST_PYTHONPATH", "")
    env.pop("PYTHONPATH", None)
    if path:
        env["PYTHONPATH"] = path
    env["CISTERN_TEST_MODE"] = "native"
    return env


def child(mode, script, arguments, timeout, conf=None, env=None):
    """Runs a Python program of this folder under that allocator."""
    argv = command(mode, [sys.executable, os.path.join(HERE, script), *arguments], conf)
    return run(argv, env=environment(mode, env), timeout=timeout)


def require_cistern():
    """Ends the program if it is to run on Cistern and does not: a figure of another allocator would be worse than none."""
    if os.environ.get("CISTERN_TEST_MODE") == "cistern" and not (loaded("libcistern.so") and loaded("libcistern_torch")):
        raise SystemExit("this process does not run on Cistern's adapter")


class Finished:
    """How a program ended: its status (None when it was stopped for time), what it wrote and how long it took."""

    def __init__(self, rc, out, err, wall):
        self.rc, self.out, self.err, self.wall = rc, out, err, wall

    def last_json(self):
        """The last line of the output that is a JSON object, or None."""
        for line in reversed(self.out.splitlines()):
            if line.startswith("{"):
                try:
                    return json.loads(line)
                except ValueError:
                    pass
        return None

    def why(self):
        """One line that says why it failed."""
        if self.rc is None:
            return f"did not end within {self.wall:.0f} s"
        lines = [line.strip() for line in (self.err + "\n" + self.out).splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or "error" in line or "panic" in line or "Fatal" in line]
        return f"status {self.rc}: {(errors or lines or ['no output'])[-1][:300]}"


def run(argv, env=None, timeout=120, stdin=None, cwd=None):
    """Runs a program in a session of its own and ends the whole session when its time is over."""
    start = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        p = subprocess.Popen(argv, env=env, cwd=cwd, stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
                             stdout=out, stderr=err, start_new_session=True)
        try:
            if stdin is not None:
                p.stdin.write(stdin)
                p.stdin.close()
            rc = p.wait(timeout)
        except subprocess.TimeoutExpired:
            rc = None
        finally:
            end_session(p)
        wall = time.monotonic() - start
        out.seek(0)
        err.seek(0)
        return Finished(rc, out.read().decode(errors="replace"), err.read().decode(errors="replace"), wall)


def end_session(p):
    """Ends the process and whatever it left running, also what began a session of its own below it."""
    below = descendants(p.pid) - {p.pid} if p.poll() is None else set()
    try:
        os.killpg(p.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    for pid in below:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    try:
        p.wait(10)
    except subprocess.TimeoutExpired:
        pass


# ---- what is held ----------------------------------------------------------------------------------------------------

_nvml = None


def _load_nvml():
    global _nvml
    if _nvml is None:
        try:
            import pynvml
            pynvml.nvmlInit()
            _nvml = pynvml
        except Exception:
            _nvml = False
    return _nvml


def visible(index):
    """NVML's name, a number or a UUID, of the device that CUDA numbers so here."""
    named = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    return named[index] if index < len(named) else str(index)


def device_processes(index=0):
    """{pid: bytes} of the processes that use the device, or None where that is not known."""
    nvml, name = _load_nvml(), visible(index)
    if nvml:
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
            found = {p.pid: p.usedGpuMemory for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
            return None if None in found.values() else found
        except Exception:
            return None
    try:
        text = subprocess.run(["nvidia-smi", "-i", name, "--query-compute-apps=pid,used_memory",
                               "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=10).stdout
        return {int(pid): int(mib) * MiB for pid, mib in (line.split(",") for line in text.splitlines() if "," in line)}
    except Exception:
        return None


def device_use(pid=None, index=0):
    """Bytes of the device that the process holds, None where that is not known: NVML may number processes otherwise."""
    found = device_processes(index)
    return None if found is None else found.get(pid or os.getpid())


def descendants(pid):
    """The process and all below it."""
    children = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as f:
                    parent = int(f.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(name))
    found, todo = set(), [pid]
    while todo:
        p = todo.pop()
        found.add(p)
        todo += children.get(p, [])
    return found


def resident():
    """Bytes of host memory that the process holds."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def loaded(name):
    """Whether a shared object whose name begins so is mapped in this process."""
    with open("/proc/self/maps") as f:
        return any(line.rstrip().rpartition("/")[2].startswith(name) for line in f if "/" in line)


# ---- compiling -------------------------------------------------------------------------------------------------------

def cuda_includes():
    """Folders that may hold CUDA's headers."""
    site = [sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]]
    found = []
    for root in dict.fromkeys(site):
        nvidia = os.path.join(root, "nvidia")
        for name in sorted(os.listdir(nvidia)) if os.path.isdir(nvidia) else []:
            found.append(os.path.join(nvidia, name, "include"))
        found.append(os.path.join(root, "triton/backends/nvidia/include"))
    found += [os.path.join(os.environ[v], "include") for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)]
    found.append("/usr/local/cuda/include")
    whole = [d for d in found if os.path.isfile(os.path.join(d, "cuda_runtime_api.h"))]
    # NVIDIA's wheels of CUDA 13 keep crt/ in one of its own, which PyTorch does not ask for.
    crt = [d for d in found if os.path.isfile(os.path.join(d, "crt/host_config.h"))]
    return list(dict.fromkeys(whole[:1] + (crt[:1] if not set(whole[:1]) & set(crt) else []) + [
        d for d in found if os.path.isdir(d) and d not in whole]))


def build(name, torch_folder):
    """Compiles NAME.cpp against that torch, once, and returns the path of the library."""
    target = os.path.join(build_folder(), f"libcistern_{name}.so")
    source = os.path.join(HERE, f"{name}.cpp")
    if os.path.exists(target) and os.path.getmtime(target) >= os.path.getmtime(source):
        return target
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or "g++"
    temporary = f"{target}.{os.getpid()}"
    argv = [compiler, "-std=c++20", "-O2", "-fPIC", "-shared", "-w", source, "-o", temporary,
            f"-I{torch_folder}/include", f"-I{torch_folder}/include/torch/csrc/api/include",
            *(f"-I{d}" for d in cuda_includes()), f"-L{torch_folder}/lib", "-lc10_cuda", "-lc10", "-Wl,--allow-shlib-undefined"]
    done = run(argv, timeout=200)
    if done.rc != 0:
        raise RuntimeError(f"{name}.cpp does not compile: {done.why()}\n{done.err[-3000:]}")
    os.replace(temporary, target)
    return target


def build_allocator():
    """Compiles allocator.c, once, and returns the path of the library."""
    target = os.path.join(build_folder(), "liballocator.so")
    source = os.path.join(HERE, "allocator.c")
    temporary = f"{target}.{os.getpid()}"
    done = run([os.environ.get("CC") or shutil.which("cc") or "gcc", "-O2", "-fPIC", "-shared", "-pthread", source, "-o", temporary, "-ldl"],
               timeout=200)
    if done.rc != 0:
        raise RuntimeError(f"allocator.c does not compile: {done.why()}\n{done.err[-3000:]}")
    os.replace(temporary, target)
    return target


# ---- the driver, for tests that ask it directly -----------------------------------------------------------------------

def cuda_driver():
    return ctypes.CDLL("libcuda.so.1")


# ---- tables ----------------------------------------------------------------------------------------------------------

def table(head, rows):
    """Rows under a head, columns as wide as they need; numbers right, words left."""
    cells = [[str(c) for c in r] for r in rows]
    widths = [max(len(str(head[i])), *(len(r[i]) for r in cells)) if cells else len(str(head[i])) for i in range(len(head))]
    right = [all(r[i][:1] in "-+0123456789." for r in cells if r[i]) for i in range(len(head))]
    def line(r):
        return "  ".join(c.rjust(w) if a else c.ljust(w) for c, w, a in zip(r, widths, right)).rstrip()
    return "\n".join([line([str(h) for h in head]), line(["-" * w for w in widths]), *(line(r) for r in cells)])


def median(values):
    v = sorted(values)
    return None if not v else v[len(v) // 2] if len(v) % 2 else (v[len(v) // 2 - 1] + v[len(v) // 2]) / 2


def size(n):
    """Bytes in words."""
    if n is None:
        return "?"
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(n) >= unit:
            return f"{n / unit:.2f} {name}"
    return f"{n} B"


def verdict(ok):
    return "?" if ok is None else "ok" if ok else "MISSED"


class Checks:
    """What a program measured, against what is wanted: printed as a table, and kept in the results folder for report.py."""

    def __init__(self, program):
        self.program, self.rows = program, []

    def add(self, what, got, want="", ok=None):
        """ok: whether it is good enough; None where nothing is wanted of it."""
        self.rows.append({"program": self.program, "what": what, "got": " ".join(str(got).split())[:200], "want": want, "ok": ok})
        return ok

    def finish(self):
        """Prints the table and returns the exit status."""
        print(checks_table(self.rows))
        write_results(f"checks-{self.program}.jsonl", self.rows)
        return 1 if any(r["ok"] is False for r in self.rows) else 0


def checks_table(rows):
    return table(["what", "measured", "wanted", ""], [[r["what"], r["got"], r["want"], "" if r["ok"] is None else verdict(r["ok"])] for r in rows])


def write_results(name, results, mode="w"):
    """One JSON object per line into the results folder."""
    path = os.path.join(out_folder(), name)
    with open(path, mode) as f:
        for r in results:
            f.write(json.dumps(r) + "\n")
    return path
