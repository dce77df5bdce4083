"""A job that works in phases: it works when it is asked to, and holds what it needs for the next phase meanwhile.

    python turns.py SCRIPT NAME SEED     a workload of workloads.py, under whichever allocator the process runs
    python turns.py --sim NAME SEED      allocations of such a phase through the C library, without computation

At {"do": "start"} it works one step, so that the code of its libraries is on the device, and returns its cache; at {"do": "phase",
"steps": N} it works N steps. It answers with the time and with bytes: the most that was requested, what is requested afterwards, and
what is reserved then. A job that runs out of memory says so, and ends.
"""
import json
import os
import random
import runpy
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../torch"))

import common  # noqa: E402

MiB = common.MiB
FOREVER = 1 << 40


class Workload:
    """A workload of the script, a generator that is continued for the steps of each phase."""

    def __init__(self, script, name, seed):
        import gate
        gate.prepare(name)
        self.steps = runpy.run_path(script)["WORKLOADS"][name](FOREVER, seed)

    def start(self):
        import torch
        torch.cuda.init()
        torch.cuda.current_stream()
        common.require_cistern()
        self.phase(1)
        torch.cuda.empty_cache()
        return self.phase(0)

    def phase(self, steps):
        import torch
        torch.cuda.reset_peak_memory_stats()
        try:
            for _ in range(steps):
                next(self.steps)
            torch.cuda.synchronize()
        except RuntimeError as e:  # libraries have errors of their own for memory that they lack
            raise MemoryError("%s: %s" % (type(e).__name__, e))
        stats = torch.cuda.memory_stats()
        return {"peak": stats["requested_bytes.all.peak"], "held": stats["requested_bytes.all.current"], "reserved": torch.cuda.memory_reserved()}


class Allocations:
    """What the workloads allocate, in small: weights that stay, and blocks of every step's own size, freed at its end."""

    WEIGHTS, MOST = 16 * MiB, {"gpt2_varlen": 320 * MiB, "generate_serving": 256 * MiB}

    def __init__(self, name, seed):
        import holder
        self.memory, self.random, self.most, self.weights = holder.Memory(), random.Random(seed), self.MOST[name], False

    def start(self):
        self.memory.free()
        return {"peak": 0, "held": 0, "reserved": 0}

    def phase(self, steps):
        if not self.weights:
            self.memory.add(self.WEIGHTS)
            self.weights, self.memory.blocks = self.memory.blocks, []
        for i in range(steps):
            size = self.most if i == 0 else self.random.randint(MiB, self.most)
            while size > 0:
                block = min(size, self.random.randint(MiB, 32 * MiB))
                self.memory.add(block)
                size -= block
            time.sleep(0.02)
            self.memory.drop()
        return {"peak": self.WEIGHTS + self.most, "held": self.WEIGHTS, "reserved": 0}


def main():
    script, name, seed = sys.argv[1:4]
    work = Allocations(name, int(seed)) if script == "--sim" else Workload(script, name, int(seed))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        what, begin = json.loads(line), time.perf_counter()
        try:
            found = work.start() if what["do"] == "start" else work.phase(what["steps"])
        except MemoryError as e:
            print(json.dumps({"error": " ".join(str(e).split())[:1500]}), flush=True)
            return 1
        print(json.dumps({**found, "sec": time.perf_counter() - begin}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
