"""The Python in the documents: it parses, the names of the package in it exist, and the reference is that of the docstrings."""

import ast
import glob
import importlib
import os
import re
import subprocess
import unittest

from .support import pythons

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PARTS = ("torch", "cupy", "numba", "rmm", "cuda_core", "node", "lightning", "transformers", "tensorboard", "wandb")


def read(name):
    with open(os.path.join(ROOT, name), encoding="utf-8") as f:
        return f.read()


def samples():
    """The Python samples of the documents, each with its file."""
    for pattern in ("README.md", "python/README.md", "docs/*.md", "docs/*/*.md"):
        for path in glob.glob(os.path.join(ROOT, pattern)):
            name = os.path.relpath(path, ROOT)
            for sample in re.findall(r"```python\n(.*?)```", read(name), re.S):
                yield name, sample


def names_of_the_package(code):
    """The dotted names in code that begin with cistern: cistern.torch.enable."""
    for node in ast.walk(ast.parse(code)):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id == "cistern":
            yield parts


def missing(parts):
    """Whether the package lacks a name."""
    if parts[0] in PARTS:
        module = importlib.import_module("cistern." + parts[0])
        # A class of the list may derive from one of a library that is not here.
        return len(parts) > 1 and parts[1] not in module.__all__ and not hasattr(module, parts[1])
    return not hasattr(importlib.import_module("cistern"), parts[0])


class Documents(unittest.TestCase):
    def test_versions_of_pytorch(self):
        releases = read("python/cistern/adapter/versions").split()
        first, last = (v.rpartition(".")[0] for v in (releases[0], releases[-1]))
        for name in ("README.md", "docs/pytorch.md"):
            self.assertIn("%s to %s" % (first, last), read(name), name)

    def test_samples(self):
        seen = 0
        for name, sample in samples():
            for parts in names_of_the_package(sample):
                seen += 1
                self.assertFalse(missing(parts), "%s: cistern.%s" % (name, ".".join(parts)))
        self.assertGreater(seen, 20, "this test no longer finds the samples")
        self.assertTrue(missing(["torch", "no_such_function"]))
        self.assertTrue(missing(["no_such_function"]))

    def test_reference(self):
        script = os.path.join(ROOT, "scripts", "python_api.py")
        for interpreter in pythons().values():
            done = subprocess.run([interpreter, "-B", script, "--check"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                  universal_newlines=True, timeout=600)
            self.assertEqual((done.returncode, done.stdout + done.stderr), (0, "\n"), "run scripts/python_api.py")
        page = read("docs/python-api.md")
        for module in ("cistern",) + tuple("cistern." + part for part in PARTS):
            for name in importlib.import_module(module).__all__:
                if name != "version":
                    self.assertIn("### %s.%s\n" % (module, name), page)


if __name__ == "__main__":
    unittest.main()
