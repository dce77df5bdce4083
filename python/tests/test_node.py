"""cistern.node over the real library and a simulated device."""

import os

from .support import ROOT, Case


class Node(Case):
    def program(self, code, conf):
        env = self.environment(PYTHONPATH=os.path.join(ROOT, "python"), CISTERN_CONF=conf)
        return self.python(code, env=env).stdout.split()

    def test_available(self):
        """What is free and what is cached, within the limit; without a broker."""
        code = """if 1:
            import cistern
            from cistern import _library
            MiB = 1 << 20
            before = cistern.node.available()
            lib = _library.load()
            p = lib.cistern_malloc(300 * MiB, 0, None)
            held = cistern.node.available(0)
            lib.cistern_free(p, 0, 0, None)
            print(before // MiB, held // MiB, cistern.node.available(device="cuda:0") // MiB)
            try:
                cistern.node.available(5)
            except cistern.CisternError as e:
                print("error", "device 5" in str(e))
        """
        for conf, first in (("", 1024), (",limit:512MiB", 512)):
            with self.subTest(conf=conf):
                before, held, after, *error = self.program(code, "driver:sim:1GiB,node:off" + conf)
                self.assertEqual((int(before), int(after)), (first, first))
                self.assertLessEqual(first - 340, int(held))
                self.assertLessEqual(int(held), first - 300)
                self.assertEqual(error, ["error", "True"])
