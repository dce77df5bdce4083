#!/bin/sh
# run.sh [PART...] : what is to be tried on a machine with a GPU and without Go. It lies in the folder that
# `make gpu-bundle` makes, beside the programs that it runs. Without a part: all that one GPU can do.
#
# The engine (no PyTorch needed):
#   test   the driver's contract and the kernels against the real driver, then the engine's random test on the GPU
#   bench  what driver calls cost (lab probe), what the engine's work costs the host (lab soak), and what its driver calls
#          take over recorded runs, against what the simulated GPU says they take (lab replay)
#   resources   every upstream, adaptor and stack of them, and the engine's pools over them, pass the suite of
#               resource/resourcetest on this GPU; with two GPUs, peers too. NCCL is the one of PYTHON's environment
#   query       queries as data-frame libraries run them, with direct, stream-ordered and Cistern's memory; fails unless
#               Cistern is the fastest, and twice as fast as direct allocation
#   exported    a stream-ordered pool of two processes: a million turns in the order of shared events, with checked contents;
#               without that order contents must be wrong
#   pause  pausing and resuming: contents beside a plain copy, through a file (in the folder PAUSE_DIR), dropped, and ten
#          thousand cycles
#   native      what RMM promises of a resource, through the C interface, for the default pool and one over each upstream
#   native-hosts  hostile hosts in C: signal handlers, fork, exits, a second copy, with checked contents (HOSTS_SECONDS=10 each)
#   native-node  memory between processes: export without a context, exporters that are killed, when memory is free again
#   native-two  two GPUs in one process: memory of each used by the other, threads, and one of them broken by a kernel
#   native-pools2  whether the driver survives the end of a pool of the second GPU after pools of the first, without Cistern
#   examples    the programs of examples/, as their readers run them
#
# PyTorch on Cistern (python3, or the one that PYTHON names, with torch for CUDA):
#   torch-load       what loading costs, and the adapter's first build
#   torch-seed       the 60/70 scenario in its three modes (needs the scripts, see below)
#   torch-test       does everything under torch.cuda behave: fidelity.py, each case in a process of its own, but torch-pools'
#   torch-upstream   the same with all memory from cuMemAlloc by the functions of a library (the setting upstream)
#   torch-native     the same cases under native PyTorch, which checks the cases
#   torch-steady     no driver call and no wait in steady state
#   torch-oom        a loop that runs out of memory a thousand times
#   torch-captures   captures on one thread beside pool releases and pauses on others, for CAPTURE_SECONDS=120
#   torch-hosts      hostile hosts under PyTorch: SIGPROF without an alternate stack, faulthandler, DataLoader, no descriptors
#                    (HOSTS_SECONDS=60 each)
#   torch-stress     a million random allocations with checked contents
#   torch-bench      the cost of an allocation under native, expandable_segments and Cistern (needs the scripts)
#   torch-record-cost  what recording a summary costs the workloads (needs the scripts); ROUNDS=3 and WORKLOADS=… choose
#   torch-workloads  real training and serving under the same three (needs the scripts); RUNS=5 and WORKLOADS=… choose
#   torch-survival   limits that tune and replay name from a recording, tried with the workload (needs the scripts); SECONDS_TRIED=300
#   torch-pools      pools of special memory, their limits, pause and resume; ten thousand pauses, and how fast they are
#   torch-dropin     programs written for torch_memory_saver and for vLLM's sleep mode, on the modules of cistern.compat
#   torch-peer       copies between two GPUs
#   torch-ranks      jobs under torchrun with a process for each GPU, one of which fails, and what cistern fleet says of them
#   peers            Cistern beside native PyTorch, expandable_segments, cudaMallocAsync, RMM and torch_memory_saver on the same
#                    work (5 minutes; needs the scripts). Packages that are not installed come from the wheels in wheels/ or
#                    in the folder CISTERN_PEERS
#   torch-two        what needs two GPUs: collectives on pools of NCCL's memory, peers, a device that fails, copies
#   torch            all of these but torch-native, torch-survival, torch-peer, peers and torch-two, with RUNS=1
#
# PyTorch, CuPy and numba on one cache (cupy and numba-cuda installed as well):
#   libs-fill       one library fills 60 % of the GPU and frees it, the next asks for as much; every order, also with
#                   separate caches
#   libs-counts     statistics are what can be counted by hand
#   libs-order      contents, where what one library frees with work in flight is the next one's; streams, threads, graphs
#   libs-cooperate  caches that stay separate and ask each other
#   libs-cost       what an allocation costs the host, against CuPy's pool and numba's own memory
#   libs-example    examples/sharing.py
#   libs            all of these
#
# What cistern trace, report and top see of programs on this GPU (nothing else may use it meanwhile; the parts may run at the
# same time on GPUs of their own, which CUDA_VISIBLE_DEVICES picks). All but see-driver, -idle, -kill, -cupy and -top need the
# scripts; WORKLOADS=… chooses among theirs:
#   see-driver    the traced peak of each way to get memory from the driver against free memory (15 s)
#   see-seed      the driver calls of the 60/70 scenario, with 80 GiB left and under expandable_segments (40 s)
#   see-agree     the traced peak against free memory, and the traced calls against PyTorch's own snapshot, over the
#                 workloads under PyTorch's three allocators (3 minutes)
#   see-segments  the latter alone
#   see-cupy      the traced peak of a CuPy program against free memory (30 s)
#   see-cost      the time of the workloads with and without tracing, in ROUNDS=1, and what the tracer counts (9 minutes)
#   see-idle      programs that use no CUDA, traced and not: time, threads, output (30 s, needs no GPU)
#   see-kill      a traced program that is killed a hundred times (60 s)
#   see-oom       reports of out-of-memory: the holders that they name, and whether what they recommend helps (3 minutes)
#   see-top       cistern top beside PyTorch's own numbers and nvidia-smi's (40 s)
#   see-two       trace and top of programs on two GPUs (1 minute)
#   see-held      what history and stacks cost a program on Cistern, for information (2 minutes)
#   see           all of these but see-segments, which see-agree contains, see-two and see-held (12 minutes)
#
# Several processes on one GPU (docs/node.md); nothing else may use it meanwhile:
#   node-latency    1 GiB of another process's unused cache, in chunks of 32 and of 2 MiB, while the driver has nothing
#   node-steady     what the broker costs while nothing lacks memory
#   node-colocated  a trainer and a server in alternating phases, beside a ballast that leaves less than the sum of their peaks:
#                   native PyTorch, expandable_segments, Cistern without a broker, with one, and with limits (needs the scripts).
#                   NODE_MINUTES=20 lets the variant with a broker go on for so long
#   node-four       the same with four processes
#   node-objects    8 GiB of weights as a named object: times of ten readers, one copy, contents after the death of the writer and of the
#                   broker, ten thousand cycles, a write through a reader's mapping, a safetensors file, a state_dict (4 minutes)
#   node            all of these
#   node-two        two GPUs: memory moves on the one where it is short, and on that alone
# Each of their programs, in broker/, takes --sim: the same over a simulated device.
#
# The scripts are workloads.py, bench_alloc.py and seed_script.py in scripts/ or in the folder CISTERN_GPU_SCRIPTS; parts
# that need one that is not there are skipped by name. What a program writes goes into the folder that OUT names, else
# into results/ beside this script. The programs change no setting of the GPU. The exit status is 0 when all passed.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here/results}
python=${PYTHON:-python3}
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
cd "$here" || exit 2
export OUT="$out"
export PYTHONDONTWRITEBYTECODE=1
failed=
passed=
begin=$(date +%s)

# The driver of machines where it is not on the linker's path.
for dir in /usr/lib/wsl/lib /usr/local/nvidia/lib64; do
  [ -e "$dir/libcuda.so.1" ] && LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$dir
done
[ -z "${LD_LIBRARY_PATH-}" ] || export LD_LIBRARY_PATH

# run NAME SECONDS COMMAND... : runs it at most so long, shows its output and keeps it.
run() {
  name=$1
  seconds=$2
  shift 2
  echo "=== $name: $*"
  start=$(date +%s)
  { timeout -k 10 "$seconds" "$@" 2>&1; echo $? >"$out/.status"; } | tee "$out/$name.txt"
  status=$(cat "$out/.status")
  rm -f "$out/.status"
  took=$(($(date +%s) - start))
  # A Go test that skips has tested nothing: that fails too.
  if [ "$status" = 0 ] && ! grep -q -- '--- SKIP' "$out/$name.txt"; then
    echo "--- $name: ok, $took s"
    passed="$passed $name"
    return
  fi
  case $status in
    0) why='it skipped' ;;
    124 | 137) why="stopped after $seconds s" ;;
    *) why="status $status" ;;
  esac
  echo "--- $name: FAILED, $why, $took s"
  failed="$failed $name"
}

# torch NAME SECONDS SCRIPT ARGUMENTS... : runs a Python program of torch/.
torch() {
  name=$1
  seconds=$2
  shift 2
  run "$name" "$seconds" "$python" "torch/$@"
}

# libs NAME SECONDS SCRIPT : runs a Python program of libs/.
libs() {
  run "$1" "$2" "$python" "libs/$3"
}

# broker NAME SECONDS SCRIPT ARGUMENTS... : runs a Python program of broker/.
broker() {
  name=$1
  seconds=$2
  shift 2
  run "$name" "$seconds" "$python" "broker/$@"
}

# see NAME SECONDS SCRIPT ARGUMENTS... : runs a Python program of see/.
see() {
  name=$1
  seconds=$2
  shift 2
  run "$name" "$seconds" "$python" "see/$@"
}

part() {
  case $1 in
    test)
      run conformance 600 ./open.test -test.v -test.run '^TestConformance$/real'
      run kernels 600 ./gpu.test -test.v -test.run '^(TestFillAndCheck|TestSpin)$/real'
      run soak 1200 ./lab soak -json "$out/soak.json"
      ;;
    bench)
      run probe 600 ./lab probe -csv "$out/driver_costs.csv"
      # Host times of the engine, after a short random test.
      run engine 600 ./lab soak -ops 100000 -json "$out/engine.json"
      run replay 1200 ./lab replay -json "$out/replay.json" traces/*.pickle.gz
      ;;
    resources)
      run resources 590 env NCCL_NVLS_ENABLE=0 VIRTUAL_ENV="$("$python" -c 'import sys; print(sys.prefix)' 2>/dev/null)" \
        ./resources.test -test.v -test.run '^TestConformance$/real'
      run pools 300 env NCCL_NVLS_ENABLE=0 VIRTUAL_ENV="$("$python" -c 'import sys; print(sys.prefix)' 2>/dev/null)" \
        ./pools.test -test.v -test.run '^TestPools(AsResources|Closed)$/real'
      ;;
    query)
      run query 300 ./lab query -want 2 -json "$out/query.json"
      run query-threads 250 ./lab query -threads 4 -rounds 5 -json "$out/query-threads.json"
      ;;
    exported)
      run exported 590 ./lab pools
      run exported-unordered 120 ./lab pools -unordered -ops 100000
      ;;
    pause)
      run pause 550 ./lab pause -json "$out/pause.json" ${PAUSE_DIR:+-dir "$PAUSE_DIR"}
      ;;
    native)
      run behaviours 300 env NCCL_NVLS_ENABLE=0 VIRTUAL_ENV="$("$python" -c 'import sys; print(sys.prefix)' 2>/dev/null)" ./behaviours
      ;;
    native-hosts)
      for s in signals_plain signals_collected signals_changing signals_onstack_deep signals_deep signals_profile forks exits copies; do
        run "hosts-$s" $((${HOSTS_SECONDS:-10} + 120)) ./hosts "$s" "${HOSTS_SECONDS:-10}"
      done
      ;;
    native-node) run node 400 ./node ;;
    native-two)
      run peers 120 ./open.test -test.v -test.run '^TestPeers$/real'
      # A device that is broken breaks for good: once where nothing was shared before, once after all the rest.
      run devices-broken 120 ./lab devices -part broken
      run devices 400 ./lab devices
      ;;
    native-pools2) run pools2 200 ./pools2 ;;
    examples)
      run example-go 60 examples/squares
      run example-c 60 examples/memory
      run example-c-numa 60 examples/memory host_numa
      run example-cpp 60 examples/containers
      ;;
    torch-load) torch "$1" 240 load.py ;;
    torch-seed) torch "$1" 240 seed.py ;;
    torch-test) torch "$1" 560 fidelity.py --skip upstreams --skip limits --skip pauses ;;
    torch-upstream) torch "$1" 560 fidelity.py --name upstream --upstream --skip upstreams --skip pauses ;;
    torch-native) torch "$1" 560 fidelity.py --native ;;
    torch-steady) torch "$1" 120 steady.py ;;
    torch-oom) torch "$1" 180 oomloop.py ;;
    torch-captures) torch "$1" 300 captures.py --seconds "${CAPTURE_SECONDS:-120}" ;;
    torch-hosts) torch "$1" $((4 * ${HOSTS_SECONDS:-60} + 300)) hosts.py --seconds "${HOSTS_SECONDS:-60}" ;;
    torch-stress) torch "$1" 300 stress.py ;;
    torch-bench) torch "$1" 560 alloc_bench.py ;;
    torch-record-cost) torch "$1" 590 record_cost.py --rounds "${ROUNDS:-3}" ${WORKLOADS:+--workloads "$WORKLOADS"} ;;
    torch-workloads) torch "$1" 590 workloads_bench.py --runs "${RUNS:-5}" ${WORKLOADS:+--workloads "$WORKLOADS"} ;;
    torch-survival)
      torch survival-record 300 survival.py record
      torch survival-predict 1200 survival.py predict
      torch survival-try $((${SECONDS_TRIED:-300} + 200)) survival.py try "$out/limits.json" --seconds "${SECONDS_TRIED:-300}"
      ;;
    torch-pools)
      torch torch-pools 400 fidelity.py --name pools --only upstreams --only limits --only pauses -v
      torch torch-pausecycles 400 pausecycles.py
      run example-pause-resume 120 env PYTHONPATH="$here" "$python" examples/pause_resume.py
      ;;
    torch-dropin) torch "$1" 500 dropin.py ;;
    torch-peer) torch "$1" 400 peer.py ;;
    peers) torch torch-peers 330 peers.py ;;
    torch-ranks) torch "$1" 300 ranks.py --ranks "$(nvidia-smi --list-gpus | wc -l)" ;;
    torch-two)
      torch torch-nccl 330 nccl.py
      torch torch-devices 560 devices.py
      run example-nccl-pool 120 env PYTHONPATH="$here" NCCL_NVLS_ENABLE=0 "$python" examples/nccl_pool.py
      part torch-peer
      ;;
    torch)
      RUNS=${RUNS:-1}
      for p in load seed test upstream pools dropin steady oom captures hosts stress bench workloads; do part "torch-$p"; done
      ;;
    libs-fill) libs "$1" 580 fill.py ;;
    libs-counts) libs "$1" 400 counts.py ;;
    libs-order) libs "$1" 590 order.py ;;
    libs-cooperate) libs "$1" 590 cooperate.py ;;
    libs-cost) libs "$1" 400 cost.py ;;
    libs-example) run "$1" 120 env PYTHONPATH="$here" "$python" examples/sharing.py ;;
    libs) for p in fill counts order cooperate cost example; do part "libs-$p"; done ;;
    see-driver) see "$1" 200 driver.py ;;
    see-seed) see "$1" 300 seed.py ;;
    see-agree) see "$1" 590 agree.py --no-cupy ${WORKLOADS:+--workloads "$WORKLOADS"} ;;
    see-segments) see "$1" 590 agree.py --only segments --name see-segments ${WORKLOADS:+--workloads "$WORKLOADS"} ;;
    see-cupy) see "$1" 200 agree.py --only-cupy --name see-cupy ;;
    see-cost) see "$1" 590 cost.py --rounds "${ROUNDS:-1}" ${WORKLOADS:+--workloads "$WORKLOADS"} ;;
    see-idle) see "$1" 200 idle.py ;;
    see-kill) see "$1" 300 kill.py ;;
    see-oom) see "$1" 590 oom.py ;;
    see-two) see "$1" 200 two.py ;;
    see-top) see "$1" 200 top.py ;;
    see-held)
      see "$1" 590 cost.py --name see-held --kinds cistern,history,native,python,both,sampled --starts 0 --rounds "${ROUNDS:-1}" \
        --workloads "${WORKLOADS:-generate_serving,multistream_prefetch}"
      ;;
    see) for p in driver seed agree cupy cost idle kill oom top; do part "see-$p"; done ;;
    node-latency) broker "$1" 400 latency.py ;;
    node-steady) broker "$1" 200 steady.py ;;
    node-colocated) broker "$1" $((60 * ${NODE_MINUTES:-0} + 590)) colocated.py --max --minutes "${NODE_MINUTES:-0}" ;;
    node-four) broker "$1" $((60 * ${NODE_MINUTES:-0} + 900)) colocated.py --name node-four --jobs 4 --max --minutes "${NODE_MINUTES:-0}" ;;
    node-two) broker "$1" 120 two.py ;;
    node-objects) broker "$1" 590 objects.py ;;
    node) for p in latency steady colocated four objects; do part "node-$p"; done ;;
    all) for p in test resources native native-hosts bench query exported pause examples torch libs see node; do part $p; done ;;
    *)
      echo "run.sh: $1: want test, bench, resources, query, exported, pause, native, native-hosts, native-node, native-two, native-pools2, examples, torch, torch-{load,seed,test,upstream,native,pools,steady,oom,captures,hosts,stress,bench,record-cost,workloads,survival,dropin,peer,ranks,two}, peers, libs, libs-{fill,counts,order,cooperate,cost,example}, see, see-{driver,seed,agree,segments,cupy,cost,idle,kill,oom,top,two,held}, node, node-{latency,steady,colocated,four,objects,two} or all" >&2
      exit 2
      ;;
  esac
}

if command -v nvidia-smi >/dev/null 2>&1; then
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$out/gpu.txt"
fi

[ $# -gt 0 ] || set -- all
for p in "$@"; do part "$p"; done

"$python" torch/report.py 2>/dev/null
echo "passed:$passed; $(($(date +%s) - begin)) s in all; results in $out"
if [ -n "$failed" ]; then
  echo "FAILED:$failed"
  exit 1
fi
