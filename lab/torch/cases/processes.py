"""Processes: exits in every order of teardown, fork, signals, faulthandler, DataLoader workers."""
import os
import signal
import subprocess
import sys
import threading
import time

from .base import GUARD, PYTHON, MiB, bytes_on, case, check, eq, script, drain, torch, under_cistern

BEGIN = """
import atexit, os, signal, sys, threading, time
import torch
t = [torch.full((3 << 20,), i, dtype=torch.uint8, device="cuda") for i in range(5)]
s = torch.cuda.Stream()
with torch.cuda.stream(s):
    u = torch.ones(1000, device="cuda")
""" + GUARD

# name: (what the program does at its end, its status, what must be in its output or on standard error)
EXITS = {
    "falls off the end": ("", 0, ""),
    "tensors in globals and a cycle": ("class A: pass\na = A(); a.me = a; a.t = t; del t", 0, ""),
    "busy stream": ("torch.cuda._sleep(500_000_000); t[0] += 1", 0, ""),
    "atexit allocates": ("atexit.register(lambda: print('sum', int(torch.ones(100, device='cuda').sum())))", 0, "sum 100"),
    "atexit holds tensors": ("def bye(x): print('bye', int(x[0]))\natexit.register(bye, t[3])\ndel t", 0, "bye 3"),
    # While Python ends the thread waits outside of PyTorch: one that comes back from C++ then is ended by force, and takes a
    # process under native PyTorch down with it as well ("terminate called without an active exception").
    "daemon thread allocated": ("held = threading.Event()\ndef work():\n    for i in range(1000):\n"
                                "        x = torch.full((100_000 + i,), 1, dtype=torch.uint8, device='cuda')\n"
                                "    held.set(); threading.Event().wait()\n"
                                "threading.Thread(target=work, daemon=True).start(); held.wait()", 0, ""),
    "thread holds tensors": ("def work():\n    x = torch.ones(10, device='cuda'); time.sleep(0.5); print('sum', int(x.sum()))\n"
                             "threading.Thread(target=work).start()", 0, "sum 10"),
    "thread local tensors": ("l = threading.local(); l.t = t\n"
                             "def work(): l.t = torch.ones(10, device='cuda')\nw = threading.Thread(target=work); w.start(); w.join()", 0, ""),
    "os._exit": ("os._exit(7)", 7, ""),
    "os._exit in a thread": ("threading.Thread(target=lambda: os._exit(8)).start(); time.sleep(5)", 8, ""),
    "sys.exit": ("sys.exit(9)", 9, ""),
    "sys.exit in a thread": ("threading.Thread(target=lambda: sys.exit(9)).start(); time.sleep(0.3)", 0, ""),
    "uncaught exception": ("raise ValueError('on purpose')", 1, "on purpose"),
    "exception in a thread": ("def work(): raise ValueError('in a thread')\nw = threading.Thread(target=work); w.start(); w.join()", 0, "in a thread"),
    "quick_exit of C": ("import ctypes; ctypes.CDLL(None).exit(4)", 4, ""),
    "graph alive": ("g = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g):\n    y = u * 2\ng.replay()", 0, ""),
    "pool alive": ("p = torch.cuda.MemPool()\nc = torch.cuda.use_mem_pool(p); c.__enter__(); q = torch.ones(10, device='cuda')", 0, ""),
    "history on": ("torch.cuda.memory._record_memory_history(); q = torch.ones(10, device='cuda')", 0, ""),
    "device reset by hand": ("del t, u; torch.cuda.empty_cache(); torch.cuda.synchronize()", 0, ""),
    "backward alive": ("x = torch.ones(10, device='cuda', requires_grad=True); y = (x * 2).sum(); y.backward(retain_graph=True)", 0, ""),
    "deletion at shutdown": ("class D:\n    def __init__(self): self.t = torch.ones(5, device='cuda')\n"
                             "    def __del__(self):\n        del self.t\nd = D(); sys.modules['d'] = d", 0, ""),
}


def exit_case(name, text, want, said):
    def fn():
        start = time.monotonic()
        done = script(BEGIN + text + "\n", timeout=60)
        eq(done.rc, want, f"status; {done.why()}")
        check(said in done.out + done.err, f"says {said!r}: {done.err[-300:]}")
        noise = [line for line in done.err.splitlines() if "panic" in line or "terminate called" in line or "SIG" in line or "fatal error" in line]
        eq(noise, [], "noise on standard error")
        return f"{time.monotonic() - start:.1f} s"
    fn.__name__ = "exit_" + name.replace(".", "").replace(" ", "_")
    fn.__module__ = __name__
    case(guard=None)(fn)


for _name, (_text, _want, _said) in EXITS.items():
    exit_case(_name, _text, _want, _said)


@case()
def exit_is_quick():
    """From the last line of the program to the end of the process: as a process without tensors, within two seconds."""
    done = script(BEGIN + "more = [torch.empty(1 << 20, device='cuda') for _ in range(2000)]\n"
                  "import time; print('at', time.time(), flush=True)\n")
    eq(done.rc, 0, done.why())
    end = time.time()
    at = float(done.out.split()[1])
    bytes_on(MiB)
    check(end - at < 4, f"the exit took {end - at:.1f} s")
    return f"{end - at:.2f} s"


# ---- fork -----------------------------------------------------------------------------------------------------------

def child_result(fn, timeout=20):
    """Runs fn in a fork and returns (status, what it returned) or says that it hangs."""
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(r)
            os.write(w, str(fn()).encode()[:4000])
            code = 0
        except BaseException as e:
            os.write(w, f"{type(e).__name__}: {e}".encode()[:4000])
        finally:
            os._exit(code)
    os.close(w)
    deadline = time.monotonic() + timeout
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(r)
            raise AssertionError(f"the child hangs, {timeout} s")
        time.sleep(0.02)
    said = os.read(r, 4096).decode()
    os.close(r)
    return os.waitstatus_to_exitcode(status), said


@case()
def fork_child_allocates():
    """A forked child that allocates by mistake gets an error, not a hang."""
    t = torch.ones(1000, device="cuda")
    said, ways = [], [("torch.empty", lambda: torch.empty(1000, device="cuda")), ("arithmetic", lambda: (t + 1).sum().item())]
    if under_cistern():  # natively the child is given an address out of the parent's cache
        ways.append(("raw allocation", lambda: torch._C._cuda_cudaCachingAllocator_raw_alloc(1000, 0)))
    for what, fn in ways:
        status, words = child_result(fn)
        check(status == 1, f"{what} in the child: status {status}, {words[:200]}")
        said.append(words.splitlines()[0][:90])
    eq(int((t + 1).sum()), 2000, "the parent goes on")
    return "; ".join(said)


@case()
def fork_child_frees():
    """A forked child may drop inherited tensors, ask for statistics and collect."""
    import gc
    held = [torch.ones(100_000, device="cuda") for _ in range(50)]
    def child():
        held.clear()
        gc.collect()
        return "dropped"
    status, words = child_result(child)
    eq((status, words), (0, "dropped"), "the child")
    check(all(int(t.sum()) == 100_000 for t in held), "the parent's tensors are intact")
    eq(len(held), 50, "the parent's tensors")


@case()
def fork_child_statistics():
    t = torch.ones(1000, device="cuda")
    for what, fn in (("memory_allocated", lambda: torch.cuda.memory_allocated()), ("empty_cache", lambda: torch.cuda.empty_cache()),
                     ("memory_stats", lambda: len(torch.cuda.memory_stats())), ("snapshot", lambda: len(torch.cuda.memory_snapshot()))):
        status, words = child_result(fn)
        check(status in (0, 1), f"{what} in the child ended with {status}: {words}")
    eq(int(t.sum()), 1000, "the parent goes on")


@case(timeout=90, native="a child may hang on a lock that was held, or be given the parent's memory")
def fork_while_allocating():
    """Forks while four threads allocate: no child hangs, whatever locks were held."""
    stop = threading.Event()
    def work():
        while not stop.is_set():
            t = bytes_on(300_000)
            u = bytes_on(5 * MiB)
            del t, u
    bytes_on(1)
    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for t in threads:
        t.start()
    try:
        keep = torch.ones(1000, device="cuda")
        for i in range(30):
            status, words = child_result(lambda: torch._C._cuda_cudaCachingAllocator_raw_alloc(1000, 0), timeout=15)
            check(status == 1, f"fork {i}: the child allocated: {status} {words}")
    finally:
        stop.set()
        for t in threads:
            t.join()
    eq(int(keep.sum()), 1000, "the parent goes on")


@case()
def fork_then_exec():
    bytes_on(MiB)
    for _ in range(10):
        done = subprocess.run([sys.executable, "-c", "print(1 + 1)"], capture_output=True, text=True, timeout=30)
        eq(done.stdout.strip(), "2", done.stderr)
    eq(subprocess.run("echo shell", shell=True, capture_output=True, text=True, timeout=10).stdout, "shell\n", "a shell")


@case()
def fork_before_cuda():
    """A child forked before CUDA starts may use CUDA, as natively."""
    import torch as _  # noqa: F401
    status, words = child_result(lambda: int(torch.ones(10, device="cuda").sum()), timeout=40)
    eq((status, words), (0, "10"), "the child")
    eq(int(torch.ones(10, device="cuda").sum()), 10, "the parent")


class Holds:
    """A data set that holds CUDA tensors which its workers inherit."""

    def __init__(self):
        self.held = [torch.ones(100_000, device="cuda") for _ in range(10)]
        self.data = torch.arange(1000.0)

    def __len__(self):
        return 1000

    def __getitem__(self, i):
        return self.data[i] * 2


class Allocates(Holds):
    def __getitem__(self, i):
        return self.held[0] + i


@case(timeout=120)
def dataloader_forked_workers():
    data = Holds()
    loader = torch.utils.data.DataLoader(data, batch_size=50, num_workers=4, pin_memory=True, multiprocessing_context="fork")
    for epoch in range(3):
        total = sum(float(batch.to("cuda", non_blocking=True).sum()) for batch in loader)
        eq(total, 999_000.0, f"epoch {epoch}")
    check(all(int(t.sum()) == 100_000 for t in data.held), "what the workers inherited is intact")
    iterator = iter(loader)  # abandoned in the middle
    next(iterator)
    del iterator


@case(timeout=120)
def dataloader_worker_allocates():
    """A worker that allocates by mistake raises in the parent, with words."""
    loader = torch.utils.data.DataLoader(Allocates(), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=40)
    start = time.monotonic()
    try:
        next(iter(loader))
    except Exception as e:
        check(time.monotonic() - start < 38, "it hung until the loader's own timeout")
        words = " ".join(str(e).split())
    else:
        raise AssertionError("the worker used the GPU")
    eq(int(torch.ones(10, device="cuda").sum()), 10, "the parent goes on")
    return words[-160:]


@case(timeout=150)
def dataloader_spawned_workers():
    loader = torch.utils.data.DataLoader(list(range(100)), batch_size=10, num_workers=2, multiprocessing_context="spawn")
    bytes_on(MiB)
    eq(sum(int(b.to("cuda").sum()) for b in loader), 4950, "sum")


# ---- signals ----------------------------------------------------------------------------------------------------------

LOOP = """
import faulthandler, os, signal, sys, threading, time
import torch
x = torch.ones(1000, 1000, device="cuda")
def spin():
    while True:
        y = (x @ x).relu()
        z = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
""" + GUARD


def interrupted(text, send, after=1.0, timeout=60):
    """Starts the program, sends it signals once it says ready, and returns how it ended."""
    p = subprocess.Popen([PYTHON, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        line = p.stdout.readline()
        check("ready" in line, f"the program did not start: {p.stderr.read()[-500:] if p.poll() is not None else line}")
        time.sleep(after)
        sent = time.monotonic()
        send(p)
        out, err = p.communicate(timeout=timeout)
        return p.returncode, out, err, time.monotonic() - sent
    except subprocess.TimeoutExpired:
        raise AssertionError("the program did not end after the signal") from None
    finally:
        try:
            os.killpg(p.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        p.wait()


@case(guard=None)
def signal_interrupt():
    """Ctrl-C in a loop of kernels and allocations is a KeyboardInterrupt."""
    rc, out, err, took = interrupted(LOOP + "print('ready', flush=True)\ntry:\n    spin()\nexcept KeyboardInterrupt:\n"
                                     "    print('caught', int(torch.ones(5, device='cuda').sum()))\n", lambda p: p.send_signal(signal.SIGINT))
    eq(rc, 0, err[-300:])
    check("caught 5" in out, out)
    check(took < 8, f"took {took:.1f} s")


@case(guard=None)
def signal_interrupt_uncaught():
    rc, out, err, took = interrupted(LOOP + "print('ready', flush=True)\nspin()\n", lambda p: p.send_signal(signal.SIGINT))
    check(rc in (-signal.SIGINT, 130, 1), f"status {rc}")
    check("KeyboardInterrupt" in err, err[-300:])


@case(guard=None)
def signal_terminate():
    rc, out, err, took = interrupted(LOOP + "print('ready', flush=True)\nspin()\n", lambda p: p.send_signal(signal.SIGTERM))
    eq(rc, -signal.SIGTERM, "status")
    check(took < 8, f"took {took:.1f} s")


@case(guard=None)
def signal_own_handlers():
    """A program's own handlers, on any signal, set before and after CUDA starts."""
    text = """
import signal, sys, time
seen = []
signal.signal(signal.SIGUSR1, lambda n, f: seen.append(n))
import torch
torch.ones(1, device="cuda")
signal.signal(signal.SIGUSR2, lambda n, f: seen.append(n))
signal.signal(signal.SIGURG, lambda n, f: seen.append(n))
""" + GUARD + """
print("ready", flush=True)
end = time.time() + 20
while len(set(seen)) < 3 and time.time() < end:
    torch.empty(1000, device="cuda")
print(sorted(set(seen)) == sorted({signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG}))
"""
    def send(p):
        for n in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG):
            p.send_signal(n)
            time.sleep(0.2)
    rc, out, err, took = interrupted(text, send)
    eq(rc, 0, err[-300:])
    check("True" in out, f"each handler ran: {out}")


@case(guard=None)
def signal_timer():
    """setitimer at a high rate while work goes on (profilers do this)."""
    text = """
import signal, torch
n = [0]
def tick(a, b): n[0] += 1
signal.signal(signal.SIGALRM, tick)
signal.signal(signal.SIGPROF, tick)
x = torch.ones(1000, device="cuda")
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
for i in range(20000):
    y = torch.empty(1000 + i % 4096 * 512, dtype=torch.uint8, device="cuda")
    if i % 1000 == 0:
        torch.cuda.synchronize(); torch.cuda.empty_cache()
signal.setitimer(signal.ITIMER_REAL, 0); signal.setitimer(signal.ITIMER_PROF, 0)
print("ticks", n[0] > 20)
""" + GUARD
    done = script(text, timeout=60)
    eq(done.rc, 0, done.why())
    check("ticks True" in done.out, done.out)


@case(guard=None)
def signal_faulthandler():
    """A crash dumps the Python stack and ends with the signal."""
    done = script(LOOP + "def crash():\n    import ctypes; ctypes.string_at(0)\ncrash()\n", python_args=("-X", "faulthandler"))
    eq(done.rc, -signal.SIGSEGV, f"status; {done.err[-300:]}")
    check("Fatal Python error: Segmentation fault" in done.err, done.err[-400:])
    check("in crash" in done.err, "with the stack")
    check("goroutine" not in done.err, "and nothing of Go's")


@case(guard=None)
def signal_faulthandler_thread():
    text = LOOP + ("faulthandler.enable()\ndef crash():\n    import ctypes; ctypes.string_at(0)\n"
                   "w = threading.Thread(target=crash); w.start(); time.sleep(10)\n")
    done = script(text)
    eq(done.rc, -signal.SIGSEGV, f"status; {done.err[-300:]}")
    check("Fatal Python error: Segmentation fault" in done.err and "in crash" in done.err, done.err[-400:])


@case(guard=None)
def signal_abort():
    done = script(LOOP + "faulthandler.enable()\nos.abort()\n")
    eq(done.rc, -signal.SIGABRT, done.err[-300:])
    check("Fatal Python error: Aborted" in done.err, done.err[-400:])


@case(guard=None)
def signal_dump_traceback():
    """faulthandler.register: a signal that prints the stacks while the program goes on."""
    text = LOOP + ("faulthandler.register(signal.SIGUSR1)\nprint('ready', flush=True)\n"
                   "end = time.time() + 3\nwhile time.time() < end:\n    torch.empty(1000, device='cuda')\nprint('went on')\n")
    rc, out, err, took = interrupted(text, lambda p: p.send_signal(signal.SIGUSR1))
    eq(rc, 0, err[-300:])
    check("went on" in out and "most recent call first" in err, err[-300:])


@case(guard=None)
def signal_broken_pipe():
    """SIGPIPE stays as Python has it: an exception."""
    text = ("import os, torch\ntorch.ones(1, device='cuda')\nr, w = os.pipe(); os.close(r)\n"
            "try:\n    os.write(w, b'x')\nexcept BrokenPipeError:\n    print('broken pipe')\n" + GUARD)
    done = script(text)
    eq(done.rc, 0, done.why())
    check("broken pipe" in done.out, done.out)


@case()
def many_threads():
    """Threads come and go by the thousand."""
    def work():
        t = torch.full((1000,), 3, dtype=torch.uint8, device="cuda")
        del t
    for _ in range(60):
        threads = [threading.Thread(target=work) for _ in range(20)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    drain()
    eq(torch.cuda.memory_allocated(), 0, "nothing is left")
