"""The C++ under PyTorch, compiled and run over the simulated device.

The plain shim needs a compiler. The adapter needs a PyTorch's headers and its two smallest libraries, libc10 and libc10_cuda:
those of the folder that CISTERN_TORCH names (a site-packages), or of the PyTorch that is installed. CISTERN_TORCH_ADAPTER names an
adapter that was built for it already."""

import importlib.util
import os
import shutil
import subprocess
import unittest
from concurrent.futures import ThreadPoolExecutor

from .support import LIBRARY, PACKAGE, ROOT, Case

SOURCES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "adapter")
HEADERS = os.path.join(ROOT, "cmd", "libcistern")
CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
FLAGS = ["-fvisibility=hidden", "-ffunction-sections", "-Wl,-O1", "-Wl,--gc-sections", "-Wl,--as-needed"]  # as it is built
WARNINGS = ["-Wall", "-Wextra", "-Werror"]


def find_torch():
    """The folder of site-packages whose PyTorch the adapter is tested with."""
    named = os.environ.get("CISTERN_TORCH")
    if named:
        return named
    spec = importlib.util.find_spec("torch")
    found = spec and spec.origin and os.path.dirname(os.path.dirname(spec.origin))
    return found if found and os.path.exists(os.path.join(found, "torch", "lib", "libc10_cuda.so")) else None


TORCH = find_torch()


@unittest.skipUnless(CXX, "no C++ compiler")
@unittest.skipUnless(os.path.exists(LIBRARY), "no libcistern.so: make library")
class Compiled(Case):
    def compile(self, name, sources, *flags, compiler=None):
        out = self.path(name)
        command = [compiler] if compiler else [CXX, "-std=c++17"]
        done = subprocess.run(command + ["-O1", "-g", "-I" + HEADERS] + sources + ["-o", out] + list(flags),
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)
        self.assertEqual(done.returncode, 0, done.stdout.decode("utf-8", "replace"))
        return out

    def passes(self, program, *arguments, conf="driver:sim:8GiB", **env):
        done = subprocess.run([program] + list(arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600,
                              env=self.environment(CISTERN_CONF=conf, **env))
        self.assertEqual(done.returncode, 0, done.stdout.decode("utf-8", "replace"))

    def test_plain(self):
        shim = self.compile("libplain.so", [os.path.join(PACKAGE, "adapter", "plain.cpp")], "-fPIC", "-shared",
                            "-fvisibility=hidden", "-ldl", "-lpthread", *WARNINGS)
        program = self.compile("plain", [os.path.join(SOURCES, "plain.cpp")], "-ldl", *WARNINGS)
        driver = self.compile("libcuda.so.1", [os.path.join(SOURCES, "driver.c")], "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1",
                              *WARNINGS, compiler=shutil.which("cc") or "gcc")
        self.passes(program, shim, LIBRARY, driver)


@unittest.skipUnless(TORCH, "no PyTorch with CUDA: CISTERN_TORCH names the folder of one")
class Adapter(Compiled):
    test_plain = None  # it is tested above

    def setUp(self):
        super().setUp()
        from cistern import _built, _toolchain, build

        torch = _toolchain.torch_in(os.path.join(TORCH, "torch"))
        self.libraries = torch.lib
        include = _toolchain.find_headers(torch)
        found, output = build.features(torch, [CXX], include, self.folder)
        self.assertIsNotNone(found, output)
        self.headers = found + build.headers(torch, include)
        os.makedirs(self.path("runtime"))
        runtime = "libcudart.so." + torch.cuda.partition(".")[0]
        self.runtime = self.compile("runtime/" + runtime, [os.path.join(SOURCES, "runtime.c")], "-w", "-fPIC", "-shared",
                                    "-Wl,-soname," + runtime, compiler=shutil.which("cc") or "gcc")
        self.adapter = os.environ.get("CISTERN_TORCH_ADAPTER")
        if self.adapter:
            return
        # One unit that includes the others compiles fastest where there are few processors.
        unit = self.write("adapter.cpp", "".join('#include "%s"\n' % f for f in _built.sources()))
        self.adapter = self.compile("libcistern_torch.so", [unit], "-fPIC", "-shared", *FLAGS, *self.headers,
                                    *WARNINGS, "-L" + self.libraries, "-lc10", "-lc10_cuda", "-ldl", "-lpthread")

    def test_adapter(self):
        """One compilation of the adapter serves all."""
        watched = self.compile("libwatched.so", [os.path.join(SOURCES, "watched.c")], "-fPIC", "-shared", "-DLIBRARY=\"%s\"" % LIBRARY,
                               "-Wl,--no-as-needed", LIBRARY, "-Wl,-rpath," + os.path.dirname(LIBRARY), "-ldl", *WARNINGS,
                               compiler=shutil.which("cc") or "gcc")
        programs = {name: ["driver:sim:8GiBx2"] for name in ("memory", "pools", "scopes", "upstreams", "history", "reentry",
                                                             "processes")}
        programs["stacks"] = ["driver:sim:8GiBx2", "driver:sim:8GiBx2,history:100"]
        programs["threads"] = ["driver:sim:1GiBx2", "driver:sim:3GiBx2,backend:malloc", "driver:sim:1GiBx2,ipc:legacy",
                               "driver:sim:1GiBx2,single_handle:true"]

        def compiled(name):
            return self.compile(name, [os.path.join(SOURCES, f) for f in (name + ".cpp", "change.cpp")], *self.headers,
                                "-rdynamic", "-L" + self.libraries, "-lc10", "-lc10_cuda", "-Wl,-rpath," + self.libraries,
                                self.runtime, "-Wl,--allow-shlib-undefined", "-ldl", "-lpthread", *WARNINGS)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            files = list(pool.map(compiled, programs))
        for program, (name, confs) in zip(files, programs.items()):
            for conf in confs:
                with self.subTest(program=name, conf=conf):
                    self.passes(program, self.adapter, watched if name == "scopes" else LIBRARY, conf=conf, LD_PRELOAD=self.runtime)


if __name__ == "__main__":
    unittest.main()
