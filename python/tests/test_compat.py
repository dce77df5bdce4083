"""The modules of cistern.compat over the real library and a simulated device, with a few lines of PyTorch (standins/pytorch), and
how they come in the place of others.

The engines' own code is executed where CISTERN_ENGINES names a folder with their wheels, each unpacked into a folder of its name:
`pip download --no-deps vllm sglang`, then `unzip -d vllm vllm-*.whl '*.py'`. Of a class with many imports only the methods that
release memory are taken.
"""

import json
import os
import textwrap
import unittest

from .support import ROOT, Case

HERE = os.path.dirname(os.path.abspath(__file__))
ENGINES = os.environ.get("CISTERN_ENGINES", "")

BEGIN = """
    import ast, contextlib, json, logging, os, sys, types
    import torch
    import cistern.torch
    cistern.torch._mode, cistern.torch._adapter = "adapter", object()  # the stand-in is one
    import cistern.compat
    MiB = 1 << 20
    def free():
        return torch.cuda.mem_get_info()[0] // MiB
    def fails(f, *a, **k):
        try:
            print("done", f(*a, **k))
        except Exception as e:
            print(type(e).__name__, str(e).splitlines()[0])
    def enter(f, *a, **k):
        with f(*a, **k):
            pass
"""

SAVER = """
    cistern.compat.install("torch_memory_saver")
    import torch_memory_saver
    from torch_memory_saver import torch_memory_saver as saver, configure_subprocess
"""

VLLM = """
    cistern.compat.install("vllm")
    from vllm.device_allocator.cumem import CuMemAllocator, cumem_available
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s")
    def memory(tag, n):
        with allocator.use_memory_pool(tag=tag):
            return torch.empty(n * MiB)
"""


class OverTheLibrary(Case):
    begin = BEGIN

    def lines(self, code, conf="driver:sim:1GiBx2", **more):
        path = os.pathsep.join([os.path.join(ROOT, "python"), os.path.join(HERE, "standins", "pytorch")])
        env = self.environment(PYTHONPATH=path, CISTERN_CONF=conf, CISTERN_ENGINES=ENGINES, **more)
        text = textwrap.dedent(BEGIN) + textwrap.dedent(self.begin if self.begin is not BEGIN else "") + textwrap.dedent(code)
        return self.python(text, env=env).stdout.splitlines()


class Saver(OverTheLibrary):
    begin = SAVER

    def test_pause_and_resume_by_tag(self):
        self.assertEqual(self.lines("""
            with saver.region("weights", enable_cpu_backup=True):
                weights = [torch.empty(32 * MiB) for _ in range(2)]
            with saver.region(tag="kv_cache"):
                cache = torch.empty(128 * MiB)
                with saver.disable():
                    outside = torch.empty(32 * MiB)
                more = torch.empty(16 * MiB)
            other = torch.empty(32 * MiB)
            addresses, before = [t.data_ptr() for t in weights + [cache, more]], free()
            for step in ("pause weights", "pause weights", "pause kv_cache", "resume kv_cache", "pause", "resume weights", "resume"):
                name, _, tag = step.partition(" ")
                getattr(saver, name)(*[tag] * bool(tag))
                print(step, free() - before)
            print(addresses == [t.data_ptr() for t in weights + [cache, more]])
            print({t["name"]: t["requested"] // MiB for t in cistern.stats()["devices"][0]["tags"]})
            """), ["pause weights 64", "pause weights 64", "pause kv_cache 208", "resume kv_cache 64", "pause 208", "resume weights 144",
                   "resume 0", "True", "{'kv_cache': 144, 'weights': 64, 'outside of regions': 32}"])

    def test_what_is_kept(self):
        """By the figures of the pauses: host memory, a file, nothing; each kind of one tag in a pool of its own."""
        self.assertEqual(self.lines("""
            from cistern import _pause
            ours = _pause.pause
            def pause(*a):
                report = ours(*a)
                print(a[3], a[4], a[5], report["bytes"] // MiB, report["kept"] // MiB)
                return report
            _pause.pause = pause
            folder = os.path.join(os.getcwd(), "a", "b")
            saver.set_disk_backup_dir(folder)
            print(os.path.isdir(folder))
            held = []
            for n, arguments in ((8, {}), (16, {"enable_cpu_backup": True, "cpu_backup_backend": "pinned"}),
                                 (32, {"enable_disk_backup": True})):
                with saver.region(**arguments):
                    held.append(torch.empty(n * MiB))
            saver.pause("default")
            saver.resume("default")
            """), ["True", "drop None True 8 0", "host None True 16 16", "disk %s True 32 32" % self.path("a", "b")])

    def test_graphs(self):
        """What a graph uses goes whole, also what its capture freed, and comes back whole; a graph that is gone is forgotten."""
        self.assertEqual(self.lines("""
            shared = torch.cuda.graph_pool_handle()
            graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
            outputs = []
            for g, pool in zip(graphs, (shared, shared, None)):
                with saver.cuda_graph(g, pool=pool, tag="graph", enable_cpu_backup=True):
                    outputs.append(torch.empty(16 * MiB))
                    torch.empty(48 * MiB)
            held = free()
            saver.pause("graph")
            print(free() - held)
            saver.resume("graph")
            print(free() - held)
            outputs.clear()
            for g in graphs[:2]:
                g.reset()
            saver.pause("graph")
            print(len(saver._regions._graphs))
            saver.resume("graph")
            """), ["144", "0", "1"])

    def test_devices_and_threads(self):
        self.assertEqual(self.lines("""
            import threading
            held = {}
            def work(device):
                torch.cuda.set_device(device)
                with saver.region("t"):
                    held[device] = torch.empty((device + 1) * 64 * MiB, device="cuda:%d" % device)
            threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
            for t in threads: t.start()
            for t in threads: t.join()
            saver.pause("t")
            print([d["paused"]["current"] // MiB for d in cistern.stats()["devices"]])
            saver.resume()
            print([d["paused"]["current"] for d in cistern.stats()["devices"]])
            """), ["[64, 128]", "[0, 0]"])

    def test_resume_without_memory(self):
        self.assertEqual(self.lines("""
            with saver.region("a"):
                a = torch.empty(600 * MiB)
            saver.pause()
            filler = torch.empty(700 * MiB)
            fails(saver.resume, "a")
            del filler
            print(saver.resume("a"), free() < 500)
            """)[1:], ["None True"])

    def test_refused(self):
        self.assertEqual(self.lines("""
            fails(enter, saver.region, enable_cpu_backup=True, enable_disk_backup=True)
            fails(enter, saver.region, cpu_backup_backend="pinned")
            fails(enter, saver.region, enable_cpu_backup=True, cpu_backup_backend="mmap")
            fails(enter, saver.region, "")
            fails(enter, saver.disable)
            fails(setattr, saver, "hook_mode", "other")
            fails(setattr, saver, "hook_mode", "torch")
            fails(setattr, saver, "memory_margin_bytes", 1 << 30)
            fails(setattr, saver, "retain_cpu_backup", True)
            fails(saver.get_cpu_backup, None)
            print(saver.enabled, saver.retain_cpu_backup, hasattr(saver, "hook_mode"), saver.pause(), saver.resume("never used"))
            print(torch_memory_saver.__name__)
            """), [
            "AssertionError enable_cpu_backup and enable_disk_backup are mutually exclusive",
            "ValueError cpu_backup_backend requires enable_cpu_backup=True",
            "ValueError cpu_backup_backend='mmap': Cistern keeps contents in page-locked memory, which is \"pinned\"",
            "ValueError tag: expected a string of at least one character without NUL, got ''",
            "AssertionError disable() should be called only when tms is active",
            "ValueError hook_mode is preload or torch, got 'other'", "done None",
            "NotImplementedError memory_margin_bytes: Cistern keeps no margin of the device's free memory; set limit: in CISTERN_CONF "
            "to leave memory to others",
            "NotImplementedError retain_cpu_backup: Cistern gives up contents when memory is resumed; the page-locked memory stays for "
            "the next pause in any case",
            "NotImplementedError get_cpu_backup: Cistern cannot read contents of paused memory: resume it first",
            "True False False None None", "cistern.compat.torch_memory_saver"])


class Sleep(OverTheLibrary):
    begin = VLLM

    def test_levels(self):
        """As vLLM's worker asks for them: weights kept or dropped, the cache dropped, what else it tags kept."""
        self.assertEqual(self.lines("""
            print(cumem_available)
            allocator = CuMemAllocator.get_instance()
            print(allocator is CuMemAllocator.get_instance(), allocator.get_current_usage())
            weights, runtime = memory("weights", 64), memory("runtime", 16)
            with allocator.use_memory_pool("runtime"), allocator.use_memory_pool("kv_cache"):
                cache = torch.empty(256 * MiB)
            print(allocator.get_current_usage() // MiB)
            addresses, before = [t.data_ptr() for t in (weights, runtime, cache)], free()
            from cistern import _pause
            ours, kept = _pause.pause, {}
            def pause(*a):
                report = ours(*a)
                kept[report["bytes"] // MiB] = report["kept"] // MiB
                return report
            _pause.pause = pause
            for level, tags in (1, ("weights", "runtime", "cudagraph")), (2, ("runtime", "cudagraph")):
                kept.clear()
                allocator.sleep(offload_tags=tags)
                print("level", level, free() - before, sorted(kept.items()))
                allocator.wake_up(tags=["weights"])
                print("weights", free() - before, allocator.get_current_usage() // MiB)
                allocator.wake_up(["kv_cache"])
                print("kv_cache", free() - before)
            print(addresses == [t.data_ptr() for t in (weights, runtime, cache)])
            del weights, runtime, cache
            print(allocator.get_current_usage())
            """), ["True", "True 0", "336", "level 1 336 [(16, 16), (64, 64), (256, 0)]", "weights 256 336", "kv_cache 0",
                   "level 2 336 [(16, 16), (64, 0), (256, 0)]", "weights 256 336", "kv_cache 0", "True", "0"])

    def test_default_tag_and_discard(self):
        self.assertEqual(self.lines("""
            allocator = CuMemAllocator.get_instance()
            held = [memory(None, 32), memory("kv_cache", 64)]
            before = free()
            allocator.discard("kv_cache")
            print(free() - before)
            allocator.sleep()
            print(free() - before)
            allocator.sleep(("kv_cache",))  # neither pool can change how it sleeps
            allocator.discard(("default",))
            allocator.wake_up()
            print(free() - before)
            allocator.sleep(("kv_cache",))  # awake again, both can
            allocator.release_pools()
            print(allocator.get_current_usage(), [t.data_ptr() != 0 for t in held])
            fails(allocator.sleep, ["default"])
            fails(getattr, sys.modules["vllm.device_allocator.cumem"], "lib_name")
            """), ["64", "96", "sleep cannot change what was decided about contents of memory that sleeps already",
                   "discard cannot change what was decided about contents of memory that sleeps already", "0", "0 [True, True]",
                   "TypeError tags are a string or a tuple of strings, got list",
                   "AttributeError module 'cistern.compat.vllm' has no attribute 'lib_name'"])

    def test_graphs(self):
        self.assertEqual(self.lines("""
            allocator = CuMemAllocator.get_instance()
            g = torch.cuda.CUDAGraph()
            with allocator.cudagraph_pool() as pool:
                with torch.cuda.graph(g, pool=pool):
                    output = torch.empty(16 * MiB)
                    torch.empty(32 * MiB)
            with allocator.cudagraph_pool() as again:
                print(pool == again)
            before = free()
            allocator.sleep(("cudagraph",))
            print(free() - before)
            allocator.wake_up(["weights"])
            print(free() - before)
            """), ["True", "48", "0"])


@unittest.skipUnless(ENGINES, "CISTERN_ENGINES names no folder with the wheels of vLLM and SGLang")
class Engines(OverTheLibrary):
    begin = """
    def package(name, **members):
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [os.path.join(os.environ["CISTERN_ENGINES"], name.partition(".")[0], *name.split("."))]
        module.__dict__.update(members)
        return module
    def methods(file, cls, names, scope):
        "A class with some of the methods of one in a file."
        with open(os.path.join(os.environ["CISTERN_ENGINES"], file)) as f:
            tree = ast.parse(f.read())
        found = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls)
        found.body = [n for n in found.body if getattr(n, "name", None) in names]
        assert len(found.body) == len(names), [n.name for n in found.body]
        found.bases, found.decorator_list = [], []
        future = ast.parse("from __future__ import annotations").body
        exec(compile(ast.fix_missing_locations(ast.Module(future + [found], [])), file, "exec"), scope)
        return scope[cls]
    """

    def test_vllm(self):
        """Worker of vllm/v1/worker/gpu_worker.py, its sleep mode backend and its platform's question."""
        self.assertEqual(self.lines("""
            import time
            cistern.compat.install("vllm")
            class Platform:
                is_cuda_alike = lambda self: True
                is_xpu = is_rocm = is_cpu = lambda self: False
            platform = Platform()
            package("vllm")
            package("vllm.logger", init_logger=logging.getLogger)
            package("vllm.platforms", current_platform=platform)
            from vllm.device_allocator import get_mem_allocator_instance
            scope = dict(torch=torch, time=time, logger=logging.getLogger("vllm"), current_platform=platform,
                         nullcontext=contextlib.nullcontext, get_mem_allocator_instance=get_mem_allocator_instance,
                         has_kv_transfer_group=lambda: False, format_gib=str)
            Worker = methods("vllm/vllm/v1/worker/gpu_worker.py", "Worker", ["sleep", "wake_up", "discard", "sleep_mode_backend",
                             "_maybe_get_memory_pool_context", "_save_sleep_parameters"], scope)
            Asks = methods("vllm/vllm/platforms/interface.py", "Platform", ["is_cumem_allocator_available"], {})
            print(Asks().is_cumem_allocator_available())
            worker = Worker()
            model = types.SimpleNamespace(enable_cumem_allocator=True, enable_sleep_mode=True, sleep_mode_backend="cumem",
                                          enable_nccl_comm_suspend=False, sleep_preserve_parameter_names=())
            worker.vllm_config, worker.model_config = types.SimpleNamespace(model_config=model), model
            worker.model_runner = types.SimpleNamespace(model=types.SimpleNamespace(named_buffers=lambda: []))
            worker._sleep_mode_backend = None
            worker._sleep_saved_parameters, worker._sleep_saved_buffers, worker._sleep_saved_draft_buffers = {}, {}, {}
            worker.get_draft_model, worker.synchronize_device = lambda: None, torch.cuda.synchronize
            with worker._maybe_get_memory_pool_context(tag="weights"):
                weights = torch.empty(64 * MiB)
            with worker._maybe_get_memory_pool_context(tag="runtime"):
                with worker._maybe_get_memory_pool_context(tag="kv_cache"):
                    cache = torch.empty(128 * MiB)
                state = torch.empty(16 * MiB)
            before = free()
            for level in 1, 2:
                worker.sleep(level)
                print(level, free() - before)
                worker.wake_up(["weights"])
                print(free() - before)
                worker.wake_up(["kv_cache"])
                print(free() - before)
            worker.discard(("kv_cache",))
            print(free() - before, worker.sleep_mode_backend.state())
            worker.wake_up()
            print(free() - before)
            """), ["True", "1 208", "128", "0", "2 208", "128", "0", "128 SUSPENDED", "0"])

    def test_sglang(self):
        """Its adapter for torch_memory_saver, and the methods of its scheduler that release and resume memory."""
        self.assertEqual(self.lines("""
            cistern.compat.install("torch_memory_saver")
            for name in "sglang", "sglang.srt", "sglang.srt.utils":
                package(name)
            package("sglang.srt.utils.common", is_xpu=lambda: False)
            from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
            from sglang.srt import constants
            torch.distributed = types.SimpleNamespace(barrier=lambda group: None)
            torch.get_device_module = lambda: torch.cuda
            scope = dict(vars(constants), torch=torch, ReleaseMemoryOccupationReqOutput=object, ResumeMemoryOccupationReqOutput=object,
                         _export_static_state=lambda model: "state", _import_static_state=lambda model, state: print(state))
            Updater = methods("sglang/sglang/srt/managers/scheduler_components/weight_updater.py", "SchedulerWeightUpdaterManager",
                              ["release_memory_occupation", "resume_memory_occupation"], scope)
            adapter = TorchMemorySaverAdapter.create(enable=True)
            print(adapter.enabled)
            with adapter.configure_subprocess():
                print(os.environ["CISTERN_COMPAT"])
            with adapter.region("weights", enable_cpu_backup=True):
                weights = torch.empty(64 * MiB)
            with adapter.region("kv_cache"):
                cache = torch.empty(128 * MiB)
            g = torch.cuda.CUDAGraph()
            with adapter.cuda_graph(cuda_graph=g, pool=None, stream=None, tag="cuda_graph", enable_cpu_backup=True):
                torch.empty(32 * MiB)
            updater = Updater()
            updater.scheduler, updater.tp_cpu_group, updater.memory_saver_adapter = None, None, adapter
            updater.tp_worker = types.SimpleNamespace(model_runner=types.SimpleNamespace(model=None))
            updater.offload_tags, updater.flush_cache = set(), torch.cuda.empty_cache
            updater.is_fully_idle = lambda ignore_waiting: True
            updater._assert_weight_cache_inactive = lambda what: None
            before = free()
            class Request:
                tags = None
            updater.release_memory_occupation(Request)
            print(free() - before)
            Request.tags = ["weights"]
            updater.resume_memory_occupation(Request)
            print(free() - before)
            Request.tags = ["kv_cache", "cuda_graph"]
            updater.resume_memory_occupation(Request)
            print(free() - before)
            """), ["True", "torch_memory_saver", "224", "state", "160", "0"])


class Installed(Case):
    """With a PyTorch and an adapter of a few lines: what an engine's import finds."""

    def setUp(self):
        super().setUp()
        self.site = self.fake_torch()
        self.copy = self.package()
        self.build(self.copy, self.site)
        self.write("site/torch_memory_saver/__init__.py", "import torch\nreal = True\n")
        self.write("site/vllm/__init__.py", "import torch\n")
        self.write("site/vllm/device_allocator/__init__.py", "")
        self.write("site/vllm/device_allocator/cumem.py", "real = True\n")

    def injected(self, code, compat, **more):
        path = [os.path.join(self.copy, "_inject"), self.site]
        # has_driver(): the adapter is built already, so it is used on a machine without a driver as well.
        return self.python(code, env=self.environment(PYTHONPATH=os.pathsep.join(path), _CISTERN_INJECT="run", CISTERN_COMPAT=compat,
                                                      **more), check=False)

    ASK = """
        import torch, vllm
        import torch_memory_saver
        from vllm.device_allocator import cumem
        import vllm.device_allocator.cumem as same
        print(torch_memory_saver.__name__, cumem.__name__, same is cumem, getattr(cumem, "cumem_available", None))
        """

    def test_by_the_environment(self):
        for compat, found in (("", ["torch_memory_saver vllm.device_allocator.cumem True None"]),
                              ("torch_memory_saver", ["cistern.compat.torch_memory_saver vllm.device_allocator.cumem True None"]),
                              (" vllm,torch_memory_saver", ["cistern.compat.torch_memory_saver cistern.compat.vllm True True"])):
            with self.subTest(compat):
                done = self.injected(self.ASK, compat)
                self.assertEqual((done.stdout.splitlines(), done.stderr), (found, ""))

    def test_bad_name(self):
        done = self.injected("import torch; print('went on')", "torch_memory_saver,sglang")
        self.assertEqual((done.returncode, done.stdout, done.stderr),
                         (2, "", "cistern: CISTERN_COMPAT: 'sglang': want torch_memory_saver or vllm\n"))

    def test_without_the_adapter(self):
        os.makedirs(self.path("tree", "lib"), exist_ok=True)
        os.symlink(os.path.join(ROOT, "lib", "libcistern_plain.so"), self.path("tree", "lib", "libcistern_plain.so"))
        done = self.injected(self.ASK, "vllm,torch_memory_saver", CISTERN_ADAPTER="off")
        self.assertEqual(done.stdout.splitlines(), ["torch_memory_saver vllm.device_allocator.cumem True None"])
        self.assertIn("cistern: CISTERN_COMPAT has no effect: pools of a kind of memory need PyTorch on Cistern's adapter, which is not "
                      "in use: CISTERN_ADAPTER=off\n", done.stderr)

    def test_imported_before(self):
        env = self.environment(PYTHONPATH=self.site + os.pathsep + os.path.dirname(self.copy))
        done = self.python("""
            import torch_memory_saver, cistern.compat
            try:
                cistern.compat.install()
            except cistern.CisternError as e:
                print(e)
            del sys.modules["torch_memory_saver"]
            cistern.compat.install("torch_memory_saver")
            cistern.compat.install("torch_memory_saver")
            import torch_memory_saver
            print(torch_memory_saver.__name__)
            """.replace("import torch_memory", "import sys, torch_memory", 1), env=env)
        self.assertEqual(done.stdout.splitlines(), [
            "torch_memory_saver is imported already: call cistern.compat.install('torch_memory_saver') before that",
            "cistern.compat.torch_memory_saver"])

    def test_subprocesses(self):
        """A child of configure_subprocess runs on Cistern with the module, though its parent was not started by `cistern run`."""
        env = self.environment(PYTHONPATH=self.site + os.pathsep + os.path.dirname(self.copy))
        done = self.python("""
            import json, os, subprocess, sys
            import cistern.compat
            cistern.compat.install("torch_memory_saver")
            import torch_memory_saver
            code = "import sys, torch, torch_memory_saver; print(torch_memory_saver.__name__, 'cistern.torch' in sys.modules)"
            before = dict(os.environ)
            with torch_memory_saver.configure_subprocess():
                subprocess.check_call([sys.executable, "-c", code])
                with torch_memory_saver.configure_subprocess():
                    print(os.environ["CISTERN_COMPAT"], os.environ["PYTHONPATH"].count("_inject"), flush=True)
            print(dict(os.environ) == before, flush=True)
            subprocess.check_call([sys.executable, "-c", code])
            """, env=env)
        self.assertEqual(done.stdout.splitlines(), ["cistern.compat.torch_memory_saver True", "torch_memory_saver 1", "True",
                                                    "torch_memory_saver False"], done.stderr)


if __name__ == "__main__":
    unittest.main()
