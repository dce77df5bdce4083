"""Tells hatchling the wheel's tag: any Python 3, and a Linux whose C library has all that the libraries in it ask for."""

import os
import platform
import re
from typing import Any, Dict

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def glibc(folder: str) -> str:
    """The newest version of glibc that a file in the folder names: 2_34."""
    newest = (2, 17)
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(parent, name), "rb") as f:
                for minor in re.findall(rb"GLIBC_2\.(\d+)", f.read()):
                    newest = max(newest, (2, int(minor)))
    return "%d_%d" % newest


class Tag(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: Dict[str, Any]) -> None:
        package = os.path.join(self.root, "cistern")
        needs = max((glibc(os.path.join(package, d)) for d in ("lib", "bin")), key=lambda v: int(v.split("_")[1]))
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-manylinux_%s_%s" % (needs, platform.machine())
