"""Recording of many ranks: `cistern run --record` and `cistern record -o FOLDER/`, over a PyTorch of a few lines and over Cistern on
the simulated device."""

import glob
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import unittest

from .support import COMMAND, PACKAGE, Case

# A PyTorch whose counters are what its program says.
COUNTERS = {
    "cuda/__init__.py": """
        now = {"allocated": [0, 0, 0, 0], "reserved": [0, 0], "split": 0, "requests": 0, "ooms": 0, "free": 80 << 30}
        def alloc(size):
            a = now["allocated"]
            a[0] += size; a[1] = max(a[1], a[0]); a[2] += size
            now["requests"] += 1
            now["reserved"][0] = max(now["reserved"][0], a[0]); now["reserved"][1] = max(now["reserved"])
            now["free"] = (80 << 30) - now["reserved"][0] - (1 << 30)
        def release(size):
            now["allocated"][0] -= size
        def memory_stats_as_nested_dict(device):
            a, r = now["allocated"], now["reserved"]
            return {"allocated_bytes": {"all": {"current": a[0], "peak": a[1], "allocated": a[2], "freed": 0}},
                    "requested_bytes": {"all": {"current": a[0], "peak": a[1], "allocated": a[2], "freed": 0}},
                    "reserved_bytes": {"all": {"current": r[0], "peak": r[1]}},
                    "inactive_split_bytes": {"all": {"current": now["split"]}},
                    "allocation": {"all": {"allocated": now["requests"]}}, "num_ooms": now["ooms"], "num_alloc_retries": 0}
        def mem_get_info(device):
            return now["free"], 80 << 30
        """,
    "optim/__init__.py": "from . import optimizer\n",
    "optim/optimizer.py": """
        hooks = []
        def register_optimizer_step_post_hook(f):
            hooks.append(f)
        class Optimizer:
            def step(self):
                for f in hooks:
                    f(self, (), {})
        """,
}


class Fleet(Case):
    def setUp(self):
        super().setUp()
        self.site = self.fake_torch()
        for name, text in COUNTERS.items():
            file = self.path("site", "torch", name)
            os.makedirs(os.path.dirname(file), exist_ok=True)
            with open(file, "a") as f:
                f.write("\n" + textwrap.dedent(text))

    def start(self, code, *options, command="record", conf="", **more):
        env = self.environment(PYTHONPATH=self.site, CISTERN_PYTHON_PACKAGE=PACKAGE, CISTERN_ADAPTER="off", **more)
        if conf:
            env["CISTERN_CONF"] = conf
        self.write("main.py", textwrap.dedent(code))
        return subprocess.Popen([COMMAND, command] + list(options) + ["--", sys.executable, self.path("main.py")], env=env, cwd=self.folder,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)

    def run_it(self, code, *options, status=0, **more):
        process = self.start(code, *options, **more)
        out, errors = process.communicate(timeout=600)
        self.assertEqual(process.returncode, status, errors)
        return out, errors

    def summaries(self, folder="runs"):
        found = []
        for file in sorted(glob.glob(self.path(folder, "*.summary.json"))):
            with open(file) as f:
                found.append(json.load(f))
        return found

    def test_summary(self):
        self.run_it("""
            import torch, cistern
            cistern.fleet.describe(dp=1, pp=0)
            torch.cuda.init()
            for i in range(3):
                torch.cuda.alloc(2 << 30); torch.cuda.alloc(1 << 20)
                torch.cuda.release(2 << 30)
                cistern.step()
            """, "-o", "runs/", RANK="3", WORLD_SIZE="4", SLURM_JOB_ID="77")
        (one,) = self.summaries()
        self.assertEqual((one["cistern_summary"], one["allocator"], one["steps"], one["marks"], one["ended"]), (1, "pytorch", 3, "cistern.step", "exit"))
        self.assertEqual(one["variables"], {**one["variables"], "RANK": "3", "WORLD_SIZE": "4", "SLURM_JOB_ID": "77"})
        self.assertEqual((one["coordinates"], one["program"], one["pytorch"]), ({"dp": 1, "pp": 0}, "main.py", "2.11.0+cu130"))
        (device,) = one["devices"]
        self.assertEqual((device["name"], device["total_bytes"]), ("Fake GPU", 80 << 30))
        steps = device["steps"]
        self.assertEqual((steps["every"], steps["step"]), (1, [1, 2, 3]))
        self.assertEqual(steps["allocated_bytes"], [1 << 20, 2 << 20, 3 << 20])
        self.assertEqual(steps["peak_allocated_bytes"], [(2 << 30) + (n << 20) for n in (1, 2, 3)])
        self.assertEqual((steps["requests"], steps["requested_bytes"]), ([2] * 3, [(2 << 30) + (1 << 20)] * 3))
        self.assertEqual((device["peak_allocated"]["bytes"], device["peak_allocated"]["step"]), ((2 << 30) + (3 << 20), 3))
        self.assertEqual(device["peak_outside"]["bytes"], 1 << 30)
        self.assertEqual([os.path.exists(self.path("runs", r)) for r in one["recordings"]], [True])
        self.assertEqual([n for n in os.listdir(self.path("runs")) if n.startswith(".")], [])

    def test_many_steps_are_few_rows(self):
        self.run_it("""
            import torch, cistern
            torch.cuda.init()
            for i in range(5000):
                torch.cuda.alloc(1); torch.cuda.release(1)
                cistern.step()
            """, "--max-entries", "0", "-o", "runs/")
        (one,) = self.summaries()
        steps = one["devices"][0]["steps"]
        self.assertEqual((steps["every"], len(steps["step"]), sum(steps["requests"]), steps["step"][-1]), (8, 625, 5000, 5000))
        self.assertEqual((one["recordings"], os.listdir(self.path("runs"))), ([], [os.path.basename(glob.glob(self.path("runs", "*"))[0])]))

    def test_optimizers(self):
        self.run_it("""
            import torch, torch.optim, cistern
            torch.cuda.init()
            a, b = torch.optim.optimizer.Optimizer(), torch.optim.optimizer.Optimizer()
            torch.cuda.alloc(1)
            for i in range(3):
                a.step(); b.step()
            """, "--max-entries", "0", "-o", "runs/")
        (one,) = self.summaries()
        self.assertEqual((one["steps"], one["marks"], len(one["devices"][0]["steps"]["step"])), (3, "optimizer", 3))
        # The program's own marks count, and no others.
        self.run_it("""
            import torch, torch.optim, cistern
            torch.cuda.init()
            a = torch.optim.optimizer.Optimizer()
            torch.cuda.alloc(1)
            for i in range(3):
                a.step(); a.step(); cistern.step()
            """, "--max-entries", "0", "-o", "more/")
        (one,) = self.summaries("more")
        self.assertEqual((one["steps"], one["marks"], one["devices"][0]["steps"]["step"]), (3, "cistern.step", [1, 2, 3]))

    def test_failures(self):
        _, errors = self.run_it("""
            import torch, cistern
            torch.cuda.init()
            torch.cuda.alloc(70 << 30)
            cistern.step()
            for i in range(9):
                for f in torch._C.observers:
                    torch.cuda.now["ooms"] = i + 1
                    f(0, (20 + i) << 30, 80 << 30, 9 << 30)
            """, "-o", "runs/")
        (one,) = self.summaries()
        device = one["devices"][0]
        self.assertEqual(device["ooms"], 9)
        self.assertEqual([f["requested_bytes"] >> 30 for f in device["failures"]], [20, 21, 22, 23, 28], errors)
        self.assertEqual([(f["step"], f["allocated_bytes"] >> 30, f["free_bytes"] >> 30) for f in device["failures"]], [(1, 70, 9)] * 5)
        self.assertEqual([f.get("recording", "").count(".oom%d." % (i + 1)) for i, f in enumerate(device["failures"][:4])], [1] * 4)

    def test_killed(self):
        process = self.start("""
            import os, sys, time, torch, cistern
            torch.cuda.init()
            torch.cuda.alloc(1)
            cistern.step()
            notes = "runs/.cistern-" + os.environ["_CISTERN_RECORD_TIME"]
            while "wrote" not in open(notes).read():
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
            """, "--max-entries", "0", "-o", "runs/")
        _, errors = process.communicate(timeout=600)
        self.assertEqual(process.returncode, 128 + 9, errors)
        (one,) = self.summaries()
        self.assertEqual((one["ended"], errors), ("", ""))

    # An agent as that of PyTorch's: once a process has failed it ends the others.
    AGENT = """
        import os, time
        class Failure:
            def __init__(self, pid, exitcode):
                self.pid, self.exitcode = pid, exitcode
        class Result:
            def __init__(self, failures):
                self.failures = failures
        class PContext:
            def __init__(self, processes):
                self.processes, self._failures = processes, {}
            def look(self):
                for n, p in enumerate(self.processes):
                    if n not in self._failures and p.poll():
                        self._failures[n] = Failure(p.pid, p.returncode)
            def wait(self):
                while not self._failures:
                    time.sleep(0.01)
                    self.look()
                self.close()
                self.look()
                return Result(self._failures)
            def close(self):
                for p in self.processes:
                    p.terminate()
                    p.wait()
        """

    def agent(self, fails):
        for name in ("torch/distributed", "torch/distributed/elastic", "torch/distributed/elastic/multiprocessing"):
            self.write(os.path.join("site", name, "__init__.py"), "")
        self.write("site/torch/distributed/elastic/multiprocessing/api.py", textwrap.dedent(self.AGENT))
        self.run_it("""
            import glob, os, subprocess, sys, time, torch
            if "RANK" not in os.environ:
                from torch.distributed.elastic.multiprocessing.api import PContext
                start = lambda n: subprocess.Popen([sys.executable, __file__], env=dict(os.environ, RANK=n, LOCAL_RANK=n, WORLD_SIZE="3"))
                print(sorted(PContext([start(n) for n in "012"]).wait().failures))
                sys.exit()
            import cistern
            torch.cuda.init()
            torch.cuda.alloc(1)
            cistern.step()
            # All have left a summary with their GPU.
            def there():
                return sum('"devices":[{' in open(f).read() for f in glob.glob("runs/rank*.summary.json"))
            while there() < 3:
                time.sleep(0.01)
            if os.environ["RANK"] == "1":
                """ + fails + """
            while True:
                time.sleep(1)
            """, "--max-entries", "0", "-o", "runs/")
        return {int(s["variables"]["RANK"]): (s["ended"], s.get("status")) for s in self.summaries()}

    def test_agent_says_how_ranks_failed(self):
        self.assertEqual(self.agent("os.kill(os.getpid(), 9)"), {0: ("", None), 1: ("", -9), 2: ("", None)})
        done = subprocess.run([COMMAND, "fleet", self.path("runs")], stdout=subprocess.PIPE, env=self.environment(), timeout=600, check=True, universal_newlines=True)
        self.assertIn("- rank 1 was killed by SIGKILL", done.stdout)

    def test_agent_says_how_ranks_ended(self):
        self.assertEqual(self.agent("sys.exit(7)"), {0: ("", None), 1: ("exit", 7), 2: ("", None)})

    def test_children(self):
        # A child of fork before CUDA starts is a process of its own; one after is none.
        self.run_it("""
            import os, torch, torch.optim, cistern
            a = torch.optim.optimizer.Optimizer()
            pid = os.fork()
            if pid == 0:
                torch.cuda.init()
                torch.cuda.alloc(1)
                a.step()
                cistern._fleet.recorder.end()
                os._exit(0)
            os.waitpid(pid, 0)
            torch.cuda.init()
            torch.cuda.alloc(1)
            a.step(); a.step()
            pid = os.fork()
            if pid == 0:
                a.step(); a.step()
                raise SystemExit  # with all that is registered for the end
            os.waitpid(pid, 0)
            os.kill(os.getpid(), 9)
            """, "--max-entries", "0", "-o", "runs/", status=128 + 9)
        found = sorted((one["steps"], one["ended"]) for one in self.summaries())
        self.assertIn((1, "exit"), found)
        found.remove((1, "exit"))
        self.assertEqual([ended for _, ended in found], [""] * len(found))

    def test_fork_while_a_summary_is_written(self):
        # The child of a fork has no thread that would let its locks go.
        self.run_it("""
            import os, signal, threading, torch, torch.optim, cistern
            torch.cuda.init()
            torch.cuda.alloc(1)
            a, r = torch.optim.optimizer.Optimizer(), cistern._fleet.recorder
            held, go = threading.Event(), threading.Event()
            def write():
                with r.lock:
                    held.set()
                    go.wait()
            threading.Thread(target=write).start()
            held.wait()
            pid = os.fork()
            if pid == 0:
                signal.alarm(60)
                a.step()
                os._exit(0)
            go.set()
            if os.waitpid(pid, 0)[1] != 0:
                raise SystemExit("the child hung")
            """, "--max-entries", "0", "-o", "runs/")

    def test_a_file_that_is_not_written(self):
        # The end of the program, and a request that fails, wait for a writer that hangs, and not for ever.
        _, errors = self.run_it("""
            import signal, threading, torch, cistern
            from cistern import _fleet
            _fleet.LAST = 0.1
            hang, hangs = threading.Event(), threading.Event()
            replace = _fleet.os.replace
            def stuck(*arguments):
                if threading.current_thread().name == "cistern-record":
                    hangs.set()
                    hang.wait()
                replace(*arguments)
            _fleet.os.replace = stuck
            signal.alarm(60)
            torch.cuda.init()
            hangs.wait()
            torch.cuda.alloc(1)
            cistern.step()
            torch.cuda.now["ooms"] = 1
            for f in torch._C.observers:
                f(0, 20 << 30, 80 << 30, 9 << 30)
            """, "--max-entries", "0", "-o", "runs/", status=1)  # as there is no file
        self.assertEqual(errors.count("recording into"), 1, errors)

    def test_nothing_elsewhere(self):
        self.python("import cistern; cistern.step(); cistern.fleet.describe(dp=1)", env=self.environment(PYTHONPATH=os.path.dirname(PACKAGE)))
        done = self.python("""
            import cistern
            for bad in (1.5, "1", True, -1):
                try:
                    cistern.fleet.describe(dp=bad)
                    raise SystemExit("accepted %r" % bad)
                except (TypeError, ValueError) as e:
                    print(e)
            """, env=self.environment(PYTHONPATH=os.path.dirname(PACKAGE)))
        self.assertEqual(done.stdout.splitlines()[-1], "dp: expected 0 or more, got -1")

    def test_folder_that_is_gone(self):
        _, errors = self.run_it("""
            import shutil, torch, cistern
            shutil.rmtree("runs")
            torch.cuda.init()
            cistern.step()
            """, "--max-entries", "0", "-o", "runs/")
        self.assertEqual(errors.count("recording into"), 1, errors)

    def test_bad_options(self):
        self.write("file", "")
        for command, options, why in (("record", ["-o", "file/"], "exists and is not a folder"), ("run", ["--record", "file"], "exists and is not a folder"),
                                      ("run", ["--record-size", "1GiB"], "without --record"), ("run", ["--record", "r", "--record-size", "0"], "expected a size"),
                                      ("record", ["--max-entries", "-1", "-o", "r/"], "expected 0 or more"),
                                      ("record", ["--max-entries", "0", "-o", "r"], "expected 1 or more")):
            _, errors = self.run_it("", *options, command=command, status=2)
            self.assertIn(why, errors)

    # A rank on Cistern, on the simulated device. What it holds grows by a MiB a step.
    RANK = """
        import os, signal, torch, cistern
        from cistern import _fleet, _library
        _fleet.begin(torch, "cistern")
        torch.cuda.init()
        lib = _library.load()
        cistern.fleet.describe(dp=int(os.environ["RANK"]))
        kept = []
        def malloc(size):
            p = lib.cistern_malloc(size, 0, None)
            assert p
            return p
        weights = malloc(64 << 20)
        for step in range(20):
            p = malloc(8 << 20)
            lib.cistern_free(p, 8 << 20, 0, None)
            kept.append(malloc(1 << 20))
            cistern.step()
            print(step, flush=True)
            if os.environ.get("DIES") == str(step):
                cistern._fleet.recorder.write()
                os.kill(os.getpid(), signal.SIGKILL)
        """

    def ranks(self, world, dies, conf="driver:sim:1GiB", **more):
        os.makedirs(self.path("runs"))
        self.write("main.py", textwrap.dedent(self.RANK))
        processes = []
        for r in range(world):
            env = self.environment(PYTHONPATH=self.site + os.pathsep + os.path.dirname(PACKAGE), CISTERN_CONF=conf, _CISTERN_FLEET=self.path("runs"),
                                   _CISTERN_VARIABLES="RANK,LOCAL_RANK,WORLD_SIZE,TORCHELASTIC_RUN_ID", RANK=str(r), LOCAL_RANK=str(r),
                                   WORLD_SIZE=str(world), TORCHELASTIC_RUN_ID="exp", DIES="7" if r == dies else "", **more)
            processes.append(subprocess.Popen([sys.executable, "main.py"], env=env, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                              universal_newlines=True))
        for rank, p in enumerate(processes):
            out, errors = p.communicate(timeout=600)
            self.assertEqual(p.returncode, -signal.SIGKILL if rank == dies else 0, errors + out)

    def test_ranks_on_cistern(self):
        world = 4
        dies = random.Random(os.environ.get("CISTERN_SEED", "1")).randrange(world)
        self.ranks(world, dies)
        found = {int(s["variables"]["RANK"]): s for s in self.summaries()}
        self.assertEqual(sorted(found), list(range(world)))
        for rank, s in found.items():
            (device,) = s["devices"]
            steps = device["steps"]
            self.assertEqual((s["allocator"], s["coordinates"], s["ended"], s["steps"]), ("cistern", {"dp": rank}, "" if rank == dies else "exit", 8 if rank == dies else 20))
            self.assertEqual(steps["allocated_bytes"], [(64 + n) << 20 for n in range(1, s["steps"] + 1)])
            self.assertEqual(steps["requests"], [3] + [2] * (s["steps"] - 1))
        # And the command says who was killed, and that all leak.
        done = subprocess.run([COMMAND, "fleet", "--json", self.path("runs")], stdout=subprocess.PIPE, env=self.environment(), timeout=600, check=True)
        answer = json.loads(done.stdout)
        found = {f["kind"]: f for f in answer["findings"]}
        self.assertEqual((answer["job"], answer["world_size"], answer["launcher"], len(answer["ranks"])), ("exp", world, "torchrun", world))
        self.assertEqual((found["ended"]["ranks"], found["ended"]["step"]), ([dies], 8))
        self.assertEqual([len(g["ranks"]) for g in answer["groups"]], [world])
        grown = [f for f in answer["findings"] if f["kind"] == "growth"]
        self.assertEqual(sorted(n for f in grown for n in f["ranks"]), [r for r in range(world) if r != dies])

    def test_files_of_failures(self):
        # The summary names the file of each request that failed, also of failures beyond those that have one of their own.
        self.RANK = self.RANK.replace("    print(step", "    recorder = _fleet.recorder\n            if step < 7:\n"
                                      "                assert not lib.cistern_malloc(2 << 30, 0, None)\n"
                                      "                recorder.out_of_memory(0, 2 << 30, 1 << 30, 0)\n            print(step")
        self.ranks(1, None, conf="driver:sim:1GiB,report:" + self.path("runs"))
        (one,) = self.summaries()
        files = ["oom-%d-%d.cistern" % (one["pid"], n) for n in range(1, 6)]
        self.assertEqual(one["recordings"][:5], files)
        self.assertEqual([f.get("recording") for f in one["devices"][0]["failures"]], files)
        done = subprocess.run([COMMAND, "fleet", "--json", self.path("runs")], stdout=subprocess.PIPE, env=self.environment(), timeout=600, check=True)
        report = json.loads(done.stdout)["limit"]["report"]
        self.assertEqual(os.path.basename(report), files[4])
        text = subprocess.run([COMMAND, "fleet", self.path("runs")], stdout=subprocess.PIPE, env=self.environment(), timeout=600, check=True, universal_newlines=True)
        self.assertIn("\n  cistern report " + report + "\n", text.stdout)

    def test_hashes_on_cistern(self):
        # With a history the hash of each step's requests is there as the process runs, and is the one that is computed of the recording.
        self.ranks(2, None, conf="driver:sim:1GiB,history:1000")
        one, other = (s["devices"][0]["steps"] for s in self.summaries())
        self.assertEqual((len(one["hash"]), 0 in one["hash"]), (20, False))
        self.assertEqual(one["hash"], other["hash"])
        for file in glob.glob(self.path("runs", "*.summary.json")):
            with open(file) as f:
                summary = json.load(f)
            del summary["devices"][0]["steps"]["hash"]
            self.write(file, json.dumps(summary))
        subprocess.run([COMMAND, "fleet", "collect", self.path("runs"), self.path("all")], env=self.environment(), stderr=subprocess.PIPE, timeout=600, check=True)
        found = [s["devices"][0]["steps"].get("hash") for s in self.summaries("all")]
        self.assertEqual([n for n in found[0] if n], [n for n, m in zip(one["hash"], found[0]) if m])
        self.assertGreater(len([n for n in found[0] if n]), 10)

    def test_hash_of_many_steps(self):
        from cistern import _fleet

        s = _fleet.Series()
        for step in range(1, 2 * _fleet.MOST_ROWS + 1):
            s.add([step, step, 0, 0, 0, 0, 1, 1, _fleet.mixed(step, step)])
        columns = s.columns()
        self.assertEqual((columns["every"], len(columns["hash"])), (2, _fleet.MOST_ROWS))
        self.assertEqual(columns["hash"][7], (_fleet.mixed(15, 15) + _fleet.mixed(16, 16)) % (1 << 64))
        s.add([step + 1, 0, 0, 0, 0, 0, 1, 1, 0])
        s.add([step + 2, 0, 0, 0, 0, 0, 1, 1, 5])
        self.assertEqual(s.columns()["hash"][-1], 0)

    def test_recordings_on_cistern(self):
        # The history is written whenever it is nearly full, and what is more than the size allows is removed.
        self.ranks(1, None, conf="driver:sim:1GiB,history:60")
        (one,) = self.summaries()
        self.assertGreaterEqual(len(one["recordings"]), 1)
        events = []
        for name in one["recordings"]:
            done = subprocess.run([COMMAND, "inspect", "--json", self.path("runs", name)], stdout=subprocess.PIPE, env=self.environment(), timeout=600)
            self.assertEqual(done.returncode, 0)
            events.append(json.loads(done.stdout)["traces"][0]["events"])
        # The last part may have the blocks that are in use alone, where the one before was written as the process ended.
        self.assertGreater(events[0], 0)


if __name__ == "__main__":
    unittest.main()
