"""The package in a process that has no descriptor left: everything works, or is an error of the package's own."""

import os
import textwrap

from .support import ROOT, Case

FULL = """
    import os, sys
    def full():
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        try:
            while True:
                os.open("/dev/null", os.O_RDONLY)
        except OSError:
            pass
    def each():
        import cistern
        def tagged():
            with cistern.tag("more"):
                pass
        for call in (cistern.stats, cistern.pause, cistern.resume, lambda: cistern.pause(keep="disk"), cistern.resume, cistern.trim,
                     lambda: cistern.pause_buffers("1MiB"), lambda: cistern.stack_usage(0), lambda: cistern.attribution().remove(),
                     lambda: cistern.report(folder, True), lambda: cistern.report(None), lambda: cistern.write_trace(folder + "/trace"),
                     lambda: cistern.snapshot(folder + "/snapshot"), lambda: cistern.on_out_of_memory(print).remove(), tagged):
            try:
                call()
                print("works")
            except cistern.CisternError as e:
                print("error", e)
    folder = os.getcwd()
"""
CALLS = 15


class Descriptors(Case):
    def program(self, code, env):
        return self.python(textwrap.dedent(FULL) + textwrap.dedent(code), env=env).stdout.splitlines()

    def test_after_the_library(self):
        lines = self.program("import cistern; cistern.stats(); full(); each()",
                             self.environment(PYTHONPATH=os.path.join(ROOT, "python"), CISTERN_CONF="driver:sim:1GiB"))
        self.assertEqual(len(lines), CALLS, lines)
        failed = [n for n, line in enumerate(lines) if line != "works"]
        self.assertEqual(failed, [11, 12], lines)  # which write files

    def test_before_the_library(self):
        lines = self.program("import cistern, resource; full(); each()",
                             self.environment(PYTHONPATH=os.path.join(ROOT, "python"), CISTERN_CONF="driver:sim:1GiB"))
        self.assertEqual(len(lines), CALLS, lines)

    def test_under_torch(self):
        site, package = self.fake_torch(), self.package()
        env = self.environment(PYTHONPATH=site + os.pathsep + os.path.dirname(package), CISTERN_CONF="driver:sim:1GiB")
        lines = self.program("""
            import torch, cistern.torch
            cistern.torch.enable()
            torch.cuda.init()
            full()
            each()
            """, env)
        self.assertEqual(len(lines), CALLS, lines)
        self.assertNotIn("Too many open files", "".join(line for n, line in enumerate(lines) if n not in (3, 11, 12)))
