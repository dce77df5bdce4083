#!/bin/sh
# fuzz.sh TIME : runs every fuzz target of the module for that long (Go's -fuzztime), one after the other.
set -eu
time=$1
found=0
for dir in $(grep -rl --include='*_test.go' --exclude-dir=node_modules '^func Fuzz' . | xargs -n 1 dirname | sort -u); do
  for target in $(go test -list '^Fuzz' "$dir" | grep '^Fuzz'); do
    found=$((found + 1))
    echo "$dir $target"
    go test -run '^$' -fuzz "^$target\$" -fuzztime "$time" -fuzzminimizetime 2s "$dir"
  done
done
if [ $found = 0 ]; then
  echo "fuzz.sh: no fuzz target found" >&2
  exit 1
fi
echo "$found fuzz targets, $time each"
