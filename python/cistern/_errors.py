"""The error of the package, and its lines on standard error."""

import os
import sys


class CisternError(RuntimeError):
    """Something that was requested of Cistern is not available; the message says what and why."""


class OutOfMemoryError(CisternError, MemoryError):
    """The device lacks memory for what was asked of Cistern itself, as by resume(); the words say how much. What PyTorch asks
    for fails with torch.OutOfMemoryError."""


class SettingsError(CisternError, ValueError):
    """Bad settings; the words name the key and the choices."""


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
