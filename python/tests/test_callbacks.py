"""The callbacks for Lightning and transformers, over stand-ins with their signatures, the real library and a simulated device."""

import os
import textwrap
import unittest

from .support import GPU, PACKAGE, Case
from .test_api import BEGIN

STANDINS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "standins")
STEPS = """
    def step(n):
        p = malloc(n << 20)
        _library.load().cistern_free(p, 0, 0, None)
"""


class Callbacks(Case):
    def program(self, code, path=STANDINS, **more):
        env = self.environment(PYTHONPATH=os.path.dirname(PACKAGE) + ":" + path, CISTERN_CONF="driver:sim:4GiB")
        return self.python("".join(map(textwrap.dedent, (BEGIN, STEPS, code))), env=dict(env, **more))

    def test_transformers(self):
        done = self.program("""
            import cistern.transformers
            assert "transformers" not in sys.modules
            from cistern.transformers import MemoryCallback
            from transformers import Trainer, TrainerCallback
            reported = []
            class Reporting(TrainerCallback):
                def on_log(self, args, state, control, logs=None, **kwargs):
                    reported.append(dict(logs))
            assert issubclass(MemoryCallback, TrainerCallback) and MemoryCallback is cistern.transformers.MemoryCallback
            step(2048)
            trainer = Trainer([Reporting])
            MemoryCallback.add_to(trainer)
            assert len(trainer.callback_handler.callbacks) == 2
            trainer.train([lambda: step(1024), lambda: step(512)])
            peaks = lambda logs: [entry["gpu_peak_allocated_gib"] for entry in logs]
            print(peaks(reported), peaks(trainer.state.log_history))
            print(all(entry["gpu_peak_reserved_gib"] >= 2 for entry in reported))
            trainer = Trainer([Reporting], callbacks=[MemoryCallback()])
            trainer.train([lambda: step(256)])
            print(peaks(trainer.state.log_history), "gpu_peak_allocated_gib" in reported[-1])
            """)
        self.assertEqual(done.stdout.splitlines(), ["[1.0, 0.5] [1.0, 0.5]", "True", "[0.25] False"])

    LIGHTNING = """
            import cistern.lightning
            assert not {"lightning", "pytorch_lightning"} & set(sys.modules)
            from cistern.lightning import MemoryCallback
            from %s import Callback, LightningModule, Trainer
            assert issubclass(MemoryCallback, Callback)
            module = LightningModule()
            step(2048)
            Trainer([MemoryCallback()]).fit(module, [[lambda: step(1024), lambda: step(512)], [lambda: step(256)]])
            print([entry["gpu_peak_allocated_gib"] for entry in module.logged])
            """

    def test_lightning(self):
        done = self.program(self.LIGHTNING % "pytorch_lightning")
        self.assertEqual(done.stdout, "[1.0, 1.0, 0.25]\n")
        # Of both packages, the newer, except where the program has imported the other.
        self.write("both/lightning/__init__.py", "")
        with open(os.path.join(STANDINS, "pytorch_lightning.py")) as f:
            self.write("both/lightning/pytorch.py", f.read())
        both = self.path("both") + ":" + STANDINS
        self.assertEqual(self.program(self.LIGHTNING % "lightning.pytorch", path=both).stdout, "[1.0, 1.0, 0.25]\n")
        done = self.program("import pytorch_lightning, cistern\nprint(cistern.lightning.MemoryCallback.__mro__[2].__module__)", path=both)
        self.assertEqual(done.stdout, "pytorch_lightning\n")

    def test_tensorboard(self):
        done = self.program("""
            from cistern.tensorboard import MemoryLogger
            class SummaryWriter:  # as torch.utils.tensorboard's
                def __init__(self):
                    self.written = []
                def add_scalar(self, tag, scalar_value, global_step=None, walltime=None, new_style=False, double_precision=False):
                    self.written.append((tag, scalar_value, global_step))
            step(2048)
            writer = SummaryWriter()
            memory = MemoryLogger(writer)
            for number, size in enumerate((1024, 512), 7):
                step(size)
                memory.log(number)
            print([(value, at) for tag, value, at in writer.written if tag == "gpu_peak_allocated_gib"])
            print([(value >= 2, at) for tag, value, at in writer.written if tag == "gpu_peak_reserved_gib"], len(writer.written))
            """)
        self.assertEqual(done.stdout.splitlines(), ["[(1.0, 7), (0.5, 8)]", "[(True, 7), (True, 8)] 4"])

    def test_wandb(self):
        done = self.program("""
            from cistern.wandb import MemoryLogger
            class Run:  # as wandb.Run
                def __init__(self):
                    self.rows, self.row = [], {}
                def log(self, data, step=None, commit=None):
                    self.row.update(data)
                    if commit is not False:
                        self.rows.append(self.row)
                        self.row = {}
            step(2048)
            run = Run()
            memory = MemoryLogger(run)
            for size in (1024, 512):
                step(size)
                memory.log()
                run.log({"loss": 0.5})
            print([(row["gpu_peak_allocated_gib"], row["gpu_peak_reserved_gib"] >= 2, row["loss"]) for row in run.rows])
            """)
        self.assertEqual(done.stdout, "[(1.0, True, 0.5), (0.5, True, 0.5)]\n")

    @unittest.skipIf(GPU, "this machine has a GPU")
    def test_without_cistern(self):
        done = self.program("""
            from cistern.lightning import MemoryCallback
            from pytorch_lightning import LightningModule, Trainer
            module = LightningModule()
            Trainer([MemoryCallback()]).fit(module, [[lambda: None] * 2] * 2)
            print(module.logged)
            """, CISTERN_CONF="")
        self.assertEqual((done.stdout, done.stderr), ("[{}, {}, {}, {}]\n", "cistern: peaks of GPU memory are not logged: Cistern does not "
                                                      "run here: start the program by `cistern run`\n"))

    def test_without_the_frameworks(self):
        done = self.program("""
            for module in (cistern.lightning, cistern.transformers):
                try:
                    module.MemoryCallback
                except cistern.CisternError as e:
                    print(e)
                print(hasattr(module, "no_such_name"))
            """, path="")
        self.assertEqual(done.stdout.splitlines(), ["Lightning is not installed: neither lightning nor pytorch_lightning is there", "False",
                                                    "transformers is not installed", "False"])
