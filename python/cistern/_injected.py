"""What happens in a program that `cistern run` or `cistern record` started, right after it imported PyTorch.

The command puts _inject first in PYTHONPATH. So every Python that the program starts runs _inject/sitecustomize.py first,
which takes itself out of the path, runs the program's own sitecustomize and waits for `import torch`. Then it calls this
module, which for `cistern run` enables cistern.torch. That starts neither CUDA nor libcistern.so, so the program may fork
until CUDA starts. Whatever goes wrong here is one line on standard error and the program goes on without Cistern; only bad
settings end it, because a run without them would not be what was asked for.
"""

import os
import sys
from typing import Any, Optional

from ._errors import CisternError, SettingsError, say


def torch_imported(torch: Any) -> None:
    what, _, how = os.environ.get("_CISTERN_INJECT", "").partition(",")
    if getattr(getattr(torch, "version", None), "cuda", None) is None:
        if what == "record":
            say("nothing is recorded: this PyTorch was built without CUDA")
        elif what == "run":
            say_without_cuda(torch)
        return  # or it is something else of that name
    try:
        if what == "record":
            from . import _record

            _record.begin(torch)
        elif what == "run":
            mode = _enable()
            if mode is not None:
                _provide()
                if os.environ.get("_CISTERN_FLEET"):
                    from . import _fleet

                    _fleet.begin(torch, "cistern")
            if mode is not None and how == "verbose":
                torch.cuda._lazy_call(lambda: _say_mode(mode))
    except SettingsError as e:
        say(str(e), every_rank=True)
        sys.exit(2)
    except Exception as e:
        say("PyTorch keeps its own allocator: %s" % e if what == "run" else "nothing is recorded: %s" % e,
            every_rank=True)


def say_without_cuda(torch: Any) -> None:
    """Says why PyTorch is left alone, where a GPU could be missed: with AMD's, or with NVIDIA's and a PyTorch for CPUs."""
    version: Any = getattr(torch, "version", None)
    hip = getattr(version, "hip", None)
    if hip or hasattr(version, "cuda") and has_driver():
        from . import _toolchain

        say("PyTorch keeps its own allocator: " + _toolchain.without_cuda(version.__version__, hip))


def _say_mode(mode: str) -> None:
    program = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    say("process %d (%s) runs on Cistern%s" % (os.getpid(), program if program not in ("", "-c", "-m") else "python",
                                              "" if mode == "adapter" else ", by PyTorch's plain pluggable allocator"), every_rank=True)


def _provide() -> None:
    """Puts the modules that CISTERN_COMPAT names in place of others."""
    if not os.environ.get("CISTERN_COMPAT"):
        return
    from . import compat

    names = compat.wanted()
    try:
        compat.install(*names)
    except ValueError as e:
        raise SettingsError("%s: %s" % (compat.VARIABLE, e)) from None
    except CisternError as e:
        say("%s has no effect: %s" % (compat.VARIABLE, e), every_rank=True)


def _enable() -> Optional[str]:
    from . import _built, _toolchain
    from . import torch as ours

    if not has_driver():
        # Nothing will be put on a GPU here. That the adapter is not built for it is as well.
        if _built.find(_toolchain.find_torch()) is None:
            return None
    return ours.enable()


def has_driver() -> bool:
    """Whether this machine has a driver of NVIDIA's, without starting it."""
    return any(os.path.exists(p) for p in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/nvhost-ctrl-gpu", "/dev/nvmap"))
