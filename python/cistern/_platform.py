"""Whether the package's libraries and programs are for this machine: its system, architecture and C library. `load` and the command
ask before or after they fail, so that the reason is a line; wheels say the same to pip by their names."""

import os
import re
from typing import Optional, Tuple

# The oldest that releases are for; a library that was built elsewhere may need a newer one.
OLDEST_GLIBC = (2, 28)

_MACHINES = {b"\x3e\x00": "x86_64", b"\xb7\x00": "aarch64"}


def machine(file: str) -> str:
    """The architecture that an ELF file is for, as uname calls it; empty where it is another one, or no such file."""
    try:
        with open(file, "rb") as f:
            head = f.read(20)
    except OSError:
        return ""
    return _MACHINES.get(head[18:], "") if head[:4] == b"\x7fELF" else ""


def glibc() -> Optional[Tuple[int, int]]:
    """The version of this process's glibc: (2, 28); None where the C library is another one."""
    try:
        found = re.match(r"glibc (\d+)\.(\d+)", os.confstr("CS_GNU_LIBC_VERSION") or "")
    except (OSError, ValueError):
        return None
    return (int(found.group(1)), int(found.group(2))) if found else None


def needed_glibc(file: str) -> Tuple[int, int]:
    """The newest version of glibc that a file names. It reads the whole file."""
    try:
        with open(file, "rb") as f:
            names = re.findall(rb"GLIBC_2\.(\d+)\0", f.read())
    except OSError:
        names = []
    return max([OLDEST_GLIBC] + [(2, int(minor)) for minor in names])


def problem(file: str, needed: Tuple[int, int] = OLDEST_GLIBC) -> str:
    """Why a file of the package cannot be used on this machine; empty where nothing is known to forbid it."""
    here = os.uname()
    if here.sysname != "Linux":
        return "%s is for Linux, this system is %s" % (file, here.sysname)
    if machine(file) not in ("", here.machine):
        return "%s is for %s, this machine is %s: install the wheel for it" % (file, machine(file), here.machine)
    version, wanted = glibc(), "%d.%d" % needed
    if version is None:
        return "%s needs glibc %s or newer, the C library of this Python is another one (musl, as on Alpine)" % (file, wanted)
    if version < needed:
        return "%s needs glibc %s or newer, this system has %d.%d" % ((file, wanted) + version)
    return ""


def explain(file: str) -> str:
    """Why a file of the package could not be loaded or started, as far as this machine is the reason."""
    return problem(file, needed_glibc(file))
