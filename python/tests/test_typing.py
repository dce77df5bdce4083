"""The types of the package: mypy over the package, and over a program that uses all of the public API."""

import os
import subprocess
import unittest

from .support import PACKAGE, ROOT, Case, tools

PROGRAM = os.path.join("tests", "typed_program.py")
PUBLIC = ("", "torch", "cupy", "numba", "rmm", "cuda_core", "node", "lightning", "transformers", "tensorboard", "wandb")


def mypy(test, *arguments):
    done = subprocess.run([tools(test), "-m", "mypy", *arguments], cwd=os.path.join(ROOT, "python"), stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, universal_newlines=True, timeout=600)
    return done.returncode, done.stdout


class Types(Case):
    def test_package(self):
        self.assertEqual(mypy(self)[0], 0, mypy(self)[1])

    def program(self, text):
        """What is wrong with a program, among that every expression whose type is not known."""
        file = self.write("program.py", text)
        _, output = mypy(self, "--disallow-any-expr", file)
        return [line for line in output.splitlines() if os.path.basename(file) in line]

    def test_program(self):
        with open(os.path.join(ROOT, "python", PROGRAM)) as f:
            text = f.read()
        self.assertEqual(self.program(text), [])
        for right, wrong in (('keep: Keep = "disk"', 'keep: Keep = "tape"'), ('use["frames"]', 'use["frame"]'),
                             ('"1MiB", history', '1.5, history'), ('folder / "now.html"', '3'), ('mine["reserved"]', 'mine["kept"]'),
                             ('upstream=upstream', 'upstream=7'), ('"python", sample', '"perl", sample'), ('"cuda:0")\n    sizes', '[0])\n    sizes')):
            self.assertIn(right, text)
            self.assertNotEqual(self.program(text.replace(right, wrong)), [], wrong)

    def test_program_uses_everything(self):
        with open(os.path.join(ROOT, "python", PROGRAM)) as f:
            text = f.read()
        for name in self.names():
            if name not in ("MemoryPool", "MemoryCallback", "malloc", "resource"):  # made of the other libraries' types
                self.assertRegex(text, r"\b%s\b" % name)

    def names(self):
        done = self.python("""
            import importlib, sys
            for part in sys.argv[1:]:
                print(*importlib.import_module("cistern" + part).__all__)
            """, *["." + p if p else "" for p in PUBLIC], env=self.environment(PYTHONPATH=os.path.dirname(PACKAGE)))
        return done.stdout.split()

    def test_program_runs(self):
        tests = os.path.join(ROOT, "python", "tests")
        env = self.environment(PYTHONPATH=os.path.dirname(PACKAGE) + ":" + tests, CISTERN_CONF="driver:sim:1GiB")
        self.python("""
            import pathlib
            import typed_program
            from cistern import _library
            assert _library.load().cistern_malloc(5 << 20, 0, None)
            typed_program.core(pathlib.Path.cwd())
            """, env=env)
        for name in ("now.cistern", "now.pickle", "now.html"):
            self.assertTrue(os.path.getsize(self.path(name)), name)


if __name__ == "__main__":
    unittest.main()
