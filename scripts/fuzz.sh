#!/bin/sh
# fuzz.sh TIME : runs every fuzz target of the module for that long (Go's -fuzztime), one after the other. Each package is
# compiled once.
set -eu
time=$1
found=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
log=$work/log
cache=$(go env GOCACHE)/fuzz

# fuzz PACKAGE TARGET : one target. On a busy machine Go's fuzzer can report its own deadline, and nothing else, as a failure of
# the target (golang/go issue 75804): that is not an input that fails, so the target is tried again, twice.
fuzz() {
  for try in 1 2 3; do
    "$work/test" -test.run '^$' -test.fuzz "^$2\$" -test.fuzztime "$time" -test.fuzzminimizetime 2s -test.fuzzcachedir "$cache/$1" \
      >"$log" 2>&1 && status=0 || status=$?
    if [ $status = 0 ] || grep -q 'Failing input written to' "$log" || ! grep -q '^ *context deadline exceeded$' "$log"; then
      cat "$log"
      return $status
    fi
    echo "fuzz.sh: $2: the fuzzer ended by its own deadline, without an input that fails (try $try)" >&2
  done
  cat "$log"
  return $status
}

for dir in $(grep -rl --include='*_test.go' --exclude-dir=node_modules '^func Fuzz' . | xargs -n 1 dirname | sort -u); do
  go test -c -fuzz=. -o "$work/test" "$dir"
  package=$(go list "$dir")
  for target in $(cd "$dir" && "$work/test" -test.list '^Fuzz' | grep '^Fuzz'); do
    found=$((found + 1))
    echo "$dir $target"
    (cd "$dir" && fuzz "$package" "$target")
  done
done
if [ $found = 0 ]; then
  echo "fuzz.sh: no fuzz target found" >&2
  exit 1
fi
echo "$found fuzz targets, $time each"
