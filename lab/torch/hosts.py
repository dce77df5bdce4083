"""PyTorch processes that are hard on a library: each scenario goes on for some seconds in a process of its own under Cistern, which
must live, with right contents of all tensors.

    python hosts.py [--seconds 60] [--only NAME]

profiler      a native profiler: SIGPROF for every millisecond of CPU time, a handler without SA_ONSTACK and 8 KiB of stack
faulthandler  all threads' stacks on a signal, a hundred times a second
dataloader    DataLoader with workers that are forked, pinned memory and a profiler
descriptors   allocating, pausing, sharing with 0 to 8 descriptors left: an error is right, and afterwards everything works
"""
import argparse
import ctypes
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time

import common

MiB = common.MiB
THREADS = 4


class Work:
    """Threads that make tensors, fill them, and compare before they drop them."""

    def __init__(self, seconds):
        self.until = time.monotonic() + seconds
        self.made, self.errors = 0, []

    def goes_on(self):
        return time.monotonic() < self.until and not self.errors

    def turns(self, seed):
        import torch
        r = random.Random(seed)
        held = []
        with torch.cuda.stream(torch.cuda.Stream()):
            while self.goes_on():
                value = r.randrange(1, 251)
                held.append((torch.full((r.randrange(1, 4 * MiB) >> r.randrange(12) or 1,), value, dtype=torch.uint8, device="cuda"), value))
                self.made += 1
                if len(held) > 100:
                    t, value = held.pop(r.randrange(len(held)))
                    if not bool((t == value).all()):
                        raise AssertionError(f"a tensor of {t.numel()} bytes has other contents than {value}")
            for t, value in held:
                if not bool((t == value).all()):
                    raise AssertionError(f"at the end a tensor of {t.numel()} bytes has other contents than {value}")

    def guarded(self, body, *arguments):
        def thread():
            try:
                body(*arguments)
            except BaseException as e:
                self.errors.append(f"{type(e).__name__}: {str(e).partition(chr(10))[0]}")
        return threading.Thread(target=thread)

    def run(self, beside=()):
        threads = [self.guarded(self.turns, i) for i in range(THREADS)] + [self.guarded(b) for b in beside]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return {"tensors": self.made}


def profiled():
    """The profiler, compiled where the bundle has it not."""
    path = os.path.join(common.HERE, "libprofiler.so")
    if not os.path.isfile(path):
        path = os.path.join(common.build_folder(), "libprofiler.so")
        subprocess.run([os.environ.get("CC", "cc"), "-O1", "-g", "-shared", "-fPIC", "-o", path, os.path.join(common.HERE, "profiler.c")],
                       check=True)
    lib = ctypes.CDLL(path)
    lib.profiler_stop.restype = ctypes.c_long
    if lib.profiler_start() != 0:
        raise OSError("no SIGPROF")
    return lib


def profiler(work):
    lib = profiled()
    found = work.run()
    return {**found, "samples": lib.profiler_stop()}


def faulthandler(work):
    import faulthandler as handler
    with tempfile.TemporaryFile() as out:
        handler.enable(out)
        handler.register(signal.SIGUSR1, out, all_threads=True)
        sent = [0]

        def send():
            while work.goes_on():
                time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGUSR1)
                sent[0] += 1
                if out.tell() > 64 * MiB:
                    out.seek(0)
                    out.truncate()
        found = work.run([send])
        handler.unregister(signal.SIGUSR1)
        handler.disable()
    return {**found, "signals": sent[0]}


class Numbered:
    """A data set whose items follow from their index."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        import torch
        return torch.full((8192,), index % 251, dtype=torch.uint8), index


def dataloader(work):
    import torch
    lib = profiled()
    batches = [0]

    def load():
        while work.goes_on():
            for data, index in torch.utils.data.DataLoader(Numbered(), batch_size=32, num_workers=4, pin_memory=True):
                on_gpu, want = data.cuda(non_blocking=True), (index % 251).to(torch.uint8).cuda()
                if not bool((on_gpu == want[:, None]).all()):
                    raise AssertionError("a batch has other contents")
                batches[0] += 1
                if not work.goes_on():
                    break
    found = work.run([load])
    return {**found, "batches": batches[0], "samples": lib.profiler_stop()}


def descriptors(work):
    import cistern
    import torch
    from torch.multiprocessing import reductions
    counts = {"succeeded": 0, "failed": 0}

    def attempts():
        held = [torch.full((3 * MiB,), i + 1, dtype=torch.uint8, device="cuda") for i in range(3)]
        with cistern.tag("paused"):
            paused = torch.full((4 * MiB,), 9, dtype=torch.uint8, device="cuda")

        def allocate():
            held.append(torch.full((64 * MiB,), len(held) + 1, dtype=torch.uint8, device="cuda"))

        def pause(keep):
            torch.cuda.synchronize()
            cistern.pause(tag="paused", keep=keep)
            cistern.resume(tag="paused")

        def share():
            reductions.reduce_tensor(torch.full((MiB,), 5, dtype=torch.uint8, device="cuda"))

        def each(must):
            for body, arguments in ((allocate, ()), (pause, ("host",)), (pause, ("disk",)), (share, ())):
                try:
                    body(*arguments)
                    counts["succeeded"] += 1
                except (RuntimeError, OSError, cistern.CisternError):
                    if must:
                        raise
                    counts["failed"] += 1
            cistern.resume(tag="paused")
            if not bool((paused == 9).all()) or not all(bool((t == i + 1).all()) for i, t in enumerate(held)):
                raise AssertionError("a tensor has other contents")
            del held[3:]
            torch.cuda.empty_cache()

        most = resource.getrlimit(resource.RLIMIT_NOFILE)
        while work.goes_on():
            for left in range(9):
                taken = []
                used = max(int(n) for n in os.listdir("/proc/self/fd")) + 16
                resource.setrlimit(resource.RLIMIT_NOFILE, (used, most[1]))
                try:
                    while True:
                        taken.append(os.open("/dev/null", os.O_RDONLY))
                except OSError:
                    pass
                for fd in taken[:left]:
                    os.close(fd)
                try:
                    each(False)
                finally:
                    for fd in taken[left:]:
                        os.close(fd)
                    resource.setrlimit(resource.RLIMIT_NOFILE, most)
            each(True)
    thread = work.guarded(attempts)
    thread.start()
    thread.join()
    return counts


SCENARIOS = {f.__name__: f for f in (profiler, faulthandler, dataloader, descriptors)}


def program(name, seconds):
    import torch
    torch.zeros(1, device="cuda")
    common.require_cistern()
    work = Work(seconds)
    found = SCENARIOS[name](work)
    torch.cuda.synchronize()
    print(json.dumps({**found, "errors": work.errors}))
    return 1 if work.errors or not all(found.values()) else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--only", choices=SCENARIOS)
    parser.add_argument("--child", choices=SCENARIOS)
    o = parser.parse_args()
    if o.child:
        return program(o.child, o.seconds)
    failed = 0
    for name in [o.only] if o.only else SCENARIOS:
        done = common.child("cistern", "hosts.py", ["--child", name, "--seconds", str(o.seconds)], timeout=o.seconds + 120)
        found = done.last_json() or {}
        for error in found.pop("errors", []):
            print(f"      {name}: {error}")
        failed += done.rc != 0
        print(f"{'ok  ' if done.rc == 0 else 'FAIL'}  {name:<12}  " + "  ".join(f"{k} {v:,}" for k, v in found.items())
              + ("" if done.rc == 0 else f"  {done.why()}"))
    print("FAIL" if failed else "PASS")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
