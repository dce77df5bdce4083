#!/bin/sh
# engines.sh: compares the answers of DuckDB, Spark, Dask and Ray (scripts/engines.py), which are installed into bin/engines.
set -eu
wanted=examples/fleet/requirements.txt
# Spark runs on Java.
scripts/need.sh python3 java
if ! cmp -s $wanted bin/engines/requirements.txt; then
  rm -rf bin/engines
  # Debian has the module in a package of its own.
  python3 -c 'import ensurepip, venv' 2>/dev/null || scripts/need.sh --try python3-venv 2>/dev/null
  python3 -m venv bin/engines
  bin/engines/bin/pip install --quiet --disable-pip-version-check -r $wanted
  cp $wanted bin/engines/requirements.txt
fi
exec bin/engines/bin/python scripts/engines.py "$@"
