#!/usr/bin/env python3
"""release.py [--quick] [--out=FOLDER]: writes into dist/ (or FOLDER) what a release has:

    cistern-V-py3-none-manylinux_2_28_ARCH.whl   the Python package, with the library, the command and prebuilt adapters
    cistern-V-OS-ARCH.tar.gz, .zip               the command alone, static, for those who read recordings
    libcistern-V-linux-ARCH.tar.gz, .deb         the C library
    *.cdx.json, LICENSES-THIRD-PARTY.txt         what is linked, and its licenses
    SHA256SUMS                                   of all files above

The same commit makes the same bytes. What is not Go is linked by zig, whose stubs of glibc are of the version that GLIBC names. C++ is
compiled by the machine's g++ and the cross compiler of Debian's name, as PyTorch's C++ library is GCC's. --quick leaves out the
adapters, and the commands for other systems than Linux."""

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORK = os.path.join(ROOT, "bin", "release")
GLIBC, GLIBCXX, CXXABI = (2, 28), (3, 4, 25), (1, 3, 11)  # manylinux_2_28 has these
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}  # and their names in Go and Debian
LICENSES = "LICENSES-THIRD-PARTY.txt"
PLATFORMS = [(system, arch) for system in ("linux", "darwin", "windows") for arch in ("amd64", "arm64")]
SIZE_LIMIT = 25 * 1000 * 1000  # of a wheel


class Failed(Exception):
    """The release is not made; the words say why."""


def run(*command, **env):
    # A clone, a worktree and an archive of a commit make the same bytes.
    env = dict(os.environ, GOFLAGS="-buildvcs=false", **env)
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    if done.returncode != 0:
        raise Failed("$ %s\n%s%s" % (" ".join(command), done.stdout, done.stderr))
    return done.stdout


def tools():
    return run("scripts/releasetools.sh").strip()


def version():
    with open(os.path.join(ROOT, "version.go"), encoding="utf-8") as f:
        return re.search(r'^const Version = "(.*)"', f.read(), re.M).group(1)


def epoch():
    return int(os.environ.get("SOURCE_DATE_EPOCH") or run("git", "log", "-1", "--format=%ct"))


def make_variables(machine, folder):
    """What `make library plain audit command` needs to write for a machine, with GLIBC, into a folder."""
    cross = "" if machine == os.uname().machine else machine + "-linux-gnu-"
    compiler = os.environ.get("CXX", "c++") if not cross else cross + "g++"
    zig = "%s/bin/python -m ziglang cc -target %s-linux-gnu.%d.%d" % ((tools(), machine) + GLIBC)
    runtime = " ".join(run(*compiler.split(), "-print-file-name=" + name).strip() for name in ("libstdc++.so.6", "libgcc_s.so.1"))
    # The resolvers of Go's own: those of the C library are of no use to the command.
    smaller = "GOBUILDFLAGS=-tags netgo,osusergo '-ldflags=-s -w -buildid= -extldflags=-s'"
    return {"library": ["CC=" + zig], "command": ["CC=" + zig, smaller], "audit": ["CC=%s" % (cross + "gcc" if cross else "cc")],
            "plain": ["CXX=" + compiler, "LINK=" + zig, "LINKLIBS=" + runtime]}, [
            "LIBRARY=%s/lib/libcistern.so" % folder, "COMMAND=%s/bin/cistern" % folder, "LIBRARYLDFLAGS=-s -w -buildid=",
            "GO=env CGO_ENABLED=1 GOOS=linux GOARCH=%s go" % MACHINES[machine]]


def build(machine):
    """The folder with lib and bin for a machine."""
    folder = os.path.join(WORK, machine)
    shutil.rmtree(folder, ignore_errors=True)
    targets, common = make_variables(machine, folder)
    for target, own in targets.items():
        run("make", "--no-print-directory", target, *common, *own, ZIG_GLOBAL_CACHE_DIR=os.path.join(tools(), "zig-cache"))
    for file in libraries(folder):
        check_symbols(file)
    return folder


def libraries(folder):
    for parent, _, names in sorted(os.walk(folder)):
        for name in sorted(names):
            yield os.path.join(parent, name)


def check_symbols(file):
    """Raises Failed if a file asks for a newer symbol than the oldest systems have."""
    newest = {"GLIBC": GLIBC, "GLIBCXX": GLIBCXX, "CXXABI": CXXABI}
    for name, found in re.findall(r"\b(GLIBC|GLIBCXX|CXXABI)_([\d.]+)", run("objdump", "-p", file)):
        if tuple(map(int, found.split("."))) > newest[name]:
            raise Failed("%s asks for %s_%s: at most %s is there" % (file, name, found, ".".join(map(str, newest[name]))))
    # A symbol that zig's glibc does not have stays without a version; the library would not load.
    missing = re.findall(r"^\s+U ([^@\s]+)$", run("nm", "-D", "--undefined-only", file), re.M)
    if missing:
        raise Failed("%s asks for what glibc %d.%d does not have: %s" % ((file,) + GLIBC + (", ".join(missing),)))


def adapters(machine, folder):
    run("scripts/adapters.py", "--machine=" + machine)
    name = "adapters" if machine == "x86_64" else "adapters-" + machine
    shutil.copytree(os.path.join(ROOT, "lib", name), os.path.join(folder, "lib", "adapters"))


def wheel(machine, folder, out):
    shutil.copy(os.path.join(WORK, LICENSES), folder)
    run("scripts/wheel.sh", folder, out, PYTHON=tools() + "/bin/python", SOURCE_DATE_EPOCH=str(epoch()))
    made = os.path.join(out, "cistern-%s-py3-none-manylinux_2_28_%s.whl" % (version(), machine))
    if os.path.getsize(made) > SIZE_LIMIT:
        raise Failed("%s has %d bytes: at most %d" % (made, os.path.getsize(made), SIZE_LIMIT))
    check_wheel(made, machine)


def check_wheel(made, machine):
    """Has auditwheel agree with the wheel's tag. The adapters are loaded after PyTorch's own libraries, which are not the wheel's."""
    with tempfile.TemporaryDirectory() as folder:
        run("auditwheel", "repair", "--disable-isa-ext-check", "--plat=auto", "--exclude=libc10.so", "--exclude=libc10_cuda.so",
            "--wheel-dir=" + folder, made, PATH=tools() + "/bin:" + os.environ["PATH"])
        found = re.findall(r"manylinux_2_(\d+)_" + machine, " ".join(os.listdir(folder)))
        if not found or min(map(int, found)) > GLIBC[1]:
            raise Failed("auditwheel makes %s of %s" % (os.listdir(folder), made))


def archive(target, folder):
    """A .tar.gz or .zip of a folder, under its own name, with sorted names and the times of the commit."""
    top, when = os.path.dirname(folder), epoch()
    files = [os.path.relpath(f, top) for f in libraries(folder)]
    if target.endswith(".zip"):
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as z:
            for name in files:
                with open(os.path.join(top, name), "rb") as f:
                    entry = zipfile.ZipInfo(name, time.gmtime(when)[:6])
                    entry.compress_type = zipfile.ZIP_DEFLATED
                    entry.external_attr = 0o100644 << 16
                    z.writestr(entry, f.read())
        return

    def plain(entry):
        entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = when, 0, 0, "root", "root"
        entry.mode = 0o755 if entry.mode & 0o100 else 0o644
        return entry

    with open(target, "wb") as f, gzip.GzipFile("", "wb", 9, f, when) as z, tarfile.open(fileobj=z, mode="w") as tar:
        for name in files:
            tar.add(os.path.join(top, name), name, recursive=False, filter=plain)


def texts(folder):
    """Copies what comes with every archive."""
    os.makedirs(folder, exist_ok=True)
    for file in (os.path.join(ROOT, "LICENSE"), os.path.join(ROOT, "NOTICE"), os.path.join(WORK, LICENSES)):
        shutil.copy(file, folder)


def command(system, arch, out):
    """The static command for a system."""
    name = "cistern-%s-%s-%s" % (version(), system, arch)
    folder = os.path.join(WORK, name)
    shutil.rmtree(folder, ignore_errors=True)
    texts(folder)
    program = os.path.join(folder, "cistern.exe" if system == "windows" else "cistern")
    run("go", "build", "-trimpath", "-ldflags=-s -w -buildid=", "-o", program, "./cmd/cistern", CGO_ENABLED="0", GOOS=system, GOARCH=arch)
    archive(os.path.join(out, name + (".zip" if system == "windows" else ".tar.gz")), folder)


def install(machine, folder, destination, *variables):
    targets, common = make_variables(machine, folder)
    run("make", "--no-print-directory", "install", *common, *targets["library"], "DESTDIR=" + destination, *variables,
        ZIG_GLOBAL_CACHE_DIR=os.path.join(tools(), "zig-cache"))


def c_library(machine, folder, out):
    """The C library as an archive that works wherever it is unpacked, and as a Debian package."""
    name = "libcistern-%s-linux-%s" % (version(), machine)
    unpacked = os.path.join(WORK, name)
    shutil.rmtree(unpacked, ignore_errors=True)
    install(machine, folder, unpacked, "PREFIX=/", "PCPREFIX=$${pcfiledir}/../..")
    texts(os.path.join(unpacked, "share", "doc", "libcistern"))
    archive(os.path.join(out, name + ".tar.gz"), unpacked)

    package = os.path.join(WORK, machine + ".deb")
    shutil.rmtree(package, ignore_errors=True)
    install(machine, folder, package, "PREFIX=/usr")
    texts(os.path.join(package, "usr", "share", "doc", "libcistern"))
    os.makedirs(os.path.join(package, "DEBIAN"))
    with open(os.path.join(package, "DEBIAN", "control"), "w", encoding="utf-8") as f:
        f.write(CONTROL % (version(), MACHINES[machine], ".".join(map(str, GLIBC))))
    with open(os.path.join(package, "DEBIAN", "triggers"), "w", encoding="utf-8") as f:
        f.write("activate-noawait ldconfig\n")
    for parent, folders, _ in os.walk(package):
        for f in folders:
            os.chmod(os.path.join(parent, f), 0o755)
    os.chmod(package, 0o755)
    run("dpkg-deb", "--root-owner-group", "-Zxz", "--build", package,
        os.path.join(out, "libcistern_%s_%s.deb" % (version(), MACHINES[machine])), SOURCE_DATE_EPOCH=str(epoch()))


CONTROL = """Package: libcistern
Version: %s
Architecture: %s
Maintainer: The Cistern Authors <maintainers@cistern-gpu.invalid>
Depends: libc6 (>= %s)
Section: libs
Priority: optional
Homepage: https://github.com/cistern-gpu/cistern
Description: caching allocator of GPU memory
 One cache of GPU memory for every library of a process: the C library,
 its header, and files for pkg-config and CMake.
"""


def modules():
    """Of each Go module that is linked into anything: its name, and the folders of its packages in use, by its own folder."""
    form = "{{with .Module}}{{if not .Main}}{{.Path}} {{.Version}}\t{{.Dir}}\t{{$.Dir}}{{end}}{{end}}"
    found = {}
    for system, arch in PLATFORMS:
        for cgo in "01" if system == "linux" else "0":
            programs = ["./cmd/cistern"] + (["./cmd/libcistern"] if cgo == "1" else [])
            env = {"GOOS": system, "GOARCH": arch, "CGO_ENABLED": cgo}
            for line in run("go", "list", "-deps", "-f", form, *programs, **env).splitlines():
                if line:
                    name, top, folder = line.split("\t")
                    found.setdefault((name, top), set()).add(folder)
    return found


def license_files(top, folders):
    """The licenses above and beside packages: parts of a module may have one of their own."""
    wanted = {top}
    for folder in folders:
        while folder != top:
            wanted.add(folder)
            folder = os.path.dirname(folder)
    return [os.path.join(folder, name) for folder in sorted(wanted) for name in sorted(os.listdir(folder))
            if re.match(r"(LICEN[CS]E|COPYING|NOTICE)", name) and os.path.isfile(os.path.join(folder, name))]


def licenses(out):
    goroot = run("go", "env", "GOROOT").strip()
    zig = run(tools() + "/bin/python", "-c", "import os, ziglang; print(os.path.dirname(ziglang.__file__))").strip()
    parts = [("Go's library and run-time system " + run("go", "env", "GOVERSION").strip(), [os.path.join(goroot, "LICENSE")]),
             ("the run-time support of zig", [os.path.join(zig, "LICENSE")])]
    for (name, top), folders in sorted(modules().items()):
        parts.append((name, license_files(top, folders)))
        if not parts[-1][1]:
            raise Failed("%s has no license in %s" % (name, top))
    parts.append(("the HTML report", [os.path.join(ROOT, "report", "dist", "LICENSES.txt")]))
    with open(os.path.join(WORK, LICENSES), "w", encoding="utf-8") as to:
        to.write("Cistern's own license is in LICENSE. What is linked into its library and its command has these:\n")
        for name, files in parts:
            for file in files:
                with open(file, encoding="utf-8") as f:
                    to.write("\n%s\n%s: %s\n\n%s\n" % ("=" * 80, name, os.path.basename(file), f.read().rstrip()))
    shutil.copy(os.path.join(WORK, LICENSES), out)


def bill(program, name, out, more=()):
    """The software bill of materials of a program, in CycloneDX's form."""
    target = os.path.join(out, "%s-%s.cdx.json" % (name, version()))
    os.chmod(program, 0o755)
    run(tools() + "/bin/cyclonedx-gomod", "bin", "-json", "-licenses", "-std", "-noserial", "-notimestamp", "-version", "v" + version(),
        "-output", target, program)
    with open(target, encoding="utf-8") as f:
        made = json.load(f)
    made["components"] += more
    with open(target, "w", encoding="utf-8") as f:
        json.dump(made, f, indent=1, sort_keys=True)
        f.write("\n")


def page_components():
    """The packages of npm in the HTML report, as its list of licenses names them."""
    with open(os.path.join(ROOT, "report", "dist", "LICENSES.txt"), encoding="utf-8") as f:
        lists = re.findall(r"^The page contains (.*):$", f.read(), re.M)
    pairs = sorted(entry.split(" ") for line in lists for entry in line.split(", "))
    return [{"type": "library", "name": name, "version": v, "purl": "pkg:npm/%s@%s" % (name, v), "bom-ref": "pkg:npm/%s@%s" % (name, v)}
            for name, v in pairs]


def sums(out):
    lines = []
    for name in sorted(os.listdir(out)):
        with open(os.path.join(out, name), "rb") as f:
            lines.append("%s  %s\n" % (hashlib.sha256(f.read()).hexdigest(), name))
    with open(os.path.join(out, "SHA256SUMS"), "w", encoding="utf-8") as f:
        f.writelines(lines)


def release(out, quick):
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    os.makedirs(WORK, exist_ok=True)
    licenses(out)
    for system, arch in PLATFORMS:
        if not quick or system == "linux":
            command(system, arch, out)
    for machine in MACHINES:
        folder = build(machine)
        if not quick:
            adapters(machine, folder)
        c_library(machine, folder, out)
        wheel(machine, folder, out)
    bill(os.path.join(WORK, "x86_64", "bin", "cistern"), "cistern", out, page_components())
    bill(os.path.join(WORK, "x86_64", "lib", "libcistern.so"), "libcistern", out)
    sums(out)
    for name in sorted(os.listdir(out)):
        print("%9d KiB  %s" % (os.path.getsize(os.path.join(out, name)) // 1024, name))


def main(arguments):
    named = [a.partition("=")[2] for a in arguments if a.startswith("--out=")]
    try:
        release(os.path.abspath((named or [os.path.join(ROOT, "dist")])[0]), "--quick" in arguments)
        return 0
    except Failed as e:
        sys.stderr.write("release.py: %s\n" % e)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
