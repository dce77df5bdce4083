"""The programs of lab/see that need no PyTorch, over the stand-in for libcuda.so.1; and how those that do judge, so that they
cannot pass by themselves on a GPU."""

import os
import shutil
import subprocess
import sys
import unittest

from .support import COMMAND, ROOT, Case

SEE = os.path.join(ROOT, "lab", "see")
MiB = 1 << 20


def see(name):
    """A module of lab/see."""
    import importlib

    if SEE not in sys.path:
        sys.path.insert(0, SEE)
    return importlib.import_module(name)


class Called:
    """A call of the driver as the programs have it."""

    def __init__(self, name, address=0, size=0, handle=0, result=0, thread=7):
        self.name, self.address, self.size, self.handle, self.result, self.thread = name, address, size, handle, result, thread
        self.device, self.pid, self.time, self.took = 0, 1, 0, 0


@unittest.skipUnless(os.path.exists(COMMAND) and os.path.exists(os.path.join(ROOT, "lib", "libcistern_audit.so")), "nothing is built: make build")
@unittest.skipUnless(shutil.which("cc"), "no C compiler")
class Programs(Case):
    def setUp(self):
        super().setUp()
        sources = os.path.join(ROOT, "cuda", "nvidia", "standin", "testdata")
        self.standin = self.path("libcuda.so.1")
        subprocess.run(["cc", "-O1", "-fPIC", "-shared", "-pthread", "-Wl,-Bsymbolic", "-o", self.standin] +
                       [os.path.join(sources, f) for f in sorted(os.listdir(sources)) if f.endswith(".c")], check=True)

    def run_see(self, name, *arguments, check=True):
        env = self.environment(STANDIN=self.standin, OUT=self.path("out"), CISTERN_COMMAND=COMMAND, CISTERN_GPU_BUILD=self.path("build"),
                               PYTHONDONTWRITEBYTECODE="1")
        done = subprocess.run([sys.executable, os.path.join(SEE, name), *arguments], env=env, cwd=self.folder, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, universal_newlines=True, timeout=600)
        if check:
            self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def test_kill(self):
        out = self.run_see("kill.py", "--times", "12", "--at-once", "2", "--longest", "0.2")
        self.assertIn("PASS see-kill: where the trace agrees with the program's own log: 12, wanted 12", out)

    def test_idle(self):
        # Times are nothing to go by on a machine that does other work.
        out = self.run_see("idle.py", "--times", "3", check=False)
        self.assertGreaterEqual(out.count("output and status: the same, wanted the same"), 5, out)
        self.assertNotIn("output and status: differ", out)
        self.assertIn("PASS see-idle: python: threads when traced: 1, wanted 1", out)
        self.assertIn("PASS see-idle: nothing of it was seen as CUDA's: yes", out)

    def test_driver(self):
        out = self.run_see("driver.py", "--kinds", "virtual,twice,pool")
        self.assertEqual(out.count("PASS see-driver:"), 5, out)
        # The stand-in's plain memory comes from the C library, not in whole pages of 2 MiB as a GPU's does: whether the peak is that
        # of free memory depends on where it lies, but the calls are all there.
        out = self.run_see("driver.py", "--kinds", "small", check=False)
        self.assertIn("PASS see-driver: 5,000 of 60 KiB by cuMemAlloc: counted anew from the calls", out)

    def test_scripts_that_are_missing(self):
        for name, words in (("seed.py", "seed_script.py"), ("agree.py", "workloads.py"), ("cost.py", "workloads.py")):
            out = self.run_see(name, *(["--no-cupy"] if name == "agree.py" else []))
            self.assertIn("skipped, there is no " + words, out)

    def test_held_is_what_inspect_says(self):
        self.write("job.py", """
            import ctypes, sys
            sys.path[:0] = [%r]
            import seen
            d = seen.Driver()
            kept = [d.allocate(n << 20) for n in (1, 2, 5, 64)]
            d.check("cuMemFree_v2", ctypes.c_uint64(kept[2]))
            d.allocate(3 << 20)
            prop = (ctypes.c_int * 16)(1, 0, 1, 0)
            h, at = ctypes.c_uint64(), ctypes.c_uint64()
            d.check("cuMemAddressReserve", ctypes.byref(at), ctypes.c_size_t(64 << 20), ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))
            for n in range(3):
                d.check("cuMemCreate", ctypes.byref(h), ctypes.c_size_t(8 << 20), prop, ctypes.c_uint64(0))
                d.check("cuMemMap", ctypes.c_uint64(at.value + (n << 23)), ctypes.c_size_t(8 << 20), ctypes.c_size_t(0), h, ctypes.c_uint64(0))
                d.check("cuMemRelease", h)
            d.check("cuMemUnmap", ctypes.c_uint64(at.value + (1 << 23)), ctypes.c_size_t(8 << 20))
            """ % SEE)
        env = self.environment(STANDIN=self.standin, OUT=self.path("out"))
        subprocess.run([COMMAND, "trace", "-o", self.path("job.cistern"), "--", sys.executable, self.path("job.py")], env=env, check=True,
                       stderr=subprocess.DEVNULL, timeout=600)
        os.environ["CISTERN_COMMAND"] = COMMAND
        self.addCleanup(os.environ.pop, "CISTERN_COMMAND", None)
        seen = see("seen")
        now, peak = seen.held(seen.calls(self.path("job.cistern")))
        self.assertEqual(peak, seen.peak_held(seen.summary(self.path("job.cistern"))))
        self.assertEqual(peak - now, 8 * MiB)
        self.assertGreaterEqual(now, (1 + 2 + 64 + 3 + 16) * MiB)


class Worker:
    """A process of cost.py that has done its steps."""

    def __init__(self, kind, times, counted=None):
        self.kind, self.times, self.start, self.retries, self.trace = kind, times, 1, 0, counted and "run.cistern"
        self.counted = lambda: counted


class Judging(Case):
    """What is wrong is found."""

    def test_segments(self):
        compare = see("agree").compare
        events = [("segment_alloc", 0x1000000, 2 * MiB), ("segment_alloc", 0x2000000, 20 * MiB), ("segment_free", 0x1000000, 2 * MiB),
                  ("segment_map", 0x9000000, 4 * MiB), ("segment_unmap", 0x9200000, 2 * MiB)]
        calls = [Called("cuMemAlloc", 0x1000000, 2 * MiB), Called("cuMemAlloc", 0x7000000, 4096), Called("cuMemAlloc", 0x2000000, 20 * MiB),
                 Called("cuMemAlloc", 0, 1 << 40, result=2), Called("cuMemFree", 0x1000000), Called("cuMemMap", 0x9000000, 2 * MiB, 1),
                 Called("cuMemMap", 0x9200000, 2 * MiB, 2), Called("cuMemUnmap", 0x9200000, 2 * MiB)]
        same, wrong, beside = compare(events, calls)
        self.assertEqual((same, wrong, [c.address for c in beside]), (5, None, [0x7000000]))
        for missing in range(len(calls)):
            if missing not in (1, 3):
                same, wrong, _ = compare(events, calls[:missing] + calls[missing + 1:])
                self.assertLess(same, 5, missing)
                self.assertIsNotNone(wrong)
        swapped = [calls[2], calls[0]] + calls[3:]
        self.assertIsNotNone(compare(events, swapped)[1])
        other = [Called("cuMemAlloc", 0x1000000, 4 * MiB)] + calls[1:]
        self.assertIsNotNone(compare(events, other)[1])

    def test_handles(self):
        handles = see("agree").handles
        calls = [Called("cuMemCreate", size=2 * MiB, handle=1), Called("cuMemMap", 0x100, 2 * MiB, 1), Called("cuMemUnmap", 0x100, 2 * MiB),
                 Called("cuMemRelease", handle=1)]
        self.assertEqual(handles(calls), "")
        for missing, words in ((0, "mapped in another size"), (1, "never mapped"), (2, "0 handles are held and 1 are mapped"), (3, "1 handles are held")):
            self.assertIn(words, handles(calls[:missing] + calls[missing + 1:]))

    def test_logs(self):
        kill = see("kill")
        entries = [(1, 0, 0x1000, 4096, 1000), (2, 0, 0x1000, 0, 2000)]
        data = kill.HEAD.pack(5, 7, len(entries)) + b"".join(kill.ENTRY.pack(*e) for e in entries)
        log = self.path("log")
        with open(log, "wb") as f:
            f.write(data.ljust(kill.HEAD.size + kill.ENTRIES * kill.ENTRY.size, b"\0"))
        calls = [Called("cuMemAlloc", 0x1000, 4096), Called("cuMemFree", 0x1000)]
        late, much = 3000, 10 ** 10
        self.assertEqual(kill.disagreement(log, calls, late, True), "")
        self.assertEqual(kill.disagreement(log, calls + [Called("cuMemAlloc", 0x1000, 512)], late, True), "")
        self.assertIn("the program made 2", kill.disagreement(log, calls + 2 * [Called("cuMemAlloc", 0x1000, 512)], late, True))
        self.assertIn("of 2 calls the trace has 1", kill.disagreement(log, calls[:1], late, True))
        self.assertEqual(kill.disagreement(log, calls[:1], late, False), "")  # the tracer was killed as well
        self.assertIn("of 2 calls the trace has 1", kill.disagreement(log, calls[:1], much, False))
        for other in (Called("cuMemAlloc", 0x2000, 4096), Called("cuMemAlloc", 0x1000, 512), Called("cuMemAlloc", 0x1000, 4096, result=2)):
            self.assertIn("call 0 is", kill.disagreement(log, [other] + calls[1:], late, True))

    def test_cost(self):
        cost, common = see("cost"), see("seen").common
        for factor, ok in ((1.005, True), (1.02, False)):
            os.environ["OUT"] = self.path("out")
            self.addCleanup(os.environ.pop, "OUT", None)
            c = common.Checks("see-cost")
            # Steps that differ by far more than what is looked for, and one outlier; the first of a step counts as much as the second.
            base = [1.0, 2.0, 5.0, 1.5, 3.0, 0.7, 1.1, 2.2, 4.0]
            times = {"plain": base, "again": base, "traced": [t * factor for t in base[:-1]] + [9.0]}
            round_ = [Worker(kind, steps) for kind, steps in times.items()]
            cost.judge(c, "work", ["plain", "traced", "again"], [round_], [])
            self.assertEqual([r["ok"] for r in c.rows], [ok, None])
            c.rows.clear()
            cost.account(c, "work", "async", [Worker("traced", [1.0, 2.0], (0.03 * factor, 10)), Worker("plain", [1.0])], [])
            self.assertEqual([r["ok"] for r in c.rows], [False])
            c.rows.clear()
            cost.account(c, "work", "async", [Worker("traced", [1.0, 2.0], (0.0299, 10))], [])
            self.assertEqual([r["ok"] for r in c.rows], [True])

    def test_remedies(self):
        command = see("oom").remedy_command
        argv = ["python", "train.py"]
        plain = {"command": "", "environment": {}, "policy": "torch"}
        self.assertEqual(command(dict(plain, environment={"PYTORCH_ALLOC_CONF": "a:b"}), argv), (argv, "native", {"PYTORCH_ALLOC_CONF": "a:b"}))
        both = {"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "a:b"}
        self.assertEqual(command(dict(plain, environment=both), argv), (argv, "native", {"PYTORCH_ALLOC_CONF": "a:b"}))
        got, mode, env = command(dict(plain, command="cistern run -- PROGRAM", policy="cistern"), argv)
        self.assertEqual((got[1:], mode, env), (["run", "--"] + argv, "cistern", {}))
        got, mode, env = command(dict(plain, environment={"CISTERN_CONF": "spill:managed"}, policy="cistern"), argv)
        self.assertEqual((got[1:], mode), (["run", "--conf", "spill:managed", "--"] + argv, "cistern"))
        self.assertIsNone(command(dict(plain, policy="cistern"), argv)[0])


if __name__ == "__main__":
    unittest.main()
