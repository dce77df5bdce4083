"""Does PyTorch under Cistern behave as PyTorch does? Each case in a process of its own.

    python fidelity.py [--native] [--jobs N] [--only WORD]... [--skip WORD]... [--list]
    python fidelity.py --standin VERSION [the same]
    python fidelity.py --upstream [the same]
    python fidelity.py --run NAME          one case in this process

With --native the same cases run under native PyTorch: what fails there is wrong with the case. A case that native
PyTorch cannot pass says why (--list shows it) and is left out then.

With --standin the cases run without a GPU, over a PyTorch of PyPI and stand-ins for NVIDIA's libraries (standin/__init__.py),
in forks of one process that has imported torch, except those that set variables of the environment. Programs that cases
start are forks too, where nothing depends on how an interpreter starts. A case that needs a GPU says why (gpu, in --list). It has to fail then.

With --upstream all memory comes from cuMemAlloc by the functions of a library, allocator.c (the setting upstream). Cases about
the device's own chunks say so (chunks, in the registry) and are left out.

Writes one JSON line per case into the results folder and prints what did not pass, then a table. The exit status is 0
when nothing failed.
"""
import argparse
import collections
import faulthandler
import json
import os
import queue
import sys
import tempfile
import threading
import time
import traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cases
import common
import standin
import standin.forks


def run_one(name):
    """Runs the case here, prints its result as the last line and returns the exit status."""
    c = cases.REGISTRY[name]
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(5, c.timeout - 4), exit=False)
    result = {"ok": False}
    try:
        result = {"ok": True, "note": c.fn() or ""}
        why = missing(c)
        if why:
            result = {"ok": False, "why": why}
    except cases.Skip as e:
        result = {"ok": True, "skip": str(e)}
    except BaseException as e:
        traceback.print_exc()
        result = {"ok": False, "why": one_line(e)}
    faulthandler.cancel_dump_traceback_later()
    print("RESULT " + json.dumps(result), flush=True)
    return 0 if result["ok"] else 1


def one_line(e):
    at = [f for f in traceback.extract_tb(e.__traceback__) if "/cases/" in f.filename and not f.filename.endswith("base.py")]
    where = f" ({os.path.basename(at[-1].filename)}:{at[-1].lineno})" if at else ""
    return f"{type(e).__name__}: {' '.join(str(e).split())[:280]}{where}"


def missing(c):
    """Whether Cistern was there, where a case must not pass without it."""
    if c.guard is None:
        return None
    library, adapter = common.loaded("libcistern.so"), common.loaded("libcistern_torch")
    if os.environ.get("CISTERN_TEST_MODE") != "cistern":
        return "Cistern is loaded in a native run" if library or adapter else None
    if not library:
        return "libcistern.so is not loaded: the case ran without Cistern"
    if c.guard == "adapter" and not adapter:
        return "the adapter is not loaded: the case ran on the plain allocator"
    if c.guard == "plain" and adapter:
        return "the adapter is loaded where the plain allocator was forced"
    return None


def start(c, mode, forks):
    timeout = c.timeout * (4 if "STANDIN_PYTHON" in os.environ else 1)  # for the processor, which does the GPU's work
    python, env = sys.executable, common.environment(mode, c.env)
    if variables(c) in forks:
        python, env["STANDIN_FORKS"] = env["STANDIN_PYTHON"], forks[variables(c)].name
    else:
        env.pop("STANDIN_PYTHON", None)
    argv = common.command(mode, [python, os.path.abspath(__file__), "--run", c.name], c.conf)
    done = common.run(argv, env=env, timeout=timeout)
    result = {"case": c.name, "group": c.group, "mode": mode, "rc": done.rc, "sec": round(done.wall, 2), "ok": False, "why": ""}
    said = None
    for line in done.out.splitlines():
        if line.startswith("RESULT "):
            said = json.loads(line[7:])
    if done.rc is None:
        result["why"] = f"did not end within {timeout} s" + (" (after its result)" if said else "")
    elif said is None:
        result["why"] = done.why()
    else:
        result.update(said)
        if said["ok"] and done.rc != 0:
            result.update(ok=False, why=f"passed, then the process ended with status {done.rc}: {done.why()}")
    if "STANDIN_PYTHON" in os.environ and c.gpu:
        result = marked(c, result)
    if not result["ok"]:
        result["tail"] = (done.out[-2500:] + "\n--- stderr\n" + done.err[-5000:])
    return result


def marked(c, result):
    """The result of a case that is said to need a GPU, where there is none."""
    if result["ok"] and not result.get("skip"):
        return {**result, "ok": False, "why": f"it passes without a GPU: gpu={c.gpu!r} has to go"}
    return {**result, "ok": True, "skip": f"needs a GPU: {c.gpu}"}


def run_fork(argv):
    """What the fork of --serve was asked to be: this program, or `python -c`. In the process that forks there is none."""
    if argv is None:
        return 0
    if argv[0] == os.path.abspath(__file__):
        return main(argv[1:])
    while argv[0] != "-c":
        del argv[0]  # the interpreter's options: those of multiprocessing
    return standin.forks.run_text(argv[1:])


def device_count():
    done = common.run([sys.executable, "-c", "import torch; print(torch.__version__, torch.cuda.device_count(), torch.__path__[0])"],
                      env=common.environment("native"), timeout=180)
    if done.rc != 0:
        return 0, "", done.why(), done.wall
    version, n, folder = done.out.split()[-3:]
    return int(n), folder, version, done.wall


def choose(args, mode, gpus):
    chosen, left = [], []
    for c in cases.REGISTRY.values():
        if args.only and not any(w == c.name or w == c.group or (w.endswith("*") and c.name.startswith(w[:-1])) for w in args.only):
            continue
        if any(w in (c.name, c.group) for w in args.skip):
            continue
        why = None
        if mode != "cistern" and c.native is not True:
            why = f"not native: {c.native}"
        elif args.upstream and (c.chunks or c.conf and any(k in c.conf for k in ("backend:", "ipc:", "single_handle:"))):
            why = f"over an upstream: {c.chunks or c.conf}"
        elif c.gpus > gpus:
            why = f"needs {c.gpus} GPUs"
        if why:
            left.append({"case": c.name, "group": c.group, "mode": mode, "ok": True, "skip": why, "sec": 0})
        else:
            chosen.append(c)
    return chosen, left


def say(r, verbose):
    if not r["ok"]:
        print(f"FAIL {r['case']} ({r['sec']:.0f} s): {r['why']}", flush=True)
    elif r.get("skip"):
        if verbose or "GPU" not in r["skip"] and "native" not in r["skip"]:
            print(f"skip {r['case']}: {r['skip']}", flush=True)
    elif verbose:
        print(f"pass {r['case']} ({r['sec']:.1f} s) {r.get('note', '')}", flush=True)


def variables(c):
    return tuple(sorted(c.env.items()))


def open_forks(chosen, mode):
    """A process that forks for each environment that several cases have: it is read while torch is imported. Cistern's settings are not."""
    argv = common.command(mode, [sys.executable, os.path.abspath(__file__), "--serve"])
    return {v: standin.forks.Forks(argv, common.environment(mode, dict(v)))
            for v, n in collections.Counter(map(variables, chosen)).items() if n > 1}


def run_all(chosen, mode, jobs, verbose, deadline, forks):
    """The cases that share the device side by side, longest first; then those that need it alone."""
    results, lock, work = [], threading.Lock(), queue.Queue()
    for c in sorted((c for c in chosen if not c.alone), key=lambda c: -c.timeout):
        work.put(c)
    def worker(q):
        while True:
            try:
                c = q.get_nowait()
            except queue.Empty:
                return
            r = start(c, mode, forks) if time.monotonic() < deadline else {
                "case": c.name, "group": c.group, "mode": mode, "ok": False, "why": "not started: no time was left", "sec": 0}
            with lock:
                results.append(r)
                say(r, verbose)
    threads = [threading.Thread(target=worker, args=(work,)) for _ in range(jobs)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    alone = queue.Queue()
    for c in (c for c in chosen if c.alone):
        alone.put(c)
    worker(alone)
    return results


def summary(results):
    groups = {}
    for r in results:
        g = groups.setdefault(r["group"], [0, 0, 0, 0.0])
        g[0 if r["ok"] and not r.get("skip") else 1 if r["ok"] else 2] += 1
        g[3] += r["sec"]
    rows = [[g, *v[:3], f"{v[3]:.0f}"] for g, v in sorted(groups.items())]
    total = [sum(v[i] for v in groups.values()) for i in range(4)]
    return common.table(["group", "passed", "skipped", "failed", "sec"], rows + [["all", *total[:3], f"{total[3]:.0f}"]])


def main(argv):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--run", metavar="NAME", choices=list(cases.REGISTRY), help="run one case in this process")
    p.add_argument("--serve", type=int, metavar="DESCRIPTOR", help="run the programs that this socket is asked for in forks of this process")
    p.add_argument("--native", action="store_true", help="the same cases under native PyTorch")
    p.add_argument("--mode", choices=common.MODES, default=None)
    p.add_argument("--jobs", type=int, default=max(2, min(8, (os.cpu_count() or 4) // 2)), help="cases at a time")
    p.add_argument("--only", action="append", default=[], metavar="WORD", help="a case, a group, or the start of names followed by *")
    p.add_argument("--skip", action="append", default=[], metavar="WORD", help="a case or a group")
    p.add_argument("--budget", type=float, default=420, help="seconds after which no case is started")
    p.add_argument("--name", default="", help="for the file of results, where several runs share a folder")
    p.add_argument("--standin", metavar="VERSION", help="over that PyTorch of PyPI, without a GPU; cases that are marked with gpu have to fail")
    p.add_argument("--upstream", action="store_true", help="all memory from cuMemAlloc, by the functions of allocator.c")
    p.add_argument("--list", action="store_true")
    p.add_argument("-v", "--verbose", action="store_true", help="say also what passed")
    args = p.parse_args(argv)
    if args.run:
        return run_one(args.run)
    if args.serve is not None:
        return run_fork(standin.forks.serve(args.serve))
    if args.list:
        print(common.table(["case", "group", "alone", "native", "needs a GPU"],
                           [[c.name, c.group, "yes" if c.alone else "", "" if c.native is True else c.native, c.gpu or ""]
                            for c in cases.REGISTRY.values()]))
        return 0
    if not args.standin:
        return run_chosen(args)
    with tempfile.TemporaryDirectory(prefix="cistern-standin-") as folder:
        os.environ.update(standin.environment(args.standin, folder), CISTERN_GPU_BUILD=folder)
        return run_chosen(args)


def run_chosen(args):
    mode = args.mode or ("native" if args.native else "cistern")
    begin = time.monotonic()
    gpus, folder, version, wall = device_count()
    if not gpus:
        print(f"fidelity: no GPU under this torch ({version})")
        return 2
    print(f"fidelity under {mode}: torch {version}, {gpus} GPU(s); importing torch took {wall:.1f} s", flush=True)
    try:
        os.environ["CISTERN_PROBE"] = common.build("probe", folder)
    except Exception as e:
        print(f"fidelity: {e}")
        return 2
    if mode == "cistern":
        first = common.run(common.command(mode, [sys.executable, "-c", "import torch; torch.empty(1, device='cuda'); print('ready')"]),
                           env=common.environment(mode), timeout=300)
        print(f"first program under cistern run, the adapter built or found: {first.wall:.1f} s"
              + ("" if first.rc == 0 and "ready" in first.out else f"; FAILED, {first.why()}"), flush=True)
        if "ready" not in first.out:
            print(first.err[-6000:])
            return 2
    if args.upstream:
        os.environ["CISTERN_TEST_CONF"] = f"upstream:external:library={common.build_allocator()};alloc=my_alloc;free=my_free"
        os.environ["ALLOCATOR_CUDA"] = "libcuda.so.1"
    chosen, left = choose(args, mode, gpus)
    forks = open_forks(chosen, mode) if args.standin else {}
    results = left + run_all(chosen, mode, args.jobs, args.verbose, begin + args.budget, forks)
    for f in forks.values():
        f.close()
    path = common.write_results(f"fidelity-{mode}{'-' + args.name if args.name else ''}.jsonl", results)
    print(summary(results))
    failed = sorted(r["case"] for r in results if not r["ok"])
    print(f"{len(failed)} failed of {len(results)} in {time.monotonic() - begin:.0f} s" + (": " + " ".join(failed) if failed else "") + f"; details in {path}")
    return 1 if failed or all(r.get("skip") for r in results) else 0  # what tests nothing does not pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
