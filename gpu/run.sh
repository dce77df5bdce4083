#!/bin/sh
# run.sh [test|bench|all] : what is to be tried on a machine with a GPU and without Go. It lies in the folder that
# `make gpu-bundle` makes, beside the programs that it runs.
#
#   test   the driver's contract and the kernels against the real driver, then the engine's random test on the GPU
#   bench  what driver calls cost (gpuprobe), what the engine's work costs the host (gpusoak), and what its driver calls
#          take over recorded runs, against what the simulated GPU says they take (gpureplay)
#
# What a program writes goes into the folder that OUT names, else into results/ beside this script. The programs change
# no setting of the GPU. The exit status is 0 when everything passed.
set -u
here=$(cd "$(dirname "$0")" && pwd)
what=${1:-all}
out=${OUT:-$here/results}
mkdir -p "$out" || exit 2
cd "$here" || exit 2
failed=

# The driver of machines where it is not on the linker's path.
for dir in /usr/lib/wsl/lib /usr/local/nvidia/lib64; do
  [ -e "$dir/libcuda.so.1" ] && LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$dir
done
[ -z "${LD_LIBRARY_PATH-}" ] || export LD_LIBRARY_PATH

# run NAME COMMAND... : runs it, shows its output and keeps it. A test that skips has tested nothing: that fails too.
run() {
  name=$1
  shift
  echo "=== $name: $*"
  { "$@" 2>&1; echo $? >"$out/.status"; } | tee "$out/$name.txt"
  status=$(cat "$out/.status")
  rm -f "$out/.status"
  if [ "$status" != 0 ]; then
    echo "--- $name: FAILED with $status"
    failed="$failed $name"
  elif grep -q -- '--- SKIP' "$out/$name.txt"; then
    echo "--- $name: FAILED, it skipped"
    failed="$failed $name"
  else
    echo "--- $name: ok"
  fi
}

case $what in
  test | bench | all) ;;
  *)
    echo "run.sh: $what: want test, bench or all" >&2
    exit 2
    ;;
esac

if command -v nvidia-smi >/dev/null 2>&1; then
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$out/gpu.txt"
fi

if [ "$what" != bench ]; then
  run conformance ./open.test -test.v -test.run '^TestConformance$/real'
  run kernels ./gpu.test -test.v -test.run '^(TestFillAndCheck|TestSpin)$/real'
  run soak ./gpusoak -json "$out/soak.json"
fi
if [ "$what" != test ]; then
  run probe ./gpuprobe -csv "$out/driver_costs.csv"
  # Host times of the engine, after a short random test.
  run engine ./gpusoak -ops 100000 -json "$out/engine.json"
  run replay ./gpureplay -json traces/*.pickle.gz
fi

if [ -n "$failed" ]; then
  echo "failed:$failed"
  exit 1
fi
echo "all passed; results in $out"
