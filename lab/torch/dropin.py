"""Programs written for torch_memory_saver and for vLLM's CuMemAllocator, on the modules of cistern.compat: what is freed while
memory is paused, what comes back, and that CUDA graphs that were captured before replay right afterwards.

    python dropin.py [--gigabytes 4] [--only saver|vllm]

One line for each check: PASS or FAIL, what was measured and what is wanted. Contents are compared by copies to the host.
"""
import argparse
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile

import common

MiB, GiB = common.MiB, common.GiB
SLACK = 64 * MiB  # of free memory: whole chunks go and come
ROUNDS = 3
WIDTH = 4096


def tell(what, got, want, ok):
    """A check, as a line for the parent."""
    print(json.dumps({"what": what, "got": str(got), "want": want, "ok": bool(ok)}), flush=True)


def free(torch):
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def freed(what, got, want):
    """A check of how many bytes more are free."""
    tell(what, f"{got / MiB:+.1f} MiB", f"{want / MiB:+.1f} MiB", abs(got - want) <= SLACK)


def held(torch, tensors):
    """Bytes of tensors as the engine allocates them."""
    return sum((t.numel() * t.element_size() + 511) // 512 * 512 for t in tensors)


def patterns(torch, tensors, seed):
    """Fills tensors from the host; what each then holds."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for t in tensors:
        found.append(torch.randn(t.shape, generator=generator))
        t.copy_(found[-1])
    return found


def bits(what, torch, tensors, copies, want="every bit"):
    """A check of contents."""
    right = sum(torch.equal(t.cpu(), c) for t, c in zip(tensors, copies))
    tell(what, f"{right} of {len(copies)} tensors", want, right == len(copies) == len(tensors))


class Model:
    """Matrices, a cache that the model writes to, and graphs over both whose pool also has what the capture freed."""

    def __init__(self, torch, gigabytes, weights, cache):
        self.torch = torch
        with weights:
            self.weights = [torch.empty(WIDTH, WIDTH, device="cuda") for _ in range(max(2, gigabytes * GiB // 4 // (4 * WIDTH * WIDTH)))]
        with cache:
            self.cache = torch.empty(gigabytes * GiB * 3 // 4, dtype=torch.uint8, device="cuda")
        self.copies = patterns(torch, self.weights, 1)
        self.x = torch.empty(WIDTH, device="cuda")
        patterns(torch, [self.x], 2)
        self.graphs, self.outputs = [], []

    def step(self, n):
        y = self.x
        for w in self.weights[:n]:
            y = self.torch.tanh((w * y).sum(1) / WIDTH ** 0.5)
        self.cache[:4 * WIDTH].view(self.torch.float32).copy_(y)
        return y * 2 + 1

    def capture(self, graph_context):
        torch, stream = self.torch, self.torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        for n in 1, 2:
            with torch.cuda.stream(stream):
                self.step(n)
            torch.cuda.synchronize()
            g = torch.cuda.CUDAGraph()
            with graph_context(g, stream):
                self.outputs.append(self.step(n))
            self.graphs.append(g)
        torch.cuda.synchronize()

    def replays(self, what, seed):
        """A check that each graph computes what the same step does without one."""
        right = True
        for n, (g, y) in enumerate(zip(self.graphs, self.outputs), 1):
            patterns(self.torch, [self.x], seed + n)
            want = self.step(n).cpu()
            self.cache[:4 * WIDTH].copy_(self.torch.zeros(4 * WIDTH, dtype=self.torch.uint8))
            g.replay()
            self.torch.cuda.synchronize()
            right = right and bool(self.torch.allclose(y.cpu(), want, rtol=1e-5, atol=1e-5)) and \
                bool(self.torch.allclose(self.cache[:4 * WIDTH].view(self.torch.float32).cpu() * 2 + 1, want, rtol=1e-5, atol=1e-5))
        tell(what, f"{len(self.graphs)} graphs, right: {right}", "right", right)

    def addresses(self):
        return [t.data_ptr() for t in [*self.weights, self.cache, *self.outputs]]


def use(torch, what, bytes):
    """Writes to memory that was freed, as another phase of the program would."""
    filler, host = torch.empty(bytes, dtype=torch.uint8, device="cuda"), torch.full((256 * MiB,), 255, dtype=torch.uint8)
    for part in filler.split(host.numel()):
        part.copy_(host[:part.numel()])
    last = int(filler[-1])
    tell(f"{what}: the memory is used for something else", f"{common.size(bytes)}, the last byte is {last}", "255", last == 255)
    del filler, part
    torch.cuda.empty_cache()


# ---- torch_memory_saver, as SGLang calls it ------------------------------------------------------------------------------

def saver(gigabytes):
    import torch
    import torch_memory_saver as module
    from torch_memory_saver import torch_memory_saver as tms
    tell("import torch_memory_saver", module.__name__, "cistern.compat.torch_memory_saver", module.__name__.startswith("cistern."))
    m = Model(torch, gigabytes, tms.region(tag="weights", enable_cpu_backup=True), tms.region(tag="kv_cache"))
    common.require_cistern()
    pool = torch.cuda.graph_pool_handle()
    before = free(torch)
    m.capture(lambda g, stream: tms.cuda_graph(cuda_graph=g, pool=pool, stream=stream, tag="cuda_graph", enable_cpu_backup=True))
    m.replays("graphs before a pause", 10)
    graphs = before - free(torch)
    addresses, weights = m.addresses(), held(torch, m.weights)
    for n in range(ROUNDS):
        torch.cuda.empty_cache()
        before, allocated = free(torch), torch.cuda.memory_allocated()
        # release_memory_occupation
        tms.pause("kv_cache")
        freed(f"round {n}: pause kv_cache", free(torch) - before, m.cache.numel())
        tms.pause("weights")
        freed(f"round {n}: pause weights", free(torch) - before, m.cache.numel() + weights)
        tms.pause("cuda_graph")
        more = free(torch) - before - m.cache.numel() - weights
        tell(f"round {n}: pause cuda_graph", f"{more / MiB:+.1f} MiB", "the outputs and what the capture freed: at least one matrix",
             4 * WIDTH * WIDTH <= more <= graphs + SLACK)
        tell(f"round {n}: memory_allocated", torch.cuda.memory_allocated(), allocated, torch.cuda.memory_allocated() == allocated)
        use(torch, f"round {n}", m.cache.numel())
        # resume_memory_occupation
        tms.resume("cuda_graph")
        tms.resume("weights")
        freed(f"round {n}: resume cuda_graph and weights", free(torch) - before, m.cache.numel())
        bits("round %d: the weights" % n, torch, m.weights, m.copies)
        tms.resume("kv_cache")
        freed(f"round {n}: resume kv_cache", free(torch) - before, 0)
        m.cache[:MiB].copy_(torch.zeros(MiB, dtype=torch.uint8))
        tell(f"round {n}: addresses", "", "the same", m.addresses() == addresses)
        m.replays(f"round {n}: graphs captured before the pause", 20 + n)
    saver_more(torch, module, tms)


def saver_more(torch, module, tms):
    """A file, what disable() leaves out, no tag, processes that are started."""
    with tempfile.TemporaryDirectory() as folder:
        tms.set_disk_backup_dir(folder)
        with tms.region(tag="disk", enable_disk_backup=True):
            a = torch.empty(64 * MiB, device="cuda")
            with tms.disable():
                b = torch.empty(16 * MiB, device="cuda")
        copies = patterns(torch, [a, b], 3)
        before = free(torch)
        tms.pause("disk")
        freed("pause of 256 MiB to a file, and disable()", free(torch) - before, held(torch, [a]))
        bits("memory of disable() meanwhile", torch, [b], copies[1:])
        tms.resume("disk")
        bits("contents from the file", torch, [a, b], copies)
        before = free(torch)
        tms.pause()
        tms.pause()
        more = free(torch) - before
        tell("pause of all, twice", f"{more / MiB:+.1f} MiB", "more than the file's", more > held(torch, [a]))
        tms.resume()
        tms.resume()
        freed("resume of all, twice", free(torch) - before, 0)
    with module.configure_subprocess():
        code = "import torch, torch_memory_saver, cistern.torch; print(torch_memory_saver.__name__, cistern.torch.mode())"
        child = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=120).stdout.strip()
    tell("a process started in configure_subprocess()", child, "on Cistern's adapter", child == "cistern.compat.torch_memory_saver adapter")


# ---- CuMemAllocator, as vLLM's worker calls it ---------------------------------------------------------------------------

class Figures(logging.Handler):
    """The bytes that the allocator's own log names: returned, and kept in host memory."""

    def emit(self, record):
        if record.msg.startswith("sleep"):
            self.last = [int(n * GiB) for n in record.args]


def vllm(gigabytes):
    import torch
    cumem = importlib.import_module("vllm.device_allocator.cumem")  # also where vLLM is not installed
    tell("import vllm.device_allocator.cumem", cumem.__name__, "cistern.compat.vllm", cumem.__name__ == "cistern.compat.vllm")
    tell("cumem_available", cumem.cumem_available, "True", cumem.cumem_available)
    figures = Figures()
    log = logging.getLogger(cumem.__name__)
    log.addHandler(figures)
    log.setLevel(logging.INFO)
    a = cumem.CuMemAllocator.get_instance()
    tell("usage at the start", a.get_current_usage(), "0", a.get_current_usage() == 0)
    m = Model(torch, gigabytes, a.use_memory_pool(tag="weights"), a.use_memory_pool(tag="kv_cache"))
    common.require_cistern()
    with a.use_memory_pool("runtime"):
        with a.use_memory_pool("kv_cache"):
            block = torch.empty(16 * MiB, device="cuda")
        state = torch.empty(16 * MiB, device="cuda")
    states = patterns(torch, [state], 5)
    with a.cudagraph_pool() as pool:
        m.capture(lambda g, stream: torch.cuda.graph(g, pool=pool, stream=stream))
    m.replays("graphs before a sleep", 10)
    weights, cache, kept = held(torch, m.weights), m.cache.numel() + held(torch, [block]), held(torch, [state, *m.outputs])
    usage = a.get_current_usage()
    tell("usage", common.size(usage), common.size(weights + cache + kept), 0 <= usage - (weights + cache + kept) <= MiB)
    addresses = m.addresses()
    for n in range(ROUNDS):
        for level in 1, 2:
            name = f"round {n}, level {level}"
            sleep(torch, a, m, figures, name, level, weights, cache, kept)
            bits(f"{name}: what is always kept", torch, [state], states)
            tell(f"{name}: addresses", "", "the same", m.addresses() == addresses)
            tell(f"{name}: usage", a.get_current_usage(), usage, a.get_current_usage() == usage)
            m.cache[:MiB].copy_(torch.zeros(MiB, dtype=torch.uint8))
            m.replays(f"{name}: graphs captured before", 20 + n)
    torch.cuda.empty_cache()
    before = free(torch)
    a.discard(("kv_cache",))
    freed("discard of kv_cache", free(torch) - before, cache)
    a.wake_up()
    freed("wake_up", free(torch) - before, 0)
    a.release_pools()
    bits("contents after release_pools()", torch, m.weights, m.copies)


def sleep(torch, a, m, figures, name, level, weights, cache, kept):
    """Worker.sleep(level), then wake_up of weights, then of kv_cache. Level 2 loads the weights again, as vLLM's users do."""
    torch.cuda.empty_cache()
    before = free(torch)
    a.sleep(offload_tags=(("weights",) if level == 1 else ()) + ("runtime", "cudagraph"))
    more = free(torch) - before
    want = weights + cache + kept
    tell(f"{name}: sleep", f"{more / MiB:+.1f} MiB", f"at least {want / MiB:+.1f} MiB", more >= want - SLACK)
    want = kept + (weights if level == 1 else 0)
    tell(f"{name}: kept in host memory", common.size(figures.last[1]), common.size(want), abs(figures.last[1] - want) <= MiB)
    use(torch, name, cache)
    a.wake_up(tags=["weights"])
    freed(f"{name}: wake_up of weights leaves the cache paused", free(torch) - before, cache)
    if level == 2:
        for t, c in zip(m.weights, m.copies):
            t.copy_(c)
    bits(f"{name}: the weights", torch, m.weights, m.copies, "every bit" if level == 1 else "as loaded again")
    a.wake_up(tags=["kv_cache"])
    freed(f"{name}: wake_up of kv_cache", free(torch) - before, 0)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--gigabytes", type=int, default=4, help="weights and cache together")
    p.add_argument("--only", choices=("saver", "vllm"))
    p.add_argument("--child", choices=("saver", "vllm"), help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return {"saver": saver, "vllm": vllm}[args.child](args.gigabytes)
    c = common.Checks("dropin")
    for part, compat in (("saver", "torch_memory_saver"), ("vllm", "vllm")):
        if args.only not in (None, part):
            continue
        arguments = ["--child", part, "--gigabytes", str(args.gigabytes)]
        done = common.child("cistern", "dropin.py", arguments, 240, env={"CISTERN_COMPAT": compat})
        rows = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
        for r in rows:
            c.add(f"{part}: {r['what']}", r["got"], r["want"], r["ok"])
        if done.rc != 0:
            print(done.out[-1000:], done.err[-4000:])
        c.add(f"{part}: the program", f"{len(rows)} checks" if done.rc == 0 else done.why(), "ends with status 0", done.rc == 0)
    for r in c.rows:
        print(f"{'PASS' if r['ok'] else 'FAIL'} {r['what']}: {r['got']} (wanted: {r['want']})")
    common.write_results("checks-dropin.jsonl", c.rows)
    failed = sum(not r["ok"] for r in c.rows)
    print(f"{len(c.rows) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
