"""What `cistern doctor` asks a program's Python: which PyTorch there is, what the adapter would be built with, whether it
is built. Prints one JSON object; the command adds what it knows itself and says what would not work."""

import json
import os
import platform
import sys
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import _built, _toolchain, build
from ._toolchain import Missing
from ._version import version


_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")


def settings(adapter: Optional[str]) -> List[str]:
    """What PyTorch's settings mean here: the adapter knows, for which PyTorch has to be loaded."""
    if adapter is None:
        return ["once the adapter is built, this says what %s means on Cistern" %
                " and ".join(v for v in _SETTINGS if v in os.environ)]
    from . import torch as ours

    try:
        import torch

        return ours.settings_report(ours.load(adapter, torch.__version__)).splitlines()
    except Exception as e:
        return ["PyTorch cannot be loaded: %s: %s" % (type(e).__name__, e)]


def glibc() -> str:
    """The version of the C library, 2.36; empty where it is not glibc."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").rpartition(" ")[2]
    except (OSError, ValueError):
        return ""


def report() -> Dict[str, Any]:
    out: Dict[str, Any] = {
        "cistern": version,
        "python": {"path": sys.executable, "version": platform.python_version(), "prefix": sys.prefix,
                   "ignores_environment": bool(sys.flags.ignore_environment), "no_site": bool(sys.flags.no_site)},
        "libc": glibc(),
        "problems": [],
    }
    problems: List[str] = out["problems"]
    try:
        torch = _toolchain.find_torch()
    except Missing as e:
        problems.append(str(e))
        out["torch"] = None
        return out
    out["torch"] = {"version": torch.version, "cuda": torch.cuda, "git": torch.git, "path": torch.folder,
                    "supported": torch.supported}
    if torch.cuda is None:
        problems.append("torch %s was built without CUDA%s: it is left as it is" %
                        (torch.version, " (for ROCm)" if torch.hip else ""))
        return out
    state = build.state(torch)
    out["adapter"] = state
    try:
        _built.check(torch)
        wanted = not state["built"]
    except Missing as e:
        problems.append("%s: PyTorch would use the plain allocator" % e)
        wanted = False
    tools: List[Tuple[str, Callable[[], List[str]]]] = [
        ("headers", lambda: _toolchain.find_headers(torch)), ("compiler", _toolchain.find_compiler)]
    for what, find in tools:
        try:
            out[what] = find()
        except Missing as e:
            out[what] = None
            # What is built already needs neither.
            if wanted:
                problems.append("%s; without the adapter PyTorch would use the plain allocator" % e)
    if wanted and "failed" in state:
        problems.append("compiling the adapter has failed before, see %s" % state["failed"])
    if any(v in os.environ for v in _SETTINGS):
        out["settings"] = settings(state["path"])
    if wanted and os.environ.get("CISTERN_BUILD") == "0":
        problems.append("the adapter is not built, and building is off (CISTERN_BUILD=0)")
    return out


def main(arguments: List[str]) -> int:
    json.dump(report(), sys.stdout)
    sys.stdout.write("\n")
    return 0
