"""The package over the real library and a simulated device."""

import importlib.util
import os
import shutil
import subprocess
import sys
import unittest

from .support import COMMAND, GPU, LIBRARY, Case, loads, pythons

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# A program of its own that allocates as C would.
BEGIN = """
    import ctypes, json, os, sys
    import cistern
    from cistern import _library
    def malloc(n):
        p = _library.load().cistern_malloc(n, 0, None)
        assert p, _library.last_error(_library.load())
        return p
    """


class Api(Case):
    def setUp(self):
        super().setUp()
        self.env = self.environment(PYTHONPATH=ROOT, CISTERN_CONF="driver:sim:1GiB,history:1000")

    def program(self, code, **more):
        import textwrap
        return self.python(textwrap.dedent(BEGIN) + textwrap.dedent(code), env=dict(self.env, **more))

    def test_import_does_nothing(self):
        for version, program in pythons().items():
            with self.subTest(version=version):
                done = self.python("import sys; before = set(sys.modules); import cistern; print(sorted(set(sys.modules) - before))\n"
                                   "print(cistern.version == cistern.__version__)\n"
                                   "print(any('libcistern' in line for line in open('/proc/self/maps')))",
                                   env=self.env, interpreter=program)
                modules, same, loaded = done.stdout.splitlines()
                self.assertEqual((same, loaded), ("True", "False"))
                for heavy in ("'torch'", "'numpy'", "'ctypes'", "'json'", "'typing'", "'threading'"):
                    self.assertNotIn(heavy, modules)

    def test_version_is_the_librarys(self):
        done = self.program("print(_library.load().cistern_version().decode(), cistern.version)")
        self.assertEqual(*done.stdout.split())

    def test_stats(self):
        done = self.program("""
            p = malloc(5 << 20)
            print(json.dumps(cistern.stats()))
            """)
        found = loads(done.stdout)
        self.assertEqual(found["version"].count("."), 2)
        device = found["devices"][0]
        self.assertEqual((device["device"], device["requested"]["all"]["current"]), (0, 5 << 20))
        self.assertGreaterEqual(device["reserved"]["all"]["peak"], 5 << 20)

    def test_tags(self):
        done = self.program("""
            import threading
            with cistern.tag("outer"):
                malloc(1 << 20)
                with cistern.tag("inner"):
                    malloc(2 << 20)
                malloc(4 << 20)
                t = threading.Thread(target=malloc, args=(8 << 20,))  # tags are a thread's own
                t.start(); t.join()
            @cistern.tag("decorated")
            def f(n):
                "doc"
                return malloc(n)
            f(16 << 20)
            assert f.__doc__ == "doc" and f.__name__ == "f"
            try:
                with cistern.tag("fails"):
                    raise KeyError
            except KeyError:
                pass
            malloc(32 << 20)
            print(json.dumps({t["name"]: t["requested"] >> 20 for t in cistern.stats()["devices"][0]["tags"]}))
            """)
        self.assertEqual(loads(done.stdout), {"outer": 5, "inner": 2, "decorated": 16})

    def test_tags_left_in_any_order(self):
        done = self.program("""
            import asyncio, threading
            async def work(name, first, second):
                with cistern.tag(name):
                    await asyncio.sleep(first)
                await asyncio.sleep(second)
            async def both():
                a = asyncio.create_task(work("a", 0.1, 0))
                with cistern.tag("b"):
                    await asyncio.sleep(0.05)
                    with cistern.tag("c"):
                        await a
                        malloc(1 << 20)  # a was left from below
                    malloc(2 << 20)
                malloc(4 << 20)
            asyncio.run(both())
            def generator():
                with cistern.tag("generator"):
                    yield
            held = generator()
            next(held)
            malloc(8 << 20)
            t = threading.Thread(target=held.close)
            t.start(); t.join()
            with cistern.tag("d"):
                malloc(16 << 20)
            malloc(32 << 20)
            same, failed = cistern.tag("same"), []
            def enter():
                try:
                    for _ in range(1000):
                        with same, same:
                            pass
                    with same:
                        malloc(1 << 20)
                except BaseException as e:
                    failed.append(e)
            threads = [threading.Thread(target=enter) for _ in range(4)]
            for t in threads: t.start()
            for t in threads: t.join()
            malloc(64 << 20)
            print(failed, file=sys.stderr)
            print(json.dumps({t["name"]: t["requested"] >> 20 for t in cistern.stats()["devices"][0]["tags"]}))
            """)
        self.assertEqual(loads(done.stdout), {"c": 1, "b": 2, "generator": 8, "d": 16, "same": 4})
        self.assertIn("[]", done.stderr)

    def test_tags_that_make_no_sense(self):
        done = self.program("""
            for bad in ("", "a\\0b", 3, None, b"x"):
                try:
                    cistern.tag(bad)
                    print("accepted", bad)
                except (TypeError, ValueError):
                    pass
            def generator():
                yield 1
            async def coroutine():
                pass
            for bad in (generator, coroutine):
                try:
                    cistern.tag("x")(bad)
                    print("accepted", bad)
                except TypeError:
                    pass
            """)
        self.assertEqual(done.stdout, "")

    def test_snapshot_is_for_the_command(self):
        self.program("""
            a = malloc(5 << 20); malloc(7 << 20)
            _library.load().cistern_free(a, 0, 0, None)
            cistern.snapshot("now.pickle"); cistern.snapshot("now.pickle.gz")
            import pathlib
            cistern.snapshot(pathlib.Path("path.pickle"))
            try:
                cistern.snapshot("no/such/folder/now.pickle")
                print("written")
            except cistern.CisternError as e:
                assert "no/such/folder" in str(e), e
            """)
        for name in ("now.pickle", "now.pickle.gz", "path.pickle"):
            done = subprocess.run([COMMAND, "inspect", "--json", self.path(name)], env=self.environment(), stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, universal_newlines=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            import json
            trace = json.loads(done.stdout)["traces"][0]
            self.assertEqual(trace["peak_live_bytes"], 12 << 20)

    def test_trim(self):
        done = self.program("""
            held = lambda: cistern.stats()["devices"][0]["reserved"]["all"]["current"]
            p = malloc(64 << 20)
            _library.load().cistern_free(p, 0, 0, None)
            before = held(); cistern.trim(); print(before >= 64 << 20, held())
            cistern.trim(0); cistern.trim(-1); cistern.trim("cuda:0"); cistern.empty_cache()
            for bad in (-2, "0", True, 1.5):
                try:
                    cistern.trim(bad)
                    print("accepted", bad)
                except ValueError:
                    pass
            """)
        self.assertEqual(done.stdout, "True 0\n")

    @unittest.skipIf(GPU, "this machine has a GPU")
    def test_without_a_gpu(self):
        done = self.program("""
            assert cistern.stats() == {"version": cistern.version, "settings": "limit:1GiB", "devices": []}, cistern.stats()
            print(cistern.memory_stats(), cistern.memory_allocated(), cistern.max_memory_reserved("cuda:3"), cistern.stack_usage())
            cistern.trim(); cistern.empty_cache(); cistern.reset_peak_memory_stats(); cistern.reset_accumulated_memory_stats()
            try:
                cistern.snapshot("x.pickle")
            except cistern.CisternError as e:
                print(e)
            """, CISTERN_CONF="limit:1GiB")
        self.assertEqual(done.stdout.splitlines()[0], "{} 0 0 []")
        self.assertIn("no GPU to use", done.stdout)

    def test_names_of_torch(self):
        done = self.program("""
            p = malloc(5 << 20)
            flat = cistern.memory_stats()
            device = cistern.stats()["devices"][0]
            assert list(flat) == sorted(flat) and all(type(v) is int for v in flat.values())
            for theirs, ours in (("allocated_bytes", "allocated"), ("reserved_bytes", "reserved"), ("requested_bytes", "requested"),
                                 ("segment", "segments"), ("allocation", "allocations")):
                for group, of in (("all", "all"), ("small_pool", "small"), ("large_pool", "large")):
                    for key, name in (("current", "current"), ("peak", "peak"), ("allocated", "added"), ("freed", "removed")):
                        assert flat.pop("%s.%s.%s" % (theirs, group, key)) == device[ours][of][name], (theirs, group, key)
            print(flat["num_ooms"], flat["oversize_segments.peak"], cistern.memory_allocated("cuda:0"), cistern.memory_reserved())
            _library.load().cistern_free(p, 0, 0, None)
            print(cistern.memory_allocated(), cistern.max_memory_allocated())
            cistern.reset_peak_memory_stats(0)
            cistern.reset_accumulated_memory_stats()
            flat = cistern.memory_stats()
            print(cistern.max_memory_allocated(), flat["allocated_bytes.all.freed"])
            class Device:
                type, index = "cuda", 0
            print(cistern.max_memory_reserved(Device()))
            for bad in (-1, "gpu", True, 1.5):
                try:
                    print("accepted", cistern.memory_stats(bad))
                except ValueError:
                    pass
            try:
                cistern.memory_stats(7)
            except cistern.CisternError as e:
                print(e)
            """)
        self.assertEqual(done.stdout.splitlines()[:4], ["0 0 5242880 6291456", "0 5242880", "0 0", "6291456"])
        self.assertIn("7", done.stdout.splitlines()[4])

    def test_exceptions(self):
        done = self.program("""
            for e in (cistern.OutOfMemoryError, cistern.SettingsError):
                assert issubclass(e, cistern.CisternError)
            print(cistern.CisternError, issubclass(cistern.OutOfMemoryError, MemoryError), issubclass(cistern.SettingsError, ValueError))
            try:
                cistern.stats()
            except cistern.SettingsError as e:
                print(e)
            """, CISTERN_CONF="driver:sim,limit:much")
        self.assertEqual(done.stdout.splitlines()[0], "<class 'cistern.CisternError'> True True")
        self.assertIn("limit:much", done.stdout)

    def test_trace_without_history(self):
        done = self.program("""
            import warnings
            malloc(1 << 20)
            def warned():
                with warnings.catch_warnings(record=True) as found:
                    warnings.simplefilter("always")
                    cistern.write_trace("now.cistern")
                return [(w.category.__name__, os.path.basename(w.filename), str(w.message)) for w in found]
            print(warned())
            with cistern.attribution("off", history=10):
                print(warned())
            cistern.report("oom")
            print(warned())
            """, CISTERN_CONF="driver:sim:1GiB")
        self.assertEqual(done.stdout.splitlines(), [
            str([("UserWarning", "<string>", "now.cistern has the current allocations alone, as no history is kept: "
                  "cistern.attribution(history=100_000) keeps one")]), "[]", "[]"])
        done = self.program("import warnings; warnings.simplefilter('error'); malloc(1 << 20); cistern.write_trace('now.cistern')")
        self.assertEqual(done.stderr, "")  # history:1000

    def test_report(self):
        done = self.program("""
            import pathlib
            with cistern.attribution(sample=0, history=100):
                p = malloc(5 << 20)
                now = cistern.Report()
                cistern.write_trace("<now>.cistern")
            report = cistern.Report(pathlib.Path("<now>.cistern"))
            report.save("page.html")
            assert str(report) == report.text and open("page.html").read() == report.html
            frame = report._repr_html_()
            assert frame.startswith("<iframe ") and frame.count("<") == 2, frame[:300]
            import html
            assert html.unescape(frame).count(report.html) == 1
            print(repr(now), repr(report))
            print("peak live 5.00 MiB" in now.text and "peak live 5.00 MiB" in report.text)
            try:
                cistern.Report("none.cistern")
            except cistern.CisternError as e:
                print(e)
            """)
        self.assertEqual(done.stdout.splitlines(), ["<cistern.Report of this process> <cistern.Report of <now>.cistern>", "True",
                                                    "none.cistern: no such file or directory"])
        self.assertEqual([n for n in os.listdir(self.folder) if n.startswith("cistern-")], [])

    def test_bad_settings(self):
        done = self.program("""
            try:
                cistern.stats()
            except cistern.CisternError as e:
                print(e)
            """, CISTERN_CONF="driver:sim,chunks:1")
        self.assertIn('unknown setting "chunks": did you mean chunk?', done.stdout)

    def test_child_of_fork(self):
        done = self.program("""
            malloc(1 << 20)
            cistern.stats()
            pid = os.fork()
            if pid == 0:
                with cistern.tag("child"):
                    assert cistern.stats()["devices"] == [] and cistern.memory_stats() == {}
                    cistern.trim()
                    assert not _library.load().cistern_malloc(1 << 20, 0, None)
                    try:
                        cistern.write_trace("child.cistern")
                        os._exit(2)
                    except cistern.CisternError:
                        os._exit(0)
            print(os.waitpid(pid, 0)[1])
            """)
        self.assertEqual(done.stdout, "0\n")

    def test_library_that_is_missing(self):
        done = self.program("""
            try:
                cistern.stats()
            except cistern.CisternError as e:
                print(e)
            """, CISTERN_LIBRARY="/no/such/lib.so")
        self.assertEqual(done.stdout, "CISTERN_LIBRARY: there is no file /no/such/lib.so\n")
        done = self.program("""
            try:
                cistern.stats()
            except cistern.CisternError as e:
                print(e)
            """, CISTERN_LIBRARY=self.write("text.so", "no library"))
        self.assertIn("cannot be loaded", done.stdout)

    def test_torch_program_before_cuda(self):
        # A PyTorch that has not started CUDA may still fork: nothing is loaded, and tags wait.
        site = self.fake_torch()
        done = self.program("""
            import torch
            print(cistern.stats()["devices"], cistern.memory_stats(), cistern.max_memory_allocated(), cistern.trim())
            try:
                cistern.snapshot("x.pickle")
            except cistern.CisternError as e:
                print(e)
            with cistern.tag("x"):
                pass
            print(any("libcistern" in line for line in open("/proc/self/maps")))
            torch.cuda.init()
            print(len(cistern.stats()["devices"]))
            """, PYTHONPATH=ROOT + ":" + site)
        self.assertEqual(done.stdout.splitlines(), ["[] {} 0 None", "x.pickle: nothing to write: CUDA has not started in this process",
                                                    "False", "0"])


class Wheel(Case):
    """The wheel, in a new virtual environment and without a network."""

    def test_wheel(self):
        folder = os.path.join(os.path.dirname(ROOT), "dist")
        wheels = [n for n in (os.listdir(folder) if os.path.isdir(folder) else []) if n.endswith(".whl")]
        if len(wheels) != 1:
            self.skipTest("no wheel was made: `make wheel`")
        if importlib.util.find_spec("ensurepip") is None:
            self.skipTest("this Python's virtual environments have no pip: install python3-venv")
        subprocess.run([sys.executable, "-m", "venv", self.path("venv")], check=True)
        program = self.path("venv", "bin", "python")
        env = self.environment(CISTERN_CONF="driver:sim:1GiB")
        del env["CISTERN_LIBRARY"]
        subprocess.run([program, "-m", "pip", "install", "-q", "--no-index", "--disable-pip-version-check",
                        os.path.join(folder, wheels[0])], check=True, env=env)
        done = self.python("import cistern\nprint(cistern.__file__, cistern.stats()['devices'], cistern.version)", env=env,
                           interpreter=program)
        file, devices, version = done.stdout.split()
        self.assertTrue(file.startswith(self.path("venv")))
        command = self.path("venv", "bin", "cistern")
        done = subprocess.run([command, "version"], env=env, stdout=subprocess.PIPE, universal_newlines=True, check=True)
        self.assertTrue(done.stdout.startswith("cistern " + version), done.stdout)
        done = subprocess.run([command, "doctor", "--json"], env=env, stdout=subprocess.PIPE, universal_newlines=True)
        import json
        found = json.loads(done.stdout)
        self.assertTrue(found["package"].startswith(self.path("venv")), found)
        self.assertTrue(found["library"].startswith(found["package"]), found)
        self.assertTrue(found["python"]["python"]["prefix"] == self.path("venv"), found)
        # And the program that it runs is followed.
        site = self.fake_torch()
        env["PYTHONPATH"] = site
        done = subprocess.run([command, "build-adapter"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              universal_newlines=True)
        self.assertNotEqual(done.returncode, 0)  # there is not much of a PyTorch
        self.assertIn("compiling the adapter for torch 2.11.0", done.stderr)
        self.assertTrue(shutil.which("cistern", path=self.path("venv", "bin")))


if __name__ == "__main__":
    unittest.main()
