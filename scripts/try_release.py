#!/usr/bin/env python3
"""try_release.py [--root=SYSTEM]... [FOLDER]: tries what `make release` made in dist/ (or FOLDER), a line for each trial: the checksums; the
wheel in a new environment of each Python from 3.9 on, without a compiler and with a home that cannot be written; its size and how long it
takes to start; pip's answer to a wheel of another architecture; the library in a program of musl's and the aarch64 files under
qemu-aarch64, where those are installed. SYSTEM is the root of another Linux that has python3 with venv, as debootstrap makes one: the
wheel is tried in it as well. That needs root."""

import glob
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RECORDING = os.path.join(ROOT, "docs", "samples", "oom.pickle.gz")
QEMU = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]
# Allocates and frees over the simulated device.
PROGRAM = """#include <cistern.h>
#include <stdio.h>
int main(void) {
  void *p = cistern_malloc(1 << 20, 0, 0);
  if (p == NULL) { char words[512]; cistern_last_error(words, sizeof words); puts(words); return 1; }
  cistern_free(p, 1 << 20, 0, 0);
  printf("%s on %d device\\n", cistern_version(), cistern_device_count());
  return 0;
}
"""
IMPORT = "import time; t = time.perf_counter(); import cistern; print(time.perf_counter() - t)"
USE = "import cistern, ctypes; from cistern import _library; l = _library.load(); " \
      "p = l.cistern_malloc(1 << 20, 0, None); assert p; " \
      "l.cistern_free(p, 1 << 20, 0, None); print(cistern.version, len(cistern.stats()['devices']))"


class Failed(Exception):
    """A trial failed; the words say how."""


def run(*command, code=0, **more):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, **more)
    if done.returncode != code:
        raise Failed("$ %s\nexit code %d\n%s" % (" ".join(command), done.returncode, done.stdout))
    return done.stdout.strip()


def say(what, *words):
    print("%-22s %s" % (what, " ".join(map(str, words))), flush=True)


def one(dist, pattern):
    found = glob.glob(os.path.join(dist, pattern))
    if len(found) != 1:
        raise Failed("%s: expected one file, found %d" % (os.path.join(dist, pattern), len(found)))
    return found[0]


def pythons():
    """A program of each Python from 3.9 on, by version: in the path, and pyenv's."""
    found = {}
    for program in [sys.executable] + glob.glob(os.path.expanduser("~/.pyenv/versions/3.*/bin/python3")) + \
            list(filter(None, (shutil.which("python3.%d" % minor) for minor in range(9, 20)))):
        done = subprocess.run([program, "-c", "import sys, ensurepip; print('%d.%02d' % sys.version_info[:2])"], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, universal_newlines=True)
        if done.returncode == 0 and done.stdout.strip() >= "3.09":  # pyenv has commands for Pythons that are not chosen
            found.setdefault(done.stdout.strip().replace(".0", "."), program)
    return found


def plain_environment(home):
    """A user without a compiler, whose home cannot be written, even by root: it is a file."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CISTERN", "PYTHON", "XDG"))}
    os.makedirs(os.path.join(home, "bin"), exist_ok=True)
    with open(os.path.join(home, "home"), "w"):
        pass
    return dict(env, PATH=os.path.join(home, "bin"), HOME=os.path.join(home, "home"), CISTERN_CONF="driver:sim:1GiB")


def quickest(times, *command, env):
    """The seconds of the quickest of several starts, and their median: others use the machine too."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run(*command, env=env)
        seconds.append(time.perf_counter() - start)
    return min(seconds), sorted(seconds)[times // 2]


def try_python(version, program, wheel, work):
    venv = os.path.join(work, "venv-" + version)
    run(program, "-m", "venv", venv)
    python, command = os.path.join(venv, "bin", "python"), os.path.join(venv, "bin", "cistern")
    run(python, "-m", "pip", "install", "-q", "--no-index", "--disable-pip-version-check", wheel)
    env = plain_environment(work)
    said = run(command, "--version", env=env)
    used = run(python, "-c", USE, env=env)
    run(command, "report", RECORDING, env=env)
    # The compiled files of the package are there from the first import on.
    seconds = sorted(float(run(python, "-c", IMPORT, env=env)) for _ in range(11))
    say("Python " + version, said, "| library:", used, "| import: %.1f ms, median %.1f ms" % (1000 * seconds[0], 1000 * seconds[5]))
    if seconds[0] > 0.050:
        raise Failed("import cistern takes %.1f ms: at most 50" % (1000 * seconds[0]))
    return venv, env


def try_wheels(dist, work):
    machine = platform.machine()
    wheel, other = one(dist, "*_%s.whl" % machine), one(dist, "*_%s.whl" % ("aarch64" if machine == "x86_64" else "x86_64"))
    venv = env = None
    for version, program in pythons().items():
        venv, env = try_python(version, program, wheel, work)
    least, middle = quickest(21, os.path.join(venv, "bin", "cistern"), "--version", env=env)
    say("cistern --version", "%.1f ms, median %.1f ms" % (1000 * least, 1000 * middle))
    if least > 0.020:
        raise Failed("cistern --version takes %.1f ms: at most 20" % (1000 * least))
    words = run(os.path.join(venv, "bin", "python"), "-m", "pip", "install", "--no-index", "--disable-pip-version-check", other, code=1)
    if "not a supported wheel on this platform" not in words:
        raise Failed("pip says of %s: %s" % (other, words))
    say("another architecture", words.splitlines()[-1])
    for file in (wheel, other):
        say("size", "%.1f MB %s" % (os.path.getsize(file) / 1e6, os.path.basename(file)))


# What a program says that cannot load a library.
OPENER = """#include <dlfcn.h>
#include <stdio.h>
int main(int n, char **arguments) {
  puts(dlopen(arguments[n - 1], RTLD_NOW) == NULL ? dlerror() : "loaded");
  return 0;
}
"""


def try_musl(dist, work):
    if shutil.which("musl-gcc") is None:
        return say("musl", "not tried: scripts/need.sh musl-gcc")
    source, program = os.path.join(work, "opener.c"), os.path.join(work, "opener")
    with open(source, "w", encoding="utf-8") as f:
        f.write(OPENER)
    run("musl-gcc", "-o", program, source)
    run("tar", "-xf", one(dist, "libcistern-*-linux-%s.tar.gz" % platform.machine()), "-C", work)
    library = glob.glob(os.path.join(work, "libcistern-*-linux-%s" % platform.machine(), "lib", "libcistern.so"))[0]
    words = run(program, library).splitlines()
    if len(words) != 1 or words[0] == "loaded":
        raise Failed("a program of musl's that loads the library says: %s" % words)
    say("musl, library", words[0].replace(library, "libcistern.so"))
    archive = one(dist, "cistern-*-linux-%s.tar.gz" % {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()])
    run("tar", "-xf", archive, "-C", work)
    static = os.path.join(work, os.path.basename(archive)[:-7], "cistern")
    if "INTERP" in run("readelf", "-lW", static):
        raise Failed("%s needs a dynamic loader" % static)
    say("musl, static", run(static, "--version"), "| needs no loader")


# Tries the wheel in another system, whose root is the working folder.
IN_ROOT = """set -eu
rm -rf /tmp/cistern-venv
python3 -m venv /tmp/cistern-venv
bin=/tmp/cistern-venv/bin
$bin/python -m pip install -q --no-index --disable-pip-version-check /tmp/cistern-try/*.whl
export CISTERN_CONF=driver:sim:1GiB HOME=/dev/null
$bin/cistern --version
$bin/python -c "$USE"
$bin/cistern report /tmp/cistern-try/recording.pickle.gz >/dev/null
$bin/python -c 'import os, platform; print(os.confstr("CS_GNU_LIBC_VERSION"), "Python", platform.python_version())'
rm -rf /tmp/cistern-venv
"""


def try_root(dist, root):
    """The mounts of the trial end with it."""
    place = os.path.join(root, "tmp", "cistern-try")
    shutil.rmtree(place, ignore_errors=True)
    os.makedirs(place)
    try:
        shutil.copy(one(dist, "*_%s.whl" % platform.machine()), place)
        shutil.copy(RECORDING, os.path.join(place, "recording.pickle.gz"))
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "USE": USE, "IN_ROOT": IN_ROOT, "ROOT": root}
        words = run("unshare", "--mount", "sh", "-c", 'mount -t proc proc "$ROOT/proc" && exec chroot "$ROOT" sh -c "$IN_ROOT"', env=env)
        version, used, system = words.splitlines()[-3:]
        say(os.path.basename(root), version, "| library:", used, "|", system)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def try_aarch64(dist, work):
    if shutil.which(QEMU[0]) is None or shutil.which("aarch64-linux-gnu-gcc") is None:
        return say("aarch64", "not tried: scripts/need.sh qemu-aarch64 aarch64-linux-gnu-gcc")
    env = dict(os.environ, CISTERN_CONF="driver:sim:1GiB")
    run("tar", "-xf", one(dist, "libcistern-*-linux-aarch64.tar.gz"), "-C", work)
    library = glob.glob(os.path.join(work, "libcistern-*-linux-aarch64"))[0]
    source, program = os.path.join(work, "program.c"), os.path.join(work, "program")
    with open(source, "w", encoding="utf-8") as f:
        f.write(PROGRAM)
    run("aarch64-linux-gnu-gcc", "-I" + library + "/include", "-o", program, source, "-L" + library + "/lib", "-lcistern",
        "-Wl,-rpath," + library + "/lib")
    say("aarch64, library", run(*QEMU, program, env=env))
    with zipfile.ZipFile(one(dist, "*_aarch64.whl")) as z:
        z.extract("cistern/bin/cistern", work)
    command = os.path.join(work, "cistern", "bin", "cistern")
    os.chmod(command, 0o755)
    static = one(dist, "cistern-*-linux-arm64.tar.gz")
    run("tar", "-xf", static, "-C", work)
    for name, file in (("wheel", command), ("static", os.path.join(work, os.path.basename(static)[:-7], "cistern"))):
        say("aarch64, " + name, run(*QEMU, file, "--version", env=env), "|", run(*QEMU, file, "report", RECORDING, env=env).splitlines()[0])


def main(arguments):
    roots = [os.path.abspath(a.partition("=")[2]) for a in arguments if a.startswith("--root=")]
    dist = os.path.abspath(([a for a in arguments if not a.startswith("-")] or [os.path.join(ROOT, "dist")])[0])
    try:
        with tempfile.TemporaryDirectory(prefix="cistern-release-") as work:
            say("checksums", len(run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=dist).splitlines()), "files")
            try_wheels(dist, work)
            for root in roots:
                try_root(dist, root)
            try_musl(dist, work)
            try_aarch64(dist, work)
        return 0
    except Failed as e:
        sys.stderr.write("try_release.py: %s\n" % e)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
