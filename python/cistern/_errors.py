"""The exceptions of the package, and its lines on standard error."""

import os
import sys


class CisternError(RuntimeError):
    """The base of Cistern's exceptions: a function cannot do its work. The message says what is missing and why."""


class OutOfMemoryError(CisternError, MemoryError):
    """The device has too little memory, for example for `cistern.resume`; the message says how much is missing. It is a MemoryError.

    Requests of PyTorch, CuPy and numba fail with the exceptions of those libraries, such as `torch.OutOfMemoryError`."""


class SettingsError(CisternError, ValueError):
    """Settings are wrong; the message names the key and the choices. It is a ValueError."""


# Named as programs know them, in tracebacks too.
for _error in (CisternError, OutOfMemoryError, SettingsError):
    _error.__module__ = "cistern"


def say(text: str, every_rank: bool = False) -> None:
    """Writes one line for people on standard error. Of several ranks on a machine only the first says what they all
    would."""
    if not every_rank and os.environ.get("LOCAL_RANK", "0") != "0":
        return
    try:
        sys.stderr.write("cistern: " + " ".join(text.split()) + "\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        pass  # no standard error, or a closed one: there is no reader
