"""A Python program to be traced: traced.py DRIVER WHAT. It prints the stack of each of its allocations, innermost frame
first, as Python has it."""

import ctypes
import os
import sys
import threading

cuda = ctypes.CDLL(sys.argv[1])
context = ctypes.c_void_p()


def current():
    if cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) or cuda.cuCtxPushCurrent_v2(context):
        sys.exit(8)


def allocate(size, silent=False):
    p = ctypes.c_uint64()
    f, rows = sys._getframe(), []
    if cuda.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(size)): sys.exit(7)
    while f is not None:
        rows.append("%s:%s:%d" % (os.path.basename(f.f_code.co_filename), getattr(f.f_code, "co_qualname", f.f_code.co_name), f.f_lineno))
        f = f.f_back
    rows[0] = rows[0].rpartition(":")[0]  # its line is another one by now
    if not silent:
        print(size, " ".join(rows), flush=True)
    return p


def free(p):
    cuda.cuMemFree_v2(p)


def deep(n, size):
    if n:
        return deep(n - 1, size)
    return allocate(size)


class Model:
    def forward(self):
        return [(lambda: allocate(3 << 20))() for _ in range(2)]

    def steps(self):
        yield self.forward()


def everything():
    deep(0, 1 << 20)
    deep(60, 2 << 20)
    for held in Model().steps():
        for p in held:
            free(p)
    list(map(lambda n: allocate(n << 20), [5, 6]))
    sorted([1, 2], key=lambda n: allocate((6 + n) << 20).value)
    exec(compile("\n\n\nallocate(9 << 20)", "<cell>", "exec"), {"allocate": allocate})
    exec(compile("def na\xefve_\u540d(): return allocate(10 << 20)\nna\xefve_\u540d()", "/folder/" + "x" * 900 + "\U0001f40d.py", "exec"), {"allocate": allocate})


def ending():
    """Calls as Python ends: from an exit handler, and from a destructor after the modules are gone."""
    import atexit
    atexit.register(allocate, 1 << 20)
    call, p = cuda.cuMemAlloc_v2, ctypes.c_uint64()

    class Held:
        def __del__(self, call=call, p=ctypes.byref(p), size=ctypes.c_size_t(2 << 20)):
            call(p, size)
    sys.held = Held()

    def daemon():
        current()
        allocate(3 << 20, True)
        while True:
            call(ctypes.byref(p), ctypes.c_size_t(4096))
            cuda.cuMemFree_v2(p)
    for _ in range(3):
        threading.Thread(target=daemon, daemon=True).start()


def threads():
    def work(i):
        current()
        for n in range(50):
            free(deep(i, 1 << 20))
    all_of_them = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in all_of_them:
        t.start()
    for t in all_of_them:
        t.join()


def together():
    """The process's first calls, at the same moment."""
    lib, call, n = ctypes.CDLL(sys.argv[3]), ctypes.cast(cuda.cuMemAlloc_v2, ctypes.c_void_p), 8

    def work():
        p = ctypes.c_uint64()
        current()
        lib.meet(call, ctypes.byref(p), ctypes.c_size_t(1 << 20), n)
    for _ in range(n):
        threading.Thread(target=work).start()


def forked():
    allocate(1 << 20)
    sys.stdout.flush()
    for i in range(2):
        if os.fork() == 0:
            if os.fork() == 0: # the child makes no call
                for _ in range(3):
                    deep(i, (2 + i) << 20)
            else:
                os.wait()
            sys.stdout.flush()
            os._exit(0)
        os.wait()


def cost():
    """What a call takes of the processor that the stand-in refuses at once, 30 frames deep, in ns."""
    import time

    def down(n):
        if n:
            return down(n - 1)
        call, zero, times = cuda.cuMemFree_v2, ctypes.c_uint64(0), 20000
        best = 1e9
        for _ in range(5):
            t = time.thread_time_ns()
            for _ in range(times):
                call(zero)
            best = min(best, (time.thread_time_ns() - t) / times)
        return best
    print("%.0f" % down(27))


def forever():
    import signal
    signal.alarm(600)  # where no process is left to end it
    free(allocate(1 << 20, True))
    print("ready", flush=True)
    n = 0
    while True:
        n += 1
        free(allocate(1 << 20, True))
        exec(compile("def f%d(): free(allocate(4096, True))\nf%d()" % (n, n), "<made %d>" % n, "exec"), {"free": free, "allocate": allocate})


if sys.argv[2] != "cost":
    current()
globals()[sys.argv[2]]()
