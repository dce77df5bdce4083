#!/bin/sh
# hostile.sh N [JOBS [TEST]] : runs N changed recordings through each command that reads recordings, in JOBS processes (one a
# CPU), and prints what they took. TEST is the test binary of ./cmd/cistern (go test -c); by default it is built, which needs
# Go. CISTERN_HOSTILE_SEED is the number of the first input (1): the same numbers are the same inputs. CISTERN_HOSTILE_COMMANDS
# names the commands, all by default.
set -eu
n=$1
jobs=${2:-$(getconf _NPROCESSORS_ONLN)}
seed=${CISTERN_HOSTILE_SEED:-1}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

if [ $# -gt 2 ]; then
  test=$(cd "$(dirname "$3")" && pwd)/$(basename "$3")
else
  test=$work/cistern.test
  (cd "$(dirname "$0")/.." && go test -c -o "$test" ./cmd/cistern)
fi

# A task is a part of the inputs of one command: several a process, so that none waits long for the last ones. One thread each:
# others would only collect garbage, and that time counts too. -test.bench leaves out the checks of the order of locks, which the
# command does not have.
commands=${CISTERN_HOSTILE_COMMANDS:-tune report replay diff convert inspect}
part=$(((n + 4 * jobs - 1) / (4 * jobs)))
for command in $commands; do
  at=0
  while [ $at -lt "$n" ]; do
    echo "$command $((seed + at)) $((n - at < part ? n - at : part))"
    at=$((at + part))
  done
done >"$work/tasks"
export test work
# shellcheck disable=SC2016 # expanded by the task
xargs -n 3 -P "$jobs" sh -c '
  log=$work/$1.$2
  mkdir "$log.tmp"
  TMPDIR=$log.tmp GOMAXPROCS=1 CISTERN_HOSTILE_SEED=$2 CISTERN_HOSTILE=$3 "$test" -test.v -test.timeout 0 \
    -test.bench "^\$" -test.run "^TestHostileRecordings\$/^$1\$" >"$log.log" 2>&1 && exit 0
  echo "hostile.sh: $1, inputs from $2: failed" >&2
  tail -n 60 "$log.log" >&2
  find "$log.tmp" -name "input*" >&2 # where the process crashed, the input that it read
  : >"$work/failed"' task <"$work/tasks"

sed -n 's/.*hostile_test.go:[0-9]*: hostile: //p' "$work"/*.log | awk -v commands="$commands" '
  { inputs[$1] += $3; read[$1] += $5; cpu[$1] += $7; over[$1] += $9 }
  $11 >= most[$1] { most[$1] = $11; mostat[$1] = $13 }
  $15 >= bytes[$1] { bytes[$1] = $15; bytesat[$1] = $17 }
  $19 > resident[$1] { resident[$1] = $19 }
  END {
    form = "%-8s %9s %9s %9s %9s %9s %11s %13s %11s %13s\n"
    printf form, "command", "inputs", "read", "mean ms", "over 2 s", "most ms", "of input", "allocated MiB", "of input", "resident MiB"
    for (i = 1; i <= split(commands, names); i++) {
      c = names[i]
      if (inputs[c])
        printf form, c, inputs[c], read[c], sprintf("%.1f", cpu[c] / inputs[c]), over[c], most[c], mostat[c], int(bytes[c] / 1024), bytesat[c], int(resident[c] / 1024)
    }
  }'
for log in "$work"/*.log; do
  sed -n "s/.*hostile_test.go:[0-9]*: \(input [0-9]*: .* of CPU\)\$/over 2 s: $(basename "$log" .log | sed 's/\..*//'), \1/p" "$log"
done
[ ! -e "$work/failed" ]
