"""cistern.torch over a PyTorch of a few lines: what is decided, what is asked of PyTorch, what it receives."""

import os
import unittest

from .support import COMMAND, ROOT, Case, loads

PLAIN = os.path.join(ROOT, "lib", "libcistern_plain.so")


class Torch(Case):
    def setUp(self):
        super().setUp()
        self.site = self.fake_torch()
        self.copy = self.package()
        self.write("tree/bin/cistern", "#!/bin/sh\nexec %s \"$@\"\n" % COMMAND)
        os.chmod(self.path("tree", "bin", "cistern"), 0o755)
        os.makedirs(self.path("tree", "lib"))
        os.symlink(PLAIN, self.path("tree", "lib", "libcistern_plain.so"))
        self.env = self.environment(PYTHONPATH=self.site + ":" + os.path.dirname(self.copy))

    def program(self, code, **more):
        return self.python(code, env=dict(self.env, **more))

    def test_adapter(self):
        self.build(self.copy, self.site)
        done = self.program("""
            import cistern, os
            print(cistern.torch.mode(), cistern.torch.enable("limit:1GiB"), cistern.torch.enable(), cistern.torch.mode())
            import torch
            print(os.environ["CISTERN_CONF"], torch.LOG, len(torch.cuda.queued))
            print(any("libcistern.so" in line for line in open("/proc/self/maps")))
            try:
                cistern.torch.enable("limit:2GiB")
            except cistern.CisternError as e:
                print(e)
            """)
        self.assertEqual(done.stdout.splitlines(), [
            "None adapter adapter adapter", "limit:1GiB [] 1", "False",
            "Cistern is enabled already, with the settings 'limit:1GiB': they cannot be changed to 'limit:2GiB'"])
        self.assertEqual(done.stderr, "")

    def test_attribution_before_enabling(self):
        self.build(self.copy, self.site)
        done = self.program("""
            import cistern, os
            cistern.attribution("python", "1MiB", history=500)
            print(cistern.torch.enable("limit:1GiB,history:5"), os.environ["CISTERN_CONF"])
            with cistern.attribution("off", history=0):
                print(os.environ["CISTERN_CONF"])
            print(os.environ["CISTERN_CONF"], cistern.torch.enable("limit:1GiB,history:5"))
            """)
        kept = "limit:1GiB,stacks:python,stack_sample:1048576,history:500"
        self.assertEqual(done.stdout.splitlines(), ["adapter " + kept, "limit:1GiB", kept + " adapter"])

    def test_too_late(self):
        self.build(self.copy, self.site)
        for state, words in (("torch.cuda.init()", "CUDA has started in this process already"),
                             ("torch.cuda.bad_fork = True", "this process was forked from one in which CUDA had started"),
                             ("torch.cuda.memory.backend = 'pluggable'", "another allocator is in place already (pluggable)")):
            done = self.program("""
                import sys, torch, cistern
                exec(sys.argv[1] if len(sys.argv) > 1 else %r)
                try:
                    cistern.torch.enable()
                except cistern.CisternError as e:
                    print(e)
                print(cistern.torch.mode())
                """ % state)
            self.assertIn(words, done.stdout)
            self.assertTrue(done.stdout.endswith("\nNone\n"))

    def test_bad_settings(self):
        self.build(self.copy, self.site)
        for conf, words in (("limit:much", "setting limit:much"), ("speed:1", 'unknown setting "speed": the keys are driver,'),
                            ("driver:sim", "the memory of a simulated device")):
            done = self.program("""
                import cistern
                try:
                    cistern.torch.enable(%r)
                except ValueError as e:
                    print(type(e).__name__, e)
                print(cistern.torch.mode())
                """ % conf)
            self.assertTrue(done.stdout.startswith("SettingsError CISTERN_CONF: "), done.stdout)
            self.assertIn(words, done.stdout)
            self.assertTrue(done.stdout.endswith("\nNone\n"))

    def test_torch_without_cuda(self):
        self.fake_torch("2.11.0+cpu", None)
        self.assertEqual(self.program("import cistern; print(cistern.torch.enable())").stdout, "None\n")

    def test_torchs_settings(self):
        self.build(self.copy, self.site)
        done = self.program("import cistern; cistern.torch.enable()", PYTORCH_ALLOC_CONF="max_split_size_mb:8")
        self.assertEqual(done.stderr, "cistern: settings of PyTorch's that have no effect on Cistern (`cistern doctor` says why): "
                         "PYTORCH_ALLOC_CONF max_split_size_mb:8\n")

    def test_torchs_settings_while_it_runs(self):
        self.build(self.copy, self.site)
        done = self.program("""
            import cistern, torch
            cistern.torch.enable()
            for settings in ("max_split_size_mb:8", "max_split_size_mb:8", "bad:1"):
                try:
                    torch._C._accelerator_setAllocatorSettings(settings)
                except ValueError as e:
                    print("refused", e)
            print(torch.LOG)
            """)
        self.assertEqual(done.stderr, "cistern: a setting of PyTorch's, max_split_size_mb:8: no effect: it is a test\n")
        self.assertEqual(done.stdout, "refused bad:1\n['settings max_split_size_mb:8', 'settings max_split_size_mb:8']\n")

    def test_allocator_of_the_programs_own(self):
        self.build(self.copy, self.site)
        done = self.program("""
            import cistern, torch
            cistern.torch.enable()
            torch.cuda.memory.change_current_allocator(torch.cuda.memory.CUDAPluggableAllocator("x.so", "a", "f"))
            print(cistern.torch.mode(), torch.LOG, cistern.stats()["devices"])
            """)
        self.assertEqual(done.stdout, "replaced\nNone ['pluggable a f', 'changed'] []\n")
        self.assertEqual(done.stderr.count("\n"), 1)
        self.assertIn("another allocator", done.stderr)

    def test_tag_entered_before_cuda_starts(self):
        self.build(self.copy, self.site)
        done = self.program("""
            import cistern, ctypes, json, torch
            from cistern import _library, torch as t
            t.enable()
            with cistern.tag("model"):
                assert cistern.stats()["devices"] == []
                t._adapter.fake_start()  # as CUDA's start does in the real one
                torch.cuda.init()
                _library.load().cistern_malloc(3 << 20, 0, None)
            _library.load().cistern_malloc(5 << 20, 0, None)
            print(json.dumps(cistern.stats()["devices"][0]["tags"]))
            """, CISTERN_CONF="driver:sim", _CISTERN_CONF_CHECKED="driver:sim")
        self.assertEqual([(t["name"], t["requested"]) for t in loads(done.stdout)], [("model", 3 << 20)])

    def test_out_of_memory_asks_through_the_adapter(self):
        """Python's functions take the interpreter's lock, for which the adapter lets its own go."""
        self.build(self.copy, self.site)
        done = self.program("""
            import cistern, torch
            from cistern import _library, torch as t
            asked = []
            registration = cistern.on_out_of_memory(lambda device, missing: print("asked") or False)
            t.enable()
            t._adapter.fake_start()
            torch.cuda.init()
            lib = _library.load()
            lib.cistern_malloc(2 << 30, 0, None)
            registration.remove()
            lib.cistern_malloc(2 << 30, 0, None)
            """, CISTERN_CONF="driver:sim:1GiB", _CISTERN_CONF_CHECKED="driver:sim:1GiB", PYTHONUNBUFFERED="1")
        self.assertEqual(done.stdout.splitlines(), ["through the adapter", "asked"])

    def test_adapter_of_another_torch(self):
        self.build(self.copy, self.site)
        self.write("tree/python/cistern/_toolchain.py", self.read("tree/python/cistern/_toolchain.py").replace(
            'self.version.partition("+")[0]', '"2.12.0"'))
        done = self.program("import cistern; print(cistern.torch.enable())")
        self.assertEqual(done.stdout, "plain\n")
        self.assertIn("is for torch 2.11.0, this is torch 2.12.0", done.stderr)

    def test_plain(self):
        for more, words in ((dict(CXX="/no/c++"), "the C++ compiler that CXX names is missing: /no/c++"),
                            (dict(CISTERN_BUILD="0"), "building is off")):
            done = self.program("""
                import cistern, torch
                print(cistern.torch.enable(), cistern.torch.enable())
                print(torch.LOG)
                """, **more)
            mode, log = done.stdout.splitlines()
            self.assertEqual(mode, "plain plain")
            log = eval(log)
            self.assertEqual((log[0], log[-1]), ("pluggable cistern_plain_malloc cistern_plain_free", "changed"))
            self.assertEqual(sorted(log[1:-1]), sorted("%s True" % h for h in (
                "set_init_fn", "set_reset_fn", "set_memory_fraction_fn", "set_base_alloc_fn", "set_record_stream_fn",
                "set_begin_allocate_to_pool", "set_end_allocate_to_pool_fn", "set_release_pool")))
            self.assertIn(words, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    def test_plain_says_what_it_passes_over(self):
        done = self.program("import cistern; cistern.torch.enable()", CXX="/no/c++", PYTORCH_NO_CUDA_MEMORY_CACHING="1",
                            PYTORCH_ALLOC_CONF="max_split_size_mb:64")
        self.assertEqual(done.stderr.splitlines()[1:], [
            "cistern: the plain allocator passes over PYTORCH_NO_CUDA_MEMORY_CACHING and PYTORCH_ALLOC_CONF"])

    def test_one_rank_speaks(self):
        code = "import cistern; cistern.torch.enable()"
        self.assertEqual(self.program(code, CXX="/no/c++", LOCAL_RANK="1").stderr, "")
        self.assertNotEqual(self.program(code, CXX="/no/c++", LOCAL_RANK="0").stderr, "")

    def test_plain_answers(self):
        # The library over the simulated device behind the functions that PyTorch's plain allocator leaves unanswered.
        done = self.program("""
            import cistern, ctypes, json, torch, sys
            from cistern import _library
            cistern.torch.enable()
            C = torch._C
            print(C._cuda_memoryStats(0)["requested_bytes"]["all"]["current"], cistern.stats()["devices"], C._cuda_memorySnapshot(None)["segments"])
            torch.cuda.init()
            shim = ctypes.CDLL(_library.find("libcistern_plain.so"))
            shim.cistern_plain_malloc.restype = ctypes.c_void_p
            shim.cistern_plain_malloc.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
            shim.cistern_plain_free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
            p, q = (shim.cistern_plain_malloc(n << 20, 0, None) for n in (5, 7))
            shim.cistern_plain_free(q, 7 << 20, 0, None)
            s = C._cuda_memoryStats(0)
            print(json.dumps(s))
            print(s["requested_bytes"]["all"], s["allocation"]["large_pool"]["current"])
            C._cuda_resetPeakMemoryStats(0)
            print(C._cuda_memoryStats(0)["requested_bytes"]["all"]["peak"])
            snapshot = C._cuda_memorySnapshot((0, 0))
            print([b["requested_size"] for g in snapshot["segments"] for b in g["blocks"] if b["state"] == "active_allocated"])
            for f in (lambda: torch.cuda.memory.MemPool(), lambda: C._cuda_attach_out_of_memory_observer(print),
                      lambda: torch.UntypedStorage()._share_cuda_()):
                try:
                    f()
                    print("accepted")
                except cistern.CisternError as e:
                    print(e)
            C._cuda_record_memory_history("all", None, "all", 100)
            shim.cistern_plain_malloc(9 << 20, 0, None)
            print([e["size"] for e in C._cuda_memorySnapshot(None)["device_traces"][0] if e["action"] == "alloc"])
            """, CISTERN_CONF="driver:sim", _CISTERN_CONF_CHECKED="driver:sim", CXX="/no/c++")
        lines = done.stdout.splitlines()
        self.assertEqual(lines[0], "0 [] []")
        stats = loads(lines[1])
        for key in ("allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
                    "inactive_split_bytes", "requested_bytes"):
            for pool in ("all", "small_pool", "large_pool"):
                self.assertEqual(sorted(stats[key][pool]), ["allocated", "current", "freed", "peak"])
        for key in ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free",
                    "max_split_size"):
            self.assertIsInstance(stats[key], int)
        self.assertEqual(eval("[%s]" % lines[2].replace("} ", "}, ")),
                         [{"current": 5 << 20, "peak": 12 << 20, "allocated": 12 << 20, "freed": 7 << 20}, 1])
        self.assertEqual(lines[3:5], [str(5 << 20), str([5 << 20])])
        for line, what in zip(lines[5:8], ("torch.cuda.MemPool", "observing out-of-memory", "sharing a CUDA tensor")):
            self.assertTrue(line.startswith(what) and "needs Cistern's PyTorch adapter" in line and "/no/c++" in line, line)
        self.assertEqual(lines[8], str([9 << 20]))

    def test_plain_captures(self):
        # The shim is notified of the stream before PyTorch begins the capture, and that none is to come after.
        done = self.program("""
            import torch
            from cistern import _plain
            def notify(stream):
                print("notified", stream)
            _plain._follow_captures(torch, notify)
            g = torch.cuda.graphs.CUDAGraph()
            g.capture_begin(pool=(0, 1), capture_error_mode="relaxed")
            try:
                g.capture_begin("bad")
            except RuntimeError as e:
                print(e)
            """)
        self.assertEqual(done.stdout, "notified 77\ncaptured (0, 1) relaxed\nnotified None\nnotified 77\ncaptured bad global\nnotified None\n"
                                      "no such pool\n")

    def test_shared_tensors(self):
        self.build(self.copy, self.site)
        send = """
            import cistern, pickle, torch, sys
            from multiprocessing.reduction import ForkingPickler
            cistern.torch.enable()
            with open("tensor", "wb") as f:
                f.write(bytes(ForkingPickler.dumps([torch.Tensor(cuda=True), torch.Tensor()])))
            cistern.torch.enable()
            func, args = torch.multiprocessing.reductions.reduce_tensor(torch.Tensor(cuda=True))
            print(func(*args))
            """
        self.assertEqual(self.program(send).stdout, "('rebuilt', 1, 2)\n")
        receive = "import torch, pickle\nprint(pickle.load(open('tensor', 'rb')))"
        self.assertEqual(self.program("import cistern; cistern.torch.enable()\n" + receive).stdout,
                         "[('rebuilt', 1, 2), ('plain', 3)]\n")
        # Without Cistern, with the package or without, one line says what is to be done.
        for path in (self.env["PYTHONPATH"], self.site):
            done = self.python(receive, env=dict(self.env, PYTHONPATH=path), check=False)
            self.assertNotEqual(done.returncode, 0)
            last = done.stderr.strip().splitlines()[-1]
            self.assertRegex(last, "^(RuntimeError|cistern.CisternError): a CUDA tensor was sent by a process whose PyTorch memory is Cistern's")
            self.assertIn("cistern run", last)


if __name__ == "__main__":
    unittest.main()
