"""The pytest plugin over the real library and a simulated device."""

import os
import re
import subprocess

from .support import PACKAGE, Case, tools

STANDINS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "standins")
BEGIN = """
    import pytest
    from cistern import _library
    def malloc(n):
        p = _library.load().cistern_malloc(n, 0, None)
        assert p
        return p
    def free(*all):
        for p in all:
            _library.load().cistern_free(p, 0, 0, None)
    @pytest.fixture(autouse=True)
    def on_cistern():
        _library.claim()  # as cistern.cupy.enable() does
"""
NO_MORE = "run the tests by `cistern run -- pytest`, or call cistern.torch.enable() in conftest.py"


class Plugin(Case):
    def pytest(self, code, begin=BEGIN):
        """Runs tests; how each ended, with the words, and the whole output."""
        import textwrap
        self.write("test_it.py", textwrap.dedent(begin) + textwrap.dedent(code))
        env = self.environment(PYTHONPATH=os.path.dirname(PACKAGE) + ":" + STANDINS, CISTERN_CONF="driver:sim:1GiB")
        done = subprocess.run([tools(self), "-m", "pytest", "-p", "cistern.pytest", "-p", "no:cacheprovider", "-q", "-rA", "--tb=short",
                               "--strict-markers"], env=dict(env, COLUMNS="400"), cwd=self.folder, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, universal_newlines=True, timeout=600)
        ended = {name: (how, words) for how, name, words in
                 re.findall(r"^(PASSED|FAILED|ERROR) test_it\.py::(\w+)(?: - (?:Failed: )?(.*))?$", done.stdout, re.M)}
        return ended, done.stdout

    def test_limits(self):
        ended, output = self.pytest("""
            @pytest.fixture
            def model():
                p = malloc(100 << 20)
                yield
                free(p)
            def step():
                free(malloc(40 << 20), malloc(30 << 20))
            @pytest.mark.gpu_memory_limit("70MiB")
            def test_first(model):
                step()
            @pytest.mark.gpu_memory_limit("64MiB")
            def test_over(model):
                step()
            @pytest.mark.gpu_memory_limit(64 << 20)
            def test_after():
                free(malloc(64 << 20))
            @pytest.mark.gpu_memory_limit("64MiB", of="reserved")
            def test_reserved():
                free(malloc(64 << 20))
            @pytest.mark.gpu_memory_limit("63MiB", of="reserved")
            def test_reserved_over():
                free(malloc(64 << 20))
            @pytest.mark.gpu_memory_limit("1MiB")
            def test_nothing():
                pass
            @pytest.mark.gpu_memory_limit("1MiB")
            def test_fails_itself():
                free(malloc(2 << 20))
                raise KeyError("mine")
            def test_without():
                free(malloc(500 << 20))
            """)
        self.assertEqual({n: how for n, (how, _) in ended.items()}, {
            "test_first": "PASSED", "test_over": "FAILED", "test_after": "PASSED", "test_reserved": "PASSED",
            "test_reserved_over": "FAILED", "test_nothing": "PASSED", "test_fails_itself": "FAILED", "test_without": "PASSED"}, output)
        words = ended["test_over"][1]
        self.assertTrue(words.startswith("gpu_memory_limit: device 0 peaked at 70.00 MiB allocated, over the limit of 64.00 MiB, beside "
                                         "100.00 MiB from before the test; largest: "), words)
        # Of this Python's version stacks may not be known.
        self.assertRegex(words, r"largest: (70\.00 MiB malloc .*test_it\.py:5|.* no stack was recorded)")
        self.assertRegex(ended["test_reserved_over"][1], r"^gpu_memory_limit: device 0 peaked at 64\.00 MiB reserved, over the limit of 63\.00 MiB; largest")
        self.assertIn("mine", ended["test_fails_itself"][1])

    def test_leaves_as_it_was(self):
        ended, output = self.pytest("""
            import cistern
            from cistern import _attribution
            def test_before():
                cistern.attribution("native", "1MiB", history=17)
                malloc(1 << 20)
            @pytest.mark.gpu_memory_limit("1MiB")
            def test_over():
                free(malloc(2 << 20))
            def test_after():
                assert _attribution.current() == ("native", 1 << 20, 17)
            """)
        self.assertEqual([ended[n][0] for n in ("test_over", "test_after")], ["FAILED", "PASSED"], output)

    def test_wrong_marks(self):
        ended, output = self.pytest("""
            @pytest.mark.gpu_memory_limit("64 apples")
            def test_size(): pass
            @pytest.mark.gpu_memory_limit("64MiB", of="used")
            def test_of(): pass
            @pytest.mark.gpu_memory_limit()
            def test_none(): pass
            """)
        self.assertEqual({how for how, _ in ended.values()}, {"FAILED"}, output)
        self.assertTrue(ended["test_size"][1].startswith("gpu_memory_limit: limit: '64 apples' is not a size"))
        self.assertEqual(ended["test_of"][1], "gpu_memory_limit: of: expected \"allocated\" or \"reserved\", got 'used'")

    def test_skipped_without_cistern(self):
        _, output = self.pytest("""
            import pytest
            @pytest.mark.gpu_memory_limit("64MiB")
            def test_it():
                assert False
            """, begin="")
        self.assertRegex(output, r"SKIPPED \[1\] .*gpu_memory_limit: no library is on Cistern: " + re.escape(NO_MORE))

    def test_on_torch_without_cuda_yet(self):
        ended, output = self.pytest("""
            import pytest, cistern.torch
            @pytest.mark.gpu_memory_limit("64MiB")
            def test_it():
                cistern.torch._library.started_by_torch = lambda: True  # as the start of CUDA does
                assert cistern.torch._library.load().cistern_malloc(65 << 20, 0, None)
            """, begin="import cistern.torch\ncistern.torch._mode = 'adapter'\ncistern.torch._library.started_by_torch = lambda: False\n")
        self.assertTrue(ended["test_it"][1].startswith("gpu_memory_limit: device 0 peaked at 65.00 MiB allocated, over the limit of "
                                                       "64.00 MiB; largest: "), output)

    def test_on_cupy(self):
        ended, output = self.pytest("""
            import cupy
            @pytest.mark.gpu_memory_limit("1MiB")
            def test_it():
                cupy.cuda.alloc(2 << 20)
            """, begin="import pytest, cistern\ncistern.cupy.enable()\n")
        self.assertTrue(ended["test_it"][1].startswith("gpu_memory_limit: device 0 peaked at 2.00 MiB"), output)

    def test_registered(self):
        with open(os.path.join(os.path.dirname(PACKAGE), "pyproject.toml")) as f:
            self.assertIn('[project.entry-points.pytest11]\ncistern = "cistern.pytest"\n', f.read())
