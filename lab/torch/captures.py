"""Captures on one thread beside pool releases and pauses on others: no capture is invalidated, and contents stay right.

    python captures.py [--seconds 120]

Three threads run until the time is over. One captures a graph after the other, each into a pool of its own, replays it and
checks its result; it keeps the last graphs and hands the oldest to the second thread. That one drops them, so that their
pools are released, and makes, fills, checks and releases pools of its own. The third pauses and resumes tensors with checked
contents; a pause that is refused because a capture is under way counts as such. Any other error fails the program.
"""
import argparse
import json
import queue
import sys
import threading
import time

import common

MiB = common.MiB
CHAIN = 40  # allocations in a capture
KEPT = 4  # graphs that live at a time


class Run:
    """What the threads share."""

    def __init__(self, seconds):
        self.until = time.monotonic() + seconds
        self.graphs = queue.Queue()
        self.counts = dict.fromkeys(("captures", "replays", "graphs_released", "pools_released", "pauses", "refused"), 0)
        self.errors = []

    def goes_on(self):
        return time.monotonic() < self.until and not self.errors

    def guarded(self, body):
        def thread():
            try:
                body(self)
            except BaseException as e:
                self.errors.append(f"{body.__name__}: {type(e).__name__}: {str(e).partition(chr(10))[0]}")
        return threading.Thread(target=thread)


def capture(run):
    import torch
    stream = torch.cuda.Stream()
    kept = []
    with torch.cuda.stream(stream):
        x = torch.zeros(MiB // 4, device="cuda")
        while run.goes_on():
            graph = torch.cuda.CUDAGraph()
            # Not torch.cuda.graph, which waits for the device and empties the cache first.
            graph.capture_begin(capture_error_mode="thread_local")
            y = x
            for _ in range(CHAIN):
                y = y + 1
            graph.capture_end()
            run.counts["captures"] += 1
            kept.append((graph, y))
            for number, (g, result) in enumerate(kept):
                x.fill_(number)
                g.replay()
                if not bool((result == number + CHAIN).all()):
                    raise AssertionError(f"graph {run.counts['captures']}, replay {number}: wrong result")
                run.counts["replays"] += 1
            x.zero_()
            if len(kept) > KEPT:
                run.graphs.put(kept.pop(0))


def release(run):
    import torch
    stream = torch.cuda.Stream()
    number = 0
    with torch.cuda.stream(stream):
        while run.goes_on():
            number += 1
            try:
                graph, result = run.graphs.get_nowait()
                del result
                graph.reset()
                del graph
                run.counts["graphs_released"] += 1
            except queue.Empty:
                pass
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool):
                parts = [torch.full((MiB,), number % 251, dtype=torch.uint8, device="cuda") for _ in range(4)]
            if not all(bool((p == number % 251).all()) for p in parts):
                raise AssertionError(f"pool {number}: wrong contents")
            del parts, pool
            run.counts["pools_released"] += 1


def pause(run):
    import cistern
    import torch
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        with cistern.tag("paused"):
            held = [torch.full((4 * MiB,), i + 1, dtype=torch.uint8, device="cuda") for i in range(4)]
        stream.synchronize()
        while run.goes_on():
            try:
                cistern.pause(tag="paused")
            except cistern.CisternError as e:
                if "is being captured" not in str(e):
                    raise
                run.counts["refused"] += 1
                continue
            cistern.resume(tag="paused")
            run.counts["pauses"] += 1
            if not all(bool((t == i + 1).all()) for i, t in enumerate(held)):
                raise AssertionError(f"pause {run.counts['pauses']}: wrong contents")


def program(seconds):
    import torch
    torch.zeros(1, device="cuda")
    common.require_cistern()
    run = Run(seconds)
    threads = [run.guarded(body) for body in (capture, release, pause)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    run.guarded(lambda _: torch.cuda.synchronize()).run()
    print(json.dumps({**run.counts, "errors": run.errors}))
    return 1 if run.errors or not all(v for k, v in run.counts.items() if k != "refused") else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--child", action="store_true")
    o = parser.parse_args()
    if o.child:
        return program(o.seconds)
    done = common.child("cistern", "captures.py", ["--child", "--seconds", str(o.seconds)], timeout=o.seconds + 90)
    found = done.last_json()
    if found is None:
        print(f"FAIL  {done.why()}")
        return 1
    for error in found.pop("errors"):
        print(f"FAIL  {error}")
    print("  ".join(f"{k} {v:,}" for k, v in found.items()))
    print("PASS" if done.rc == 0 else f"FAIL  {done.why()}")
    return done.rc or 0


if __name__ == "__main__":
    sys.exit(main())
