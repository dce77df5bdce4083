"""What the tests share: the tree, a PyTorch made of a few lines that writes down what is asked of it, and copies of the
package whose adapter is made of a few lines too."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PACKAGE = os.path.join(ROOT, "python", "cistern")
COMMAND = os.environ.get("CISTERN_COMMAND") or os.path.join(ROOT, "bin", "cistern")
GPU = os.path.exists("/dev/nvidiactl")
TOOLS = os.path.join(ROOT, "bin", "pytools", "bin", "python")
LIBRARY = os.environ.get("CISTERN_LIBRARY") or os.path.join(ROOT, "lib", "libcistern.so")

FAKE_TORCH = {
    "__init__.py": """
        import os
        LOG = []
        def note(*words):
            LOG.append(" ".join(map(str, words)))
            if os.environ.get("FAKE_TORCH_LOG"):
                with open(os.environ["FAKE_TORCH_LOG"], "a") as f:
                    f.write("%d %s\\n" % (os.getpid(), LOG[-1]))
        from . import version
        __version__ = version.__version__
        class Tensor:
            def __init__(self, cuda=False):
                self.cuda = cuda
        class UntypedStorage:
            def _share_cuda_(self):
                return ()
        from . import _C, cuda, multiprocessing
        """,
    "_C.py": """
        import os
        from . import note
        observers = []
        def _cuda_attach_out_of_memory_observer(f):
            observers.append(f)
        def _cuda_memoryStats(device):
            if os.environ.get("FAKE_TORCH_STATS"):
                return {"allocated_bytes": {"all": {"current": int(os.environ["FAKE_TORCH_STATS"])}}}
            raise RuntimeError("does not yet support getDeviceStats")
        def _cuda_changeCurrentAllocator(allocator):
            note("changed")
        def _accelerator_setAllocatorSettings(settings):
            if "bad" in settings:
                raise ValueError(settings)
            note("settings", settings)
        def _cuda_resetPeakMemoryStats(device):
            raise RuntimeError("does not yet support resetPeakStats")
        def _cuda_memorySnapshot(pool):
            raise RuntimeError("does not yet support snapshot")
        def _cuda_record_memory_history(*a):
            raise RuntimeError("does not yet support recordHistory")
        """,
    "cuda/__init__.py": """
        from .. import note
        started = False
        bad_fork = False
        queued = []
        def is_initialized():
            return started
        def _is_in_bad_fork():
            return bad_fork
        def _lazy_call(f):
            f() if started else queued.append(f)
        def init():
            global started
            if not started:
                note("cuda starts")
                for f in queued:
                    f()
                started = True
        _lazy_init = init
        def device_count():
            return 1
        def current_device():
            return 0
        class Properties:
            name = "Fake GPU"
            total_memory = 80 << 30
        def get_device_properties(device):
            return Properties
        class Stream:
            cuda_stream = 77
        def current_stream():
            return Stream
        from . import graphs, memory
        MemPool = getattr(memory, "MemPool", None)
        """,
    "cuda/memory.py": """
        import os
        from .. import _C, note
        backend = os.environ.get("FAKE_TORCH_BACKEND", "native")
        def get_allocator_backend():
            return backend
        def _record_memory_history(enabled="all", context="all", stacks="all", max_entries=0):
            note("history", enabled, context, stacks, max_entries)
        events = [{"action": "alloc", "addr": 1 << 30, "size": 512, "stream": 0, "time_us": 1, "frames": []}]
        def _snapshot():
            return {"segments": [], "device_traces": [list(events)], "allocator_settings": {}, "external_annotations": []}
        class Inner:
            def __getattr__(self, name):
                if not name.startswith("set_"):
                    raise AttributeError(name)
                return lambda address: note(name, bool(address))
        class CUDAPluggableAllocator:
            def __init__(self, path, malloc, free):
                note("pluggable", malloc, free)
                self.inner = Inner()
            def allocator(self):
                return self.inner
        def change_current_allocator(allocator):
            _C._cuda_changeCurrentAllocator(allocator.allocator())
        class MemPool:
            id = (0, 7)
            def __init__(self, allocator=None, use_on_oom=False):
                note("pool", use_on_oom)
        """,
    "cuda/graphs.py": """
        class CUDAGraph:
            def capture_begin(self, pool=None, capture_error_mode="global"):
                print("captured", pool, capture_error_mode)
                if pool == "bad":
                    raise RuntimeError("no such pool")
        """,
    "multiprocessing/__init__.py": "from . import reductions\n",
    "multiprocessing/reductions.py": """
        from multiprocessing.reduction import ForkingPickler
        from .. import Tensor
        def rebuild_cuda_tensor(*a):
            return ("rebuilt",) + a
        def rebuild_tensor(*a):
            return ("plain",) + a
        def reduce_tensor(t):
            return (rebuild_cuda_tensor, (1, 2)) if t.cuda else (rebuild_tensor, (3,))
        ForkingPickler.register(Tensor, reduce_tensor)
        """,
    "include/c10/cuda/CUDACachingAllocator.h": "#define FAKE_TORCH 1\n",
    "include/torch/csrc/api/include/empty.h": "",
}

FAKE_PROBE = """
    #include <c10/cuda/CUDACachingAllocator.h>
    #if FAKE_TORCH >= 20 && __cplusplus < 202002L
    #error C++20 is needed
    #endif
    extern const char *const found[];
    const char *const found[] = {"cistern:CISTERN_TORCH_PROBED=1", "cistern:CISTERN_TORCH_OTHER=0"};
    """

FAKE_ADAPTER = r"""
    #include <c10/cuda/CUDACachingAllocator.h>
    #if !CISTERN_TORCH_PROBED || CISTERN_TORCH_OTHER || (FAKE_TORCH >= 20 && __cplusplus < 202002L)
    #error features that the probe did not find
    #endif
    #include <cuda_runtime_api.h>
    #pragma GCC visibility push(default)
    #include <crt/host_config.h>
    #include <cistern.h>
    #include <cstdio>
    #include <cstdlib>
    #include <cstring>
    #include <string>
    static int started = 0;
    static std::string words;
    extern "C" const char *cistern_torch_install(const char *library, const char *conf) {
      const char *fail = getenv("FAKE_ADAPTER_FAILS");
      return fail;
    }
    extern "C" const char *cistern_torch_abi(void) { return FAKE_VERSION; }
    extern "C" int cistern_torch_started(void) { return started; }
    extern "C" const char *cistern_torch_start(int) { return getenv("FAKE_ADAPTER_CRASHES") ? (abort(), "") : nullptr; }
    extern "C" const char *cistern_torch_settings(void) {
      const char *s = getenv("PYTORCH_ALLOC_CONF");
      if (!s) return "";
      words = std::string("PYTORCH_ALLOC_CONF ") + s + ": no effect: it is a test\n"
              "PYTORCH_ALLOC_CONF per_process_memory_fraction:0.5: honoured\n";
      return words.c_str();
    }
    extern "C" const char *cistern_torch_settings_of(const char *s) {
      words = std::string(s) + ": no effect: it is a test\n";
      return words.c_str();
    }
    extern "C" void cistern_torch_replaced(void) {
      puts("replaced");
      fflush(stdout);
    }
    extern "C" void fake_start(void) { started = 1; }
    struct wanted { cistern_pool_options o; unsigned bare, reserved; void (*dropped)(void *); void *token; };
    static wanted last;
    extern "C" void fake_drop(void) { last.dropped(last.token); }
    extern "C" int fake_ask(unsigned long long missing) {
      return last.o.on_out_of_memory(last.o.on_out_of_memory_ctx, 0, missing);
    }
    extern "C" void *fake_alloc(void) {
      if (last.bare)
        return ((void *(*)(ssize_t, int, void *))last.o.alloc)(64, 3, (void *)5);
      return last.o.alloc(last.o.ctx, 64, 3, (void *)5);
    }
    extern "C" const char *fake_pool(void) {
      words = "flags " + std::to_string(last.o.flags) + " upstream " + (last.o.upstream ? last.o.upstream : "-") + " limit " +
              std::to_string(last.o.limit) + " spill " + (last.o.spill ? last.o.spill : "-");
      return words.c_str();
    }
    extern "C" int cistern_torch_asks(void *ctx, int device, unsigned long long missing) {
      puts("through the adapter");
      fflush(stdout);
      return ((int (*)(void *, int, unsigned long long))ctx)(nullptr, device, missing);
    }
    extern "C" void cistern_torch_python_ends(void) {
      if (getenv("FAKE_SAYS_END"))
        puts("Python ends");
    }
    extern "C" void fake_free(void *p) { last.o.free(last.o.ctx, p, 64, 3, (void *)5); }
    extern "C" int cistern_torch_upstream(const wanted *w) { return last = *w, !started; }
    extern "C" int cistern_torch_pool(int device, unsigned long long a, unsigned long long b, const wanted *w, const char **why) {
      static std::string upstream, spill;
      last = *w;
      if (w->o.upstream) last.o.upstream = (upstream = w->o.upstream).c_str();
      if (w->o.spill) last.o.spill = (spill = w->o.spill).c_str();
      *why = "";
      if (w->o.size != sizeof w->o || (w->o.upstream && strchr(w->o.upstream, '!')) || a != 0 || b != 7 || device != 0) {
        *why = "upstream moon!: expected device";
        w->dropped(w->token);
        return CISTERN_INVALID;
      }
      return 0;
    }
    """


def tools(test):
    """The Python that has mypy and pytest; the test is skipped without it, where that is allowed."""
    if not os.path.exists(TOOLS):
        if os.environ.get("CISTERN_TOOLS_TEST") == "1":
            test.fail("scripts/pytools.sh has not installed the tools")
        test.skipTest("mypy and pytest are not installed: scripts/pytools.sh")
    return TOOLS


class Case(unittest.TestCase):
    """A test with a folder of its own, which holds everything that the processes it starts would write."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="cistern-test-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def write(self, name, text):
        file = self.path(name)
        os.makedirs(os.path.dirname(file), exist_ok=True)
        with open(file, "w") as f:
            f.write(textwrap.dedent(text))
        return file

    def read(self, name):
        with open(self.path(name)) as f:
            return f.read()

    def fake_torch(self, version="2.11.0+cu130", cuda="13.0", at="site"):
        """Makes a PyTorch in a folder, and CUDA's headers as NVIDIA's wheels bring them."""
        for name, text in FAKE_TORCH.items():
            self.write(os.path.join(at, "torch", name), text)
        self.write(os.path.join(at, "torch", "version.py"),
                   "__version__ = %r\ngit_version = 'abc'\ncuda = %r\nhip = None\n" % (version, cuda))
        for header in ("cuda.h", "cuda_runtime_api.h"):
            self.write(os.path.join(at, "nvidia", "cu13", "include", header), "")
        # CUDA 13 has these in a wheel that PyTorch does not ask for; Triton brings some.
        self.write(os.path.join(at, "triton", "backends", "nvidia", "include", "crt", "host_config.h"), "")
        return self.path(at)

    def package(self, source=FAKE_ADAPTER, version="2.11.0", **files):
        """A copy of the package with another adapter, in a tree like the real one."""
        copy = self.path("tree", "python", "cistern")
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "adapter"))
        self.write("tree/python/cistern/adapter/adapter.cpp", '#define FAKE_VERSION "%s"\n%s' % (version, textwrap.dedent(source)))
        self.write("tree/python/cistern/adapter/probe.cpp", FAKE_PROBE)
        shutil.copy(os.path.join(PACKAGE, "adapter", "versions"), os.path.join(copy, "adapter"))
        os.makedirs(self.path("tree", "cmd", "libcistern"))
        shutil.copy(os.path.join(ROOT, "cmd", "libcistern", "cistern.h"), self.path("tree", "cmd", "libcistern"))
        return copy

    def environment(self, **more):
        """An environment in which nothing of the real one is used or changed."""
        env = {k: v for k, v in os.environ.items()
               if not k.startswith(("CISTERN", "_CISTERN", "PYTHON", "PYTORCH", "CUDA", "XDG")) and
               k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CXX")}
        env.update(HOME=self.path("home"), TMPDIR=self.folder, CISTERN_LIBRARY=LIBRARY)
        env.update(more)
        return env

    def python(self, code, *arguments, env=None, check=True, interpreter=sys.executable, command=(), **more):
        """Runs code in a new Python, perhaps by a command in front; what it printed, and its standard error."""
        done = subprocess.run(list(command) + [interpreter, "-c", textwrap.dedent(code)] + list(arguments),
                              env=env or self.environment(), cwd=self.folder, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, universal_newlines=True, timeout=600, **more)
        if check and done.returncode != 0:
            self.fail("exit code %d\n%s%s" % (done.returncode, done.stdout, done.stderr))
        return done

    def build(self, package, site, *arguments, **more):
        """Builds the adapter of a copy; the file."""
        env = self.environment(PYTHONPATH=site, **more)
        done = subprocess.run([sys.executable, os.path.join(package, "_inject", "tool.py"), "build", *arguments], env=env,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, timeout=600)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.strip()


def pythons():
    """The Pythons of this machine that the package is for: each (3, n) with its program."""
    found = {}
    for program in [sys.executable] + [shutil.which("python3.%d" % n) for n in range(9, 20)] + [shutil.which("python3")]:
        if not program:
            continue
        try:
            done = subprocess.run([program, "-c", "import sys; print(sys.version_info[:2])"], stdout=subprocess.PIPE,
                                  stderr=subprocess.DEVNULL, timeout=600)
        except OSError:
            continue
        if done.returncode == 0:
            version = eval(done.stdout)
            if version >= (3, 9):
                found.setdefault(version, program)
    return found


def loads(text):
    return json.loads(text.strip().splitlines()[-1])

# What programs of the tests ask, indented as their text is: how f fails, and what the devices and libraries hold.
ERROR = """
    def error(f, *a, **k):
        try:
            f(*a, **k)
        except Exception as e:
            return e
        raise AssertionError("no error")
    """
HELD = """
    def device(n=0):
        return next(d for d in cistern.stats()["devices"] if d["device"] == n)
    def requested(n=0):
        return device(n)["requested"]["all"]["current"]
    def libraries(n=0):
        return {l["library"]: l["requested"] for l in device(n)["libraries"]}
    """
