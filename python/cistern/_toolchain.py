"""What the adapter is built with: the installed PyTorch, found without importing it, CUDA's headers, a C++ compiler."""

import os
import re
import shutil
import sys
from typing import Any, Dict, List, Optional, Tuple

# The first PyTorch that the adapter is for. Later ones are tried, whether they are known (known) or not.
OLDEST = (2, 6)


class Missing(Exception):
    """Something without which there is no adapter; the words say what, and where it was looked for."""


class Torch:
    """An installed PyTorch."""

    def __init__(self, folder: str, facts: Dict[str, Any]) -> None:
        self.folder = folder
        self.version = str(facts.get("__version__", ""))
        self.git = str(facts.get("git_version", ""))
        self.cuda: Optional[str] = facts.get("cuda")
        self.hip: Optional[str] = facts.get("hip")

    @property
    def release(self) -> str:
        """2.11.0 of 2.11.0+cu130."""
        return self.version.partition("+")[0]

    @property
    def minor(self) -> Tuple[int, ...]:
        """(2, 11) of 2.11.0+cu130; () of what is no version."""
        found = re.match(r"(\d+)\.(\d+)", self.version)
        return tuple(map(int, found.groups())) if found else ()

    @property
    def supported(self) -> bool:
        return self.minor >= OLDEST

    @property
    def official(self) -> bool:
        """Whether it is a release, and neither a nightly nor built from other sources, as its version has it."""
        return re.fullmatch(r"\d+\.\d+\.\d+(\+cu\d+)?", self.version) is not None

    @property
    def include(self) -> List[str]:
        base = os.path.join(self.folder, "include")
        return [base, os.path.join(base, "torch", "csrc", "api", "include")]

    @property
    def lib(self) -> str:
        return os.path.join(self.folder, "lib")

    @property
    def new_abi(self) -> bool:
        """Whether it was compiled with libstdc++'s strings of 2011, as all wheels of today are. In a library of the other
        kind no function of c10's takes one."""
        try:
            with open(os.path.join(self.lib, "libc10.so"), "rb") as f:
                return re.search(rb"_ZN3c10\w+NSt7__cxx1112basic_string", f.read()) is not None
        except OSError:
            return True


def without_cuda(version: str, hip: Optional[str]) -> str:
    return "PyTorch %s was built without CUDA%s" % (version, " (for ROCm)" if hip else "")


def known() -> List[Tuple[int, ...]]:
    """The minor releases of PyTorch that the adapter was tried with: (2, 11)."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "adapter", "versions"), encoding="utf-8") as f:
        return [Torch("", {"__version__": line}).minor for line in f.read().split()]


def find_torch() -> Torch:
    """The PyTorch that `import torch` would give, or has given."""
    module = sys.modules.get("torch")
    file = getattr(module, "__file__", None)
    if file is None:
        import importlib.util

        try:
            spec = importlib.util.find_spec("torch")
        except (ImportError, ValueError):
            spec = None
        file = spec.origin if spec is not None else None
    if file is None:
        raise Missing("PyTorch is not installed for %s" % sys.executable)
    folder = os.path.dirname(os.path.abspath(file))
    known = vars(getattr(module, "version", None) or object)
    if "__version__" in known and "git_version" in known:
        return Torch(folder, dict(known))
    return torch_in(folder)


def torch_in(folder: str) -> Torch:
    """The PyTorch in a folder, which has its version. The file with it is assignments only, and importing the package takes
    seconds."""
    facts: Dict[str, Any] = {}
    try:
        with open(os.path.join(folder, "version.py"), encoding="utf-8") as f:
            exec(compile(f.read(), f.name, "exec"), facts)
    except Exception as e:
        raise Missing("%s does not say which version it is: %s" % (folder, e)) from None
    return Torch(folder, facts)


# Both are needed, and a folder that has one of them only (a stub, a rest of another installation) is of no use.
_HEADERS = ("cuda.h", "cuda_runtime_api.h")
# What these include and NVIDIA's wheels of CUDA 13 keep in a wheel of its own, which PyTorch does not ask for. It holds
# macros for compilers, so that of another CUDA does.
_COMPILER_HEADER = os.path.join("crt", "host_config.h")


def cuda_folders(torch: Torch) -> List[str]:
    """Where CUDA's headers may lie, best first: NVIDIA's wheels beside PyTorch, a toolkit, the copy that Triton has."""
    site = os.path.dirname(torch.folder)
    folders = [os.path.join(site, "nvidia", *p, "include") for p in
               (("cu%s" % (torch.cuda or "").partition(".")[0],), ("cuda_runtime",), ("cuda_nvcc",))]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            folders.append(os.path.join(os.environ[variable], "include"))
    nvcc = shutil.which("nvcc")
    if nvcc:
        folders.append(os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(nvcc))), "include"))
    folders += ["/usr/local/cuda/include", "/usr/include", os.path.join(site, "triton", "backends", "nvidia", "include")]
    return folders


def find_cuda(torch: Torch) -> List[str]:
    """The folder of CUDA's headers, and where need be a second one with those for compilers."""
    folders = cuda_folders(torch)
    for folder in folders:
        if all(os.path.isfile(os.path.join(folder, h)) for h in _HEADERS):
            for second in [folder] + folders:
                if os.path.isfile(os.path.join(second, _COMPILER_HEADER)):
                    return [folder] if second == folder else [folder, second]
            raise Missing("CUDA's headers in %s lack %s, and none of %s has it; `pip install nvidia-cuda-crt` or a CUDA "
                          "toolkit brings it" % (folder, _COMPILER_HEADER, ", ".join(folders)))
    raise Missing("CUDA's headers (%s) are missing: looked in %s; `pip install nvidia-cuda-runtime` or a CUDA toolkit "
                  "brings them" % (" and ".join(_HEADERS), ", ".join(folders)))


def find_headers(torch: Torch) -> List[str]:
    """The include folders of a compilation against PyTorch."""
    if not os.path.isfile(os.path.join(torch.include[0], "c10", "cuda", "CUDACachingAllocator.h")):
        raise Missing("PyTorch's headers are missing: there is no c10/cuda/CUDACachingAllocator.h in %s" %
                      torch.include[0])
    return torch.include + find_cuda(torch)


def find_compiler() -> List[str]:
    """The command of a C++ compiler."""
    named = os.environ.get("CXX", "").split()
    if named:
        # `CXX="ccache g++"` is common.
        for word in named[:2]:
            if not word.startswith("-") and not shutil.which(word):
                raise Missing("the C++ compiler that CXX names is missing: %s" % word)
        return named
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise Missing("there is no C++ compiler: install g++ (c++, g++ and clang++ were looked for), or name one in CXX")


def find_runtime() -> Optional[str]:
    """The file of the C++ library that PyTorch uses in this process, or would: libstdc++.so.6."""
    name = "libstdc++.so.6"
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as f:
            for line in f:
                file = line.rstrip("\n").partition("/")[2]
                if os.path.basename(file).startswith(name):
                    return "/" + file
    except OSError:
        pass
    # As the dynamic linker would look for it.
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":") + [os.path.join(sys.prefix, "lib")]
    folders += ["/usr/lib/%s-linux-gnu" % os.uname().machine, "/usr/lib64", "/lib64", "/usr/lib", "/lib"]
    for folder in folders:
        if folder and os.path.isfile(os.path.join(folder, name)):
            return os.path.join(folder, name)
    return None
