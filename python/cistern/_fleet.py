"""What a process of a job writes of itself under `cistern run --record` and `cistern record -o FOLDER/`: its summary, which
`fleet/format.md` describes, and under Cistern the recordings beside it.

The thread that marks a step reads counters, some 20 µs. A thread of this module writes the files: a summary at the
start and then every ten seconds, after hours every five minutes, so that it takes less than half a percent of the time, and a
recording whenever the history is nearly full. No process waits for another. What goes wrong is one line, and the program goes on.
"""

import atexit
import json
import os
import socket
import sys
import tempfile
import threading
import time
from typing import Any, Callable, Dict, List, Optional

from . import _agent, _library
from ._errors import CisternError, say
from ._version import version

MOST_ROWS = 1024
MOST_FAILURES = 5
# Seconds between two summaries: at least, later, and as a part of the time so far; and this many times what writing one took.
EVERY, SELDOM, LATER = 10.0, 300.0, 1 / 60
SHARE = 200
LAST = 30.0  # how long the end of a process, and a request that failed, wait for a file that is being written
FREE_EVERY = 1.0  # seconds between two looks at what else is in use on a device
# A recording is written when about this part of the history is new.
FULL = 0.7
EVENTS = 3  # of each request: alloc, free_requested, free_completed

_COLUMNS = ("step", "time_us", "allocated_bytes", "peak_allocated_bytes", "reserved_bytes", "outside_bytes", "requests",
            "requested_bytes", "hash")

# The recorder of this process; None: nothing is recorded.
recorder: "Optional[Recorder]" = None
_coordinates: Dict[str, int] = {}


def describe(coordinates: Dict[str, int]) -> None:
    for name, n in coordinates.items():
        if isinstance(n, bool) or not hasattr(type(n), "__index__"):
            raise TypeError("%s: expected a number, got %s" % (name, type(n).__name__))
        if not 0 <= int(n) < 1 << 31:
            raise ValueError("%s: expected 0 or more, got %d" % (name, n))
    _coordinates.update((name, int(n)) for name, n in coordinates.items())
    # The library writes it into files of requests that fail.
    os.environ["CISTERN_COORDINATES"] = ",".join("%s=%d" % item for item in _coordinates.items())


def step() -> None:
    if recorder is not None:
        recorder.mark("cistern.step")


def begin(torch: Any, allocator: str) -> Any:
    """Has recording begin when CUDA starts in this process; the recorder."""
    global recorder
    recorder = Recorder(torch, allocator, os.environ["_CISTERN_FLEET"])
    recorder.follow_optimizers()
    _agent.follow(recorder.folder, machine())
    os.register_at_fork(after_in_child=_forked)
    if torch.cuda.is_initialized():
        recorder.start()
    else:
        torch.cuda._lazy_call(recorder.start)
    return recorder


def _forked() -> None:
    # A child has no thread of this, and no memory of its parent's; one that starts CUDA itself is another process.
    global recorder
    r = recorder
    if r is None:
        return
    if r.started:
        recorder = None
        r.started = 0  # so that its hooks do nothing here, the one at the end among them
        r.lock, r.writing = threading.RLock(), threading.Lock()  # which the parent's threads may have held
    else:
        recorder = Recorder(r.torch, r.allocator, r.folder)
        r.successor = recorder


class Series:
    """The rows of a device: fleet/series.go does the same."""

    def __init__(self) -> None:
        self.every = 1
        self.rows: List[List[int]] = []

    def add(self, row: List[int]) -> None:
        self.join(row)
        while len(self.rows) > MOST_ROWS:
            rows, self.rows, self.every = self.rows, [], 2 * self.every
            for r in rows:
                self.join(r)

    def join(self, row: List[int]) -> None:
        if self.rows and (self.rows[-1][0] - 1) // self.every == (row[0] - 1) // self.every:
            a = self.rows.pop()
            row = row[:3] + [max(a[3], row[3]), max(a[4], row[4]), max(a[5], row[5]), a[6] + row[6], a[7] + row[7],
                             max(1, (a[8] + row[8]) & WORD) if a[8] and row[8] else 0]
        self.rows.append(row)

    def columns(self) -> Dict[str, Any]:
        found: Dict[str, Any] = {"every": self.every}
        for i, name in enumerate(_COLUMNS):
            found[name] = [row[i] for row in self.rows]
        if not any(found["hash"]):
            del found["hash"]
        return found


WORD = (1 << 64) - 1


def mixed(value: int, size: int) -> int:
    """event.Mix in Go: the hash of a sequence with one more number."""
    for _ in range(8):
        value = (value ^ size & 0xff) * 1099511628211 & WORD
        size >>= 8
    return max(1, value)


class Device:
    """What this process does on one GPU."""

    def __init__(self, torch: Any, ordinal: int, on_cistern: bool) -> None:
        self.torch = torch
        self.ordinal = ordinal
        self.on_cistern = on_cistern
        self.about: Dict[str, Any] = {"device": ordinal, "total_bytes": 0, "limit_bytes": 0}
        self.series = Series()
        self.peaks = {name: {"bytes": 0} for name in ("peak_allocated", "peak_reserved", "peak_outside")}
        self.failures: List[Dict[str, Any]] = []
        self.retries = self.ooms = 0
        self.outside = 0
        self.looked = 0.0
        self.requests = 0  # so far
        self.last = (0, 0, 0, 0)  # at the last mark: requests, their bytes, the peak that was read, allocated
        self._try(self._describe)

    def _try(self, f: Callable[[], None]) -> None:
        try:
            f()
        except Exception:
            pass  # of an older PyTorch, say: it is a remark on the run

    def _describe(self) -> None:
        properties = self.torch.cuda.get_device_properties(self.ordinal)
        self.about["name"] = str(properties.name)
        self.about["total_bytes"] = int(properties.total_memory)
        self._try(lambda: self.about.update(uuid="GPU-" + str(properties.uuid)))
        self._try(self._fraction)

    def _fraction(self) -> None:
        fraction = float(self.torch.cuda.get_per_process_memory_fraction(self.ordinal))
        if fraction < 1:
            self.about["limit_bytes"] = int(fraction * self.about["total_bytes"])

    def read(self) -> Dict[str, Any]:
        """PyTorch's counters, or Cistern's of the same names where PyTorch runs on it."""
        if self.on_cistern and _library.running_already():
            from . import _stats

            s = _stats.read(_library.load(), self.ordinal)
            self.about["limit_bytes"] = int(s.limit)
            return _stats.few_as_torch(s)
        found: Dict[str, Any] = self.torch.cuda.memory_stats_as_nested_dict(self.ordinal)
        return found

    def look(self, stats: Dict[str, Any], step: int, now: int, free: bool = False) -> List[int]:
        """Takes in the counters of a moment; bytes allocated, reserved and split then, and the peak of those allocated."""
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        split = stats.get("inactive_split_bytes", {}).get("all", {}).get("current", 0)
        clock = time.monotonic()
        if (free or clock - self.looked >= FREE_EVERY) and self.about["total_bytes"]:
            self.looked = clock
            self._try(lambda: self._outside(reserved["current"]))
        self.retries, self.ooms = int(stats.get("num_alloc_retries", 0)), int(stats.get("num_ooms", 0))
        for name, value in (("peak_allocated", allocated["peak"]), ("peak_reserved", reserved["peak"]), ("peak_outside", self.outside)):
            if value > self.peaks[name]["bytes"]:
                self.peaks[name] = {"bytes": int(value), "step": step, "time_us": now, "allocated_bytes": int(allocated["current"]),
                                    "reserved_bytes": int(reserved["current"]), "split_bytes": int(split), "outside_bytes": self.outside}
        return [int(allocated["current"]), int(reserved["current"]), int(split), int(allocated["peak"])]

    def _outside(self, reserved: int) -> None:
        free, total = self.torch.cuda.mem_get_info(self.ordinal)
        self.outside = max(0, int(total) - int(free) - int(reserved))

    def mark(self, step: int, now: int) -> None:
        stats = self.read()
        allocated, reserved, _, peak = self.look(stats, step, now)
        requested = stats.get("requested_bytes") or stats["allocated_bytes"]  # PyTorch before 2.1 has no requested bytes
        total = (stats["allocation"]["all"]["allocated"], requested["all"]["allocated"])
        requests, their_bytes, last_peak, before = self.last
        self.last = (total[0], total[1], peak, allocated)
        known = max(allocated, before)
        if peak != last_peak:
            known = max(known, peak)
        self.requests = total[0]
        # Counters that are smaller than before were set back by the program.
        self.series.add([step, now, allocated, known, reserved, self.outside,
                         total[0] - requests if total[0] >= requests else total[0],
                         total[1] - their_bytes if total[1] >= their_bytes else total[1], self.hash(step)])

    def hash(self, step: int) -> int:
        """Of the requests of a step, where Cistern keeps a history; else 0."""
        from . import _attribution

        if not self.on_cistern or not _attribution.current().history or not _library.running_already():
            return 0
        value = _attribution.history_hash(self.ordinal)
        return mixed(value, step) if value else 0

    def failed(self, step: int, now: int, requested: int, free: int) -> Dict[str, Any]:
        allocated, reserved, split, _ = self.look(self.read(), step, now, free=True)
        found = {"time_us": now, "step": step, "requested_bytes": int(requested), "allocated_bytes": allocated,
                 "reserved_bytes": reserved, "split_bytes": split, "free_bytes": int(free)}
        if len(self.failures) == MOST_FAILURES:
            before = self.failures.pop()
            if "recording" in before:  # until this one has a file, the newest is that
                found["recording"] = before["recording"]
        self.failures.append(found)
        return found

    def forget(self) -> None:
        self.series = Series()

    def json(self) -> Dict[str, Any]:
        found = dict(self.about)
        found.update(self.peaks)
        found.update(retries=self.retries, ooms=self.ooms, failures=[dict(f) for f in self.failures], steps=self.series.columns())
        return found


class Recorder:
    def __init__(self, torch: Any, allocator: str, folder: str) -> None:
        self.torch = torch
        self.allocator = allocator
        self.folder = folder
        self.name = name_of_process()
        self.lock = threading.RLock()
        self.writing = threading.Lock()
        self.devices: Dict[int, Device] = {}
        self.recordings: List[str] = []
        self.steps = 0
        self.marks = ""
        self.started = 0
        self.spent = 0.0
        self.took = 0.0
        self.ended = ""
        self.complained = False
        self.wake = threading.Event()
        self.thread: Optional[threading.Thread] = None
        self.optimizer: Any = None
        self.successor: "Optional[Recorder]" = None
        self.parts = Parts(self)
        # Called once a summary is there.
        self.wrote: Callable[[], None] = lambda: None

    # Steps.

    def follow_optimizers(self) -> None:
        try:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            register_optimizer_step_post_hook(self.stepped)
        except Exception:
            pass  # PyTorch before 2.0: cistern.step() marks steps

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """A step of training ends with a step of the optimizer; of several, with that of the first that stepped."""
        if self.successor is not None:
            self.successor.stepped(optimizer)
            return
        if self.marks == "cistern.step":
            return
        if self.optimizer is None:
            self.optimizer = id(optimizer)
        if self.optimizer == id(optimizer):
            self.mark("optimizer")

    def mark(self, by: str) -> None:
        """Never raises: the program comes first."""
        began = time.thread_time()
        try:
            with self.lock:
                if not self.started:
                    return
                if by != self.marks:
                    if by == "cistern.step" and self.marks:  # the program says better what a step is
                        self.steps = 0
                        for device in self.devices.values():
                            device.forget()
                    self.marks = by
                self.steps += 1
                now = time.time_ns() // 1000
                known = len(self.devices)
                if not known or self.steps & (self.steps - 1) == 0:
                    self.find_devices()
                for device in self.devices.values():
                    device.mark(self.steps, now)
            if self.parts.due() or len(self.devices) > known:  # a process that is killed soon has been there
                self.wake.set()
        except Exception as e:
            self.complain(e)
        self.spent += time.thread_time() - began

    def find_devices(self) -> None:
        for ordinal in range(self.torch.cuda.device_count()):
            if ordinal not in self.devices:
                device = Device(self.torch, ordinal, self.allocator == "cistern")
                try:
                    used = device.read()["reserved_bytes"]["all"]["peak"] > 0
                except Exception:
                    used = False  # it has not come into use
                if used:
                    self.devices[ordinal] = device

    def out_of_memory(self, device: int, allocation: int, total: int, free: int) -> None:
        """PyTorch's observer of failed requests."""
        try:
            file = self.file_of_failure()
            with self.lock:
                if device not in self.devices:
                    self.devices[device] = Device(self.torch, device, self.allocator == "cistern")
                failure = self.devices[device].failed(self.steps, time.time_ns() // 1000, allocation, free)
                if file:
                    failure["recording"] = file
                    if file not in self.recordings:  # of failures but the first the newest has the same
                        self.recordings.append(file)
                few = self.devices[device].ooms <= MOST_FAILURES
            if few:
                self.write()
            else:
                self.wake.set()
        except Exception as e:
            self.complain(e)

    def file_of_failure(self) -> str:
        """The file that Cistern has written of the failure of this thread, where it lies beside the summary; else nothing."""
        if self.allocator != "cistern" or not _library.running_already():
            return ""
        from . import _attribution

        folder, name = os.path.split(_attribution.last_report())
        return name if folder and os.path.realpath(folder) == os.path.realpath(self.folder) else ""

    def recording_of_failure(self, device: int, name: str) -> None:
        with self.lock:
            found = self.devices.get(device)
            if found is not None and found.failures:
                found.failures[-1]["recording"] = name

    # Writing.

    def start(self) -> None:
        """Called by the thread that starts CUDA."""
        if self.successor is not None:
            self.successor.start()
            return
        global recorder
        recorder = self
        try:
            self.started = time.time_ns() // 1000
            self.name = name_of_process()
            atexit.register(self.end)
            util = sys.modules.get("multiprocessing.util")
            if util is not None:  # processes of multiprocessing end without atexit
                util.Finalize(None, self.end, exitpriority=90)  # type: ignore[attr-defined]
            try:
                self.torch._C._cuda_attach_out_of_memory_observer(self.out_of_memory)
            except Exception:
                pass  # the plain allocator has no observers: counters tell of failures
            self.thread = threading.Thread(target=self.run, name="cistern-record", daemon=True)
            self.thread.start()
        except Exception as e:  # of this, PyTorch would make a failure to start CUDA
            self.complain(e)

    def run(self) -> None:
        began = time.monotonic()
        self.write()
        while not self.ended:
            self.wake.wait(max(EVERY, SHARE * self.took, min(SELDOM, LATER * (time.monotonic() - began))))
            self.wake.clear()
            if not self.ended:
                try:
                    self.parts.write_if_due()
                except Exception as e:
                    self.complain(e)
                self.write()

    def end(self) -> None:
        if not self.started or self.ended:
            return
        self.ended = "exit"
        self.wake.set()
        if self.thread is not None:
            self.thread.join(LAST)  # a thread that writes while Python ends could end it with an error
            if self.thread.is_alive():  # it hangs, and holds what the last files need
                self.complain(TimeoutError("a file was not written within %g seconds" % LAST))
                return
        try:
            self.parts.write()
        except Exception as e:
            self.complain(e)
        self.write()

    def write(self) -> None:
        """Writes the summary, whole or not at all."""
        if not self.writing.acquire(timeout=LAST):
            self.complain(TimeoutError("a summary was not written within %g seconds" % LAST))
            return
        try:
            self.write_now()
        finally:
            self.writing.release()

    def write_now(self) -> None:
        temporary: Optional[str] = None
        try:
            began, cpu = time.perf_counter(), time.thread_time()
            with self.lock:
                self.find_devices()
                now = time.time_ns() // 1000
                for device in self.devices.values():
                    device.look(device.read(), self.steps, now)
                found = self.summary(now)
            text = json.dumps(found, separators=(",", ":"))
            with tempfile.NamedTemporaryFile("w", prefix=".cistern-", dir=self.folder, delete=False) as f:
                temporary = f.name
                f.write(text + "\n")
            os.replace(temporary, os.path.join(self.folder, self.name + ".summary.json"))
            temporary = None
            self.took = time.perf_counter() - began
            self.spent += time.thread_time() - cpu
            self.wrote()
        except Exception as e:
            self.complain(e)
        finally:
            if temporary is not None:
                try:
                    os.unlink(temporary)
                except OSError:
                    pass

    def summary(self, now: int) -> Dict[str, Any]:
        torch = self.torch
        found: Dict[str, Any] = {
            "cistern_summary": 1, "cistern": version, "allocator": self.allocator, "variables": variables(),
            "coordinates": _coordinates or mesh(torch), "host": socket.gethostname(), "pid": os.getpid(), "program": program(),
            "pytorch": str(getattr(torch, "__version__", "")), "cuda": str(getattr(torch.version, "cuda", "") or ""),
            "driver": driver(), "settings": settings(self.allocator), "started_us": self.started, "updated_us": now, "ended": self.ended,
            "marks": self.marks, "steps": self.steps, "spent_us": int(1e6 * self.spent), "recordings": list(self.recordings),
            "devices": [self.devices[n].json() for n in sorted(self.devices)],
        }
        return found

    def complain(self, e: BaseException) -> None:
        if not self.complained:
            self.complained = True
            say("recording into %s: %s: %s" % (self.folder, type(e).__name__, e), every_rank=True)


class Parts:
    """The recordings of a process on Cistern, where it keeps a history: one whenever the history is nearly full, and one at the end.
    The first stays, and the newest as far as the size allows."""

    def __init__(self, owner: Recorder) -> None:
        self.owner = owner
        self.number = 0
        self.since = 0  # requests before this part
        self.sizes: Dict[str, int] = {}
        self.most = int(os.environ.get("_CISTERN_FLEET_BYTES", "0") or 0) or 256 << 20

    def history(self) -> int:
        if self.owner.allocator != "cistern":
            return 0
        from . import _attribution

        return _attribution.current().history

    def fresh(self) -> int:
        return EVENTS * (sum(d.requests for d in self.owner.devices.values()) - self.since)

    def due(self) -> bool:
        history = self.history()
        return history > 0 and self.fresh() >= FULL * history

    def write_if_due(self) -> None:
        if self.due():
            self.write()

    def write(self) -> None:
        history = self.history()
        if not history or not _library.running_already():
            return
        owner = self.owner
        name = "%s.%04d.cistern" % (owner.name, self.number)
        lib = _library.load()
        from . import _attribution

        self.since = sum(d.requests for d in owner.devices.values())
        path = os.path.join(owner.folder, name)
        try:
            _library.check(_attribution._lib(), lib.cistern_trace_write(os.fsencode(path)))
        except CisternError:
            if owner.devices:
                raise
            return  # no device is in use
        if not owner.ended:
            _library.check(lib, lib.cistern_history(-1, history))  # what is written is not written again
        self.number += 1
        with owner.lock:
            owner.recordings.append(name)
        self.sizes[name] = os.path.getsize(path)
        while sum(self.sizes.values()) > self.most and len(self.sizes) > 2:
            oldest = list(self.sizes)[1]
            del self.sizes[oldest]
            with owner.lock:
                owner.recordings.remove(oldest)
            os.unlink(os.path.join(owner.folder, oldest))


def name_of_process() -> str:
    """Of no two processes the same, also on a file system that many nodes share."""
    rank = os.environ.get("RANK", "")
    first = "rank%05d" % int(rank) if rank.isdigit() else "process"
    return "%s-%s-%d-%x" % (first, machine(), os.getpid(), time.time_ns() // 1000000)


def machine() -> str:
    """The name of this machine as a part of a file's."""
    return "".join(c if c.isalnum() or c == "-" else "-" for c in socket.gethostname())[:64]


def variables() -> Dict[str, str]:
    """Those of launchers and schedulers, whose names the command passes on."""
    names = os.environ.get("_CISTERN_VARIABLES", "").split(",")
    found = {name: os.environ[name][:256] for name in names if os.environ.get(name)}
    return found if set(found) - {"HOSTNAME"} else {}  # which alone is a part of no job


def mesh(torch: Any) -> Dict[str, int]:
    """The process's coordinates in torch.distributed's device mesh, where the program works with one that has names."""
    try:
        if "torch.distributed.device_mesh" not in sys.modules:
            return {}
        found = sys.modules["torch.distributed.device_mesh"]._mesh_resources  # type: ignore[attr-defined]
        roots = list(getattr(found, "child_to_root_mapping", {}).values()) + list(getattr(found, "mesh_stack", ()))
        for one in roots:
            place, names = one.get_coordinate(), one.mesh_dim_names
            if place and names:
                return {str(name): int(n) for name, n in zip(names, place)}
    except Exception:
        pass
    return {}


def program() -> str:
    argv: List[str] = getattr(sys, "argv", None) or [""]
    return os.path.basename(argv[0]) or "python"


def driver() -> str:
    from . import _record

    try:
        return _record.driver_version()
    except OSError:
        return ""


def settings(allocator: str) -> str:
    if allocator == "cistern":
        return os.environ.get("CISTERN_CONF", "")
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
