#!/usr/bin/env bash
# fuzz.sh TIME [JOBS] : runs every fuzz target of the module for that long (Go's -fuzztime), JOBS at once (one a CPU), each with one
# worker: starting and ending a target keeps one CPU busy. Each package is compiled once.
set -euo pipefail
time=$1
jobs=${2:-$(getconf _NPROCESSORS_ONLN)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
cache=$(go env GOCACHE)/fuzz
export time work cache

# compile DIR : the test binary of a package, and its targets in a file.
compile() {
  local package name
  package=$(go list "$1")
  name=${package//\//_}
  go test -c -fuzz=. -o "$work/$name.test" "$1"
  (cd "$1" && "$work/$name.test" -test.list '^Fuzz') | sed -n "s|^Fuzz.*|$1 $package $work/$name.test &|p" >"$work/$name.targets"
}

# fuzz DIR PACKAGE BINARY TARGET : one target. On a busy machine Go's fuzzer can report its own deadline, and nothing else, as a
# failure of the target (golang/go issue 75804): that is not an input that fails, so the target is tried again, twice.
fuzz() {
  local log=$3.$4.log status try
  cd "$1"
  for try in 1 2 3; do
    "$3" -test.run '^$' -test.fuzz "^$4\$" -test.fuzztime "$time" -test.fuzzminimizetime 200ms -test.parallel 1 \
      -test.fuzzcachedir "$cache/$2" >"$log" 2>&1 && status=0 || status=$?
    if [ $status = 0 ] || grep -q 'Failing input written to' "$log" || ! grep -q '^ *context deadline exceeded$' "$log"; then
      break
    fi
    echo "fuzz.sh: $4: the fuzzer ended by its own deadline, without an input that fails (try $try)" >&2
  done
  { echo "$1 $4"; cat "$log"; } >"$log.whole"
  cat "$log.whole" # at once, as other targets write too
  return $status
}
export -f compile fuzz

grep -rl --include='*_test.go' --exclude-dir=node_modules '^func Fuzz' . | xargs -n 1 dirname | sort -u |
  xargs -n 1 -P "$jobs" bash -euo pipefail -c 'compile "$1"' compile
cat "$work"/*.targets >"$work/all"
found=$(wc -l <"$work/all")
if [ "$found" = 0 ]; then
  echo "fuzz.sh: no fuzz target found" >&2
  exit 1
fi
xargs -n 4 -P "$jobs" bash -uo pipefail -c 'fuzz "$@"' fuzz <"$work/all"
echo "$found fuzz targets, $time each"
