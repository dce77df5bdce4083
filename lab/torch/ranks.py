"""Jobs of several ranks under torchrun, recorded by `cistern run --record` and answered for by `cistern fleet`.

    python ranks.py --standin VERSION [--seed N]    over a PyTorch of PyPI, without a GPU (standin/__init__.py)
    python ranks.py [--seed N] [--ranks N]          on the GPUs of this machine

Each job has three ranks, or --ranks of them, that train together: over NCCL where each has a GPU of its own, over gloo where they
share. The seed chooses which of them fails, and when.

restarted  a rank is killed by SIGKILL; torchrun starts all anew; then another one, which holds more than its twins, runs out of memory
killed     a rank is killed by SIGKILL, another one holds more than its twins; no rank is started again

The answer must name the rank that sets the limit, why, the one that died, and the size of the job. The exit status is 0 when it does.
"""
import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import common
import standin
from common import GiB, MiB

STEPS = 6
LIMIT = 4 * GiB
TWIN, MORE = 256 * MiB, 2 * GiB  # what a rank holds, and how much more the one that sets the limit has


def plan(seed, ranks):
    """What happens in each job; ranks and steps are of different numbers."""
    r = random.Random(seed)
    killed, large = r.sample(range(ranks), 2)
    return {"ranks": ranks, "killed": killed, "killed_at": r.randint(2, STEPS - 1), "large": large, "fails_at": r.randint(2, STEPS - 1)}


# ---- a rank ----------------------------------------------------------------------------------------------------------

def wait_for_summaries(attempt, ranks):
    """Until all ranks have left a summary with their GPU in it, as any has that lives for some seconds."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        there = 0
        for name in os.listdir(os.environ["RANKS_FOLDER"]):
            if name.endswith(".summary.json") and not name.startswith("."):
                with open(os.path.join(os.environ["RANKS_FOLDER"], name)) as f:
                    summary = json.load(f)
                there += bool(summary["devices"]) and summary["variables"]["TORCHELASTIC_RESTART_COUNT"] == str(attempt)
        if there == ranks:
            return
        time.sleep(0.02)
    raise SystemExit("not all ranks have left a summary after 120 s")


def rank(job, p):
    import cistern
    import torch
    import torch.distributed as dist

    me, ranks, attempt = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    apart = torch.cuda.device_count() >= ranks
    # PyTorch 2.11 keeps the addresses of the attempt before in its store, and gloo would connect to those.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl" if apart else "gloo", store=dist.PrefixStore(f"attempt{attempt}", store), rank=me, world_size=ranks)
    cistern.fleet.describe(dp=me)
    large = me == p["large"]
    # Pages that nothing is written to cost a machine without a GPU no memory.
    held = torch.empty(TWIN + large * MORE, dtype=torch.uint8, device="cuda")
    common.require_cistern()
    weights = torch.nn.Parameter(torch.zeros(1 << 16, device="cuda"))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    for step in range(1, STEPS + 1):
        batch = torch.empty(64 * MiB, dtype=torch.uint8, device="cuda")
        weights.grad = torch.full_like(weights, 1.0)
        mean = weights.grad if apart else weights.grad.cpu()
        dist.all_reduce(mean)
        weights.grad.copy_(mean / ranks)
        optimizer.step()
        if me == p["killed"] and step == p["killed_at"] and (job == "killed" or attempt == 0):
            wait_for_summaries(attempt, ranks)
            os.kill(os.getpid(), signal.SIGKILL)
        if large and job == "restarted" and attempt == 1 and step == p["fails_at"]:
            wait_for_summaries(attempt, ranks)
            held = held, torch.empty(LIMIT - MORE, dtype=torch.uint8, device="cuda")
        del batch
    dist.destroy_process_group()


# ---- the jobs --------------------------------------------------------------------------------------------------------

def run_job(job, args, folder):
    """The answer for a job: the object of --json, and the text."""
    runs = os.path.join(folder, job)
    argv = [common.cistern_command(), "run", "--conf", f"limit:{LIMIT}", "--record", runs, "--history", "10000", "--",
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks), "--max-restarts", "1" if job == "restarted" else "0",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", job, os.path.abspath(__file__), "--rank", job, "--seed", str(args.seed)]
    done = common.run(argv, env=common.environment("cistern", {"RANKS_FOLDER": runs}), timeout=400)
    if done.rc is None or done.rc == 0:
        raise SystemExit(f"{job}: torchrun ended with {done.rc}, and a rank of it should have failed\n{done.out[-3000:]}\n{done.err[-6000:]}")
    answer = common.run([common.cistern_command(), "fleet", "--json", runs], timeout=60)
    text = common.run([common.cistern_command(), "fleet", runs], timeout=60)
    if answer.rc != 0 or text.rc != 0:
        raise SystemExit(f"{job}: {answer.why()}\n{done.err[-6000:]}")
    return json.loads(answer.out), text.out, done


def check_job(job, p, a, text, checks):
    ranks = p["ranks"]
    found = {f["kind"]: f for f in a["findings"]}
    limit = a["limit"]

    def expect(what, got, want):
        checks.add(f"{job}: {what}", got, want, got == want)

    expect("job, launcher, ranks", [a["job"], a["launcher"], a["world_size"], len(a["ranks"]), a["nodes"]], [job, "torchrun", ranks, ranks, 1])
    expect("rank that sets the limit, cause", [limit["identity"]["rank"], limit["cause"]], [p["large"], "used"])
    expect("more than its twins, MiB", round(limit["excess_bytes"] / MiB), MORE // MiB)
    expect("twins", [r["twins"] for r in a["ranks"]], [ranks - 1] * ranks)
    expect("limit of the process", limit["limit_bytes"], LIMIT)
    if job == "restarted":
        expect("ranks that ran out of memory", found.get("out_of_memory", {}).get("ranks"), [p["large"]])
        failure = limit.get("failure", {})
        expect("the request that failed", [failure.get("requested_bytes"), failure.get("step")], [LIMIT - MORE, p["fails_at"]])
        expect("ranks that failed", found.get("ended", {}).get("ranks"), [p["large"]])
        expect("ranks that were started again", found.get("restarted", {}).get("ranks"), list(range(ranks)))
        expect("attempts", [r["identity"]["restart"] for r in a["ranks"]], [1] * ranks)
        expect("why they were", f"before, rank {p['killed']} was killed by SIGKILL" in found.get("restarted", {}).get("text", ""), True)
        explained = common.run([common.cistern_command(), "report", limit.get("report", "")], timeout=120)
        expect("cistern report of its file", [explained.rc, f"cistern report {limit.get('report')}\n" in text, f"rank {p['large']} of {ranks}" in explained.out],
               [0, True, True])
    else:
        expect("rank that was killed", found.get("ended", {}).get("ranks"), [p["killed"]])
        expect("how", f"rank {p['killed']} was killed by SIGKILL" in found.get("ended", {}).get("text", ""), True)
        expect("its status", [r["status"] for r in a["ranks"] if r["identity"]["rank"] == p["killed"]], [-signal.SIGKILL])
        expect("no request failed", found.get("out_of_memory"), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rank", metavar="JOB", help="be a rank of the job")
    parser.add_argument("--standin", metavar="VERSION", help="over that PyTorch of PyPI, without a GPU")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=3)
    args = parser.parse_args()
    if args.rank:
        return rank(args.rank, plan(args.seed, int(os.environ["WORLD_SIZE"])))
    with tempfile.TemporaryDirectory(prefix="cistern-ranks-") as folder:
        if args.standin:
            os.environ.update(standin.environment(args.standin, os.path.join(folder, "standin")))
        return run_all(args, folder)


def run_all(args, folder):
    p = plan(args.seed, args.ranks)
    print(f"seed {args.seed}: {p}", flush=True)
    checks = common.Checks("ranks")
    for job in ("restarted", "killed"):
        begin = time.monotonic()
        a, text, done = run_job(job, args, folder)
        print(f"\n{job}, {time.monotonic() - begin:.0f} s\n\n{text}", flush=True)
        before = len(checks.rows)
        check_job(job, p, a, text, checks)
        if any(r["ok"] is False for r in checks.rows[before:]):
            print(done.out[-2000:], done.err[-12000:])
    return checks.finish()


if __name__ == "__main__":
    sys.exit(main())
