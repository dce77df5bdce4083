"""Stream order across libraries: a producer in one library works on its stream for long, frees the memory while that work is in
flight, and the next library uses what it is given at once. Every kernel writes its own value and then counts what is not it:
a missing order would show as corrupted words. Memory is limited so that it must be the same. The check is shown to fail where
the order is left out.

    python order.py [--rounds 3000]
"""
import argparse
import itertools
import random
import sys
import threading

import shared
from shared import common

BUFFER = 64 << 20
KERNELS = r"""
extern "C" __global__ void put(unsigned *p, size_t n, unsigned value, long long cycles) {
  long long begin = clock64();
  while (clock64() - begin < cycles) {}
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) p[i] = value;
}
extern "C" __global__ void check(const unsigned *p, size_t n, unsigned value, unsigned long long *wrong) {
  unsigned long long bad = 0;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) bad += p[i] != value;
  if (bad) atomicAdd(wrong, bad);
}
"""


class Work:
    """Kernels that are launched on any library's stream."""

    def __init__(self):
        import cupy
        import numpy
        self.cupy, self.numpy = cupy, numpy
        module = cupy.RawModule(code=KERNELS)
        self.put, self.check = module.get_function("put"), module.get_function("check")
        self.wrong = cupy.zeros(1, dtype=cupy.uint64)
        self.on = {}
        # Loading a kernel may wait for the GPU: do it now.
        self.run(0, self.wrong.data.ptr, 0, 0, 0)
        shared.synchronize()

    def run(self, handle, address, size, value, cycles):
        np = self.numpy
        if handle not in self.on:
            self.on[handle] = self.cupy.cuda.ExternalStream(handle)
        words = np.uint64(size // 4)
        with self.on[handle]:
            self.put((16,), (256,), (np.uint64(address), words, np.uint32(value), np.int64(cycles)))
            self.check((16,), (256,), (np.uint64(address), words, np.uint32(value), np.uint64(self.wrong.data.ptr)))

    def errors(self):
        shared.synchronize()
        return int(self.wrong[0])


def rounds(work, sources, streams, count, seed, size=BUFFER):
    """Takes turns with the libraries: memory, long work, given back with the work in flight."""
    choose, used = random.Random(seed), set()
    for i in range(count):
        k = choose.randrange(len(sources))
        memory = sources[k].allocate(size, streams[k])
        address = sources[k].address(memory)
        used.add(address)
        work.run(sources[k].handle(streams[k]), address, size, seed * 1_000_000 + i + 1, choose.choice((0, 50_000, 400_000)))
        del memory
    return len(used)


def libraries(names, kind, count):
    shared.enable(shared.LIBRARIES)
    work = Work()
    sources = [shared.Source(n) for n in names]
    streams = [s.stream(kind) for s in sources]
    before = shared.counters("remaps", "stream_syncs", "device_allocs")
    places = rounds(work, sources, streams, count, 1)
    after = shared.counters("remaps", "stream_syncs", "device_allocs")
    return {"errors": work.errors(), "places": places, **{k: after[k] - before[k] for k in before}}


def threads(count):
    shared.enable(shared.LIBRARIES)
    work = Work()
    failed = []

    def one(seed, name):
        try:
            source = shared.Source(name)
            rounds(work, [source], [source.stream()], count, seed, BUFFER // 8)
        except BaseException as e:
            failed.append("%s: %s" % (name, e))

    all = [threading.Thread(target=one, args=(i + 2, shared.LIBRARIES[i % 3])) for i in range(6)]
    for t in all:
        t.start()
    for t in all:
        t.join()
    return {"errors": work.errors(), "failed": failed[:3], "places": 0}


def unordered(count):
    """The same with the order left out: one buffer for all, and no call that says so."""
    shared.enable(shared.LIBRARIES)
    work = Work()
    sources = [shared.Source(n) for n in shared.LIBRARIES]
    streams = [s.stream("external") for s in sources]
    memory = sources[0].allocate(BUFFER)
    address = sources[0].address(memory)
    shared.synchronize()
    choose = random.Random(1)
    for i in range(count):
        k = choose.randrange(3)
        work.run(sources[k].handle(streams[k]), address, BUFFER, i + 1, choose.choice((0, 50_000, 400_000)))
    return {"errors": work.errors(), "places": 1}


def short_streams(count):
    """CuPy's streams end before the arrays that were allocated on them, with work in flight."""
    shared.enable(shared.LIBRARIES)
    work = Work()
    source = shared.Source("cupy")
    for i in range(count):
        stream = source.stream()
        memory = source.allocate(BUFFER, stream)
        work.run(stream.ptr, source.address(memory), BUFFER, i + 1, 200_000)
        work.on.clear()
        del stream
        del memory
    return {"errors": work.errors(), "places": 0}


def graph(count):
    """What a captured graph uses has no other use, until the graph is gone."""
    shared.enable(shared.LIBRARIES)
    import cupy
    n = 8 << 20
    source = cupy.arange(n, dtype=cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    shared.synchronize()
    wrong = 0
    for i in range(max(1, count // 300)):
        with stream:
            out = cupy.empty_like(source)
            cupy.add(source, 0, out=out)  # compiled before the capture
            temporary = source * 2
            out = temporary + 1
            del temporary
            stream.synchronize()
            stream.begin_capture()
            temporary = source * 2
            cupy.add(temporary, 1, out=out)
            del temporary
            captured = stream.end_capture()
        for k in range(5):
            out.fill(0)
            others = [shared.Source(name).allocate(n * 4) for name in shared.LIBRARIES for _ in range(2)]
            for name, memory in zip((a for a in shared.LIBRARIES for _ in range(2)), others):
                shared.Source(name).touch(memory)
            shared.synchronize()
            captured.launch(stream)
            stream.synchronize()
            wrong += int((out != source * 2 + 1).sum())
            wrong += sum(int((cupy.asarray(m) != 1).sum()) for m in others)
            del others
        del captured
    return {"errors": wrong, "places": 0}


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--rounds", type=int, default=3000)
    p.add_argument("--timeout", type=float, default=120)
    p.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        case, names, count = args.child[0], args.child[1].split(","), int(args.child[2])
        if case in ("own", "external"):
            return shared.answer(libraries(names, case, count))
        return shared.answer({"threads": threads, "unordered": unordered, "short": short_streams, "graph": graph}[case](count))
    tight = "limit:%dMiB" % (BUFFER * 3 // 2 >> 20)
    cases = [("all three, own streams", "own", ",".join(shared.LIBRARIES), tight),
             ("all three, numba on another's stream", "external", ",".join(shared.LIBRARIES), tight)]
    cases += [(f"{a} and {b}", "own", f"{a},{b}", tight) for a, b in itertools.combinations(shared.LIBRARIES, 2)]
    cases += [("six threads", "threads", "-", "limit:%dMiB" % (BUFFER * 3 // 2 >> 20)), ("streams that end before their arrays", "short", "-", tight),
              ("CuPy's graphs", "graph", "-", None), ("the order left out", "unordered", "-", None)]
    shared.prepare()
    c, results = common.Checks("libs-order"), []
    for what, case, names, conf in cases:
        count = args.rounds if case in ("own", "external") else max(1, args.rounds // 4)
        done = shared.child("order.py", [case, names, count], args.timeout, conf)
        r = done.last_json()
        if done.rc != 0 or r is None:
            print(done.err[-2000:])
            c.add(what, done.why(), "runs", False)
            continue
        results.append({"case": what, "rounds": count, **r})
        got = f"{r['errors']:,} wrong words in {count:,} rounds" + (f", {r['remaps']} remaps, {r['stream_syncs']} waits" if "remaps" in r else "")
        if r.get("failed"):
            got += ", " + "; ".join(r["failed"])
        if case == "unordered":
            c.add(what, got, "some: the check can fail", r["errors"] > 0)
        else:
            c.add(what, got, "0", r["errors"] == 0 and not r.get("failed"))
    return shared.finish("order", c, results)


if __name__ == "__main__":
    sys.exit(main())
