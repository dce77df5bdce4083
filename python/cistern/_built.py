"""The adapter that is built already: what it depends on, which its folder is named by, and where it is kept. Those for releases
of PyTorch come with the package; others are built, once (cistern.build).

Every program that starts comes through here, those that build it (cistern.build) once; so this imports little.
"""

import os
import stat
from typing import Any, List, Optional, Set

from . import _toolchain
from ._errors import say
from ._toolchain import Missing, Torch
from ._version import version

SOURCES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "adapter")
NAME = "libcistern_torch.so"
FLAGS = ["-O2", "-fPIC", "-DNDEBUG", "-g0", "-fvisibility=hidden", "-ffunction-sections"]
# Little to load: no section that nothing uses, no library that nothing is wanted from.
LINK = ["-Wl,-O1", "-Wl,--gc-sections", "-Wl,--as-needed"]

# What the adapter calls. PyTorch has loaded them, so no path is written into the result.
LIBRARIES = ["c10_cuda", "c10"]


PROBE = "probe.cpp"


def sources() -> List[str]:
    """What is compiled. plain.cpp is the fallback, which needs no PyTorch and is built with the library."""
    names = sorted(n for n in os.listdir(SOURCES) if n.endswith(".cpp") and n not in ("plain.cpp", PROBE))
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


def _hash_of_sources() -> Any:
    import hashlib

    h = hashlib.sha256()
    files = [os.path.join(SOURCES, n) for n in sorted(os.listdir(SOURCES)) if n.endswith((".cpp", ".h"))]
    for file in files + [os.path.join(header(), "cistern.h")]:
        with open(file, "rb") as f:
            h.update(os.path.basename(file).encode() + b"\0" + f.read() + b"\0")
    return h


def key(torch: Torch) -> str:
    """A hash of what the adapter depends on."""
    h = _hash_of_sources()
    libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    abi = "cxx11abi=%d" % torch.new_abi
    for fact in [version, torch.version, torch.git, torch.cuda or "", abi, os.uname().machine, libc] + FLAGS + LINK + LIBRARIES:
        h.update(fact.encode() + b"\0")
    digest: str = h.hexdigest()[:16]
    return digest


def _cache() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or ""
    if not os.path.isabs(base):  # as the specification of these folders has it
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "cistern")


def temporary() -> str:
    import tempfile

    return os.path.join(tempfile.gettempdir(), "cistern-%d" % os.geteuid())


_reported: Set[str] = set()  # files that were reported as unusable


def named() -> List[str]:
    """The folder that the user chose."""
    folder = os.environ.get("CISTERN_ADAPTER_DIR")
    return [os.path.abspath(folder)] if folder else []


def places() -> List[str]:
    """The folders where adapters are kept, in the order in which they are looked through and written to."""
    return named() + [_cache(), temporary()]


def safe(path: str, kept: int) -> Optional[str]:
    """The path without symbolic links, if only this user and root can change what it leads to; else None. The file there is
    loaded and run. The last kept names are the cache's own, which others must not be able to write to at all.

    All folders on the way are checked, so no other user can replace anything between this check and the use of the answer."""
    real = at = os.path.realpath(path)
    owners, above = {0, os.geteuid()}, _unmapped()
    while True:
        try:
            st = os.lstat(at)
        except FileNotFoundError:
            pass  # to be made
        except OSError:
            return None
        else:
            if stat.S_ISLNK(st.st_mode) or st.st_uid not in (owners if kept > 0 else owners | above):
                return None
            writers = st.st_mode & 0o022
            if kept <= 0 and st.st_mode & stat.S_ISVTX:
                writers = 0  # others can make files there, and not replace this user's
            elif kept <= 0 and st.st_gid == st.st_uid:
                writers &= 0o002  # the group that each user has alone
            if writers:
                return None
        if at == os.path.dirname(at):
            return real
        at, kept = os.path.dirname(at), kept - 1


def _unmapped() -> Set[int]:
    """The owner shown for files of users outside of the user namespace: in a rootless container, files of the system."""
    try:
        with open("/proc/sys/kernel/overflowuid") as f:
            overflow = int(f.read())
        with open("/proc/self/uid_map") as f:
            known = any(int(first) <= overflow < int(first) + int(n) for first, _, n in map(str.split, f))
    except (OSError, ValueError):
        return set()
    return set() if known else {overflow}


def find(torch: Torch, where: Optional[List[str]] = None) -> Optional[str]:
    """The adapter for this PyTorch in one of these places (default: places()), if it was built already."""
    name = "adapter-" + key(torch)
    for place in where or places():
        file = usable(os.path.join(place, name), where)
        if file is not None:
            return file
    return prebuilt(torch) if where is None else None


# Those that come with the package lie in a folder with a list of their checksums, whose first line names their sources.
SUMS = "checksums.txt"
# These make the interface between PyTorch and its allocator, which patches of a release leave alone.
_INTERFACE = ("c10/cuda/CUDACachingAllocator.h", "c10/core/CachingDeviceAllocator.h", "c10/core/Allocator.h")


def prebuilt_name(torch: Torch) -> str:
    """The name of the adapter for a release of PyTorch: its minor version, the major one of CUDA, C++'s ABI and a hash of the
    interface; for a PyTorch whose headers were removed, as from some images, the part before the hash."""
    import hashlib

    h = hashlib.sha256()
    try:
        for name in _INTERFACE:
            with open(os.path.join(torch.include[0], *name.split("/")), "rb") as f:
                h.update(f.read())
        interface = h.hexdigest()[:8] + ".so"
    except OSError:
        interface = ""
    minor = ".".join(map(str, torch.minor))
    return "libcistern_torch-%s-cu%s-abi%d-%s" % (minor, (torch.cuda or "").partition(".")[0], torch.new_abi, interface)


def sums_head() -> str:
    return "# of the sources %s %s" % (version, _hash_of_sources().hexdigest()[:16])


def prebuilt(torch: Torch) -> Optional[str]:
    """The adapter for this PyTorch that came with the package, in the wheel or beside it, if it is as it was made."""
    if not torch.official:
        return None
    package = os.path.dirname(SOURCES)
    above = os.path.dirname(package)
    for folder in (os.path.join(package, "adapters"), os.path.join(above, "lib", "adapters"),
                   os.path.join(os.path.dirname(above), "lib", "adapters")):
        try:
            with open(os.path.join(folder, SUMS), encoding="utf-8") as f:
                lines = f.read().splitlines()
        except OSError:
            continue
        if lines[:1] != [sums_head()]:
            continue  # they were made before the sources changed
        wanted = prebuilt_name(torch)
        for digest, name in (line.split() for line in lines[1:]):
            file = os.path.join(folder, name)
            if name.startswith(wanted) and _intact(file, digest):
                return file
    return None


def _intact(file: str, digest: str) -> bool:
    import hashlib

    try:
        with open(file, "rb") as f:
            real = hashlib.sha256(f.read()).hexdigest()
    except OSError as e:
        real = e.strerror or "unreadable"
    if real != digest and file not in _reported:
        _reported.add(file)
        say("the adapter %s is not loaded: its checksum is wrong" % file)
    return real == digest


def usable(folder: str, where: Optional[List[str]] = None) -> Optional[str]:
    """The adapter in a folder of its own, if it is there and may be loaded."""
    file, place = os.path.join(folder, NAME), os.path.dirname(folder)
    if not os.path.isfile(file):
        return None
    if place in (where or named()):
        return file
    real = safe(file, kept=3)
    if real is None and file not in _reported:
        _reported.add(file)
        say("the adapter in %s is not used: another user could have written it" % place)
    return real


def check(torch: Torch) -> None:
    """Raises Missing where there can be no adapter for this PyTorch, or the user wants none."""
    wanted = os.environ.get("CISTERN_ADAPTER") or "on"
    if wanted != "on":
        raise Missing("CISTERN_ADAPTER=off" if wanted == "off" else "CISTERN_ADAPTER=%s: expected on or off" % wanted)
    if torch.cuda is None:
        raise Missing(_toolchain.without_cuda(torch.version, torch.hip))
    if not torch.supported:
        raise Missing("torch %s is older than %d.%d, the first that the adapter is for" % ((torch.release,) + _toolchain.OLDEST))
