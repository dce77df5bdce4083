#!/bin/sh
# pytools.sh [--try]: installs what tests of the Python package run, mypy and pytest, into an environment of its own, bin/pytools.
# --try: that they cannot be installed is no failure.
set -eu
wanted=python/tests/requirements.txt
cmp -s $wanted bin/pytools/requirements.txt && exit 0
rm -rf bin/pytools
# Debian has the module in a package of its own.
python3 -c 'import ensurepip, venv' 2>/dev/null || scripts/need.sh --try python3-venv 2>/dev/null
if python3 -m venv bin/pytools && bin/pytools/bin/pip install --quiet --disable-pip-version-check -r $wanted; then
  cp $wanted bin/pytools/requirements.txt
elif [ "${1-}" != --try ]; then
  exit 1
fi
