#!/bin/sh
# torch.sh [VERSION [MACHINE]]: prints a folder with what the adapter is compiled and tested against: the headers of a PyTorch release, its
# libc10 and libc10_cuda, and CUDA's headers, out of the wheels on PyPI. The folder is a cache, made on the first call (a download
# of up to 900 MB) and usable as CISTERN_TORCH. It holds no PyTorch that could be imported. MACHINE is x86_64, the default, or aarch64.
set -eu
torch=${1:-2.11.0}
machine=${2:-x86_64}
folder=${XDG_CACHE_HOME:-$HOME/.cache}/cistern/torch-$torch
[ "$machine" = x86_64 ] || folder=$folder-$machine

fetch() {
  # Headers and libc10 are the same for every Python.
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform "manylinux_2_28_$machine" --platform "manylinux_2_17_$machine" --platform "manylinux2014_$machine" \
    --platform "manylinux1_$machine" -d "$work/wheels" "$@" >&2
}

extract() {
  python3 - "$work" <<'PY'
import glob, os, sys, zipfile
wanted = ("torch/include/", "torch/lib/libc10.so", "torch/lib/libc10_cuda.so", "torch/version.py", "torch/__init__.py", "nvidia/")
for wheel in glob.glob(sys.argv[1] + "/wheels/*.whl"):
    with zipfile.ZipFile(wheel) as z:
        names = [n for n in z.namelist() if n.startswith(wanted) and (not n.startswith("nvidia/") or "/include/" in n)]
        z.extractall(sys.argv[1] + "/site", names)
    os.unlink(wheel)
PY
}

if [ ! -e "$folder/complete" ]; then
  mkdir -p "$(dirname "$folder")"
  work=$(mktemp -d "$folder.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  fetch "torch==$torch"
  extract
  # CUDA's headers are in the wheel of its runtime, those for compilers in one more.
  cuda=$(sed -n "s/^cuda.*= '\(.*\)'/\1/p" "$work/site/torch/version.py")
  case $cuda in
    12.*) fetch "nvidia-cuda-runtime-cu12==$cuda.*" "nvidia-cuda-nvcc-cu12==$cuda.*" ;;
    *) fetch "nvidia-cuda-runtime==$cuda.*" "nvidia-cuda-crt==$cuda.*" ;;
  esac
  extract
  touch "$work/site/complete"
  # Where another call was faster its folder stays.
  mv -T "$work/site" "$folder" 2>/dev/null || [ -e "$folder/complete" ]
fi
echo "$folder"
