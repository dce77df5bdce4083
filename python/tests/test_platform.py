"""A package that is not for this machine: each reason is one line."""

import os
import subprocess
import sys
import unittest

from .support import PACKAGE, ROOT, Case

sys.path.insert(0, os.path.dirname(PACKAGE))

from cistern import _platform  # noqa: E402

MACHINE = os.uname().machine
OTHER = "aarch64" if MACHINE == "x86_64" else "x86_64"


class Platform(Case):
    def elf(self, machine, rest=b""):
        """A file that begins as a library for the machine does."""
        number = {name: code for code, name in _platform._MACHINES.items()}[machine]
        file = self.path("lib-" + machine + ".so")
        with open(file, "wb") as f:
            f.write(b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00" + number + bytes(64) + rest)
        return file

    def load(self, file, before=""):
        """What loading the library of the package says, and enabling PyTorch on it."""
        done = self.python("""
            import os, sys
            %s
            from cistern import CisternError, _library
            import cistern.torch
            for call in (_library.load, cistern.torch.enable):
                try:
                    call()
                except CisternError as e:
                    print(e)
            """ % before, env=self.environment(CISTERN_LIBRARY=file, PYTHONPATH=ROOT + "/python:" + self.fake_torch()))
        return done.stdout.splitlines()

    def test_other_architecture(self):
        file = self.elf(OTHER)
        line = "%s is for %s, this machine is %s: install the wheel for it" % (file, OTHER, MACHINE)
        self.assertEqual(self.load(file), [line, line])

    def test_old_glibc(self):
        file = self.elf(MACHINE)
        line = file + " needs glibc 2.28 or newer, this system has 2.17"
        self.assertEqual(self.load(file, "os.confstr = lambda name: 'glibc 2.17'"), [line, line])

    def test_library_of_newer_glibc(self):
        file = self.elf(MACHINE, b"GLIBC_2.2.5\0GLIBC_2.99\0")
        self.assertEqual(self.load(file)[0], "%s needs glibc 2.99 or newer, this system has %d.%d" % ((file,) + _platform.glibc()))

    def test_musl(self):
        file = self.elf(MACHINE)
        # As Python has it where the C library does not know the name.
        line = file + " needs glibc 2.28 or newer, the C library of this Python is another one (musl, as on Alpine)"
        self.assertEqual(self.load(file, "def none(name): raise ValueError('unrecognized configuration name')\nos.confstr = none"
                                   .replace("\n", "\n" + " " * 12)), [line, line])

    def test_damaged_library(self):
        file = self.elf(MACHINE)
        lines = self.load(file)
        self.assertRegex(lines[0], "^%s cannot be loaded: " % file)

    def test_this_machine(self):
        self.assertEqual(_platform.problem(self.elf(MACHINE)), "")
        self.assertEqual(_platform.machine(sys.executable), MACHINE)
        self.assertEqual(_platform.machine(__file__), "")
        self.assertEqual(_platform.machine(self.path("none")), "")

    def test_torch_for_rocm(self):
        site = self.fake_torch("2.11.0+rocm6.4", None)
        self.write("site/torch/version.py", "__version__ = '2.11.0+rocm6.4'\ngit_version = 'abc'\ncuda = None\nhip = '6.4'\n")
        env = self.environment(PYTHONPATH=ROOT + "/python:" + site)
        line = "cistern: PyTorch keeps its own allocator: PyTorch 2.11.0+rocm6.4 was built without CUDA (for ROCm)\n"
        done = self.python("import cistern.torch\nprint(cistern.torch.enable())", env=env)
        self.assertEqual((done.stdout, done.stderr), ("None\n", line))
        env.update(_CISTERN_INJECT="run", PYTHONPATH=ROOT + "/python/cistern/_inject:" + site)
        self.assertEqual(self.python("import torch", env=env).stderr, line)

    def test_torch_for_cpus(self):
        env = self.environment(PYTHONPATH=ROOT + "/python:" + self.fake_torch("2.11.0+cpu", None))
        for driver, line in ((True, "cistern: PyTorch keeps its own allocator: PyTorch 2.11.0+cpu was built without CUDA\n"), (False, "")):
            done = self.python("from cistern import _injected, torch\n_injected.has_driver = lambda: %s\nprint(torch.enable())" % driver,
                               env=env)
            self.assertEqual((done.stdout, done.stderr), ("None\n", line))


if __name__ == "__main__":
    unittest.main()
