"""How ranks ended, as torchrun's agent knows it: a process that was killed cannot say so in its summary. The agent, which starts the
ranks of a node (torchrun, accelerate launch), adds the key `status` to the summaries of those that failed, once they are gone.
"""

import functools
import glob
import importlib.machinery
import json
import os
import stat
import sys
import tempfile
from typing import Any, Callable, Dict

from ._errors import say

API = "torch.distributed.elastic.multiprocessing.api"
MOST_BYTES = 8 << 20  # of a summary: fleet/summary.go


def follow(folder: str, machine: str) -> None:
    """Has this process note how its ranks ended, should it become an agent. machine is how names of summaries have this one's."""
    if API in sys.modules:
        wrap(sys.modules[API], folder, machine)
    else:
        sys.meta_path.insert(0, Finder(lambda module: wrap(module, folder, machine)))


class Finder:
    """Notices the import of the module from which an agent starts its ranks."""

    def __init__(self, imported: Callable[[Any], None]) -> None:
        self.imported = imported

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != API:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader: Any = getattr(spec, "loader", None)
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                self.imported(module)

            loader.exec_module = exec_module
        return spec


def wrap(module: Any, folder: str, machine: str) -> None:
    context = getattr(module, "PContext", None)
    wait, close = getattr(context, "wait", None), getattr(context, "close", None)
    if context is None or wait is None or close is None:
        return  # of a PyTorch that is newer than this

    @functools.wraps(close)
    def closed(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Ranks that fail from here on are those that this ends.
        self.__dict__.setdefault("_cistern_failed", dict(getattr(self, "_failures", None) or {}))
        return close(self, *args, **kwargs)

    @functools.wraps(wait)
    def waited(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = wait(self, *args, **kwargs)
        failures = getattr(result, "failures", None)
        if failures:
            note(getattr(self, "_cistern_failed", None) or failures, folder, machine)
        return result

    context.close, context.wait = closed, waited


def note(failures: Dict[int, Any], folder: str, machine: str) -> None:
    """Never raises: the job comes first."""
    try:
        for local_rank, f in failures.items():
            add(os.path.join(folder, "*-%s-%d-*.summary.json" % (glob.escape(machine), f.pid)), f.pid, str(local_rank), int(f.exitcode))
    except Exception as e:
        say("how ranks ended is not noted in %s: %s: %s" % (folder, type(e).__name__, e))


def add(pattern: str, pid: int, local_rank: str, status: int) -> None:
    for path in glob.glob(pattern):
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
            continue
        with open(path, encoding="utf-8") as f:
            summary = json.load(f)
        if "status" in summary or summary.get("pid") != pid or summary.get("variables", {}).get("LOCAL_RANK") != local_rank:
            continue  # of an earlier process of that number
        summary["status"] = status
        replace(path, summary)


def replace(path: str, summary: Dict[str, Any]) -> None:
    """Writes a summary, whole or not at all."""
    with tempfile.NamedTemporaryFile("w", prefix=".cistern-", dir=os.path.dirname(path), delete=False) as f:
        f.write(json.dumps(summary, separators=(",", ":")) + "\n")
    try:
        os.replace(f.name, path)
    except OSError:
        os.unlink(f.name)
        raise
