"""The script that pip installs as the command `cistern`: it finds the program and the Python that it was installed for."""

import os
import shutil
import subprocess
import sys
import unittest

from .support import ROOT, Case

PROGRAM = """#!/bin/sh
echo "$0|$CISTERN_PYTHON|$#|$*"
exit 7
"""


def executable(file, text):
    os.makedirs(os.path.dirname(file), exist_ok=True)
    with open(file, "w") as f:
        f.write(text)
    os.chmod(file, 0o755)
    return file


class Command(Case):
    def install(self, packages, *pythons):
        """A prefix with the script, a program in this folder of packages, and Pythons."""
        script = self.path("prefix", "bin", "cistern")
        os.makedirs(os.path.dirname(script), exist_ok=True)
        shutil.copy(os.path.join(ROOT, "python", "cistern.sh"), script)
        executable(self.path("prefix", packages, "cistern", "bin", "cistern"), PROGRAM)
        for name in pythons:
            executable(self.path("prefix", "bin", name), "")
        return script

    def started(self, script, path="", **more):
        """The program that was started, relative to the prefix, and what it says of Python and the arguments."""
        env = dict({"PATH": path}, **more)
        done = subprocess.run([script, "a b", "-c"], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
        self.assertEqual(done.returncode, 7, done.stdout)
        program, python, arguments = done.stdout.strip().split("|", 2)
        self.assertEqual(arguments, "2|a b -c")
        folder = os.path.realpath(self.path("prefix"))
        return os.path.relpath(os.path.realpath(program), folder), os.path.realpath(python) if python else ""

    def test_virtual_environment(self):
        script = self.install("lib/python3.12/site-packages", "python")
        os.symlink("lib", self.path("prefix", "lib64"))
        os.symlink(sys.executable, self.path("prefix", "bin", "python3"))
        wanted = "lib/python3.12/site-packages/cistern/bin/cistern", os.path.realpath(self.path("prefix", "bin", "python"))
        self.assertEqual(self.started(script), wanted)
        self.assertEqual(self.started("cistern", path=os.path.dirname(script)), wanted)

    def test_link_to_the_script(self):
        link = self.path("elsewhere")
        os.symlink(self.install("lib/python3.9/site-packages"), link)
        self.assertEqual(self.started(link, path=os.environ["PATH"])[0], "lib/python3.9/site-packages/cistern/bin/cistern")

    def test_python_of_the_same_version(self):
        script = self.install("lib/python3.10/dist-packages", "python", "python3.10")
        self.assertEqual(self.started(script)[1], os.path.realpath(self.path("prefix", "bin", "python3.10")))

    def test_python_in_the_path(self):
        script = self.install("lib64/python3.11/site-packages")
        python = executable(self.path("usr", "python3.11"), "")
        self.assertEqual(self.started(script, path=os.path.dirname(python))[1], os.path.realpath(python))
        self.assertEqual(self.started(script)[1], "")

    def test_named_python(self):
        script = self.install("lib/python3.11/site-packages", "python")
        self.assertEqual(self.started(script, CISTERN_PYTHON=sys.executable)[1], os.path.realpath(sys.executable))

    def test_newest_of_several(self):
        self.install("lib/python3.9/site-packages")
        script = self.install("lib/python3.13/site-packages", "python3.9", "python3.13")
        self.assertEqual(self.started(script), ("lib/python3.13/site-packages/cistern/bin/cistern",
                                                os.path.realpath(self.path("prefix", "bin", "python3.13"))))

    def test_target_folder(self):
        self.assertEqual(self.started(self.install(""))[0], "cistern/bin/cistern")

    def test_no_package(self):
        script = self.install("lib/python3.12/site-packages")
        shutil.rmtree(self.path("prefix", "lib"))
        done = subprocess.run([script, "--version"], env={"PATH": ""}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stdout, r"\Acistern: the package cistern is missing: looked in .*\n\Z")


if __name__ == "__main__":
    unittest.main()
