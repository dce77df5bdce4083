"""What Python programs do with processes and signals, with the library loaded and in use. Prints ok."""

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

FORKED = 4


def load():
    lib = ctypes.CDLL(sys.argv[1])
    lib.cistern_malloc.restype = ctypes.c_void_p
    lib.cistern_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    lib.cistern_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    lib.cistern_free.restype = None
    lib.cistern_release.argtypes = [ctypes.c_void_p]
    lib.cistern_last_error.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    lib.cistern_stats_json.restype = ctypes.c_void_p
    lib.cistern_string_free.argtypes = [ctypes.c_void_p]
    return lib


lib = load()


def words():
    text = ctypes.create_string_buffer(1000)
    return lib.cistern_last_error(text, 1000), text.value.decode()


def worker(inherited, tasks, results):
    """A DataLoader's: forked, it holds what its parent allocated, and frees it when it ends."""
    assert not lib.cistern_malloc(512, 0, None)
    code, text = words()
    assert code == FORKED and "child of fork" in text, (code, text)
    for n in iter(tasks.get, None):
        results.put(n * n)
    lib.cistern_free(inherited, 1 << 20, 0, None)
    assert lib.cistern_release(inherited) == FORKED


def forked_workers():
    context = multiprocessing.get_context("fork")
    p = lib.cistern_malloc(1 << 20, 0, None)
    assert p
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            lib.cistern_free(lib.cistern_malloc(4096, 0, 0x1000), 4096, 0, 0x1000)

    threads = [threading.Thread(target=churn) for _ in range(3)]
    for t in threads:
        t.start()
    for _ in range(5):
        tasks, results = context.Queue(), context.Queue()
        workers = [context.Process(target=worker, args=(p, tasks, results)) for _ in range(4)]
        for w in workers:
            w.start()
        for n in range(40):
            tasks.put(n)
        for _ in workers:
            tasks.put(None)
        assert sorted(results.get(timeout=300) for _ in range(40)) == [n * n for n in range(40)]
        for w in workers:
            w.join(300)
            assert w.exitcode == 0, w.exitcode
    stop.set()
    for t in threads:
        t.join()
    assert lib.cistern_release(p) == 0


def spawned(results):
    p = lib.cistern_malloc(1 << 20, 0, None)
    results.put(bool(p) and lib.cistern_release(p) == 0)


def children_of_their_own():
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        results = context.Queue()
        p = context.Process(target=spawned, args=(results,))
        p.start()
        assert results.get(timeout=300)
        p.join()
    out = subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, check=True)
    assert out.stdout == b"42\n"


def signals():
    seen = []
    for s in (signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGURG):
        signal.signal(s, lambda number, frame: seen.append(number))
        lib.cistern_free(lib.cistern_malloc(4096, 0, None), 4096, 0, None)
        os.kill(os.getpid(), s)
        deadline = time.monotonic() + 300
        while s not in seen and time.monotonic() < deadline:
            lib.cistern_free(lib.cistern_malloc(4096, 0, None), 4096, 0, None)
        assert s in seen, s
        signal.signal(s, signal.SIG_DFL)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(300)
        raise AssertionError("not interrupted")
    except KeyboardInterrupt:
        pass


def blocks(task):
    """Which signals a thread blocks."""
    with open("/proc/self/task/%s/status" % task) as f:
        return int(dict(line.split(":", 1) for line in f)["SigBlk"], 16)


def own_threads():
    """Signals of the process are the program's: none of the library's threads takes one."""
    ours = {threading.get_native_id()}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert before == set(), before
    for stream in range(64):
        lib.cistern_free(lib.cistern_malloc(4 << 20, 0, stream << 12), 4 << 20, 0, stream << 12)
    seen = set()
    for _ in range(20):
        for task in os.listdir("/proc/self/task"):
            if int(task) not in ours:
                blocked = blocks(task)
                while blocked >> signal.SIGSEGV - 1 & 1: # it is being made, with all signals blocked
                    time.sleep(0.01)
                    blocked = blocks(task)
                for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2,
                          signal.SIGPIPE, signal.SIGCHLD, signal.SIGPROF, signal.SIGWINCH, signal.SIGTSTP, signal.SIGRTMIN + 5):
                    assert blocked >> s - 1 & 1, (s, hex(blocked))
                seen.add(task)
        time.sleep(0.01)
    assert len(seen) >= 2, seen
    # What the program waits for by itself is there when it looks, after calls that had to go a long way too.
    waits = {signal.SIGCHLD, signal.SIGTERM, signal.SIGPROF, signal.SIGALRM}
    signal.pthread_sigmask(signal.SIG_BLOCK, waits)
    for i in range(20):
        if os.fork() == 0:
            os._exit(0)
        for s in waits - {signal.SIGCHLD}:
            os.kill(os.getpid(), s)
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        p = lib.cistern_malloc((100 + i) << 20, 0, None)
        lib.cistern_free(p, (100 + i) << 20, 0, None)
        lib.cistern_trim(0)
        for s in waits:
            assert signal.sigtimedwait({s}, 300) is not None, (i, s)
        os.wait()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == waits


def state(pid):
    """Of a process's main thread: R running, S waiting."""
    with open("/proc/%d/task/%d/stat" % (pid, pid)) as f:
        return f.read().rpartition(")")[2].split()[0]


CHILD = """
import ctypes, faulthandler, os, signal, sys, time
before = sys.argv[2] == "handler first"
if before: faulthandler.enable()
lib = ctypes.CDLL(sys.argv[1])
lib.cistern_malloc.restype = ctypes.c_void_p
assert lib.cistern_malloc(ctypes.c_ssize_t(512), 0, None)
if sys.argv[2] == "handler last": faulthandler.enable()
if sys.argv[3] == "crash": ctypes.string_at(8)
if sys.argv[3] == "abort": os.abort()
if sys.argv[3] == "interrupt":
    print("ready", flush=True)
    time.sleep(600)
os.kill(os.getpid(), getattr(signal, sys.argv[3]))
time.sleep(600)
"""


def ends():
    """A process that dies does so of the same signal, with the same report, as without the library."""
    for handler in ("handler first", "handler last", "no handler"):
        for how, number in (("crash", signal.SIGSEGV), ("abort", signal.SIGABRT), ("SIGTERM", signal.SIGTERM),
                            ("SIGQUIT", signal.SIGQUIT), ("SIGBUS", signal.SIGBUS), ("SIGKILL", signal.SIGKILL)):
            r = subprocess.run([sys.executable, "-c", CHILD, sys.argv[1], handler, how], capture_output=True, timeout=300)
            assert r.returncode == -number, (handler, how, r)
            reported = b"Fatal Python error" in r.stderr
            assert reported == (handler != "no handler" and how in ("crash", "abort", "SIGBUS")), (handler, how, r)
            if how in ("crash", "abort"):
                assert b"goroutine" not in r.stderr, (handler, how, r)
    child = subprocess.Popen([sys.executable, "-c", CHILD, sys.argv[1], "no handler", "interrupt"], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    # Python alone misses, once in a few hundred times on a busy machine, a signal that comes right before its sleep. That no
    # other thread takes it is own_threads' business.
    while state(child.pid) != "S":
        time.sleep(0.001)
    child.send_signal(signal.SIGINT) # as Ctrl-C does
    _, report = child.communicate(timeout=300) # it sleeps twice as long
    assert child.returncode == -signal.SIGINT and b"KeyboardInterrupt" in report, report


def interruptible():
    """dump_traceback_later, timers and sleeps go on undisturbed."""
    ticks = []
    signal.signal(signal.SIGALRM, lambda number, frame: ticks.append(time.monotonic()))
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    begin = time.thread_time()
    while time.thread_time() - begin < 0.5: # of the processor's, of which a busy machine gives less than it has
        lib.cistern_free(lib.cistern_malloc(4096, 0, None), 4096, 0, None)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert len(ticks) > 10, len(ticks)
    with open(os.devnull, "w") as f:
        faulthandler.dump_traceback_later(0.05, file=f)
        time.sleep(0.2)
        faulthandler.cancel_dump_traceback_later()
    begin = time.monotonic()
    time.sleep(0.3)
    assert time.monotonic() - begin >= 0.3


if __name__ == "__main__":
    globals()[sys.argv[2]]()
    print("ok")
