"""Launchers and surroundings: torchrun, accelerate, spawn, virtual environments, programs with their own sitecustomize."""
import importlib.util
import os
import subprocess
import sys
import tempfile
import textwrap
import time

import common
from .base import GUARD, Skip, bytes_on, case, check, eq, under_cistern

TRAIN = """
import os, sys, torch
import torch.distributed as dist
dist.init_process_group("gloo")
r, n = dist.get_rank(), dist.get_world_size()
torch.manual_seed(r)
torch.cuda.set_device(0)
m = torch.nn.Linear(100, 100).cuda()
for i in range(20):
    m(torch.randn(64, 100, device="cuda")).square().mean().backward()
t = torch.full((1,), float(r + 1))
dist.all_reduce(t)
assert float(t) == n * (n + 1) / 2
assert torch.cuda.memory_allocated() > 0
%s
sys.stdout.write(f"rank {r} ok\\n"); sys.stdout.flush()
dist.destroy_process_group()
""" % textwrap.dedent(GUARD)


def write(folder, name, text):
    path = os.path.join(folder, name)
    with open(path, "w") as f:
        f.write(text)
    return path


def ended_well(done, *parts):
    check(done.rc == 0, done.why())
    for p in parts:
        check(p in done.out, f"lacks {p!r}: {done.out[-500:]} {done.err[-500:]}")


@case(timeout=150, guard=None)
def run_torchrun():
    """Two processes on one GPU."""
    with tempfile.TemporaryDirectory() as d:
        path = write(d, "train.py", TRAIN)
        done = common.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", path], env=dict(os.environ), timeout=140)
        ended_well(done, "rank 0 ok", "rank 1 ok")


@case(timeout=150, guard=None)
def run_torchrun_outermost():
    """`cistern run -- torchrun …` from a clean environment, as a user types it."""
    mode = "cistern" if under_cistern() else "native"
    with tempfile.TemporaryDirectory() as d:
        path = write(d, "train.py", TRAIN)
        torchrun = os.path.join(os.path.dirname(sys.executable), "torchrun")
        argv = [torchrun] if os.path.exists(torchrun) else [sys.executable, "-m", "torch.distributed.run"]
        env = common.native_environment()
        env["CISTERN_TEST_MODE"] = mode
        done = common.run(common.command(mode, [*argv, "--standalone", "--nproc-per-node", "2", path]), env=env, timeout=140)
        ended_well(done, "rank 0 ok", "rank 1 ok")


@case(timeout=150, guard=None)
def run_accelerate():
    if importlib.util.find_spec("accelerate") is None:
        raise Skip("accelerate is not installed")
    text = ("import torch\nfrom accelerate import Accelerator\na = Accelerator()\nm = torch.nn.Linear(10, 10)\n"
            "m, o = a.prepare(m, torch.optim.SGD(m.parameters(), lr=0.1))\n"
            "for _ in range(5):\n    a.backward(m(torch.randn(8, 10, device=a.device)).mean()); o.step()\n"
            "assert a.device.type == 'cuda'\nprint('accelerate ok')\n" + GUARD)
    with tempfile.TemporaryDirectory() as d:
        path = write(d, "train.py", text)
        done = common.run([sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1",
                           "--mixed_precision", "no", "--dynamo_backend", "no", path], env=dict(os.environ), timeout=140)
        ended_well(done, "accelerate ok")


@case(timeout=120, guard=None)
def run_spawned():
    text = ("import torch, torch.multiprocessing as mp\n"
            "def work(i):\n    t = torch.full((10,), float(i), device='cuda')\n    print('child', i, float(t.sum()), flush=True)\n"
            + textwrap.indent(GUARD, "    ") + "\n"
            "if __name__ == '__main__':\n    mp.spawn(work, nprocs=2)\n    print('all')\n")
    with tempfile.TemporaryDirectory() as d:
        ended_well(common.run([sys.executable, write(d, "main.py", text)], env=dict(os.environ), timeout=110), "child 0 0.0", "child 1 10.0", "all")


@case(timeout=120, guard=None)
def run_forked():
    """Processes forked before CUDA starts."""
    text = ("import torch, multiprocessing as mp\n"
            "def work(i):\n    t = torch.full((10,), float(i), device='cuda')\n    assert float(t.sum()) == 10.0 * i\n    print('child', i, flush=True)\n"
            + textwrap.indent(GUARD, "    ") + "\n"
            "if __name__ == '__main__':\n    mp.set_start_method('fork')\n    p = [mp.Process(target=work, args=(i,)) for i in range(3)]\n"
            "    [x.start() for x in p]; [x.join() for x in p]\n    print('all', [x.exitcode for x in p])\n")
    with tempfile.TemporaryDirectory() as d:
        ended_well(common.run([sys.executable, write(d, "main.py", text)], env=dict(os.environ), timeout=110), "child 0", "child 1", "child 2", "all [0, 0, 0]")


@case(guard=None)
def run_own_sitecustomize():
    """A program's own sitecustomize and usercustomize still run."""
    with tempfile.TemporaryDirectory() as d:
        write(d, "sitecustomize.py", "import builtins\nbuiltins.MINE = 'mine'\n")
        env = common.native_environment()
        env["PYTHONPATH"] = d + (os.pathsep + env["PYTHONPATH"] if env.get("PYTHONPATH") else "")
        env["CISTERN_TEST_MODE"] = "cistern" if under_cistern() else "native"
        text = "import torch\nprint(MINE, int(torch.ones(4, device='cuda').sum()))\n" + GUARD
        done = common.run(common.command(env["CISTERN_TEST_MODE"], [sys.executable, "-c", text]), env=env)
        ended_well(done, "mine 4")


@case(guard=None, timeout=90)
def run_virtual_environment():
    """A virtual environment made on top of this Python."""
    with tempfile.TemporaryDirectory() as d:
        made = subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", os.path.join(d, "v")], capture_output=True, text=True)
        if made.returncode != 0:
            raise Skip(f"no venv: {made.stderr[-100:]}")
        python = os.path.join(d, "v/bin/python")
        done = common.run([python, "-c", "import torch; torch.ones"], env=common.native_environment())
        if done.rc != 0:  # this Python is a virtual environment itself: hand its packages on
            site = os.path.dirname(os.path.dirname(os.path.abspath(importlib.util.find_spec("torch").origin)))
            lib = subprocess.run([python, "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True, text=True).stdout.strip()
            write(lib, "outer.pth", site + "\n")
        env = common.native_environment()
        env["CISTERN_TEST_MODE"] = "cistern" if under_cistern() else "native"
        text = "import sys, torch\nprint(sys.prefix != sys.base_prefix, int(torch.ones(4, device='cuda').sum()))\n" + GUARD
        done = common.run(common.command(env["CISTERN_TEST_MODE"], [python, "-c", text]), env=env)
        ended_well(done, "True 4")


@case(guard=None)
def run_without_torch():
    """Programs that never import torch, and those that are no Python, are left alone."""
    mode = "cistern" if under_cistern() else "native"
    env = common.native_environment()
    for argv, want in (([sys.executable, "-c", "import sys; print('torch' in sys.modules, len([m for m in sys.modules if m.startswith('cistern')]) < 3)"], "False True"),
                       (["/bin/sh", "-c", "echo shell"], "shell"), ([sys.executable, "-S", "-c", "print('no site')"], "no site"),
                       ([sys.executable, "-I", "-c", "print('isolated')"], "isolated")):
        done = common.run(common.command(mode, argv), env=env)
        ended_well(done, want)
        eq([line for line in done.err.splitlines() if "Error" in line], [], "standard error")
    eq(common.run(common.command(mode, ["/bin/sh", "-c", "exit 41"]), env=env).rc, 41, "the status of the program")
    if under_cistern():
        done = common.run(common.command(mode, ["/no/such/program"]), env=env)
        check(done.rc not in (0, None) and "/no/such/program" in done.err, f"a program that does not exist is named: {done.why()}")


@case(guard=None, native="the command's own")
def run_enable():
    """cistern.torch.enable() in the program instead of `cistern run`."""
    env = common.native_environment()
    env["CISTERN_TEST_MODE"] = "cistern"
    env["PYTHONPATH"] = common.package_folder() + (os.pathsep + env["PYTHONPATH"] if env.get("PYTHONPATH") else "")
    text = ("import cistern.torch\ncistern.torch.enable(conf='limit:1GiB')\nimport torch\n"
            "try:\n    torch.empty(2 << 30, dtype=torch.uint8, device='cuda')\nexcept torch.OutOfMemoryError:\n    print('limited')\n" + GUARD)
    ended_well(common.run([sys.executable, "-c", text], env=env), "limited")
    late = ("import torch\ntorch.ones(1, device='cuda')\nimport cistern.torch\n"
            "try:\n    cistern.torch.enable()\nexcept Exception as e:\n    print('late:', str(e).splitlines()[0])\n")
    done = common.run([sys.executable, "-c", late], env=env)
    ended_well(done, "late:")
    return next(line for line in done.out.splitlines() if line.startswith("late:"))[:160]


@case(guard=None, native="the command's own")
def run_doctor():
    done = common.run([common.cistern_command(), "doctor"], env=common.native_environment(), timeout=50)
    check(done.rc is not None and "torch" in done.out + done.err, f"doctor: {done.why()}")
    return done.out.strip().splitlines()[0][:120]


@case(guard=None, timeout=120, native="the command's own")
def run_record():
    """`cistern record` under the native allocator: a file that `cistern replay` reads, also after out of memory."""
    env = common.native_environment()
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "run.pickle")
        text = ("import torch\ntorch.cuda.set_per_process_memory_fraction(0.02)\nt = [torch.empty(1 << 20, device='cuda') for _ in range(5)]\n"
                "try:\n    torch.empty(1 << 40, device='cuda')\nexcept torch.OutOfMemoryError:\n    print('caught')\ndel t[::2]\n")
        done = common.run([common.cistern_command(), "record", "-o", path, "--", sys.executable, "-c", text], env=env, timeout=60)
        ended_well(done, "caught")
        found = sorted(os.listdir(d))
        check(os.path.exists(path), f"the file: {found} {done.err[-300:]}")
        done = common.run([common.cistern_command(), "replay", path], timeout=50)
        eq(done.rc, 0, done.why())
    return " ".join(found)


@case(guard=None, timeout=90, native="the command's own")
def run_many_ranks_one_builder():
    """Eight programs start at once with no adapter built: one builds it, the others wait, all work."""
    env = common.native_environment()
    env["CISTERN_TEST_MODE"] = "cistern"
    with tempfile.TemporaryDirectory() as d:
        env["XDG_CACHE_HOME"] = env["TMPDIR"] = d  # the places where adapters are looked for
        text = "import torch\nprint('sum', int(torch.ones(4, device='cuda').sum()))\n" + GUARD
        begin = time.monotonic()
        many = [subprocess.Popen(common.command("cistern", [sys.executable, "-c", text]), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 text=True, start_new_session=True) for _ in range(8)]
        ends = []
        try:
            for p in many:
                out, err = p.communicate(timeout=85)
                ends.append((p.returncode, "sum 4" in out, err))
        finally:
            for p in many:
                common.end_session(p)
        eq([e[:2] for e in ends], [(0, True)] * 8, f"all eight; {next((e[2][-400:] for e in ends if e[0]), '')}")
        built = sum("uil" in e[2] for e in ends)
        return f"{time.monotonic() - begin:.1f} s, {built} of 8 said that they build"


@case()
def run_inside_is_active():
    bytes_on(1)
    return "cistern" if under_cistern() else "native"
