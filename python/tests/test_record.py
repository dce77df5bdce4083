"""`cistern record` over a PyTorch of a few lines."""

import gzip
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import unittest

from .support import COMMAND, PACKAGE, Case


def _interruptible():
    """Where the tests run in a shell's background, SIGINT is ignored, and programs that they start would ignore it too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Record(Case):
    def setUp(self):
        super().setUp()
        self.site = self.fake_torch()

    def record(self, code, *options, out="run.pickle", check=True, command=None, **more):
        env = self.environment(PYTHONPATH=self.site, CISTERN_PYTHON_PACKAGE=PACKAGE, FAKE_TORCH_LOG=self.path("log"), **more)
        self.write("main.py", textwrap.dedent(code))
        done = subprocess.run([COMMAND, "record", "-o", out] + list(options) + ["--"] +
                              (command or [sys.executable, self.path("main.py")]), env=env, cwd=self.folder, timeout=600,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
        if check:
            self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def files(self):
        return sorted(n for n in os.listdir(self.folder) if n.startswith("run") or n.startswith("."))

    def test_at_exit(self):
        done = self.record("""
            import os, torch
            os.mkdir("elsewhere"); os.chdir("elsewhere")
            torch.cuda.init()
            """)
        self.assertEqual(self.files(), ["run.pickle"])
        self.assertEqual(done.stderr, "cistern: wrote %s (1 events)\n" % self.path("run.pickle"))
        with open(self.path("run.pickle"), "rb") as f:
            self.assertEqual(pickle.load(f)["device_traces"][0][0]["action"], "alloc")
        log = [line.split(" ", 1)[1] for line in self.read("log").splitlines()]
        self.assertEqual(log, ["cuda starts", "history all all python 1000000"])

    def test_environment(self):
        self.record("import torch; torch.cuda.init(); torch._C.observers[0](0, 1, 1, 0)")
        for name in ("run.pickle", "run.oom1.pickle"):
            with open(self.path(name), "rb") as f:
                found = pickle.load(f)["cistern"]
            found.pop("driver", None)  # this machine's, if it has one
            self.assertEqual(found, {"torch": "2.11.0+cu130", "cuda": "13.0", "devices": {"0": "Fake GPU"}, "total_memory": {"0": 80 << 30}})
        done = subprocess.run([COMMAND, "inspect", "--json", self.path("run.pickle")], check=True, stdout=subprocess.PIPE,
                              env=self.environment(), timeout=600)
        self.assertLessEqual({"pytorch": "2.11.0+cu130", "cuda": "13.0", "device_name": "Fake GPU", "device_total_bytes": 80 << 30}.items(),
                             json.loads(done.stdout)["traces"][0]["environment"].items())

    def test_place_in_a_job(self):
        self.record("import torch, cistern; cistern.fleet.describe(dp=1); torch.cuda.init()", RANK="3", WORLD_SIZE="8", LOCAL_RANK="3", SLURM_JOB_ID="77")
        done = subprocess.run([COMMAND, "inspect", "--json", self.path("run.rank3.pickle")], check=True, stdout=subprocess.PIPE,
                              env=self.environment(), timeout=600)
        found = json.loads(done.stdout)["traces"][0]["identity"]
        self.assertEqual((found["job"], found["rank"], found["world_size"], found["local_rank"], found["coordinates"]), ("77", 3, 8, 3, {"dp": 1}))
        self.assertEqual(found["node"], socket.gethostname())

    def test_environment_is_not_needed(self):
        # Of a PyTorch that says none of it, or whose version is no plain string, the file is written all the same.
        done = self.record("""
            import torch
            class Version(str):
                pass
            torch.__version__ = Version("2.12.0")
            del torch.version.cuda, torch.cuda.get_device_properties
            torch.cuda.init()
            """)
        self.assertEqual(done.stderr, "cistern: wrote %s (1 events)\n" % self.path("run.pickle"))
        with open(self.path("run.pickle"), "rb") as f:
            found = pickle.load(f)["cistern"]
        found.pop("driver", None)
        self.assertEqual(found, {"torch": "2.12.0"})
        self.assertIs(type(found["torch"]), str)

    def test_options(self):
        self.record("import torch; torch.cuda.init()", "--stacks", "off", "--max-entries", "5", out="run.pickle.gz")
        with gzip.open(self.path("run.pickle.gz")) as f:
            self.assertIn("segments", pickle.load(f))
        self.assertIn("history all None all 5", self.read("log"))
        self.record("import torch; torch.cuda.init()", "--stacks", "all")
        self.assertIn("history all all all 1000000", self.read("log"))

    def test_ways_to_end(self):
        for code, status in (("raise ValueError('x')", 1), ("sys.exit(3)", 3), ("raise KeyboardInterrupt", 130)):
            done = self.record("import sys, torch\ntorch.cuda.init()\n" + code, check=False)
            self.assertEqual(done.returncode, status)
            self.assertEqual(self.files(), ["run.pickle"])
            os.unlink(self.path("run.pickle"))

    def test_nothing_without_cuda(self):
        none = "cistern: no recording: no process initialised CUDA through PyTorch\n"
        done = self.record("import torch", check=False)
        self.assertEqual((self.files(), done.stderr, done.returncode), ([], none, 1))
        done = self.record("print('no torch')", check=False)
        self.assertEqual((self.files(), done.stdout, done.stderr, done.returncode), ([], "no torch\n", none, 1))
        # A failure of the program is its own.
        done = self.record("import sys; sys.exit(7)", check=False)
        self.assertEqual((self.files(), done.stderr, done.returncode), ([], none, 7))
        # An old recording of that name is none of this program.
        self.write("run.pickle", "old")
        self.assertEqual(self.record("import torch", check=False).returncode, 1)

    def test_killed(self):
        done = self.record("import os, signal, torch; torch.cuda.init(); os.kill(os.getpid(), signal.SIGKILL)", check=False)
        self.assertEqual((self.files(), done.returncode), ([], 128 + 9))
        self.assertIn("cistern: no recording: CUDA was initialised, but no process wrote", done.stderr)

    def test_signals_are_the_programs(self):
        self.write("main.py", textwrap.dedent("""
            import signal, sys, torch
            torch.cuda.init()
            def end(*_):
                sys.exit(5)
            signal.signal(signal.SIGINT, end)
            print("ready", flush=True)
            signal.pause()
            """))
        env = self.environment(PYTHONPATH=self.site, CISTERN_PYTHON_PACKAGE=PACKAGE, FAKE_TORCH_LOG=self.path("log"))
        command = subprocess.Popen([COMMAND, "record", "-o", "run.pickle", "--", sys.executable, "main.py"], env=env, cwd=self.folder,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                                   preexec_fn=_interruptible)
        try:
            command.stdout.readline()
            command.send_signal(signal.SIGINT)
            _, errors = command.communicate(timeout=120)
        except BaseException:
            os.killpg(command.pid, signal.SIGKILL)
            command.communicate()
            raise
        self.assertEqual(command.returncode, 5, errors)
        self.assertEqual(self.files(), ["run.pickle"])

    def test_out_of_memory(self):
        done = self.record("""
            import torch
            torch.cuda.init()
            for i in range(9):
                torch._C.observers[0](0, 1 << 30, 2 << 30, 0)
            """)
        self.assertEqual(self.files(), ["run.oom%d.pickle" % i for i in range(1, 6)] + ["run.pickle"])
        self.assertEqual(done.stderr.count("at an out-of-memory"), 5)
        self.assertEqual(done.stderr.count("no further files"), 1)

    def test_ranks(self):
        for rank in ("0", "3"):
            self.record("import torch; torch.cuda.init(); torch._C.observers[0](0, 1, 1, 0)", RANK=rank, WORLD_SIZE="4",
                        LOCAL_RANK=rank)
        self.assertEqual(self.files(), ["run.rank0.oom1.pickle", "run.rank0.pickle", "run.rank3.oom1.pickle", "run.rank3.pickle"])

    def test_children(self):
        done = self.record("""
            import multiprocessing, subprocess, sys, torch
            def child():
                import torch
                torch.cuda.init()
            if __name__ == "__main__":
                for method in ("fork", "spawn", "forkserver"):
                    p = multiprocessing.get_context(method).Process(target=child)
                    p.start(); p.join()
                    print("pid", p.pid, p.exitcode)
                torch.cuda.init()
            """)
        pids = [line.split()[1] for line in done.stdout.splitlines()]
        self.assertEqual(self.files(), sorted(["run.pid%s.pickle" % p for p in pids] + ["run.pickle"]), done.stderr)

    def test_processes_of_a_script(self):
        # One after the other, none the other's child: the first has the name, and no other writes over it.
        again = "%s main.py; %s main.py" % (sys.executable, sys.executable)
        self.record("import torch; torch.cuda.init()", command=["sh", "-c", again])
        self.assertEqual(len(self.files()), 2)
        self.assertIn("run.pickle", self.files())

    def test_the_last_recording_is_replaced(self):
        self.write("run.pickle", "old")
        os.utime(self.path("run.pickle"), (1, 1))
        self.record("import torch; torch.cuda.init()")
        with open(self.path("run.pickle"), "rb") as f:
            self.assertIn("segments", pickle.load(f))
        self.assertEqual(self.files(), ["run.pickle"])

    def test_failure_to_write_is_a_line(self):
        done = self.record("""
            import os, shutil, torch
            torch.cuda.init()
            shutil.rmtree("out")
            """, out=self.folder_named("out"))
        self.assertEqual(done.returncode, 0)
        self.assertRegex(done.stderr, r"^cistern: .*out/run.pickle: nothing was written: FileNotFoundError: .*\n$")

    def folder_named(self, name):
        os.mkdir(self.path(name))
        return os.path.join(name, "run.pickle")

    def test_torch_that_cannot_record(self):
        self.write("site/torch/cuda/memory.py", "def _record_memory_history(enabled):\n    pass\n")
        done = self.record("import torch; torch.cuda.init(); print('goes on')", check=False)
        self.assertEqual(done.stdout, "goes on\n")
        self.assertIn("cistern: recording: torch 2.11.0+cu130: TypeError: ", done.stderr)


if __name__ == "__main__":
    unittest.main()
