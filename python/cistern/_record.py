"""`cistern record`: PyTorch's own allocator, its history of allocations recorded from the moment CUDA starts, and written
as a snapshot when the process ends and whenever it runs out of memory.

Each process writes files of its own, whole or not at all: run.pickle; run.rank3.pickle where RANK says so; and
run.pid4711.pickle for a process of multiprocessing, one that a recorded one started, or one that comes second. An out-of-memory goes to
run.oom1.pickle and so on, also one that the program catches.

In a folder for many ranks, the names are those of the processes' summaries (_fleet), with the endings .pickle.gz and .oom1.pickle.gz.
"""

import atexit
import fcntl
import gzip
import os
import pickle
import socket
import sys
import tempfile
import threading
from typing import Any, Callable, Dict, Optional

from ._errors import say

# A program that lives with running out of memory does so often; the first few files tell it all.
MOST_OOMS = 5


def begin(torch: Any) -> None:
    """Has recording begin when CUDA starts in this process."""
    recording = Recording(torch, os.environ["_CISTERN_RECORD"], int(os.environ.get("_CISTERN_RECORD_ENTRIES", "0")),
                          os.environ.get("_CISTERN_RECORD_STACKS", "python"))
    if os.environ.get("_CISTERN_FLEET"):
        from . import _fleet

        recording.owner = _fleet.begin(torch, "pytorch")
        recording.owner.wrote = recording.summary_written
    if torch.cuda.is_initialized():
        recording.start()
    else:
        torch.cuda._lazy_call(recording.start)


class Recording:
    def __init__(self, torch: Any, path: str, entries: int, stacks: str) -> None:
        self.torch = torch
        self.path = path
        self.entries = entries
        self.owner: Any = None  # the recorder of the process's summary, where there is one
        self.stacks = stacks
        self.ooms = 0
        self.written = False
        self.lock = threading.RLock()
        self.child = False
        # The command made this file; when the program has ended, it looks there whether there is a recording.
        self.notes = os.path.join(os.path.dirname(os.path.abspath(path)), ".cistern-" + os.environ.get("_CISTERN_RECORD_TIME", ""))

    def start(self) -> None:
        """Called by the thread that starts CUDA, which may be in a child of fork."""
        process = sys.modules.get("multiprocessing.process")
        parent = process.parent_process() if process is not None else None  # type: ignore[attr-defined]
        # Processes that this one starts know that they are not the first.
        self.child = parent is not None or "_CISTERN_RECORD_PARENT" in os.environ
        os.environ["_CISTERN_RECORD_PARENT"] = str(os.getpid())
        self.log("started")
        if self.entries == 0 and self.owner is not None:
            return  # summaries are all that is wanted
        try:
            if self.stacks == "off":
                self.torch.cuda.memory._record_memory_history(context=None, max_entries=self.entries)
            else:
                self.torch.cuda.memory._record_memory_history(stacks=self.stacks, max_entries=self.entries)
            atexit.register(self.end)
            # Processes of multiprocessing end without atexit.
            util = sys.modules.get("multiprocessing.util")
            if util is not None:
                util.Finalize(None, self.end, exitpriority=100)  # type: ignore[attr-defined]
            self.torch._C._cuda_attach_out_of_memory_observer(self.out_of_memory)
        except Exception as e:  # of this, PyTorch would make a failure to start CUDA
            say("recording: torch %s: %s: %s" % (self.torch.__version__, type(e).__name__, e))

    def out_of_memory(self, device: int, allocation: int, total: int, free: int) -> None:
        with self.lock:
            self.ooms += 1
            if self.ooms > MOST_OOMS:
                if self.ooms == MOST_OOMS + 1:
                    say("out of memory once more; no further files are written for that")
                return
            target = self.write(".oom%d" % self.ooms, "at an out-of-memory")
            if self.owner is not None and target:
                self.owner.recording_of_failure(device, os.path.basename(target))

    def end(self) -> None:
        with self.lock:
            if not self.written and self.torch.cuda.is_initialized():
                self.written = True
                self.write("", "")

    def summary_written(self) -> None:
        """Called whenever the process's summary was written; with the first there is a recording."""
        self.owner.wrote = lambda: None
        self.log("wrote")

    def log(self, word: str) -> None:
        """Adds a line to the command's file, which is gone when the command is."""
        try:
            with open(os.open(self.notes, os.O_WRONLY | os.O_APPEND), "w") as f:
                f.write(word + "\n")
        except OSError:
            pass

    def write(self, suffix: str, when: str) -> str:
        """The file; "" where it could not be written. Never raises: the program that is recorded comes first."""
        temporary: Optional[str] = None
        try:
            snapshot = self.torch.cuda.memory._snapshot()
            # PyTorch's own tools look up the keys that they know, and no others.
            snapshot["cistern"] = environment(self.torch, snapshot)
            folder, name = os.path.split(os.path.abspath(self.path))
            if self.owner is not None:
                name = self.owner.name + ".pickle.gz"
            compress = name.endswith(".gz")
            f = tempfile.NamedTemporaryFile(prefix=".cistern-", dir=folder, delete=False)
            temporary = f.name
            with f:
                if compress:
                    with gzip.GzipFile(filename="", mode="wb", fileobj=f, compresslevel=3) as z:
                        pickle.dump(snapshot, z, protocol=4)
                else:
                    pickle.dump(snapshot, f, protocol=4)
            if self.owner is not None:
                stem, ending = split(name)
                target = os.path.join(folder, stem + suffix + ending)
                os.replace(temporary, target)
                self.owner.recordings.append(os.path.basename(target))
            else:
                target = place(temporary, folder, name, suffix, self.child)
            temporary = None
            self.log("wrote")
            events = sum(map(len, snapshot.get("device_traces", ())))
            sys.stderr.write("cistern: wrote %s (%d events%s)\n" % (target, events, ", " + when if when else ""))
            return target
        except Exception as e:
            sys.stderr.write("cistern: %s: nothing was written: %s: %s\n" % (self.path, type(e).__name__, e))
            return ""
        finally:
            if temporary is not None:
                try:
                    os.unlink(temporary)
                except OSError:
                    pass


def environment(torch: Any, snapshot: Any) -> Dict[str, Any]:
    """What the run is recorded with, as far as it is known: recording/pytorch/environment.go reads it."""
    found: Dict[str, Any] = {}

    def note(key: str, value: Callable[[], Any], into: Dict[str, Any] = found) -> None:
        try:
            v = value()
            if v:
                into[key] = v
        except Exception:  # it is a remark on the run, and the run can be read without it
            pass

    note("torch", lambda: str(torch.__version__))
    note("cuda", lambda: str(torch.version.cuda or ""))
    note("driver", driver_version)
    devices: Dict[str, str] = {}
    memory: Dict[str, int] = {}
    for device, trace in enumerate(snapshot.get("device_traces", ())):
        if trace:
            # PyTorch asks CUDA for the properties of each device once, when it starts, and keeps them.
            note(str(device), lambda: str(torch.cuda.get_device_properties(device).name), devices)
            note(str(device), lambda: int(torch.cuda.get_device_properties(device).total_memory), memory)
    from . import _fleet

    note("variables", _fleet.variables)
    if "variables" in found:
        note("host", socket.gethostname)
        note("pid", os.getpid)
    note("devices", lambda: devices)
    note("total_memory", lambda: memory)
    return found


def driver_version() -> str:
    """The kernel module's, which is in a file: no call of the driver is needed."""
    with open("/sys/module/nvidia/version") as f:
        return f.read(256).strip()


def split(name: str) -> Any:
    """run.pickle.gz → run, .pickle.gz"""
    rest = ""
    if name.endswith(".gz"):
        name, rest = name[:-3], ".gz"
    stem, ending = os.path.splitext(name)
    return stem, ending + rest


def place(temporary: str, folder: str, name: str, suffix: str, child: bool) -> str:
    """Renames a file to the first name that is this process's to use, and returns that."""
    stem, ending = split(name)
    pid = ".pid%d" % os.getpid()
    rank = os.environ.get("RANK", "")
    if rank.isdigit() and int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
        names = [".rank" + rank, ".rank" + rank + pid]
    else:
        names = [pid] if child else ["", pid]
    begun = float(os.environ.get("_CISTERN_RECORD_TIME", "0") or 0)
    # Of several processes that end at once each takes its own.
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for n in names:
            target = os.path.join(folder, stem + n + suffix + ending)
            try:
                if os.stat(target).st_mtime >= begun and n != names[-1]:
                    continue  # of this recording, another process's
            except FileNotFoundError:
                pass
            break
        os.replace(temporary, target)
        return target
    finally:
        os.close(lock)
