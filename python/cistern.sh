#!/bin/sh
# The command `cistern` as pip installs it. A script of Python's would take several times as long to start.
self=$0
[ -L "$self" ] && self=$(readlink -f "$self")
bin=${self%/*}
program=
# A virtual environment, a prefix and a user's folder have lib, some systems lib64; Debian has dist-packages; --target has neither.
for folder in "$bin"/../lib*/python3.?/*-packages "$bin"/../lib*/python3.??/*-packages "$bin"/..; do
  [ -x "$folder/cistern/bin/cistern" ] && program=$folder/cistern/bin/cistern packages=$folder
done
if [ -z "$program" ]; then
  echo "cistern: the package cistern is missing: looked in $bin/../lib*/python3.*/*-packages and $bin/.." >&2
  exit 2
fi
# The Python that it was installed for.
if [ -z "${CISTERN_PYTHON-}" ]; then
  python=${packages%/*}
  python=${python##*/}
  if [ -x "$bin/$python" ]; then
    export CISTERN_PYTHON="$bin/$python"
  elif [ -x "$bin/python" ]; then
    export CISTERN_PYTHON="$bin/python"
  elif python=$(command -v "$python"); then
    export CISTERN_PYTHON="$python"
  fi
fi
exec "$program" "$@"
