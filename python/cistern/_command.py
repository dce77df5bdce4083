"""The command `cistern`, a program of its own: where it lies, and the script of that name that the wheel installs."""

import os
import sys

from . import _library, _platform
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


def main() -> None:
    """Becomes the program. An argument names the Python it was installed for."""
    program = ""
    try:
        program = path()
        os.environ.setdefault("CISTERN_PYTHON", sys.executable)
        os.execv(program, [sys.argv[0] or program] + sys.argv[1:])
    except (CisternError, OSError) as e:
        sys.stderr.write("cistern: %s\n" % (program and _platform.explain(program) or e))
        sys.exit(2)
