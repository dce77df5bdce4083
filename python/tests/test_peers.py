"""lab/torch/peers.py: what of it needs neither PyTorch nor a GPU. Cistern's own row is measured over the simulated device."""

import json
import os
import shutil
import subprocess
import sys
import unittest
import zipfile

from .support import LIBRARY, ROOT, Case

PROGRAM = os.path.join(ROOT, "lab", "torch", "peers.py")


@unittest.skipUnless(os.path.exists(LIBRARY), "nothing is built: make build")
@unittest.skipUnless(shutil.which("cc"), "no C compiler")
class Peers(Case):
    def peers(self, *arguments, **env):
        env = self.environment(OUT=self.path("out"), CISTERN_LIBRARY=LIBRARY, CISTERN_GPU_BUILD=self.path("build"), **env)
        # Without the packages of this Python, of which RMM may be one.
        done = subprocess.run([sys.executable, "-S", PROGRAM, *arguments], env=env, timeout=120,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return done.returncode, done.stdout.decode()

    def results(self):
        with open(self.path("out", "peers.json")) as f:
            return json.load(f)

    def test_cistern_alone(self):
        status, text = self.peers("--peers", "cistern-alone", "--measures", "alone", "--conf", "driver:sim:8GiB")
        self.assertEqual(status, 0, text)
        found = self.results()
        self.assertEqual([r["round"] for r in found["rounds"]], [0, 1, 2], text)
        median = sorted(r["pair_512"] for r in found["rounds"])[1]
        self.assertEqual(found["medians"]["cistern-alone"]["alloc.pair_512"], median)
        self.assertGreater(median, 0)
        times = [found["medians"]["cistern-alone"][f"alloc.request_{name}"] for name in ("median", "p99", "p99.9", "longest")]
        self.assertEqual(times, sorted(times))
        self.assertGreater(times[0], 0)
        self.assertIn("one request, p99.9, us", text)
        self.assertIn("left out: kvcached", text)

    def test_failures_are_no_figures(self):
        status, text = self.peers("--peers", "cistern-alone", "--measures", "alone", "--rounds", "1",
                                  "--conf", "driver:sim:8GiB,limit:64MiB")
        self.assertEqual(status, 1, text)
        self.assertIn("an allocation failed", text)
        self.assertEqual(self.results()["medians"], {})

    def test_missing_packages(self):
        status, text = self.peers("--peers", "rmm-alone", "--measures", "alone", CISTERN_PEERS=self.path("none"))
        self.assertEqual(status, 0, text)
        self.assertIn("left out: RMM pool alone, the package rmm-cu13 is not installed", text)
        self.assertEqual(self.results()["rounds"], [])

    def test_packages_from_wheels(self):
        os.mkdir(self.path("wheels"))
        with zipfile.ZipFile(self.path("wheels", "rmm_cu13-1.2-py3-none-any.whl"), "w") as z:
            z.writestr("rmm/__init__.py", "raise ImportError('the wheel of the test')")
            z.writestr("rmm_cu13-1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: rmm-cu13\nVersion: 1.2\n")
        status, text = self.peers("--peers", "rmm-alone", "--measures", "alone", "--rounds", "1", CISTERN_PEERS=self.path("wheels"))
        self.assertEqual(status, 1, text)
        self.assertIn("the wheel of the test", text)
        self.assertEqual(self.results()["machine"]["rmm-cu13"], "1.2")


if __name__ == "__main__":
    unittest.main()
