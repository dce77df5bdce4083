"""The programs of lab/broker over one simulated device that their processes share: they measure, and they judge, so that they
cannot pass by themselves on a GPU."""

import os
import shutil
import subprocess
import sys
import unittest

from .support import COMMAND, LIBRARY, ROOT, Case

BROKER = os.path.join(ROOT, "lab", "broker")


@unittest.skipUnless(sys.platform == "linux", "the broker is for Linux")
@unittest.skipUnless(os.path.exists(COMMAND) and os.path.exists(LIBRARY) and shutil.which("cc"), "nothing is built: make build")
class Programs(Case):
    def start(self, name, *arguments):
        env = self.environment(OUT=self.path("out"), CISTERN_COMMAND=COMMAND, CISTERN_LIBRARY=LIBRARY, CISTERN_GPU_BUILD=self.path("build"),
                               CISTERN_GPU_SCRIPTS=self.folder, PYTHONDONTWRITEBYTECODE="1")
        p = subprocess.Popen([sys.executable, os.path.join(BROKER, name + ".py"), *arguments], env=env, cwd=self.folder, stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.addCleanup(p.wait)
        self.addCleanup(p.stdout.close)
        self.addCleanup(p.kill)
        return p

    def said(self, p, status=0):
        out = p.communicate(timeout=300)[0]
        self.assertEqual(p.returncode, status, out)
        return out

    def test_programs(self):
        """All at once, as most of their time is waits for what a process used recently to count no more."""
        latency = self.start("latency", "--sim", "500", "--leave", "0", "--size", "64", "--cache", "128", "--rounds", "2", "--chunks", "32")
        steady = self.start("steady", "--sim", "--rounds", "2", "--n", "4000")
        turns = self.start("colocated", "--sim", "--phases", "2", "--steps", "1", "--variants", "without,off", "--max")
        # A ballast that leaves enough for all is no success, nor is a request that no cache can meet.
        roomy = self.start("colocated", "--sim", "--phases", "1", "--steps", "1", "--room", "2")
        two = self.start("two", "--sim")
        large = self.start("latency", "--sim", "500", "--leave", "0", "--size", "600", "--cache", "128", "--rounds", "1", "--chunks", "32")
        out = self.said(latency)
        self.assertIn("PASS node-latency: chunks of 32 MiB: given by the victim", out)
        self.assertIn("INFO node-latency: chunks of 32 MiB: ms, median of 2: ", out)
        out = self.said(steady)
        self.assertIn("PASS node-steady: what was asked and given", out)
        self.assertIn("INFO node-steady: churn: % more with a broker, shortest of 4: ", out)
        out = self.said(turns)
        self.assertIn("PASS node-colocated: Cistern, node:off: what became of it: generate_serving-1 in phase 1: out of memory", out)
        for words in ("what became of it: all finished 2 phases", "left for the jobs: ", "moved between the jobs: "):
            self.assertIn("PASS node-colocated: Cistern, broker with max: " + words, out)
        self.assertEqual(out.count("PASS node-colocated: Cistern, broker with max: most that "), 2, out)
        self.assertIn("PASS node-two: given on the first: 0, wanted 0", self.said(two))
        out = self.said(roomy, status=1)
        self.assertIn("FAIL node-colocated: Cistern, node:off: what became of it: all finished", out)
        self.assertIn("FAIL node-colocated: Cistern, broker: left for the jobs: ", out)
        self.assertIn("FAIL node-colocated: Cistern, broker: moved between the jobs: 0 B", out)
        self.assertIn("FAIL node-latency: chunks of 32 MiB: the victim: out of memory", self.said(large, status=1))

    def test_objects(self):
        """Weights that outlive their writer and the broker; and what must fail: fewer cycles than wanted, and a device that is too small."""
        whole = self.start("objects", "--sim", "512", "--size", "32", "--each", "4", "--readers", "3", "--cycles", "40", "--seconds", "200", "--file", "8")
        few = self.start("objects", "--sim", "512", "--size", "4", "--each", "2", "--readers", "2", "--cycles", "40", "--seconds", "0", "--file", "4")
        small = self.start("objects", "--sim", "64", "--size", "128", "--each", "64", "--readers", "1")
        out = self.said(whole)
        for words in ("one copy, the writer was killed: 32.00 MiB", "one copy for 3 readers: 32.00 MiB", "a write through a reader's mapping: ",
                      "contents after another reader wrote: right in 2", "contents while there is no broker: right in 2",
                      "contents in a new process, after the broker was killed: right in 1",
                      "contents in a new process, after all processes had ended but the one that keeps descriptors: right in 1",
                      "cycles of put, get, close and remove: 40", "descriptors of the broker before and after 40 cycles: ",
                      "contents of the file: right in 3", "memory in use at the end, and before: 0 B, 0 B"):
            self.assertIn("PASS node-objects: " + words, out)
        self.assertIn("FAIL node-objects: cycles of put, get, close and remove: 0", self.said(few, status=1))
        self.assertIn("FAIL node-objects: named objects: the writer: ", self.said(small, status=1))

    def test_scripts_that_are_missing(self):
        self.assertIn("skipped, there is no workloads.py", self.said(self.start("colocated")))
