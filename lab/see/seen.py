"""What the programs in this folder share: programs under `cistern trace`, the calls that it saw, and memory that they
held.

Nothing here imports torch: a program that starts others must not touch the GPU.
"""
import csv
import ctypes
import io
import json
import os
import select
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "../torch"))

import common  # noqa: E402  where Cistern is, programs with a time limit, tables

MiB, GiB = common.MiB, common.GiB
PAGE = 2 * MiB  # what the driver gets memory in
OUT_OF_MEMORY = 2  # CUresult


def folder(name):
    """An empty folder for what a program writes, below the results."""
    return tempfile.mkdtemp(prefix="%s-" % name, dir=common.out_folder())


def script(name, checks):
    """The path of one of the scripts of real work; None, and said, where it is not here."""
    base = common.scripts_folder()
    path = base and os.path.join(base, name)
    if path and os.path.isfile(path):
        return path
    print("%s: skipped, there is no %s: CISTERN_GPU_SCRIPTS names its folder" % (checks.program, name))
    return None


def cistern(*arguments, timeout=120, env=None):
    """The command cistern, to its end."""
    return common.run([common.cistern_command(), *map(str, arguments)], env=env, timeout=timeout)


def traced(argv, out=None, flags=()):
    """argv under cistern trace."""
    return [common.cistern_command(), "trace", *flags, *(["-o", out] if out else []), "--", *argv]


# ---- what a trace says -----------------------------------------------------------------------------------------------

class Call:
    """One call of the driver, as `cistern convert --table calls` has it."""

    __slots__ = ("number", "pid", "thread", "time", "took", "name", "result", "device", "address", "size", "stream", "handle", "pool", "stack")

    def __init__(self, row):
        def whole(key):
            return int(row[key] or 0)
        self.number, self.pid, self.thread, self.time, self.took = (whole(k) for k in ("call", "pid", "thread", "time_ns", "took_ns"))
        self.name, self.result, self.device = row["function"], whole("result"), int(row["device"] or -1)
        self.address, self.size, self.stream, self.handle, self.pool = (whole(k) for k in ("address", "bytes", "stream", "handle", "memory_pool"))
        self.stack = row.get("stack") or ""

    def __repr__(self):
        return "%s(%s) = %d" % (self.name, common.size(self.size) if self.size else hex(self.address), self.result)


def calls(path, timeout=120):
    """The calls of a trace, in the order in which they ended."""
    done = cistern("convert", path, "--to", "csv", "--table", "calls", "-o", "-", timeout=timeout)
    if done.rc != 0:
        raise RuntimeError("%s: %s" % (path, done.why()))
    csv.field_size_limit(1 << 24)
    return [Call(row) for row in csv.DictReader(io.StringIO(done.out))]


def summary(path, timeout=120):
    """What `cistern inspect` says of a driver trace."""
    done = cistern("inspect", "--json", path, timeout=timeout)
    if done.rc != 0:
        raise RuntimeError("%s: %s" % (path, done.why()))
    return json.loads(done.out)["drivers"][0]


def peak_held(found, device=0):
    """The most that a trace says was held of a device, in bytes."""
    return max([d["peak_held_bytes"] for d in found["devices"] if d["device"] == device], default=0)


PLAIN = ("cuMemAlloc", "cuMemAllocPitch")


class Held:
    """Device memory that one process holds by its calls, counted anew and apart from Cistern's own counting: pages of
    2 MiB that plain memory lies in, and physical handles until their last reference and mapping are gone. Pools are not
    counted: what they hold the driver says."""

    def __init__(self, device=0):
        self.device, self.bytes, self.peak = device, 0, 0
        self.plain, self.pages = {}, {}
        self.handles = {}  # handle: [size, references, mappings]
        self.mapped = {}  # address: (size, handle)

    def call(self, c):
        if c.result == 0 and c.device in (self.device, -1):
            getattr(self, c.name, self.other)(c)
            self.peak = max(self.peak, self.bytes)

    def other(self, c):
        """A call that changes nothing that is counted."""

    def touched(self, address, size):
        return range(address // PAGE, (address + size - 1) // PAGE + 1)

    def cuMemAlloc(self, c):
        self.plain[c.address] = c.size
        for n in self.touched(c.address, c.size):
            self.pages[n] = self.pages.get(n, 0) + 1
            self.bytes += PAGE if self.pages[n] == 1 else 0

    cuMemAllocPitch = cuMemAlloc

    def cuMemFree(self, c):
        size = self.plain.pop(c.address, 0)
        for n in self.touched(c.address, size) if size else ():
            self.pages[n] -= 1
            if self.pages[n] == 0:
                del self.pages[n]
                self.bytes -= PAGE

    def cuMemCreate(self, c):
        self.handles[c.handle] = [c.size, 1, 0]
        self.bytes += c.size

    def cuMemRetainAllocationHandle(self, c):
        if c.handle in self.handles:
            self.handles[c.handle][1] += 1

    def cuMemMap(self, c):
        if c.handle in self.handles:
            self.mapped[c.address] = (c.size, c.handle)
            self.handles[c.handle][2] += 1

    def gone(self, handle):
        size, references, mappings = self.handles[handle]
        if references <= 0 and mappings <= 0:
            del self.handles[handle]
            self.bytes -= size

    def cuMemRelease(self, c):
        if c.handle in self.handles:
            self.handles[c.handle][1] -= 1
            self.gone(c.handle)

    def cuMemUnmap(self, c):
        end = c.address + c.size
        for address in [a for a in self.mapped if c.address <= a < end] if c.address not in self.mapped or self.mapped[c.address][0] != c.size else [c.address]:
            _, handle = self.mapped.pop(address)
            if handle in self.handles:
                self.handles[handle][2] -= 1
                self.gone(handle)


def held(found, until=None, pid=None):
    """What the calls that ended by a time (ns since 1970) leave held, and the most that they held, in bytes."""
    h = Held()
    for c in found:
        if (pid is None or c.pid == pid) and (until is None or c.time + c.took <= until):
            h.call(c)
    return h.bytes, h.peak


# ---- programs that wait for commands ------------------------------------------------------------------------------------

class Talker:
    """A program that is spoken to a line at a time. What it answers are lines of JSON; other lines are kept as words."""

    def __init__(self, argv, env=None):
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, start_new_session=True)
        self.rest, self.words = b"", []

    def tell(self, word):
        try:
            self.process.stdin.write((word + "\n").encode())
            self.process.stdin.flush()
        except OSError:
            pass  # that it has ended shows in its answer

    def answer(self, timeout):
        """The next JSON object, None when there comes none in time."""
        end = time.monotonic() + timeout
        while True:
            line, found, self.rest = self.rest.partition(b"\n")
            if found:
                text = line.decode(errors="replace").strip()
                if text.startswith("{"):
                    try:
                        return json.loads(text)
                    except ValueError:
                        pass
                self.words.append(text)
                continue
            self.rest = line
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                return None
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            if not more:
                return None
            self.rest += more

    def ask(self, word, timeout):
        self.tell(word)
        return self.answer(timeout)

    def end(self, timeout=30):
        """Closes its input and waits; its status, None where it had to be ended."""
        try:
            self.process.stdin.close()
        except OSError:
            pass
        try:
            rc = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            rc = None
        common.end_session(self.process)
        self.process.stdout.close()
        return rc

    def why(self):
        """One line of what it wrote last on standard error."""
        self.errors.seek(0)
        lines = [line for line in self.errors.read().decode(errors="replace").splitlines() if line.strip()]
        status = self.process.poll()
        return "status %s: %s" % (status, (lines or self.words or ["no words"])[-1][:300])


def answer(**found):
    """What a program that was asked says."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


# ---- the driver, without any library -----------------------------------------------------------------------------------

class Driver:
    """The CUDA driver through ctypes, with the primary context of a device current in the calling thread."""

    def __init__(self, device=0):
        named = os.environ.get("STANDIN")  # tests without a GPU have a driver of their own
        self.lib = ctypes.CDLL(named or "libcuda.so.1")
        self.check("cuInit", 0)
        context = ctypes.c_void_p()
        self.check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.check("cuCtxPushCurrent_v2", context)

    def code(self, name, *arguments):
        return int(getattr(self.lib, name)(*arguments))

    def check(self, name, *arguments):
        code = self.code(name, *arguments)
        if code != 0:
            raise SystemExit("%s: CUDA error %d" % (name, code))

    def memory(self):
        """Free and total bytes of the device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.check("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, size):
        """An address, 0 where there is no memory."""
        p = ctypes.c_uint64()
        return p.value if self.code("cuMemAlloc_v2", ctypes.byref(p), ctypes.c_size_t(size)) == 0 else 0


def finish(checks):
    """A line of PASS or FAIL for each thing that was wanted, and one for each that is only told; the exit status."""
    for row in checks.rows:
        word = "INFO" if row["ok"] is None else "PASS" if row["ok"] else "FAIL"
        print("%s %s: %s: %s%s" % (word, checks.program, row["what"], row["got"], ", wanted %s" % row["want"] if row["want"] != "" else ""))
    sys.stdout.flush()
    common.write_results("checks-%s.jsonl" % checks.program, checks.rows)
    return 1 if any(row["ok"] is False for row in checks.rows) else 0
