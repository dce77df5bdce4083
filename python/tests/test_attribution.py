"""Attribution: stacks, traces and files of out-of-memory, over the real library and a simulated device."""

import json
import os
import subprocess
import textwrap
import time

from .support import COMMAND, ERROR, Case, loads
from .test_api import BEGIN, ROOT


class Attribution(Case):
    def setUp(self):
        super().setUp()
        self.env = self.environment(PYTHONPATH=ROOT, CISTERN_CONF="driver:sim:1GiB")

    def program(self, code, **more):
        text = textwrap.dedent(BEGIN) + textwrap.dedent(ERROR) + textwrap.dedent(code)
        return self.python(text, env=dict(self.env, **more))

    def command(self, *arguments):
        done = subprocess.run([COMMAND, *arguments], env=self.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              universal_newlines=True, timeout=600)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_off_at_first(self):
        done = self.program("""
            malloc(1 << 20)
            print(json.dumps(cistern.stack_usage()))
            """)
        self.assertEqual(loads(done.stdout), [])

    def check_stacks(self, code):
        found = loads(self.program(code).stdout)
        self.assertEqual([u["requested"] >> 20 for u in found if u["frames"]], [12, 4], found)
        inner, outer = [u for u in found if u["frames"]]
        self.assertEqual((inner["blocks"], outer["blocks"]), (3, 1))
        self.assertEqual(inner["allocated"], 12 << 20)
        self.assertTrue(any(f.startswith("inner ") for f in inner["frames"]), inner)
        self.assertFalse(any(f.startswith("inner ") for f in outer["frames"]), outer)
        for use in (inner, outer):
            at = next(i for i, f in enumerate(use["frames"]) if f.startswith("outer "))
            self.assertRegex(use["frames"][at], r"^outer .*:\\d+$".replace("\\\\", "\\"))
            self.assertTrue(any(f.startswith("<module> ") for f in use["frames"][at:]), use)

    STACKS = """
        def inner():
            return malloc(4 << 20)
        def outer():
            malloc(4 << 20)
            for _ in range(3):
                inner()
        """

    def test_before_the_library_starts(self):
        self.check_stacks(self.STACKS + """
        cistern.attribution()
        print(any('libcistern' in line for line in open('/proc/self/maps')), os.environ["CISTERN_CONF"])
        outer()
        print(json.dumps(cistern.stack_usage()))
        """)

    def test_after_the_library_started(self):
        self.check_stacks(self.STACKS + """
        malloc(1 << 20)
        cistern.attribution("python", sample=0)
        outer()
        print(json.dumps(cistern.stack_usage(0)))
        """)

    def test_native_and_python(self):
        done = self.program(self.STACKS + """
        cistern.attribution("all", 0)
        inner()
        print(json.dumps(cistern.stack_usage()))
        """)
        frames = loads(done.stdout)[0]["frames"]
        at = next(i for i, f in enumerate(frames) if f.startswith("inner "))
        self.assertGreater(at, 0, frames)  # the native functions that called the library come before
        self.assertFalse(any(f.startswith("cistern_malloc") for f in frames), frames)

    def test_between_the_library_and_the_device(self):
        done = self.program("""
            _library.start(None)
            a = cistern.attribution(sample=0, history=100)
            malloc(2 << 20)
            cistern.write_trace("in.cistern")
            print(json.dumps(str(error(lambda: cistern.write_trace("/no/folder/x.cistern")))))
            """)
        self.assertGreaterEqual(json.loads(self.command("inspect", "--json", self.path("in.cistern")))["traces"][0]["events"], 1)
        self.assertIn("/no/folder/x.cistern: cannot be written: ", str(loads(done.stdout)))

    def test_scope(self):
        done = self.program("""
            malloc(1 << 20)
            with cistern.attribution(sample=0, history=100) as a:
                malloc(2 << 20)
                kept = cistern.stack_usage()
                cistern.write_trace("in.cistern")
            after = cistern.stack_usage()
            a.remove()
            cistern.write_trace("out.cistern")
            print(json.dumps([[u["requested"] >> 20 for u in kept if u["frames"]], after]))
            """)
        self.assertEqual(loads(done.stdout), [[2], []])
        events = [json.loads(self.command("inspect", "--json", self.path(n)))["traces"][0]["events"] for n in ("in.cistern", "out.cistern")]
        self.assertGreaterEqual(events[0], 1)
        self.assertEqual(events[1], 0)

    def test_scope_before_the_library_starts(self):
        done = self.program("""
            before = os.environ["CISTERN_CONF"]
            with cistern.attribution("native", "1MiB", history=7):
                print(os.environ["CISTERN_CONF"])
            print(os.environ["CISTERN_CONF"] == before)
            """, CISTERN_CONF="driver:sim:1GiB,history:5")
        self.assertEqual(done.stdout.splitlines(), ["driver:sim:1GiB,stacks:native,stack_sample:1048576,history:7", "True"])

    def test_sample(self):
        done = self.program("""
            cistern.attribution(sample="1GiB", history=0)
            kept = [malloc(512) for _ in range(1000)]  # each with a chance of one in two million
            print(json.dumps(sum(u["blocks"] for u in cistern.stack_usage() if u["frames"])))
            """)
        self.assertLess(loads(done.stdout), 10)

    def test_trace_has_the_words(self):
        self.program("""
            cistern.attribution("python", 0, history=1000)
            def step():
                with cistern.tag("optimizer"):
                    return malloc(8 << 20)
            p = step()
            step()
            _library.load().cistern_free(p, 0, 0, None)
            cistern.write_trace("run.cistern")
            e = error(cistern.write_trace, "no/such/folder/run.cistern")
            assert isinstance(e, cistern.CisternError) and "no/such/folder" in str(e), e
            assert os.listdir(".") == ["run.cistern"] or "home" in os.listdir("."), os.listdir(".")
            """)
        found = json.loads(self.command("inspect", "--json", self.path("run.cistern")))["traces"][0]
        self.assertEqual(found["peak_live_bytes"], 16 << 20)
        self.assertIn("step", json.dumps(found))
        self.command("convert", self.path("run.cistern"), "-o", self.path("events.csv"), "--table", "allocations")
        table = self.read("events.csv")
        self.assertIn("optimizer", table)

    def test_report(self):
        for before in (True, False):
            with self.subTest(before=before):
                folder = "oom-%s" % before
                done = self.program("""
                    folder = sys.argv[1] if len(sys.argv) > 1 else %r
                    if not %r:
                        malloc(1 << 20)
                    cistern.report(folder)
                    held = malloc(900 << 20)
                    for n in range(7):
                        assert not _library.load().cistern_malloc(512 << 20, 0, None)
                    cistern.report(None)
                    assert not _library.load().cistern_malloc(512 << 20, 0, None)
                    print(json.dumps([os.getpid(), sorted(os.listdir(folder))]))
                    """ % (folder, before), CISTERN_CONF="driver:sim:1GiB,history:1000,stacks:python")
                pid, files = loads(done.stdout)
                self.assertEqual(files, ["oom-%d-%d.cistern" % (pid, n) for n in range(1, 6)])
                self.assertEqual(done.stderr.count("cistern report"), 5, done.stderr)
                self.assertIn(files[0], done.stderr)
        self.assertIn("512", self.command("report", self.path(folder, files[0])))

    def test_report_child(self):
        self.program("""
            import time
            cistern.report("oom", child=True)
            held = malloc(900 << 20)
            assert not _library.load().cistern_malloc(512 << 20, 0, None)
            os.chdir("/")
            """, CISTERN_CONF="driver:sim:1GiB,history:1000,stacks:python", CISTERN_COMMAND=COMMAND)
        end = time.monotonic() + 600
        while time.monotonic() < end:
            there = os.listdir(self.path("oom"))
            if len(there) == 3 and not any(n.startswith(".") for n in there):
                break
            time.sleep(0.1)
        name = next(n for n in there if n.endswith(".cistern"))
        self.assertEqual(sorted(there), [name, name + ".html", name + ".txt"])
        text = ""
        while "remedies" not in text and time.monotonic() < end:
            time.sleep(0.1)
            text = self.read(os.path.join("oom", name + ".txt"))
        self.assertIn("512.00 MiB asked for", text)
        self.assertIn("<module>", text)

    def test_what_makes_no_sense(self):
        self.write("file", "")
        done = self.program("""
            for f, a, k in ((cistern.attribution, ("native+python",), {}), (cistern.attribution, ("python", "many"), {}),
                            (cistern.attribution, ("python", -1), {}), (cistern.attribution, ("python", 0, -1), {}),
                            (cistern.attribution, ("python", 0, 1 << 40), {}), (cistern.attribution, ("python", 0, "5"), {}),
                            (cistern.attribution, ("python", None), {}), (cistern.report, ("a,b",), {}), (cistern.report, (None, True), {})):
                assert isinstance(error(f, *a, **k), (TypeError, ValueError)), a
            for bad in ("file", "file/below", "/proc/no/such"):
                e = error(cistern.report, bad)
                assert isinstance(e, cistern.CisternError) and bad in str(e), e
            print(os.environ["CISTERN_CONF"])
            """)
        self.assertEqual(done.stdout, "driver:sim:1GiB\n")

    def test_child_of_fork(self):
        done = self.program("""
            cistern.attribution(sample=0)
            malloc(1 << 20)
            assert cistern.stack_usage()
            pid = os.fork()
            if pid == 0:
                assert cistern.stack_usage() == []
                assert isinstance(error(cistern.write_trace, "child.cistern"), cistern.CisternError)
                os._exit(0)
            print(os.waitpid(pid, 0)[1], os.path.exists("child.cistern"))
            """)
        self.assertEqual(done.stdout, "0 False\n")

    def test_torch_program_before_cuda(self):
        # Nothing is loaded before CUDA starts; what is asked for goes into settings, also those that enable() is given.
        site = self.fake_torch()
        done = self.program("""
            import torch
            torch.version.cuda = "13.0"
            cistern.attribution("python", history=500)
            cistern.report("oom")
            print(cistern.stack_usage(0), os.environ["CISTERN_CONF"])
            print(error(cistern.write_trace, "x.cistern"))
            from cistern import _settings
            print(_settings.merged("limit:1GiB,history:5"))
            print(any("libcistern" in line for line in open("/proc/self/maps")))
            """, PYTHONPATH=ROOT + ":" + site, CISTERN_CONF="chunk:4MiB")
        wanted = "stacks:python,stack_sample:65536,history:500,report:" + self.path("oom")
        self.assertEqual(done.stdout.splitlines(), [
            "[] chunk:4MiB," + wanted, "x.cistern: nothing to write: CUDA has not started in this process", "limit:1GiB," + wanted, "False"])
