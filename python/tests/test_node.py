"""cistern.node over the real library and a simulated device."""

import os
import re
import shlex
import subprocess
import sys
import textwrap
import unittest

from .support import COMMAND, ROOT, Case


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

    def test_allow_pause(self):
        """Bad arguments, a second consent, and a block that ends by an exception; without a broker."""
        code = """if 1:
            import cistern
            for bad in (dict(keep="no"), dict(dir="/tmp"), dict(tag="")):
                try:
                    with cistern.node.allow_pause(**bad):
                        pass
                except ValueError as e:
                    print("value")
            try:
                with cistern.node.allow_pause():
                    with cistern.node.allow_pause():
                        pass
            except cistern.CisternError as e:
                print("allowed" in str(e))
            try:
                with cistern.node.allow_pause(keep="drop"):
                    raise KeyError
            except KeyError:
                print("ended")
            with cistern.node.allow_pause(tag="x", auto=True):
                print("again")
        """
        self.assertEqual(self.program(code, "driver:sim:1GiB,node:off"), ["value"] * 3 + ["True", "ended", "again"])


@unittest.skipUnless(os.path.exists(COMMAND), "make command makes bin/cistern")
class Turns(Case):
    """The recipe of docs/node.md: a trainer and an engine that do not fit beside each other take turns."""

    TRAINER = """
        import sys, cistern
        from cistern import _library, _memory
        lib = _memory.library()
        p = lib.cistern_malloc(700 << 20, 0, None)
        assert p
        for line in sys.stdin:
            with cistern.node.allow_pause():
                print("idle", flush=True)
                sys.stdin.readline()
            print("trains", flush=True)
        """
    ENGINE = """
        import sys
        from cistern import _library, _memory
        lib = _memory.library()
        for line in sys.stdin:
            p = lib.cistern_malloc(600 << 20, 0, None)
            if p:
                lib.cistern_free(p, 0, 0, None)
                lib.cistern_trim(0)
            print("generates" if p else "has too little", flush=True)
        """

    def start(self, code, label, wait="0s"):
        env = self.environment(PYTHONPATH=os.path.join(ROOT, "python"), XDG_RUNTIME_DIR=self.run,
                               CISTERN_CONF="driver:sim:1GiB@%s,node:%s,node_wait:%s,node_label:%s" % (os.path.join(self.run, "gpu"), self.socket, wait, label))
        p = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.addCleanup(p.wait)
        self.addCleanup(p.stdout.close)
        self.addCleanup(p.stdin.close)
        self.addCleanup(p.kill)
        return p

    def say(self, p, answer=True):
        p.stdin.write("\n")
        p.stdin.flush()
        return p.stdout.readline().split() if answer else None

    def commands(self):
        """The launcher's commands in the document."""
        with open(os.path.join(ROOT, "docs", "node.md")) as f:
            text = f.read()
        found = [shlex.split(line) for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines()
                 if re.match(r"cistern node (pause|resume)", line)]
        self.assertEqual([c[2] for c in found], ["pause", "resume"])
        return found

    def launch(self, command):
        return subprocess.run([COMMAND] + command[1:3] + ["--socket", self.socket] + command[3:], capture_output=True, text=True, timeout=120)

    def serve(self):
        self.run = self.path("run")
        os.makedirs(self.run, exist_ok=True)
        self.socket = os.path.join(self.run, "s")
        if len(self.socket) > 100:
            self.skipTest("the folder for temporary files has too long a path for a socket")
        broker = subprocess.Popen([COMMAND, "serve", "--socket", self.socket], stderr=subprocess.PIPE, text=True)
        self.addCleanup(broker.wait)
        self.addCleanup(broker.stderr.close)
        self.addCleanup(broker.terminate)
        self.assertIn("the broker serves", broker.stderr.readline())

    def test_auto(self):
        """Without a launcher: the broker pauses the trainer for the engine's request, where the trainer allows that."""
        self.serve()
        engine = self.start(self.ENGINE, "engine", "60s")
        trainer = self.start(self.TRAINER.replace("allow_pause()", "allow_pause(auto=True)"), "trainer")
        for _ in range(2):
            self.assertEqual(self.say(trainer), ["idle"])
            self.assertEqual(self.say(engine), ["generates"])
            self.assertEqual(self.say(trainer)[0], "trains")
        self.assertEqual(subprocess.run([COMMAND, "node", "ls", "--socket", self.socket], capture_output=True, text=True,
                                        timeout=120).stdout.splitlines()[1].split()[5:7], ["PAUSABLE", "PAUSED"])

    def test_recipe(self):
        self.serve()
        pause, resume = self.commands()
        trainer, engine = self.start(self.TRAINER, "trainer"), self.start(self.ENGINE, "engine")
        for resumes in (True, False):
            self.assertEqual(self.say(trainer), ["idle"])
            self.assertEqual(self.say(engine), ["has", "too", "little"])
            r = self.launch(pause)
            self.assertEqual((r.returncode, r.stderr), (0, ""))
            self.assertRegex(r.stdout, r"process %d \(.*\) on GPU-.*: paused 700.00 MiB in" % trainer.pid)
            self.assertEqual(self.say(engine), ["generates"])
            if resumes:
                r = self.launch(resume)
                self.assertEqual((r.returncode, r.stderr), (0, ""))
                self.assertIn("resumed 700.00 MiB in", r.stdout)
            self.assertEqual(self.say(trainer)[0], "trains")
            r = self.launch([*pause[:-2]])  # without --wait
            self.assertEqual(r.returncode, 2)
            self.assertIn("does not allow it now", r.stderr)
