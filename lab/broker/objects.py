"""Named objects on a GPU: weights that one process puts and others map without a copy. Whether that takes milliseconds, there is one
copy, and contents are right, also after the death of the writer and of the broker.

    python objects.py [--size 8192] [--each 128] [--readers 10] [--cycles 10000] [--seconds 100] [--file 4096] [--sim [MIB]]

The broker stores descriptors with a stand-in for systemd, which uses no GPU. The readers have a CUDA context, and have run the kernels
that they need, before the object is there; so their times are those of get and of the mapping's first use. Memory of the device is what
NVML says.
"""
import argparse
import functools
import json
import os
import subprocess
import sys
import time

import shared
from shared import MiB, common, seen

GOAL = 50  # ms of get
SEED = 1000
NAME = "weights/lab"


def met(found, who):
    if "error" in found:
        raise RuntimeError("%s: %s" % (who, found["error"]))
    return found


def pid_of(process):
    return process.talker.process.pid


class Device:
    """What the device's memory is, without a context."""

    def __init__(self, node):
        self.holder = node.ballast() if node.sim else None

    def used(self):
        """Bytes of the device in use by all processes."""
        if self.holder:
            found = met(self.holder.ask("free"), "the simulated device")
            return found["total"] - found["free"]
        return int(self.query("memory.used")) * MiB

    @staticmethod
    def query(what):
        try:
            done = subprocess.run(["nvidia-smi", "-i", common.visible(0), "--query-gpu=" + what, "--format=csv,noheader,nounits"], check=True,
                                  capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as e:
            raise RuntimeError("nvidia-smi: %s" % e) from None
        return done.stdout.split("\n")[0].strip()

    def until(self, most, timeout=60):
        """Waits until so much is in use at most, as memory of a killed process comes back late; what is in use then."""
        end = time.monotonic() + timeout
        while True:
            used = self.used()
            if used <= most or time.monotonic() > end:
                return used
            time.sleep(0.2)


class Run:
    """One run: the broker, the readers, and what was found."""

    def __init__(self, node, args, checks):
        self.node, self.args, self.c = node, args, checks
        self.size, self.each = args.size * MiB, args.each * MiB
        self.manager = shared.Manager(node)
        self.broker = node.broker(manager=self.manager)
        self.device = Device(node)
        self.readers = []

    def right(self, processes, when, seed=SEED):
        """Whether what processes read is what was written."""
        for p in processes:
            p.send("check", seed=seed)
        wrong = [pid_of(p) for p in processes if not met(p.answer(), "a reader")["right"]]
        self.c.add("contents " + when, "wrong in %d of %d processes" % (len(wrong), len(processes)) if wrong else "right in %d" % len(processes),
                   "right", not wrong)

    def fresh(self, when):
        """A new process that gets the object and ends."""
        p = self.node.tensors(self.broker)
        met(p.ask("start"), "a reader")
        met(p.ask("get", name=NAME), "a reader %s" % when)
        self.right([p], "in a new process, %s" % when)
        p.end()

    def contexts(self):
        """The readers, with a context and no object; they all stay."""
        before = self.device.used()
        self.readers = [self.node.tensors(self.broker) for _ in range(self.args.readers)]
        for p in self.readers:
            p.send("start")
        gpu = [met(p.answer(300), "a reader") for p in self.readers][0]
        self.c.add("%d contexts without an object, each" % len(self.readers), common.size((self.device.used() - before) // len(self.readers)))
        if "gpu" in gpu:
            self.c.add("GPU, PyTorch, persistence mode", "%s, %s, %s" % (gpu["gpu"], gpu["torch"], self.device.query("persistence_mode")))

    def write(self):
        """The object, of a writer that is killed; how much memory is in use before and after."""
        writer = self.node.tensors(self.broker)
        met(writer.ask("start", 300), "the writer")
        # The broker loads the driver with its first object.
        met(writer.ask("put", name="first", bytes=2 * MiB, each=2 * MiB, seed=1), "the writer")
        met(writer.ask("remove", name="first"), "the writer")
        writer.end()
        before = self.device.used()
        writer = self.node.tensors(self.broker)
        met(writer.ask("start", 300), "the writer")
        took = met(writer.ask("put", name=NAME, bytes=self.size, each=self.each, seed=SEED), "the writer")["ms"]
        writer.talker.process.kill()
        writer.talker.process.wait()
        self.c.add("put of %s, ms (GB/s)" % common.size(self.size), "%.0f (%.1f)" % (took, self.size / took / 1e6))
        most = self.size * 21 // 20
        used = self.device.until(before + most) - before
        self.c.add("one copy, the writer was killed", common.size(used), "%s to %s" % (common.size(self.size), common.size(most)),
                   self.size <= used <= most)
        return before

    def read(self, before):
        """All readers, one after the other; and all at once hold one copy."""
        rows, judged = [], None if self.args.sim else GOAL
        found = [met(p.ask("get", name=NAME), "a reader") for p in self.readers]
        for what, key, goal in (("get", "ms", judged), ("get and the first use of 3 tensors", "used_ms", None)):
            times = sorted(x[key] for x in found)
            rows.append([what, len(times), *("%.2f" % t for t in (times[0], common.median(times), times[-1])), goal or ""])
            self.c.add("%s of %s, ms: median, maximum" % (what, common.size(self.size)), "%.2f, %.2f" % (common.median(times), times[-1]),
                       "below %d" % goal if goal else "", times[-1] < goal if goal else None)
        print(common.table(["of %s in %d tensors" % (common.size(self.size), found[0]["tensors"]), "processes", "least, ms", "median", "maximum", "goal"], rows))
        used, most = self.device.used() - before, self.size * 21 // 20
        self.c.add("one copy for %d readers" % len(self.readers), common.size(used), "%s to %s" % (common.size(self.size), common.size(most)),
                   self.size <= used <= most)
        self.right(self.readers, "after the writer was killed")

    def overwrite(self):
        """One reader writes."""
        bad = self.readers.pop()
        failed = met(bad.ask("overwrite"), "the reader that writes")["failed"]
        self.c.add("a write through a reader's mapping", failed or "went through", "fails", bool(failed))
        bad.end()
        self.right(self.readers, "after another reader wrote")
        self.fresh("after a reader wrote")

    def restarts(self):
        """The broker is killed with readers, and when no other process is left."""
        self.broker.kill()
        self.right(self.readers, "while there is no broker")
        self.broker = self.node.broker(manager=self.manager)
        self.right(self.readers, "of readers that outlived the broker")
        for p in self.readers[:1]:
            met(p.ask("close"), "a reader")
            met(p.ask("get", name=NAME), "a reader that connects again")
            self.right([p], "of a reader that connected again")
        self.fresh("after the broker was killed")
        for p in self.readers:
            p.end()
        self.broker.kill()
        time.sleep(2)  # for the driver to give up what it would, with no process left
        self.broker = self.node.broker(manager=self.manager)
        self.fresh("after all processes had ended but the one that keeps descriptors")

    def cycles(self):
        """Objects that come and go."""
        p = self.node.tensors(self.broker)
        met(p.ask("start", 300), "the process of the cycles")
        state = lambda: {"device": self.device.used(), "stored": self.manager.count(), "broker": self.broker.open(), "process": p.ask("open")}  # noqa: E731
        cycle = lambda n, seconds: met(p.ask("cycles", seconds + 100, n=n, seconds=seconds, bytes=2 * MiB), "the process of the cycles")  # noqa: E731
        cycle(min(500, self.args.cycles), self.args.seconds)
        before = state()
        found = cycle(self.args.cycles, self.args.seconds)
        after = state()
        n = found["n"]
        self.c.add("cycles of put, get, close and remove", "%d, %.2f ms each" % (n, found["ms"] / max(n, 1)), "%d within %d s" % (self.args.cycles, self.args.seconds),
                   n >= self.args.cycles)
        for what, was, now, more in (
                ("memory of the device", before["device"], after["device"], 2 * MiB),
                ("descriptors that are stored", before["stored"], after["stored"], 0),
                ("descriptors of the broker", before["broker"]["descriptors"], after["broker"]["descriptors"], 2),
                ("descriptors of the process", before["process"]["descriptors"], after["process"]["descriptors"], 2),
                ("resident memory of the broker", before["broker"]["resident"], after["broker"]["resident"], 16 * MiB),
                # The library collects its garbage when there are 64 MiB of it.
                ("resident memory of the process", before["process"]["resident"], after["process"]["resident"], 80 * MiB)):
            show = common.size if "memory" in what else str
            self.c.add("%s before and after %d cycles" % (what, n), "%s, %s" % (show(was), show(now)), "at most %s more" % show(more), now - was <= more)
        p.end()

    def file(self):
        """A safetensors file: the first process reads it, the others map it."""
        path, size = os.path.join(self.node.folder, "lab.safetensors"), self.args.file * MiB
        each = min(size, self.each)
        many = [self.node.tensors(self.broker) for _ in range(3)]
        for p in many:
            p.send("start")
        for p in many:
            met(p.answer(300), "a reader of the file")
        met(many[0].ask("file", 300, path=path, bytes=size, each=each), "the file")
        found = [met(p.ask("load", 300, path=path), "a reader of the file") for p in many]
        first, later = found[0], max(x["ms"] for x in found[1:])
        self.c.add("load_safetensors of %s that the host has cached, first process, ms" % common.size(size), "%.0f" % first["ms"])
        if "own_ms" in first:
            self.c.add("the same by safetensors.torch.load_file, ms", "%.0f" % min(x["own_ms"] for x in found))
        self.c.add("load_safetensors, second and third process, ms", "%.2f" % later, "" if self.args.sim else "below %d" % GOAL,
                   None if self.args.sim else later < GOAL)
        self.right(many, "of the file", seed=100)
        for p in many:
            p.end()

    def state(self, mode):
        """A model's weights."""
        p = self.node.tensors(self.broker, mode)
        met(p.ask("start", 500), "the model's process")
        before = self.device.used()
        x = met(p.ask("state", name="state/" + mode, seed=3), "the model's process")
        ok = x["equal"] and not x["equal_before"] and not x["own"] and x["open"] == [1] and x["closed"] == [0]
        self.c.add("state_dict, %s" % mode, "%s; readers %s, then %s" % ("equal" if x["equal"] else "another result", x["open"], x["closed"]),
                   "equal, one reader, then none", ok)
        self.c.add("state_dict, %s: types" % mode, ", ".join(x["types"]), "bfloat16, float32, int64", len(x["types"]) == 3)
        p.end()
        used = self.device.until(before)
        self.c.add("state_dict, %s: memory after the end" % mode, common.size(used), "at most " + common.size(before), used <= before)


def steps(run, args):
    """The steps; where one fails for another reason than a figure the next ones are still tried."""
    before = run.device.used()
    run.contexts()
    base = run.write()
    run.read(base)
    later = [run.overwrite, run.restarts, run.cycles, run.file]
    if not args.sim:
        later += [functools.partial(run.state, "native"), functools.partial(run.state, "cistern")]
    for step in later:
        try:
            step()
        except RuntimeError as e:
            run.c.add(getattr(step, "__name__", "state"), "%s; the broker says: %s" % (e, run.broker.said()[-300:]), "it works", False)
    done = seen.cistern("node", "rm", NAME, "--socket", run.broker.socket)
    run.c.add("cistern node rm", done.why() if done.rc else "ok", "ok", done.rc == 0)
    listed = seen.cistern("node", "ls", "--objects", "--json", "--socket", run.broker.socket)
    run.c.add("cistern node ls --objects", "status %s" % listed.rc, "status 0", listed.rc == 0)
    for left in json.loads(listed.out)["objects"] if listed.rc == 0 else []:  # those of files: descriptors that are stored outlive the broker
        seen.cistern("node", "rm", left["name"], "--socket", run.broker.socket)
    run.broker.end()
    used = run.device.until(before + 64 * MiB)
    run.c.add("memory in use at the end, and before", "%s, %s" % (common.size(used), common.size(before)), "at most 64 MiB more", used <= before + 64 * MiB)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--size", type=int, default=8 * 1024, help="MiB of the weights")
    p.add_argument("--each", type=int, default=128, help="MiB of a tensor")
    p.add_argument("--readers", type=int, default=10)
    p.add_argument("--cycles", type=int, default=10_000)
    p.add_argument("--seconds", type=int, default=100, help="time for the cycles")
    p.add_argument("--file", type=int, default=4 * 1024, help="MiB of the safetensors file")
    shared.arguments(p, 16 * shared.GiB)
    args = p.parse_args()
    c = common.Checks("node-objects")
    with shared.Node("objects", args.sim) as node:
        try:
            steps(Run(node, args, c), args)
        except RuntimeError as e:
            c.add("named objects", str(e), "they work", False)
    return seen.finish(c)


if __name__ == "__main__":
    sys.exit(main())
