"""The command `cistern`, a program of its own: where it lies. The script of that name that the wheel installs, python/cistern.sh,
starts it without Python."""

import os

from . import _library
from ._errors import CisternError


def path() -> str:
    """The program: in the wheel, in the bundle, in the source tree."""
    package = _library.PACKAGE
    folders = [os.path.join(package, "bin"), os.path.join(os.path.dirname(package), "bin"),
               os.path.join(os.path.dirname(os.path.dirname(package)), "bin")]
    for folder in folders:
        file = os.path.join(folder, "cistern")
        if os.access(file, os.X_OK) and os.path.isfile(file):
            return file
    raise CisternError("the command cistern is missing: looked in " + ", ".join(folders))
