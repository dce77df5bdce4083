#!/bin/sh
# wheel.sh : makes dist/cistern-*.whl of python/, lib/*.so, bin/cistern and cistern.h, which must be there, and of lib/adapters
# where those are made of the present sources. It takes a Python with hatchling (Debian's python3-hatchling); without one it
# says so, and --try makes that no failure.
set -eu
cd "$(dirname "$0")/.."
missing=1
[ "${1-}" = --try ] && missing=0

# Debian's hatchling is its own Python's, which need not be the first in the path.
python=
for p in python3 /usr/bin/python3; do
  if "$p" -c 'import hatchling' 2>/dev/null; then
    python=$p
    break
  fi
done
if [ -z "$python" ]; then
  echo "wheel.sh: no wheel: hatchling is missing: install the package python3-hatchling (Debian's name)" >&2
  exit $missing
fi

stage=dist/.stage
rm -rf dist
mkdir -p $stage
trap 'rm -rf $stage' EXIT
cp -r python/cistern python/pyproject.toml python/hatch_build.py python/README.md LICENSE $stage
find $stage -name __pycache__ -prune -exec rm -rf {} +
mkdir $stage/cistern/lib $stage/cistern/bin $stage/cistern/include
cp lib/*.so $stage/cistern/lib
if python3 scripts/adapters.py --current; then
  cp -r lib/adapters $stage/cistern/adapters
fi
cp bin/cistern $stage/cistern/bin
cp cmd/libcistern/cistern.h $stage/cistern/include
# Times of the commit, not of the clock: the same sources make the same wheel.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH-$(git log -1 --format=%ct 2>/dev/null || echo 1577836800)}
export SOURCE_DATE_EPOCH
(cd $stage && "$python" -m hatchling build -t wheel -d ..) >/dev/null
chmod 644 dist/*.whl
ls dist/*.whl
