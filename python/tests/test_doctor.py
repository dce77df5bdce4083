"""`cistern doctor` over a PyTorch of a few lines."""

import json
import os
import platform
import re
import subprocess
import sys
import unittest

from .support import COMMAND, ROOT, Case


class Doctor(Case):
    def setUp(self):
        super().setUp()
        self.site = self.fake_torch()
        self.copy = self.package()
        self.env = self.environment(PYTHONPATH=self.site, CISTERN_PYTHON_PACKAGE=self.copy, CISTERN_CONF="driver:sim:80GiB")

    def doctor(self, *arguments, **more):
        done = subprocess.run([COMMAND, "doctor", "--python", sys.executable] + list(arguments), env=dict(self.env, **more),
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, timeout=600)
        self.assertEqual(done.stderr, "")
        return done

    def found(self, **more):
        done = self.doctor("--json", **more)
        found = json.loads(done.stdout)
        self.assertEqual(done.returncode, 1 if found["problems"] else 0)
        return found

    def test_adapter_that_is_not_wanted(self):
        self.assertIn("CISTERN_ADAPTER=off: PyTorch would use the plain allocator", self.found(CISTERN_ADAPTER="off")["problems"])

    def test_all_is_well(self):
        found = self.found()
        self.assertEqual(found["problems"], [])
        self.assertFalse(found["python"]["adapter"]["built"])
        self.assertEqual(found["python"]["torch"]["version"], "2.11.0+cu130")
        file = self.build(self.copy, self.site)
        found = self.found()
        self.assertEqual(found["python"]["adapter"]["path"], file)
        text = self.doctor().stdout
        for words in ("torch      2.11.0+cu130, CUDA 13.0, ", "adapter    built for torch 2.11.0+cu130 in ", " s, " + file, "device 0   ", "80.00 GiB",
                      "PyTorch programs can run on Cistern here."):
            self.assertIn(words, text)
        # What is built needs no compiler.
        self.assertEqual(self.found(CXX="/no/c++")["problems"], [])

    def test_each_problem_is_a_line(self):
        for words, more in (("the C++ compiler that CXX names is missing: /no/c++; without the adapter PyTorch would use the "
                             "plain allocator", dict(CXX="/no/c++")),
                            ("CISTERN_CONF: unknown setting", dict(CISTERN_CONF="x:1")),
                            ("PyTorch is not installed for", dict(PYTHONPATH="")),
                            ("the adapter is not built, and building is off", dict(CISTERN_BUILD="0")),
                            ("torch 2.5.1 is older than 2.6, the first that the adapter is for: PyTorch would use the plain "
                             "allocator", dict(PYTHONPATH=self.fake_torch("2.5.1+cu124", "12.4", at="old"))),
                            ("torch 2.11.0+cpu was built without CUDA", dict(PYTHONPATH=self.fake_torch("2.11.0+cpu", None, at="cpu"))),
                            ("there is no file /no/lib.so", dict(CISTERN_LIBRARY="/no/lib.so"))):
            found = self.found(**more)
            self.assertTrue(any(words in p for p in found["problems"]), (words, found["problems"]))
            text = self.doctor(**more).stdout
            self.assertEqual(text.count("PROBLEM"), len(found["problems"]), text)

    def test_supported_versions(self):
        rows = {row["what"]: row for row in self.found()["support"]}
        self.assertEqual((rows["PyTorch"]["here"], rows["PyTorch"]["ok"]), ("2.11.0+cu130", True))
        self.assertEqual((rows["Python"]["here"], rows["Python"]["ok"]), (platform.python_version(), True))
        self.assertEqual((rows["glibc"]["here"], rows["glibc"]["ok"]), (platform.libc_ver()[1], True))
        text = self.doctor(PYTHONPATH=self.fake_torch("2.5.1+cu124", "12.4", at="old")).stdout
        for what, here, ok in (("PyTorch", "2.5.1+cu124", "no"), ("PyTorch's build", "CUDA 12.4", "yes"), ("GPU", "1 of 1", "yes")):
            self.assertRegex(text, r"(?m)^%s +%s +%s  " % tuple(map(re.escape, (what, here, ok))))

    def test_build_that_failed(self):
        self.write("tree/python/cistern/adapter/adapter.cpp", "#error on purpose\n")
        subprocess.run([COMMAND, "build-adapter", "--python", sys.executable], env=self.env, stderr=subprocess.DEVNULL)
        found = self.found()
        self.assertTrue(any("compiling the adapter has failed before, see" in p for p in found["problems"]), found["problems"])

    def test_torchs_settings(self):
        conf = dict(PYTORCH_ALLOC_CONF="max_split_size_mb:8")
        self.assertIn("once the adapter is built, this says what PYTORCH_ALLOC_CONF means on Cistern", self.found(**conf)["notes"])
        self.build(self.copy, self.site)
        notes = self.found(**conf)["notes"]
        self.assertIn("PYTORCH_ALLOC_CONF max_split_size_mb:8: no effect: it is a test", notes)


class BuildAdapter(Case):
    def test_command(self):
        site, copy = self.fake_torch(), self.package()
        env = self.environment(PYTHONPATH=site, CISTERN_PYTHON_PACKAGE=copy)
        done = subprocess.run([COMMAND, "build-adapter", "--python", sys.executable, "--dir", "image"], env=env, cwd=self.folder,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, timeout=600)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(done.stdout.startswith(self.path("image", "adapter-")), done.stdout)
        # A program that is given the folder uses it.
        done = subprocess.run([COMMAND, "run", "--", sys.executable, "-c", "import torch, cistern; print(cistern.torch.mode())"],
                              env=dict(env, CISTERN_ADAPTER_DIR=self.path("image"), PATH="/nowhere"), cwd=self.folder,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, timeout=600)
        self.assertEqual((done.stdout, done.stderr), ("adapter\n", ""))
        done = subprocess.run([COMMAND, "build-adapter", "--python", "/no/python"], env=env, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, universal_newlines=True)
        self.assertEqual((done.returncode, done.stderr), (2, "cistern: --python /no/python: there is no such program\n"))


if __name__ == "__main__":
    unittest.main()
