"""A PyTorch of PyPI on a machine without a GPU: NVIDIA's libraries are stand-ins.

The driver, libcuda.so.1, is the one that Cistern's own tests have (cuda/nvidia/standin), with memory of the host. The runtime in
runtime.c calls it. Of all other libraries that PyTorch asks for, and of all other functions, the names are there, and return an error.
There are no kernels: what launches one fails. PyTorch's operators are those of the host (site/standin_operators.py).
"""
import glob
import os
import re
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.realpath(os.path.join(HERE, "../../.."))
DRIVER, RUNTIME, NCCL = "libcuda.so.1", "libcudart.so.", "libnccl.so.2"
NVIDIA = re.compile(r"lib(cu|nv|nccl)\w*\.so\.")
NAMES = re.compile(r"(__)?(cu|nv|nccl)\w*[A-Z]")  # of NVIDIA's functions
FLAGS = ["-O1", "-fPIC", "-shared", "-pthread", "-w", "-Wl,-Bsymbolic", "-Wl,-z,defs"]


def output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, universal_newlines=True).stdout


def site_packages(version):
    """The folder with that release of PyTorch for this Python and what it needs, but NVIDIA's libraries: a cache."""
    cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "cistern")
    folder = os.path.join(cache, "site-%s-%s" % (version, sys.implementation.cache_tag))
    if os.path.exists(os.path.join(folder, "complete")):
        return folder
    os.makedirs(cache, exist_ok=True)
    work = "%s.%d" % (folder, os.getpid())
    shutil.rmtree(work, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "install", "--target", work, "--only-binary=:all:"]
    env = dict(os.environ, PIP_ROOT_USER_ACTION="ignore")
    subprocess.run(pip + ["--no-deps", "torch==" + version], check=True, env=env, stdout=sys.stderr)
    with open(glob.glob(work + "/torch-*.dist-info/METADATA")[0], encoding="utf-8") as f:
        needs = re.findall(r"^Requires-Dist: ([^;\n]+)$", f.read(), re.M)
    subprocess.run(pip + ["--upgrade", "numpy"] + needs, check=True, env=env, stdout=sys.stderr)
    open(os.path.join(work, "complete"), "w").close()
    try:
        os.rename(work, folder)
    except OSError:  # another process was faster
        shutil.rmtree(work)
    return folder


def functions(libraries):
    """{library: {function: version}} of what these libraries want of NVIDIA's; a version is empty where there is none."""
    wanted, of_version, plain = {}, {}, set()
    for path in libraries:
        soname = None
        for line in output("objdump", "-p", path).splitlines():
            if re.match(r"  NEEDED +" + NVIDIA.pattern, line):
                wanted.setdefault(line.split()[1], {})
            elif "required from" in line:
                soname = line.split()[-1].rstrip(":")
            elif soname and re.match(r"    0x\w+ 0x\w+ \d+ ", line):
                of_version[line.split()[-1]] = soname
        for line in output("nm", "-D", "--undefined-only", "--format=posix", path).splitlines():
            name, _, version = line.split()[0].replace("@@", "@").partition("@")
            if not version:
                plain.add(name)
            elif NVIDIA.match(of_version[version]):
                wanted[of_version[version]][name] = version
    # A function without a version is of the library whose name it begins with.
    for name in filter(NAMES.match, plain):
        owners = [s for s in wanted if name.lower().startswith(s[3:].partition(".")[0].lower().split("_")[0])]
        wanted[max(owners, key=len, default=DRIVER)].setdefault(name, "")
    return wanted


def written(name, body):
    """A function that returns an error; or words, which some give by a pointer."""
    if name.startswith("cupti") and name.endswith("String"):
        return "int %s(int result, const char **words) { return *words = \"a stand-in\", 0; }\n" % name
    if "String" in name or name == "ncclGetLastError":
        return "const char *%s(void) { return \"a stand-in\"; }\n" % name
    return "int %s(void) { return %s; }\n" % (name, body)


def compile_library(folder, soname, sources, wanted, body, *more):
    """A library of these sources, with the functions that it lacks of those that are wanted."""
    path = os.path.join(folder, soname)
    there = set()
    if sources:
        subprocess.run(["cc", *FLAGS, *sources, *more, "-o", path, "-ldl"], check=True)
        there = {line.split()[0] for line in output("nm", "-D", "--defined-only", "--format=posix", path).splitlines()}
    rest, script = os.path.join(folder, soname + ".c"), os.path.join(folder, soname + ".map")
    with open(rest, "w", encoding="utf-8") as f:
        f.write("int standin_unsupported(void);\n")
        f.writelines(written(n, body) for n in sorted(wanted) if not {n, n + "_v2"} & there)
    with open(script, "w", encoding="utf-8") as f:
        f.write("".join("%s { global: *; };\n" % v for v in sorted({v for v in wanted.values() if v})))
    versions = ["-Wl,--version-script=" + script] if os.path.getsize(script) else []
    subprocess.run(["cc", *FLAGS, *sources, rest, *more, *versions, "-Wl,-soname," + soname, "-o", path, "-ldl"], check=True)


def build(site, include, folder):
    """Compiles the libraries that the PyTorch in site wants into the folder."""
    os.makedirs(folder, exist_ok=True)
    libraries = glob.glob(site + "/torch/lib/*.so*")
    wanted = functions(libraries)
    # PyTorch wants addresses of these by their names.
    with open(site + "/torch/lib/libc10_cuda.so", "rb") as f:
        for name in re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", f.read()):
            wanted[DRIVER].setdefault(name.decode(), "")
    testdata = os.path.join(ROOT, "cuda", "nvidia", "standin", "testdata")
    compile_library(folder, DRIVER, sorted(glob.glob(testdata + "/*.c")), wanted.pop(DRIVER), "801")
    for soname, names in wanted.items():
        if soname.startswith(RUNTIME):
            compile_library(folder, soname, [os.path.join(HERE, "runtime.c")], names, "standin_unsupported()", "-I" + include,
                            os.path.join(folder, DRIVER))
        else:
            own = [os.path.join(ROOT, "resource", "nccl", "testdata", "libnccl.c")] if soname == NCCL else []
            compile_library(folder, soname, own, names, "1")


def environment(version, folder):
    """The variables with which `import torch` gives that release over stand-ins, which are compiled into the folder."""
    site, python = site_packages(version), os.path.join(folder, "python")
    headers = output(os.path.join(ROOT, "scripts", "torch.sh"), version).strip()
    include = glob.glob(headers + "/nvidia/*/include/cuda_runtime_api.h")[0]
    build(site, os.path.dirname(include), folder)
    subprocess.run(["cc", "-O1", os.path.join(HERE, "python.c"), "-o", python], check=True)
    return {"PYTHONPATH": site + ":" + os.path.join(HERE, "site"), "LD_LIBRARY_PATH": folder,
            "CUDA_HOME": os.path.dirname(os.path.dirname(include)), "STANDIN_DEVICES": "2", "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1", "STANDIN_PYTHON": python,
            "STANDIN_NCCL_DRIVER": os.path.join(folder, DRIVER)}


if __name__ == "__main__":
    for k, v in environment(sys.argv[1], sys.argv[2]).items():
        print("export %s=%s" % (k, v))
