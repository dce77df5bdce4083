"""cistern.torch.MemPool over a PyTorch and an adapter of a few lines: what the adapter receives, what is refused, what is kept
and for how long."""

import os

from .support import Case

BEGIN = """
    import cistern.torch, ctypes, gc, torch, weakref
    from cistern.torch import External, MemPool
    def refused(*a, **k):
        try:
            print("made", MemPool(*a, **k))
        except Exception as e:
            print(type(e).__name__, e)
    def enable():
        cistern.torch.enable()
        global adapter
        adapter = cistern.torch._adapter
        adapter.fake_pool.restype = ctypes.c_char_p
        adapter.fake_ask.argtypes = [ctypes.c_ulonglong]
        adapter.fake_alloc.restype = ctypes.c_void_p
    def received():
        return adapter.fake_pool().decode()
"""


class Pools(Case):
    def setUp(self):
        super().setUp()
        site = self.fake_torch()
        copy = self.package()
        self.build(copy, site)
        self.env = self.environment(PYTHONPATH=site + ":" + os.path.dirname(copy))

    def program(self, code, **more):
        import textwrap
        return self.python(textwrap.dedent(BEGIN) + textwrap.dedent(code), env=dict(self.env, **more))

    def test_what_the_adapter_receives(self):
        done = self.program("""
            refused()
            enable()
            for arguments in (dict(memory="ipc_legacy"), dict(memory="single_handle", use_on_oom=True), dict(upstream="nccl"),
                              dict(upstream="logging:file=/tmp/x.csv|async:threshold=1GiB", limit="1.5G", on_oom="managed"),
                              dict(limit=12345), dict(on_oom="pinned")):
                pool = MemPool(**arguments)
                print(pool.id, received())
            print(torch.LOG[-6:])
            """)
        self.assertEqual(done.stdout.splitlines(), [
            "CisternError pools of a kind of memory need PyTorch on Cistern's adapter: call cistern.torch.enable()",
            "(0, 7) flags 2 upstream - limit 0 spill -",
            "(0, 7) flags 4 upstream - limit 0 spill -",
            "(0, 7) flags 0 upstream nccl limit 0 spill -",
            "(0, 7) flags 0 upstream logging:file=/tmp/x.csv|async:threshold=1GiB limit 1610612736 spill managed",
            "(0, 7) flags 0 upstream - limit 12345 spill -",
            "(0, 7) flags 0 upstream - limit 0 spill pinned",
            str(["pool False", "pool True"] + ["pool False"] * 4)], done.stderr)

    def test_bad_words(self):
        done = self.program("""
            enable()
            refused("nccl")
            refused("ipc_legacy", upstream="nccl")
            refused(upstream="moon!")
            refused(upstream="nccl", allocator=object())
            refused(upstream=3)
            refused(upstream="")
            for limit in ("2 apples", "2Gi", "-1", 0, -1, 1.5, True, "99999999 PiB"):
                refused(limit=limit)
            refused(on_oom=None)
            refused(on_oom="")
            torch.cuda.MemPool.id = (0, 8)
            refused(upstream="nccl")
            from cistern import _pools
            print(len(_pools._kept))
            """)
        size = "is not a size in bytes: write 80G or 80GiB, 1.5GiB, 512MiB, 80GB or a plain number"
        self.assertEqual(done.stdout.splitlines(), [
            "ValueError memory: expected one of chunks, ipc_legacy, single_handle, got 'nccl'",
            "ValueError a pool has one kind of memory: give memory or upstream, not both",
            "SettingsError upstream moon!: expected device",
            "ValueError a pool has one upstream: give allocator or upstream, not both",
            "TypeError upstream: expected the name of an upstream such as \"nccl\", or cistern.torch.External, got int",
            "ValueError upstream: expected the name of an upstream such as \"nccl\", or cistern.torch.External, got ''",
            "ValueError limit: '2 apples' " + size, "ValueError limit: '2Gi' " + size, "ValueError limit: '-1' " + size,
            "ValueError limit: expected more than 0 bytes; leave it out for a pool without a limit of its own",
            "ValueError limit: -1 is not a size that memory can have",
            "TypeError limit: expected a number of bytes or a size such as \"2GiB\", got float",
            "TypeError limit: expected a number of bytes or a size such as \"2GiB\", got bool",
            "ValueError limit: '99999999 PiB' is not a size that memory can have",
            "TypeError on_oom: expected \"error\", the name of an upstream to go on with, or a function of the bytes that are missing, "
            "got NoneType",
            "ValueError on_oom: expected \"error\", the name of an upstream to go on with, or a function of the bytes that are missing, "
            "got ''",
            "SettingsError upstream moon!: expected device", "0"], done.stderr)

    def test_on_oom(self):
        done = self.program("""
            enable()
            class Helper:
                def __call__(self, missing):
                    print("missing", missing)
                    return missing > 10
            helper = Helper()
            gone = weakref.ref(helper)
            pool = MemPool(on_oom=helper)
            del helper, pool
            gc.collect()
            print(adapter.fake_ask(1 << 40), adapter.fake_ask(3), gone() is not None)
            adapter.fake_drop()
            gc.collect()
            print(gone())
            def fails(missing):
                raise RuntimeError("my own mistake")
            pool = MemPool(on_oom=fails)
            print(adapter.fake_ask(5), adapter.fake_ask(5))
            """)
        self.assertEqual(done.stdout.splitlines(), ["missing %d" % (1 << 40), "missing 3", "1 0 True", "None", "0 0"])
        self.assertEqual(done.stderr.count("my own mistake\n"), 1, done.stderr)
        self.assertIn("cistern: the on_oom of a pool failed, which counts as no help:\n", done.stderr)

    def test_external(self):
        source = self.write("mine.c", """
            #include <stddef.h>
            #include <sys/types.h>
            void *bare(ssize_t size, int device, void *stream) { return (void *)(size * 1000 + device * 10 + (size_t)stream); }
            void bare_free(void *p, ssize_t size, int device, void *stream) {}
            """)
        import subprocess
        subprocess.check_call(["cc", "-shared", "-fPIC", source, "-o", self.path("mine.so")])
        done = self.program("""
            enable()
            from cistern._pools import ALLOC, FREE
            class Owner:
                pass
            owner = Owner()
            gone = weakref.ref(owner)
            alloc = ALLOC(lambda ctx, size, device, stream: ctx + size + device + stream)
            free = FREE(lambda *a: None)
            pool = MemPool(upstream=External(alloc, free, ctx=0x10000, keep=owner))
            del alloc, free, owner, pool
            gc.collect()
            print(hex(adapter.fake_alloc()), gone() is not None)
            adapter.fake_drop()
            gc.collect()
            print(gone())
            pool = MemPool(upstream=External.library("./mine.so", "bare", "bare_free"), limit="1MiB")
            print(adapter.fake_alloc(), received())
            for bad in (lambda: External.library("./none.so", "a", "b"), lambda: External.library("./mine.so", "a", "b"),
                        lambda: External(0, 1), lambda: External("a", 1), lambda: External(None, 1)):
                try:
                    print(bad())
                except Exception as e:
                    print(type(e).__name__)
            """)
        self.assertEqual(done.stdout.splitlines(), [
            "0x10048 True", "None", "64035 flags 0 upstream - limit 1048576 spill -", "CisternError", "CisternError",
            "ValueError", "TypeError", "ValueError"], done.stderr)

    def test_python_functions(self):
        done = self.program("""
            import threading
            from cistern.torch import PythonAllocator
            enable()
            adapter.fake_free.argtypes = [ctypes.c_void_p]
            results = [4096, None, 0, "x", True, -1, 1 << 64, OSError("mine"), 8192]
            def alloc(size, device, stream):
                print("alloc", size, device, stream)
                result = results.pop(0)
                if isinstance(result, Exception):
                    raise result
                return result
            def free(ptr, size, device, stream):
                print("free", ptr, size, device, stream)
                if ptr == 1:
                    raise KeyboardInterrupt("not here")
            pool = MemPool(upstream=PythonAllocator(alloc, free))
            print([adapter.fake_alloc() for _ in range(9)])
            for ptr in (4096, 1, 1, 8192):
                adapter.fake_free(ptr)
            def nested(size, device, stream):  # asks itself
                print("inside", adapter.fake_alloc())
                return 4096
            pool = MemPool(upstream=PythonAllocator(nested, free))
            print(adapter.fake_alloc())
            # The lock is released while the library is called, and several threads are in it at once.
            together = threading.Barrier(3)
            def meet(size, device, stream):
                together.wait(60)
                return 4096
            pool = MemPool(upstream=PythonAllocator(meet, free))
            got = []
            threads = [threading.Thread(target=lambda: got.append(adapter.fake_alloc())) for _ in range(3)]
            for t in threads: t.start()
            for t in threads: t.join()
            print(got)
            for bad in ((1, free), (alloc, None)):
                try:
                    PythonAllocator(*bad)
                except TypeError as e:
                    print(e)
            """)
        self.assertEqual(done.stdout.splitlines(), ["alloc 64 3 5"] * 9 + ["[4096, None, None, None, None, None, None, None, 8192]"] +
                         ["free %d 64 3 5" % n for n in (4096, 1, 1, 8192)] +
                         ["inside None", "4096", "[4096, 4096, 4096]", "alloc: expected a function, got int",
                          "free: expected a function, got NoneType"], done.stderr)
        for words, times in (("the alloc function of an upstream failed, which counts as no memory:", 2),
                             ("the free function of an upstream failed, which counts as a free:", 1), ("not here", 1),
                             ("expected the address of memory as an integer, or None, got 'x'", 1), ("mine", 0),
                             ("RecursionError: the function asks for memory", 1)):
            self.assertEqual(done.stderr.count(words), times, (words, done.stderr))

    def test_enable_over_an_upstream(self):
        self.write("mine.c", "void *bare(void) { return 0; } void bare_free(void) {}")
        import subprocess
        subprocess.check_call(["cc", "-shared", "-fPIC", self.path("mine.c"), "-o", self.path("mine.so")])
        done = self.program("""
            import os
            def refusals(*list):
                for bad in list:
                    try:
                        cistern.torch.enable(**bad)
                    except Exception as e:
                        print(type(e).__name__, e)
            mine = External.library("./mine.so", "bare", "bare_free")
            refusals(dict(upstream=3), dict(upstream=""), dict(upstream="a;b"))
            cistern.torch.enable("limit:1GiB", upstream=mine)
            print(os.environ["CISTERN_CONF"].replace(os.getcwd(), "HERE"))
            cistern.torch.enable("limit:1GiB", upstream=mine)
            refusals(dict(upstream="managed"), dict(upstream=External(8, 8)))
            """)
        lines = done.stdout.splitlines()
        self.assertEqual(lines[:4], [
            "TypeError upstream: expected the name of an upstream such as \"managed\", or cistern.torch.External, got int",
            "ValueError upstream: expected the name of an upstream such as \"managed\", got ''",
            "ValueError upstream: expected the name of an upstream such as \"managed\", got 'a;b'",
            "limit:1GiB,upstream:external:library=HERE/mine.so;alloc=bare;free=bare_free"], done.stderr)
        self.assertTrue(lines[4].startswith("CisternError Cistern is enabled already, with the settings"), lines)
        self.assertEqual(lines[5:], ["CisternError Cistern is enabled already: the upstream cannot be changed"], done.stderr)
        done = self.program("""
            from cistern.torch import PythonAllocator
            cistern.torch.enable(upstream=PythonAllocator(lambda size, device, stream: size * 4096, lambda *a: None))
            adapter = cistern.torch._adapter
            adapter.fake_alloc.restype = ctypes.c_void_p
            gc.collect()
            print(adapter.fake_alloc())
            """, FAKE_SAYS_END="1")
        self.assertEqual(done.stdout, "262144\nPython ends\n", done.stderr)

    def test_the_adapter_learns_when_python_ends(self):
        done = self.program("enable(); MemPool(); print('made'); MemPool(on_oom=print); MemPool(on_oom=print)", FAKE_SAYS_END="1")
        self.assertEqual(done.stdout, "made\nPython ends\n")

    def test_pools_by_number(self):
        done = self.program("""
            from cistern._pools import numbers, device_index
            class Graph:
                def pool(self):
                    return (3, 0)
            print(numbers(torch.cuda.MemPool()), numbers((1, 2)), numbers([4, 0]), numbers(Graph()))
            class Device:
                type, index = "cuda", 2
            print(device_index(None), device_index("cuda:3"), device_index("cuda"), device_index(1), device_index(Device()))
            for bad in (lambda: numbers("x"), lambda: numbers((1,)), lambda: numbers((1, -1)), lambda: numbers(None),
                        lambda: device_index("cpu"), lambda: device_index(-1), lambda: device_index(True)):
                try:
                    print(bad())
                except (TypeError, ValueError) as e:
                    print(type(e).__name__)
            try:
                cistern.torch.pool_stats((0, 0))
            except cistern.CisternError as e:
                print(e)
            """)
        self.assertEqual(done.stdout.splitlines(), [
            "(0, 7) (1, 2) (4, 0) (3, 0)", "0 3 0 1 2"] + ["TypeError"] * 4 + ["ValueError"] * 3 +
            ["no statistics of pools: CUDA has not started on Cistern in this process"], done.stderr)
