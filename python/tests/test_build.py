"""The builder of the adapter, with a PyTorch of a few lines and the compiler of this machine."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import unittest

from .support import Case


class Build(Case):
    def setUp(self):
        super().setUp()
        self.site = self.fake_torch()
        self.copy = self.package()
        self.env = self.environment(PYTHONPATH=self.site)

    def tool(self, *arguments, **more):
        env = dict(self.env, **more)
        return subprocess.run([sys.executable, os.path.join(self.copy, "_inject", "tool.py"), "build"] + list(arguments),
                              env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, timeout=600)

    def built(self, *more):
        found = []
        for parent, _, names in os.walk(self.path("home")):
            found += [os.path.join(parent, n) for n in names if n.endswith(".so")]
        return found

    def test_builds_once(self):
        first = self.tool()
        self.assertEqual(first.returncode, 0, first.stderr)
        file = first.stdout.strip()
        self.assertEqual([file], self.built())
        self.assertTrue(file.startswith(self.path("home", ".cache", "cistern", "adapter-")), file)
        self.assertRegex(first.stderr, r"^cistern: building the PyTorch adapter for torch 2\.11\.0 \(once\) \.\.\. \d+ s\n$")
        second = self.tool()
        self.assertEqual((second.stdout, second.stderr), (file + " (built already)\n", ""))
        with open(os.path.join(os.path.dirname(file), "adapter.json")) as f:
            self.assertEqual(json.load(f)["torch"], "2.11.0+cu130")
        # Nothing of the build is left but its log.
        self.assertEqual(sorted(os.listdir(os.path.dirname(file))), ["adapter.json", "build.log", "libcistern_torch.so", "lock"])

    def test_torch_is_not_imported(self):
        self.write("site/torch/__init__.py", "raise RuntimeError('imported')")
        self.assertEqual(self.tool().returncode, 0)

    def test_one_of_many_builds(self):
        log = self.path("calls")
        self.write("cxx", '#!/bin/sh\necho call >>%s\nsleep 0.3\nexec c++ "$@"\n' % log)
        os.chmod(self.path("cxx"), 0o755)
        many = [subprocess.Popen([sys.executable, os.path.join(self.copy, "_inject", "tool.py"), "build"],
                                 env=dict(self.env, CXX=self.path("cxx")), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 universal_newlines=True) for _ in range(8)]
        ends = [p.communicate(timeout=600) + (p.returncode,) for p in many]
        self.assertEqual({e[2] for e in ends}, {0}, ends)
        self.assertEqual(len({e[0].split()[0] for e in ends}), 1)
        self.assertEqual(sum("building" in e[1] for e in ends), 1, ends)
        self.assertEqual(self.read("calls").count("call"), 3)  # the probe, one source, one link

    def test_builder_that_dies_blocks_no_other(self):
        self.write("cxx", "#!/bin/sh\nsleep 600\n")
        os.chmod(self.path("cxx"), 0o755)
        first = subprocess.Popen([sys.executable, os.path.join(self.copy, "_inject", "tool.py"), "build"],
                                 env=dict(self.env, CXX=self.path("cxx")), stderr=subprocess.PIPE, start_new_session=True)
        first.stderr.read(10)  # it has begun, and holds the lock
        second = subprocess.Popen([sys.executable, os.path.join(self.copy, "_inject", "tool.py"), "build"], env=self.env,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
        time.sleep(0.5)  # in which nothing is to happen
        self.assertIsNone(second.poll(), "the second did not wait")
        os.killpg(first.pid, 9)
        first.wait()
        first.stderr.close()
        out, err = second.communicate(timeout=600)
        self.assertEqual((second.returncode, [out.strip()]), (0, self.built()), err)

    def test_compile_error(self):
        self.write("tree/python/cistern/adapter/adapter.cpp", "#error on purpose\n")
        done = self.tool()
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stderr, r"failed after \d+ s\ncistern: compiling the adapter for torch 2\.11\.0 with c\+\+ failed: #error on purpose, see ")
        log = done.stderr.split("see ")[1].strip()
        with open(log) as f:
            self.assertIn("on purpose", f.read())
        self.assertEqual(self.built(), [])
        # A program does not try again what the same compiler could not do, and says where it stands.
        again = self.python("import cistern.build as b, cistern._toolchain as t\n"
                            "try:\n    b.adapter(t.find_torch())\nexcept b.BuildError as e:\n    print(e)",
                            env=dict(self.env, PYTHONPATH=self.site + ":" + os.path.dirname(self.copy)))
        self.assertIn("failed before, see " + log, again.stdout)
        self.assertEqual(again.stderr, "")
        # Another compiler is tried.
        self.write("cxx", '#!/bin/sh\nexec c++ "$@"\n')
        os.chmod(self.path("cxx"), 0o755)
        again = self.python("import cistern.build as b, cistern._toolchain as t\n"
                            "try:\n    b.adapter(t.find_torch())\nexcept b.BuildError as e:\n    print(e)",
                            env=dict(self.env, PYTHONPATH=self.site + ":" + os.path.dirname(self.copy), CXX=self.path("cxx")))
        self.assertIn("building", again.stderr)

    def test_standard_of_the_headers(self):
        self.write("site/torch/include/c10/cuda/CUDACachingAllocator.h", "#define FAKE_TORCH 20\n")
        file = self.build(self.copy, self.site)
        with open(os.path.join(os.path.dirname(file), "adapter.json")) as f:
            self.assertEqual(json.load(f)["features"], ["-std=c++20", "-DCISTERN_TORCH_PROBED=1", "-DCISTERN_TORCH_OTHER=0"])

    def test_version_that_is_not_known(self):
        """It is tried; its build and a self-test decide."""
        self.site = self.fake_torch("2.99.0.dev20260101+cu130", at="nightly")
        self.write("tree/python/cistern/adapter/adapter.cpp",
                   self.read("tree/python/cistern/adapter/adapter.cpp").replace('"2.11.0"', '"2.99.0"'))
        for words, more in (("the name of PyTorch's allocator: expected 'cistern', got 'native'", {}),
                            ("what is allocated at first: expected 0, got 7",
                             dict(FAKE_TORCH_BACKEND="cistern", FAKE_TORCH_STATS="7")),
                            ("RuntimeError: does not yet support getDeviceStats", dict(FAKE_TORCH_BACKEND="cistern")),
                            ("not today", dict(FAKE_ADAPTER_FAILS="not today")),
                            ("it ended with -6", dict(FAKE_TORCH_BACKEND="cistern", FAKE_ADAPTER_CRASHES="1"))):
            done = self.tool(PYTHONPATH=self.site, **more)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn("cistern: the adapter for torch 2.99.0.dev20260101 fails its self-test: %s, see " % words, done.stderr)
            self.assertEqual(self.built(), [])
        done = self.tool(PYTHONPATH=self.site, FAKE_TORCH_BACKEND="cistern", FAKE_TORCH_STATS="0")
        self.assertEqual((done.returncode, [done.stdout.strip()]), (0, self.built()), done.stderr)

    def test_what_is_missing_is_named(self):
        def refused(words, **more):
            done = self.tool(**more)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(words, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1)

        refused("the C++ compiler that CXX names is missing: /no/such/c++", CXX="/no/such/c++")
        refused("there is no C++ compiler", PATH="/nowhere")
        refused("CISTERN_ADAPTER=off", CISTERN_ADAPTER="off")
        refused("CISTERN_ADAPTER=none: expected on or off", CISTERN_ADAPTER="none")
        for version, cuda, words in (("2.5.1+cu124", "12.4", "torch 2.5.1 is older than 2.6, the first that the adapter is for"),
                                     ("2.11.0+cpu", None, "PyTorch 2.11.0+cpu was built without CUDA")):
            refused(words, PYTHONPATH=self.fake_torch(version, cuda, at="other"))
        refused("PyTorch is not installed", PYTHONPATH="")
        os.unlink(self.path("site", "torch", "include", "c10", "cuda", "CUDACachingAllocator.h"))
        refused("PyTorch's headers are missing: there is no c10/cuda/CUDACachingAllocator.h")

    def test_headers_of_cuda(self):
        def where(**more):
            return self.python("import cistern._toolchain as t\ntry:\n    print(t.find_cuda(t.find_torch()))\n"
                               "except t.Missing as e:\n    print(e)",
                               env=dict(self.env, PYTHONPATH=self.site + ":" + os.path.dirname(self.copy), **more)).stdout.strip()

        wheel, triton, toolkit = map(self.path, ("site/nvidia/cu13/include", "site/triton/backends/nvidia/include",
                                                 "toolkit/include"))
        installed = os.path.exists("/usr/local/cuda/include/cuda.h") or os.path.exists("/usr/include/cuda.h")
        if not installed:
            self.assertEqual(where(), str([wheel, triton]))
        os.unlink(os.path.join(triton, "crt", "host_config.h"))
        if not installed:
            self.assertIn("lack crt/host_config.h", where())
        for header in ("cuda.h", "cuda_runtime_api.h", "crt/host_config.h"):
            self.write(os.path.join(triton, header), "")
            self.write(os.path.join(toolkit, header), "")
        self.assertEqual(where(CUDA_HOME=self.path("toolkit")), str([wheel, toolkit]))
        self.write(os.path.join(wheel, "crt", "host_config.h"), "")
        self.assertEqual(where(CUDA_HOME=self.path("toolkit")), str([wheel]))
        os.unlink(os.path.join(wheel, "cuda.h"))  # one of two is not enough
        if not installed:
            self.assertEqual(where(), str([triton]))
        self.assertEqual(where(CUDA_HOME=self.path("toolkit")), str([toolkit]))

    def test_folder_for_images(self):
        done = self.tool("--dir", self.path("image"))
        self.assertEqual(done.returncode, 0, done.stderr)
        file = done.stdout.strip()
        self.assertTrue(file.startswith(self.path("image") + os.sep))
        # Found there, without a compiler.
        done = self.tool(CISTERN_ADAPTER_DIR=self.path("image"), PATH="/nowhere")
        self.assertEqual((done.returncode, done.stdout), (0, file + " (built already)\n"))
        # Being built elsewhere does not count for a folder that was named.
        self.tool()
        self.assertEqual(len(self.built()), 1)
        done = self.tool("--dir", self.path("second"))
        self.assertTrue(done.stdout.startswith(self.path("second")), done)

    def test_force_builds_again(self):
        file = self.tool().stdout.strip()
        before = os.stat(file).st_mtime_ns
        done = self.tool("--force")
        self.assertEqual((done.returncode, done.stdout.strip()), (0, file))
        self.assertGreater(os.stat(file).st_mtime_ns, before)

    def test_cache_that_cannot_be_written(self):
        self.write("home/.cache", "a file in the way")
        done = self.tool()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(done.stdout.startswith(self.path("cistern-%d" % os.getuid())), done.stdout)
        # What others could have written to is not loaded.
        os.chmod(self.path("cistern-%d" % os.getuid()), 0o777)
        done = self.tool()
        self.assertEqual(done.returncode, 2)
        self.assertIn("another user could write to " + self.path("cistern-%d" % os.getuid()), done.stderr)

    def found(self, **more):
        """What is found in the cache, None where nothing is; and the messages."""
        done = self.python("import cistern._built as b, cistern._toolchain as t; print(b.find(t.find_torch()))",
                           env=dict(self.env, PYTHONPATH=self.site + ":" + os.path.dirname(self.copy), **more))
        return done.stdout.strip(), done.stderr

    def test_umask(self):
        was = os.umask(0o002)
        try:
            file = self.tool().stdout.strip()
        finally:
            os.umask(was)
        self.assertEqual(self.found(), (file, ""))

    def test_others_could_have_written(self):
        file = self.tool().stdout.strip()
        self.assertEqual(self.found(), (file, ""))
        folder = os.path.dirname(file)
        place = os.path.dirname(folder)
        cache, home = os.path.dirname(place), self.path("home")
        for path in (file, folder, place, cache, home):
            mode = os.stat(path).st_mode & 0o7777
            for more in (0o002, 0o020, 0o1002):
                with self.subTest(path=path, mode=oct(mode | more)):
                    os.chmod(path, mode | more)
                    if path in (cache, home) and more == 0o1002:
                        self.assertEqual(self.found()[0], file)  # as in /tmp: others can add files, and not replace this one
                    elif path in (cache, home) and more == 0o020 and os.stat(path).st_gid == os.getuid():
                        self.assertEqual(self.found()[0], file)  # a group of this user's own
                    else:
                        nothing, words = self.found()
                        self.assertEqual(nothing, "None")
                        self.assertIn("another user could have written it", words)
                    os.chmod(path, mode)
        self.assertEqual(self.found(), (file, ""))
        # A folder that the user chose is the user's business.
        os.chmod(place, 0o777)
        self.assertEqual(self.found(CISTERN_ADAPTER_DIR=place), (file, ""))

    @unittest.skipUnless(os.getuid() == 0 or os.environ.get("CISTERN_TOOLS_TEST") == "1", "only root gives files to others")
    def test_of_another_user(self):
        """As with HOME=/tmp, or root under sudo -E: the cache, or a folder above it, belongs to another user."""
        file = self.tool().stdout.strip()
        folder = os.path.dirname(file)
        place = os.path.dirname(folder)
        for path in (file, folder, place, os.path.dirname(place), self.path("home")):
            with self.subTest(path=path):
                os.chown(path, 65534, 65534)
                self.assertEqual(self.found()[0], "None")
                done = self.tool()
                if path == file:  # which is replaced
                    self.assertEqual((done.stdout.strip(), os.stat(file).st_uid), (file, 0))
                    continue
                self.assertTrue(done.stdout.startswith(self.path("cistern-0")), done)
                shutil.rmtree(self.path("cistern-0"))
                os.chown(path, 0, 0)
        self.assertEqual(self.found(), (file, ""))

    def test_links_in_between(self):
        file = self.tool().stdout.strip()
        os.rename(self.path("home", ".cache"), self.path("elsewhere"))
        os.symlink(self.path("elsewhere"), self.path("home", ".cache"))
        real = file.replace(self.path("home", ".cache"), self.path("elsewhere"))
        # What is loaded is named without the link, which may lead elsewhere by then.
        self.assertEqual(self.found(), (real, ""))
        os.chmod(self.path("elsewhere"), 0o777)
        self.assertEqual(self.found()[0], "None")

    def test_key(self):
        def key(**more):
            return self.python("import cistern.build as b, cistern._toolchain as t; print(b.key(t.find_torch()))",
                               env=dict(self.env, PYTHONPATH=self.site + ":" + os.path.dirname(self.copy), **more)).stdout

        first = key()
        self.assertEqual(first, key(CXX="g++ -O1"))  # any compiler's will do
        self.fake_torch("2.11.1+cu130")
        second = key()
        self.write("tree/python/cistern/adapter/more.h", "int x;\n")
        third = key()
        self.write("tree/cmd/libcistern/cistern.h", "int y;\n")
        fourth = key()
        # Two builds of one version may differ in the C++ library's strings alone, as libraries tell by their symbols.
        self.write("site/torch/lib/libc10.so", "_ZN3c105ErrorC1ESs")
        old = key()
        self.write("site/torch/lib/libc10.so", "_ZN3c105ErrorC1ENSt7__cxx1112basic_stringIcE")
        self.assertEqual(len({first, second, third, fourth, old}), 5)
        self.assertEqual(key(), fourth)


class Prebuilt(Case):
    """The adapter that comes with the package, for a release of PyTorch."""

    def setUp(self):
        super().setUp()
        self.site = self.fake_torch()
        self.copy = self.package()
        for header in ("CachingDeviceAllocator.h", "Allocator.h"):
            self.write("site/torch/include/c10/core/" + header, "")
        file = self.build(self.copy, self.site, "--dir", self.path("image"))
        self.folder_of_adapters = os.path.join(self.copy, "adapters")
        os.makedirs(self.folder_of_adapters)
        name, head = self.asked("_built.prebuilt_name(t) + '\\n' + _built.sums_head()").splitlines()
        self.adapter = os.path.join(self.folder_of_adapters, name)
        shutil.copy(file, self.adapter)
        with open(file, "rb") as f:
            digest = hashlib.sha256(f.read()).hexdigest()
        with open(os.path.join(self.folder_of_adapters, "checksums.txt"), "w") as f:
            f.write("%s\n%s  %s\n" % (head, digest, name))

    def asked(self, what, site=None, err=""):
        done = self.python("from cistern import _built, _toolchain\nt = _toolchain.find_torch()\nprint(%s)" % what,
                           env=self.environment(PYTHONPATH=(site or self.site) + ":" + os.path.dirname(self.copy)))
        self.assertEqual(done.stderr, err)
        return done.stdout.strip()

    def found(self, *arguments, **more):
        return self.asked("_built.find(t)", *arguments, **more)

    def test_no_compiler(self):
        done = self.python("import cistern; print(cistern.torch.enable())", env=self.environment(
            PYTHONPATH=self.site + ":" + os.path.dirname(self.copy), PATH="/nowhere"))
        self.assertEqual((done.stdout, done.stderr), ("adapter\n", ""))

    def test_whose(self):
        self.assertRegex(os.path.basename(self.adapter), r"^libcistern_torch-2\.11-cu13-abi1-[0-9a-f]{8}\.so$")
        self.assertEqual(self.found(), self.adapter)

        def another(version, cuda="13.0"):
            site = self.fake_torch(version, cuda, at="other")
            for header in ("CachingDeviceAllocator.h", "Allocator.h"):
                self.write("other/torch/include/c10/core/" + header, "")
            return site

        self.assertEqual(self.found(another("2.11.3+cu130")), self.adapter)  # a patch of the release
        self.assertEqual(self.found(another("2.11.0+cu132", "13.2")), self.adapter)
        for version, cuda in (("2.11.0+cu126", "12.6"), ("2.12.0+cu130", "13.0"), ("2.11.0a0+gitabc", "13.0"),
                              ("2.11.0.dev20260101+cu130", "13.0"), ("2.11.0+nv25", "13.0")):
            self.assertEqual(self.found(another(version, cuda)), "None", version)
        site = another("2.11.0+cu130")
        self.write("other/torch/include/c10/core/Allocator.h", "// changed by its distributor\n")
        self.assertEqual(self.found(site), "None")
        shutil.rmtree(self.path("other", "torch", "include"))  # in an image that leaves them out
        self.assertEqual(self.found(site), self.adapter)

    def test_of_other_sources(self):
        self.write("tree/python/cistern/adapter/more.h", "int x;\n")
        self.assertEqual(self.found(), "None")

    def test_damaged(self):
        with open(self.adapter, "ab") as f:
            f.write(b"x")
        self.assertEqual(self.found(err="cistern: the adapter %s is not loaded: its checksum is wrong\n" % self.adapter), "None")
        os.unlink(self.adapter)
        self.assertEqual(self.found(err="cistern: the adapter %s is not loaded: its checksum is wrong\n" % self.adapter), "None")


class Real(Case):
    """The real adapter, compiled against a real PyTorch where there is one."""

    def test_against_the_headers(self):
        site = os.environ.get("CISTERN_TORCH")
        if not site:
            self.skipTest("CISTERN_TORCH names no folder with a PyTorch")
        from .support import PACKAGE
        file = self.build(PACKAGE, site, "--dir", self.path("image"))
        symbols = subprocess.run(["nm", "-D", "--defined-only", file], stdout=subprocess.PIPE, universal_newlines=True).stdout
        for name in ("install", "abi", "started", "settings"):
            self.assertIn(" T cistern_torch_%s\n" % name, symbols)


if __name__ == "__main__":
    unittest.main()
