#!/bin/sh
# need.sh [--try] COMMAND... : makes sure that commands are there. What is missing is installed from Debian's packages
# where that is possible (apt-get, as root); else the package is named. --try: missing commands are no failure.
set -eu
fail=1
if [ "${1-}" = --try ]; then
  fail=0
  shift
fi

# The Debian package that a command comes with.
package() {
  case $1 in
    node) echo nodejs ;;
    cc) echo gcc ;;
    c++) echo g++ ;;
    hatchling) echo python3-hatchling ;;
    aarch64-linux-gnu-gcc) echo gcc-aarch64-linux-gnu libc6-dev-arm64-cross ;;
    aarch64-linux-gnu-g++) echo g++-aarch64-linux-gnu libc6-dev-arm64-cross ;;
    dpkg-deb) echo dpkg ;;
    java) echo default-jre-headless ;;
    munged) echo munge ;;
    srun) echo slurm-client ;;
    qemu-aarch64) echo qemu-user ;;
    musl-gcc) echo musl-tools ;;
    *) echo "$1" ;;
  esac
}

have() { command -v "$1" >/dev/null 2>&1; }

install() {
  export DEBIAN_FRONTEND=noninteractive
  apt-get install -y --no-install-recommends "$@" >/dev/null 2>&1 && return
  # The lists of packages may be old, or empty as on a new machine.
  apt-get update >/dev/null && apt-get install -y --no-install-recommends "$@" >/dev/null
}

packages=
for c in "$@"; do
  have "$c" && continue
  if [ "$c" = go ]; then
    echo "need.sh: Go is missing: install Go 1.26 or newer from https://go.dev/dl/" >&2
    exit 1
  fi
  # gcc brings no headers of the C library by itself.
  [ "$c" = cc ] && packages="$packages libc6-dev"
  packages="$packages $(package "$c")"
done
[ -n "$packages" ] || exit 0

if [ "$(id -u)" = 0 ] && have apt-get; then
  echo "installing$packages"
  # shellcheck disable=SC2086 # one word per package
  install $packages </dev/null || true
fi
for c in "$@"; do
  have "$c" && continue
  echo "need.sh: $c is missing: install the package $(package "$c") (Debian's name)" >&2
  [ $fail = 0 ] || exit 1
done
