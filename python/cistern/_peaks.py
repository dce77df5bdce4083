"""Peaks of GPU memory as numbers to log, for the callbacks of training frameworks."""

from typing import Dict

from . import _stats
from ._errors import say

_GIB = 1 << 30


class Peaks:
    """The peaks of the current device since reset()."""

    def __init__(self) -> None:
        self._complained = False

    def reset(self) -> None:
        _stats.reset_peaks(None)

    def read(self) -> Dict[str, float]:
        """The peaks in GiB; nothing, and one line on standard error, where Cistern does not run."""
        found = _stats.flat(None)
        if not found:
            if not self._complained:
                self._complained = True
                say("peaks of GPU memory are not logged: Cistern does not run here: start the program by `cistern run`")
            return {}
        return {"gpu_peak_%s_gib" % what: found[what + "_bytes.all.peak"] / _GIB for what in ("allocated", "reserved")}
