#!/bin/sh
# fuzz.sh TIME : runs every fuzz target of the module for that long (Go's -fuzztime), one after the other.
set -eu
time=$1
found=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# fuzz DIR TARGET : one target. On a busy machine Go's fuzzer can report its own deadline, and nothing else, as a failure of
# the target (golang/go issue 75804): that is not an input that fails, so the target is tried again, twice.
fuzz() {
  for try in 1 2 3; do
    go test -run '^$' -fuzz "^$2\$" -fuzztime "$time" -fuzzminimizetime 2s "$1" >"$log" 2>&1 && status=0 || status=$?
    cat "$log"
    [ $status = 0 ] && return 0
    if grep -q 'Failing input written to' "$log" || ! grep -q '^ *context deadline exceeded$' "$log"; then
      return $status
    fi
    echo "fuzz.sh: $2: the fuzzer ended by its own deadline, without an input that fails (try $try)" >&2
  done
  return $status
}

for dir in $(grep -rl --include='*_test.go' --exclude-dir=node_modules '^func Fuzz' . | xargs -n 1 dirname | sort -u); do
  for target in $(go test -list '^Fuzz' "$dir" | grep '^Fuzz'); do
    found=$((found + 1))
    echo "$dir $target"
    fuzz "$dir" "$target"
  done
done
if [ $found = 0 ]; then
  echo "fuzz.sh: no fuzz target found" >&2
  exit 1
fi
echo "$found fuzz targets, $time each"
