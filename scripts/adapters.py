#!/usr/bin/env python3
"""adapters.py [--test | --current] [--machine=aarch64] [VERSION...]: compiles the adapters that the wheel carries into lib/adapters,
one for each release of PyTorch in python/cistern/adapter/versions, or for these; with --test, runs the adapter's tests on each as well;
with --current, says by its exit code whether all are there, made of the present sources. --machine: for another architecture than
x86-64, by the cross compiler where this machine is none, into lib/adapters-MACHINE; of the releases that PyPI has with CUDA for it.

An adapter has to run wherever its PyTorch does. So it is linked with PyTorch's own libraries alone, without versions of symbols,
and each symbol that it asks for has to be in a library that PyTorch asks for, in a version that PyTorch asks for or an older one."""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MACHINE = ([a.partition("=")[2] for a in sys.argv if a.startswith("--machine=")] or ["x86_64"])[0]
# Of all architectures that are no x86-64, PyPI has PyTorch with CUDA from this release on.
OLDEST_ELSEWHERE = (2, 11)
OUT = os.path.join(ROOT, "lib", "adapters" if MACHINE == "x86_64" else "adapters-" + MACHINE)
sys.path.insert(0, os.path.join(ROOT, "python"))

from cistern import _built, _toolchain, build  # noqa: E402

WARNINGS = ["-Wall", "-Wextra", "-Werror"]


class Failed(Exception):
    """One adapter was not made; the words say why."""


def run(command, **more):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, **more)
    if done.returncode != 0:
        raise Failed("$ %s\n%s" % (" ".join(command), done.stdout))
    return done.stdout


def fetched(version):
    """The folder of site-packages that has what is needed of the release."""
    return subprocess.run([os.path.join(ROOT, "scripts", "torch.sh"), version, MACHINE], check=True, stdout=subprocess.PIPE,
                          universal_newlines=True).stdout.strip()


def find_compiler():
    if MACHINE == os.uname().machine:
        return _toolchain.find_compiler()
    return [MACHINE + "-linux-gnu-g++"]


def compiled(torch, work):
    """The adapter as the builder would make it, but of one unit, and with nothing of this machine in it."""
    compiler, include = find_compiler(), _toolchain.find_headers(torch)
    found, output = build.features(torch, compiler, include, work)
    if found is None:
        raise Failed(output)
    unit, made = os.path.join(work, "adapter.cpp"), os.path.join(work, _built.NAME)
    with open(unit, "w", encoding="utf-8") as f:
        f.writelines('#include "%s"\n' % source for source in _built.sources())
    own = [os.path.join(ROOT, "scripts", "baseline.cpp"), "-nodefaultlibs", "-L" + torch.lib, "-lc10_cuda", "-lc10", "-l:libc_nonshared.a", "-lgcc", "-Wl,-s"]
    paths = ["-ffile-prefix-map=%s=%s" % pair for pair in ((ROOT, "cistern"), (os.path.dirname(torch.folder), "pytorch"), (work, "."))]
    run(compiler + found + _built.FLAGS + paths + WARNINGS + build.headers(torch, include) + ["-shared"] + _built.LINK +
        ["-o", made, unit] + own)
    return made


def symbols(file, *which):
    """Pairs of the names and versions of a library's symbols; a version is empty where there is none."""
    for line in run(["nm", "-D", "--format=posix", *which, file]).splitlines():
        name, _, version = line.split()[0].replace("@@", "@").partition("@")
        if line.split()[1] not in "wv":
            yield name, version


def number(version):
    return tuple(map(int, re.findall(r"\d+", version)))


def check_baseline(made, torch):
    """Raises Failed if the adapter asks for more than PyTorch does."""
    if "Version References" in run(["objdump", "-p", made]):
        raise Failed("%s asks for versions of symbols" % made)
    own = [os.path.join(torch.lib, "lib%s.so" % name) for name in _built.LIBRARIES]
    newest = {}  # what PyTorch asks for: GLIBC to (2, 17)
    for file in own:
        for name, version in re.findall(r" (\w+)_([\d.]+)$", run(["objdump", "-p", file]), re.M):
            newest[name] = max(newest.get(name, ()), number(version))
    there = {name for file in own for name, _ in symbols(file, "--defined-only")}
    oldest = {}  # of each symbol of this machine's libraries
    loader = {"x86_64": "ld-linux-x86-64.so.2"}.get(MACHINE, "ld-linux-%s.so.1" % MACHINE)
    for library in ("libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", loader):
        for name, version in symbols(run(find_compiler() + ["-print-file-name=" + library]).strip(), "--defined-only"):
            family = version.rpartition("_")[0]
            if family in newest:
                oldest[name] = min(oldest.get(name, (family, (99,))), (family, number(version)))
    beyond = [name for name, _ in symbols(made, "--undefined-only")
              if name not in there and not name.startswith("cuda")  # CUDA's runtime has the same functions in all its versions
              and (name not in oldest or oldest[name][1] > newest[oldest[name][0]])]
    if beyond:
        raise Failed("it asks for what PyTorch's libraries do without: " + ", ".join(
            "%s (%s_%s)" % ((name,) + (lambda f, v: (f, ".".join(map(str, v))))(*oldest[name])) if name in oldest else name for name in beyond))


def make(torch):
    """The adapter's file, and the seconds that it took, 0 where it was there already."""
    target = os.path.join(OUT, _built.prebuilt_name(torch))
    if os.path.exists(target):
        return target, 0
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cistern-adapter-") as work:
        made = compiled(torch, work)
        check_baseline(made, torch)
        os.makedirs(OUT, exist_ok=True)
        with open(made, "rb") as f, open(target, "wb") as to:
            to.write(f.read())
    return target, time.monotonic() - start


def test(site, file):
    """How many tests passed."""
    env = dict(os.environ, CISTERN_TORCH=site, CISTERN_TORCH_ADAPTER=file)
    out = run([sys.executable, "-m", "unittest", "-v", "tests.test_adapter.Adapter"], cwd=os.path.join(ROOT, "python"), env=env)
    if "skipped" in out:
        raise Failed(out)
    return out.count("... ok")


def listed():
    """The names of the adapters that were made of the present sources; None where others were."""
    try:
        with open(os.path.join(OUT, _built.SUMS), encoding="utf-8") as f:
            head, *lines = f.read().splitlines()
    except (OSError, ValueError):
        return None
    return [line.split()[1] for line in lines] if head == _built.sums_head() else None


def forget_old():
    """Removes what was made of other sources."""
    if listed() is None and os.path.isdir(OUT):
        for name in os.listdir(OUT):
            os.unlink(os.path.join(OUT, name))


def write_sums(head):
    lines = [head]
    for name in sorted(n for n in os.listdir(OUT) if n.endswith(".so")):
        with open(os.path.join(OUT, name), "rb") as f:
            lines.append("%s  %s" % (hashlib.sha256(f.read()).hexdigest(), name))
    with open(os.path.join(OUT, _built.SUMS), "w", encoding="utf-8") as f:
        f.write("".join(line + "\n" for line in lines))


def main(arguments):
    tests = "--test" in arguments
    versions = [a for a in arguments if not a.startswith("-")]
    if not versions:
        with open(os.path.join(_built.SOURCES, "versions"), encoding="utf-8") as f:
            versions = [v for v in f.read().split() if MACHINE == "x86_64" or number(v) >= OLDEST_ELSEWHERE]
    if "--current" in arguments:
        names = listed() or []
        return 0 if all(any(n.startswith("libcistern_torch-%s-" % v.rpartition(".")[0]) for n in names) for v in versions) else 1
    forget_old()
    head = _built.sums_head()
    failed = []
    for version in versions:
        try:
            site = fetched(version)
            file, seconds = make(_toolchain.torch_in(os.path.join(site, "torch")))
            write_sums(head)
            line = "torch %-7s %-45s %4d KiB" % (version, os.path.basename(file), os.path.getsize(file) // 1024)
            line += ", compiled in %.0f s" % seconds if seconds else ", there already"
            if tests:
                start = time.monotonic()
                line += ", tests passed: %d in %.0f s" % (test(site, file), time.monotonic() - start)
            print(line, flush=True)
        except (Failed, _toolchain.Missing, subprocess.CalledProcessError) as e:
            failed.append(version)
            print("torch %-7s FAILED: %s" % (version, e), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
