"""The adapter that is built already: what it depends on, which its folder is named by, and where it is kept.

Every program that starts comes through here, those that build it (cistern.build) once; so this imports little.
"""

import os
from typing import List, Optional

from . import _toolchain
from ._toolchain import Missing, Torch
from ._version import version

SOURCES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "adapter")
NAME = "libcistern_torch.so"
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-DNDEBUG", "-g0", "-fvisibility=hidden", "-ffunction-sections"]
# Little to load: no section that nothing uses, no library that nothing is wanted from.
LINK = ["-Wl,-O1", "-Wl,--gc-sections", "-Wl,--as-needed"]

# What the adapter calls. PyTorch has loaded them, so no path is written into the result.
LIBRARIES = ["c10_cuda", "c10"]


def sources() -> List[str]:
    """What is compiled. plain.cpp is the fallback, which needs no PyTorch and is built with the library."""
    names = sorted(n for n in os.listdir(SOURCES) if n.endswith(".cpp") and n != "plain.cpp")
    return [os.path.join(SOURCES, n) for n in names]


def header() -> str:
    """The folder of cistern.h: in the wheel, in the bundle, in the source tree."""
    package = os.path.dirname(SOURCES)
    folders = [os.path.join(package, "include"), os.path.join(os.path.dirname(package), "include"),
               os.path.join(os.path.dirname(os.path.dirname(package)), "cmd", "libcistern")]
    for folder in folders:
        if os.path.isfile(os.path.join(folder, "cistern.h")):
            return folder
    raise Missing("cistern.h is missing: looked in " + ", ".join(folders))


def key(torch: Torch) -> str:
    """A hash of what the adapter depends on."""
    import hashlib

    h = hashlib.sha256()
    files = [os.path.join(SOURCES, n) for n in sorted(os.listdir(SOURCES)) if n.endswith((".cpp", ".h"))]
    for file in files + [os.path.join(header(), "cistern.h")]:
        with open(file, "rb") as f:
            h.update(os.path.basename(file).encode() + b"\0" + f.read() + b"\0")
    libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    abi = "cxx11abi=%d" % torch.new_abi
    for fact in [version, torch.version, torch.git, torch.cuda or "", abi, os.uname().machine, libc] + FLAGS + LINK + LIBRARIES:
        h.update(fact.encode() + b"\0")
    return h.hexdigest()[:16]


def _cache() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or ""
    if not os.path.isabs(base):  # as the specification of these folders has it
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "cistern")


def temporary() -> str:
    import tempfile

    return os.path.join(tempfile.gettempdir(), "cistern-%d" % os.getuid())


def places() -> List[str]:
    """The folders where adapters are kept, in the order in which they are looked through and written to."""
    named = os.environ.get("CISTERN_ADAPTER_DIR")
    return ([os.path.abspath(named)] if named else []) + [_cache(), temporary()]


def ours(folder: str) -> bool:
    """Whether nobody else can have put something into the folder: what lies there is loaded and run."""
    if folder != temporary():
        return True
    try:
        st = os.lstat(folder)
    except OSError:
        return False
    return st.st_uid == os.getuid() and st.st_mode & 0o170022 == 0o040000


def find(torch: Torch, where: Optional[List[str]] = None) -> Optional[str]:
    """The adapter for this PyTorch in one of these places (default: places()), if it was built already."""
    name = "adapter-" + key(torch)
    for place in where or places():
        file = os.path.join(place, name, NAME)
        if os.path.isfile(file) and ours(place):
            return file
    return None


def check(torch: Torch) -> None:
    """Raises Missing where there can be no adapter for this PyTorch."""
    if torch.cuda is None:
        raise Missing("PyTorch %s was built without CUDA" % torch.version)
    if not torch.supported:
        raise Missing("torch %s is not among the versions this adapter was compiled against (%s)" %
                      (torch.release, ", ".join(_toolchain.SUPPORTED)))
