"""Builds the adapter, the C++ class by which PyTorch allocates from Cistern, for the PyTorch that is installed.

    python -m cistern.build [--dir DIR] [--force]

The wheel brings it for releases of PyTorch; this is for other builds. The host's C++ compiler is called directly; neither nvcc nor ninja nor a CUDA toolkit is needed, only the headers of CUDA
that come with PyTorch's wheels. The result is kept in a folder whose name is a hash of everything that it depends on
but the compiler, so that an image without one can carry an adapter that was built elsewhere.

What differs between versions of PyTorch is found by compiling adapter/probe.cpp. A version that the adapter was not tried with
has to pass a self-test as well (cistern._selftest); where one fails, the words say what.

Of several processes that want it at once, as the ranks of a job do, one builds, under a file lock that dies with its
holder, and the others wait for the result. It is built aside and renamed into place.
"""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import IO, Any, Dict, List, Optional, Tuple

from . import _toolchain
from ._built import (FLAGS, LIBRARIES, LINK, NAME, PROBE, SOURCES, check, find, header, key, named, places, safe, sources,
                     usable)
from ._toolchain import Missing, Torch
from ._version import version


class BuildError(Exception):
    """The adapter could not be built; the words say why, and where the compiler's output is."""


def adapter(torch: Torch, build: bool = True, retry: bool = False, force: bool = False,
            where: Optional[List[str]] = None) -> str:
    """The adapter's file, built now if it is not there (force: or if it is). Missing or BuildError where it cannot be
    had; retry: the same compiler is tried again if it has failed before."""
    check(torch)
    file = find(torch, where)
    if file is not None and not force:
        return file
    if not build:
        raise Missing("the adapter for torch %s is not built, and building is off (CISTERN_BUILD=0); "
                      "`cistern build-adapter` builds it" % torch.release)
    include = _toolchain.find_headers(torch)
    compiler = _toolchain.find_compiler()
    folder = _writable("adapter-" + key(torch), where)
    with open(os.path.join(folder, "lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            made = None if force else usable(folder, where)  # another process built it, while this one waited for the lock
            return made or _build(torch, compiler, include, folder, retry)
        finally:
            # A child that another thread forked meanwhile holds the descriptor too: closing it would not be enough.
            fcntl.flock(lock, fcntl.LOCK_UN)


def _writable(name: str, where: Optional[List[str]]) -> str:
    why = []
    for place in where or places():
        folder = os.path.join(place, name)
        chosen = place in (where or named())
        try:
            if not chosen:
                real = safe(folder, kept=2)
                if real is None:
                    why.append("another user could write to %s" % place)
                    continue
                folder = real
                os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
            os.makedirs(folder, mode=0o777 if chosen else 0o700, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as e:
            why.append("%s: %s" % (place, e.strerror))
    raise Missing("there is no folder to build the adapter in: " + "; ".join(why))


def _build(torch: Torch, compiler: List[str], include: List[str], folder: str, retry: bool) -> str:
    target = os.path.join(folder, NAME)
    log, failed = os.path.join(folder, "build.log"), os.path.join(folder, "failed.json")
    attempt = {"compiler": _identity(compiler), "include": include}
    if not retry and _read(failed) == attempt:
        raise BuildError("compiling the adapter for torch %s failed before, see %s; `cistern build-adapter` tries again"
                         % (torch.release, log))
    work = tempfile.mkdtemp(prefix="build-", dir=folder)
    start = time.monotonic()
    _tell("cistern: building the PyTorch adapter for torch %s (once) ... " % torch.release)
    try:
        found, output = features(torch, compiler, include, work)
        made = None
        if found is not None:
            made, more = _compile(torch, compiler, include, found, work)
            output += "\n" + more
        if made is None:
            wrong = "compiling the adapter for torch %s with %s failed%s" % (torch.release, compiler[0], _first_error(output))
        else:
            wrong, more = _self_test(torch, made)
            output += "\n" + more
        seconds = time.monotonic() - start
        with open(log, "w", encoding="utf-8") as f:
            f.write(output)
        if made is None or wrong:
            _tell("failed after %.0f s\n" % seconds)
            with open(failed, "w", encoding="utf-8") as f:
                json.dump(attempt, f)
            raise BuildError("%s, see %s" % (wrong, log))
        with open(os.path.join(folder, "adapter.json"), "w", encoding="utf-8") as f:
            json.dump({"cistern": version, "torch": torch.version, "seconds": round(seconds, 1), "features": found, **attempt}, f)
        os.chmod(made, 0o755)  # whatever the umask: others must not write to it
        os.replace(made, target)
        _tell("%.0f s\n" % seconds)
    except BaseException as e:
        if not isinstance(e, BuildError):
            _tell("stopped\n")
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _read(file: str) -> Any:
    try:
        with open(file, encoding="utf-8") as f:
            return json.load(f)
    except (OSError, ValueError):
        return None


def _identity(compiler: List[str]) -> List[str]:
    """The command, and which programs that is today: another version of a compiler may do what this one could not."""
    out = list(compiler)
    for word in compiler:
        found = shutil.which(word)
        if found:
            real = os.path.realpath(found)
            out.append("%s %d" % (real, os.stat(real).st_mtime_ns))
    return out


def headers(torch: Torch, include: List[str]) -> List[str]:
    """The words for the compiler by which it finds headers: those of others as the system's, whose warnings do not matter."""
    folders = [word for folder in include for word in ("-isystem", folder)]
    return ["-D_GLIBCXX_USE_CXX11_ABI=%d" % torch.new_abi, "-I" + header()] + folders


# PyTorch's headers need C++20 from 2.14 on; until then the older one is what they were tried with.
_STANDARDS = ("-std=c++17", "-std=c++20", "-std=c++23")


def features(torch: Torch, compiler: List[str], include: List[str], work: str) -> Tuple[Optional[List[str]], str]:
    """Which standard of C++ this PyTorch's headers are in, and what its allocator's interface has, as words for the compiler; and
    all that was printed. None where the probe compiles with none."""
    probe = os.path.join(SOURCES, PROBE)
    output = ""
    for standard in _STANDARDS:
        made = os.path.join(work, "probe.s")
        command, process, out = _start(compiler + [standard] + headers(torch, include) + ["-S", probe, "-o", made])
        ok = process.wait() == 0
        output += _finish(command, out)
        if ok:
            with open(made, encoding="utf-8", errors="replace") as f:
                return [standard] + ["-D" + word for word in re.findall(r'"cistern:(\w+=[01])', f.read())], output
    return None, output


def commands(torch: Torch, compiler: List[str], include: List[str], found: List[str],
             work: str) -> Tuple[List[List[str]], List[str]]:
    """The command for each source, and the one that links the results."""
    compiles, objects = [], []
    for source in sources():
        made = os.path.join(work, os.path.basename(source)[:-4] + ".o")
        compiles.append(compiler + found + FLAGS + headers(torch, include) + ["-c", source, "-o", made])
        objects.append(made)
    # Only those that this PyTorch has; what is missing is found, or not, when the adapter is loaded.
    libraries = ["-l" + n for n in LIBRARIES if os.path.isfile(os.path.join(torch.lib, "lib%s.so" % n))]
    link = compiler + ["-shared"] + LINK + ["-o", os.path.join(work, NAME)] + objects + ["-L" + torch.lib] + libraries
    # The C++ library of the process, by its file. Compilers beside the system's (toolsets, Conda's, one in /opt) would put
    # a static one of their own, or parts of it, into the adapter: two of them in a process share what they must not.
    runtime = _toolchain.find_runtime()
    if runtime is not None:
        link += ["-nodefaultlibs", runtime, "-lm", "-lgcc_s", "-lc"]
    return compiles, link + ["-ldl", "-lpthread"]


def _compile(torch: Torch, compiler: List[str], include: List[str], found: List[str], work: str) -> Tuple[Optional[str], str]:
    """Runs the commands, as many at once as there are processors. The file, or None, and all that was printed."""
    compiles, link = commands(torch, compiler, include, found, work)
    output: List[str] = []
    waiting = list(reversed(compiles))
    running: List[Tuple[List[str], Any, IO[bytes]]] = []
    ok = True
    try:
        while running or waiting and ok:
            while waiting and ok and len(running) < (os.cpu_count() or 1):
                running.append(_start(waiting.pop()))
            command, process, out = running.pop(0)
            ok = process.wait() == 0 and ok
            output.append(_finish(command, out))
    finally:
        for _, process, _ in running:  # interrupted
            process.kill()
            process.wait()
    if ok:
        command, process, out = _start(link)
        ok = process.wait() == 0
        output.append(_finish(command, out))
    return os.path.join(work, NAME) if ok else None, "\n".join(output)


def _start(command: List[str]) -> Tuple[List[str], Any, IO[bytes]]:
    out = tempfile.TemporaryFile()
    # The messages of a compiler in English go into reports.
    env = dict(os.environ, LC_ALL="C")
    return command, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env), out


def _finish(command: List[str], out: IO[bytes]) -> str:
    with out:
        out.seek(0)
        return "$ %s\n%s" % (" ".join(command), out.read().decode("utf-8", "replace"))


def _first_error(output: str) -> str:
    found = re.search(r": (?:fatal )?error: (.*)", output)
    return ": " + found.group(1) if found else ""


def _self_test(torch: Torch, file: str) -> Tuple[str, str]:
    """What is wrong with an adapter for a version that none was tried with; and all that was printed. A process of its own finds
    out, as the worst that can happen is a crash."""
    if torch.minor in _toolchain.known():
        return "", ""
    tool = os.path.join(os.path.dirname(SOURCES), "_inject", "tool.py")
    try:
        command, process, out = _start([sys.executable, tool, "_selftest", file])
        code = process.wait(timeout=600)
    except (OSError, subprocess.SubprocessError) as e:
        return "the adapter for torch %s cannot be tested: %s" % (torch.release, e), ""
    output = _finish(command, out)
    if code == 0:
        return "", output
    words = output.rstrip().splitlines()[-1] if code == 1 else "it ended with %d" % code
    return "the adapter for torch %s fails its self-test: %s" % (torch.release, words), output


def _tell(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        pass


def state(torch: Torch) -> Dict[str, Any]:
    """What doctor says of the adapter."""
    file = find(torch)
    out: Dict[str, Any] = {"built": file is not None, "path": file, "places": places()}
    if file is not None:
        out["build"] = _read(os.path.join(os.path.dirname(file), "adapter.json"))
    else:
        for place in places():
            folder = os.path.join(place, "adapter-" + key(torch))
            if os.path.isfile(os.path.join(folder, "failed.json")):
                out["failed"] = os.path.join(folder, "build.log")
    return out


def main(arguments: Optional[List[str]] = None) -> int:
    import argparse

    parser = argparse.ArgumentParser(prog="cistern build-adapter", description="Builds the adapter for the PyTorch of "
                                     "this Python, ahead of its first use.")
    parser.add_argument("--dir", help="folder to keep it in, to be named by CISTERN_ADAPTER_DIR when it is used "
                        "(default: ~/.cache/cistern)")
    parser.add_argument("--force", action="store_true", help="build it again")
    a = parser.parse_args(arguments)
    where = [os.path.abspath(a.dir)] if a.dir else None
    try:
        torch = _toolchain.find_torch()
        check(torch)
        there = find(torch, where)
        if there is not None and not a.force:
            print("%s (built already)" % there)
        else:
            print(adapter(torch, retry=True, force=a.force, where=where))
        return 0
    except (Missing, BuildError, OSError) as e:
        sys.stderr.write("cistern: %s\n" % e)
        return 2


if __name__ == "__main__":
    sys.exit(main())
