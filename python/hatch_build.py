"""Tells hatchling the wheel's tag: any Python 3, and a Linux of the libraries' architecture whose C library has all that they ask for."""

import os
import re
from typing import Any, Dict

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def glibc(folder: str) -> str:
    """The newest version of glibc that a file in the folder names: 2_34."""
    newest = (2, 28)  # older ones are not tried, and PyTorch's wheels ask for this
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(parent, name), "rb") as f:
                for minor in re.findall(rb"GLIBC_2\.(\d+)", f.read()):
                    newest = max(newest, (2, int(minor)))
    return "%d_%d" % newest


def machine(library: str) -> str:
    """The architecture that a library is for, as wheels call it."""
    with open(library, "rb") as f:
        number = int.from_bytes(f.read(20)[18:], "little")
    return {62: "x86_64", 183: "aarch64"}[number]


class Tag(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: Dict[str, Any]) -> None:
        package = os.path.join(self.root, "cistern")
        needs = max((glibc(os.path.join(package, d)) for d in ("lib", "bin")), key=lambda v: int(v.split("_")[1]))
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-manylinux_%s_%s" % (needs, machine(os.path.join(package, "lib", "libcistern.so")))
