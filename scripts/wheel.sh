#!/bin/sh
# wheel.sh [--try | FOLDER OUT] : makes dist/cistern-*.whl of python/, lib/*.so, bin/cistern and cistern.h, which must be there, and of
# lib/adapters where those are made of the present sources. It takes a Python with hatchling (Debian's python3-hatchling); without one
# it says so, and --try makes that no failure. FOLDER has the lib and bin of a release and their licenses; OUT takes its wheel.
set -eu
cd "$(dirname "$0")/.."
missing=1
from=. out=$PWD/dist
case ${1-} in
  --try) missing=0 ;;
  ?*) from=$1 out=$2 ;;
esac

# Debian's hatchling is its own Python's, which need not be the first in the path.
python=
for p in "${PYTHON-python3}" python3 /usr/bin/python3; do
  if "$p" -c 'import hatchling' 2>/dev/null; then
    python=$p
    break
  fi
done
if [ -z "$python" ]; then
  echo "wheel.sh: no wheel: hatchling is missing: install the package python3-hatchling (Debian's name)" >&2
  exit $missing
fi

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
[ "$from" != . ] || rm -rf dist
mkdir -p "$out"
cp -r python/cistern python/cistern.sh python/pyproject.toml python/hatch_build.py python/README.md LICENSE NOTICE "$stage"
find "$stage" -name __pycache__ -prune -exec rm -rf {} +
mkdir "$stage"/cistern/lib "$stage"/cistern/bin "$stage"/cistern/include
cp "$from"/lib/*.so "$stage"/cistern/lib
if [ "$from" != . ]; then
  cp "$from"/LICENSES-THIRD-PARTY.txt "$stage"
fi
if [ -d "$from/lib/adapters" ] && { [ "$from" != . ] || python3 scripts/adapters.py --current; }; then
  cp -r "$from/lib/adapters" "$stage"/cistern/adapters
fi
cp "$from/bin/cistern" "$stage"/cistern/bin
cp cmd/libcistern/cistern.h "$stage"/cistern/include
# Times of the commit, not of the clock: the same sources make the same wheel.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH-$(git log -1 --format=%ct 2>/dev/null || echo 1577836800)}
export SOURCE_DATE_EPOCH
(cd "$stage" && "$python" -m hatchling build -t wheel -d "$out") >/dev/null
chmod 644 "$out"/*.whl
ls "$out"/*.whl
