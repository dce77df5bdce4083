"""deploy/slurm under Slurm itself: a controller and two nodes on this machine, whose jobs record over a PyTorch of a few lines. Run as
root by `make slurm`, which installs Slurm; it is not found by discovery."""

import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

from .support import COMMAND, LIBRARY, PACKAGE, ROOT, Case
from .test_fleet import COUNTERS

NODES = ("n1", "n2")
USER = pwd.getpwnam("nobody")
# One that every user can run.
PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
PROGRAM = """
    import cistern, os, signal, torch
    torch.cuda.init()
    rank = int(os.environ["RANK"])
    for i in range(3):
        torch.cuda.alloc((rank + 1) << 30)
        torch.cuda.release((rank + 1) << 30)
        cistern.step()
    if rank == 3:
        torch._C.observers[0](0, 1 << 40, 80 << 30, 1 << 30)  # a request that fails
        os.kill(os.getpid(), signal.SIGKILL)
    """


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Slurm(Case):
    def setUp(self):
        super().setUp()
        # Daemons have short paths for sockets, and all users can enter it.
        self.folder = tempfile.mkdtemp(prefix="cs", dir="/tmp")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        os.chmod(self.folder, 0o755)
        self.daemons = []
        self.addCleanup(self.stop)
        self.begin()

    def stop(self):
        for process in reversed(self.daemons):
            process.terminate()
        for process in reversed(self.daemons):
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def daemon(self, *command):
        log = open(self.path(os.path.basename(command[0]) + str(len(self.daemons)) + ".out"), "w")
        self.addCleanup(log.close)
        self.daemons.append(subprocess.Popen(command, env=self.env, cwd=self.folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    def logs(self):
        text = ""
        for name in sorted(os.listdir(self.folder)):
            if name.endswith((".out", ".log")):
                with open(self.path(name), errors="replace") as f:
                    text += "== %s\n%s" % (name, f.read()[-3000:])
        return text

    def slurm(self, *command, check=True):
        done = subprocess.run(command, env=self.env, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, timeout=120)
        if check and done.returncode:
            self.fail("%s: %d\n%s%s\n%s" % (" ".join(command), done.returncode, done.stdout, done.stderr, self.logs()))
        return done.stdout

    def wait_for(self, what, ready):
        end = time.monotonic() + 120
        while not ready():
            if time.monotonic() > end:
                self.fail("%s did not come\n%s" % (what, self.logs()))
            time.sleep(0.1)

    def begin(self):
        for name, mode in (("spool-n1", 0o755), ("spool-n2", 0o755), ("state", 0o755), ("munge", 0o755), ("shared", 0o1777), ("bin", 0o755), ("job", 0o777)):
            os.mkdir(self.path(name))
            os.chmod(self.path(name), mode)
        key = self.path("munge", "key")
        with open(key, "wb") as f:
            f.write(os.urandom(128))
        os.chmod(key, 0o600)
        controller, *ports = free_ports(1 + len(NODES))
        self.write("slurm.conf", textwrap.dedent("""
            ClusterName=test
            SlurmctldHost=%(host)s(127.0.0.1)
            SlurmctldPort=%(controller)d
            SlurmUser=root
            SlurmdUser=root
            AuthType=auth/munge
            AuthInfo=socket=%(folder)s/munge/s
            CredType=cred/munge
            StateSaveLocation=%(folder)s/state
            SlurmdSpoolDir=%(folder)s/spool-%%n
            SlurmdPidFile=%(folder)s/%%n.pid
            SlurmctldPidFile=%(folder)s/controller.pid
            SlurmdParameters=config_overrides
            ProctrackType=proctrack/linuxproc
            TaskPlugin=task/none
            SwitchType=switch/none
            MpiDefault=none
            AccountingStorageType=accounting_storage/none
            JobAcctGatherType=jobacct_gather/none
            SelectType=select/cons_tres
            SelectTypeParameters=CR_Core
            ReturnToService=2
            KillWait=5
            PrologFlags=Alloc
            Prolog=%(folder)s/etc/prolog.sh
            Epilog=%(folder)s/etc/epilog.sh
            NodeName=%(nodes)s NodeHostname=%(host)s NodeAddr=127.0.0.1 Port=%(ports)s CPUs=4 RealMemory=512
            PartitionName=p Nodes=ALL Default=YES State=UP
            """) % {"host": socket.gethostname(), "controller": controller, "folder": self.folder, "nodes": ",".join(NODES),
                    "ports": ",".join(map(str, ports))})
        self.env = {"PATH": self.path("bin") + ":/usr/sbin:/usr/bin:/sbin:/bin", "SLURM_CONF": self.path("slurm.conf"), "LC_ALL": "C.UTF-8"}
        shutil.copytree(os.path.join(ROOT, "deploy", "slurm"), self.path("etc"))
        self.write("etc/cistern.conf", "LOCAL=%s/local-$SLURMD_NODENAME\nSHARED=%s/shared\nCISTERN=%s\nSECONDS_AT_MOST=60\n" % (
            self.folder, self.folder, self.path("bin", "cistern")))
        # In a place that the job's user can read, whatever folder this tree is in.
        shutil.copy(COMMAND, self.path("bin", "cistern"))
        os.symlink(PYTHON, self.path("bin", "python"))
        shutil.copytree(PACKAGE, self.path("package", "cistern"))
        shutil.copy(LIBRARY, self.path("libcistern.so"))
        self.site = self.fake_torch()
        for name, text in COUNTERS.items():
            file = self.path("site", "torch", name)
            os.makedirs(os.path.dirname(file), exist_ok=True)
            with open(file, "a") as f:
                f.write("\n" + textwrap.dedent(text))
        self.write("job/train.py", textwrap.dedent(PROGRAM))
        self.daemon("/usr/sbin/munged", "--foreground", "--force", "--key-file", key, "--socket", self.path("munge", "s"), "--pid-file", self.path("munge", "pid"),
                    "--log-file", self.path("munge", "log"), "--seed-file", self.path("munge", "seed"))
        self.wait_for("munge", lambda: os.path.exists(self.path("munge", "s")))
        self.daemon("/usr/sbin/slurmctld", "-D", "-f", self.path("slurm.conf"))
        for node in NODES:
            self.daemon("/usr/sbin/slurmd", "-D", "-f", self.path("slurm.conf"), "-N", node)
        self.wait_for("idle nodes", lambda: self.slurm("sinfo", "-h", "-o", "%t %D", check=False).strip() == "idle 2")

    def script(self, name):
        """A script of deploy/slurm, on nodes without GPUs, whose disks are folders: PyTorch's own allocator needs no driver here."""
        with open(os.path.join(ROOT, "deploy", "slurm", name)) as f:
            text = f.read()
        text = re.sub(r"#SBATCH --gpus.*\n", "", text).replace("/var/lib/cistern/jobs", self.path("local-$SLURMD_NODENAME"))
        text = text.replace("cistern run --record", "cistern record --max-entries 0 -o").replace('$SLURM_JOB_ID" -- python', '$SLURM_JOB_ID/" -- python')
        self.write("job/" + name, text)
        return self.path("job", name)

    def submit(self, *options):
        """Runs a job to its end, epilog and all; its number."""
        more = "PYTHONPATH=%s,CISTERN_PYTHON_PACKAGE=%s,CISTERN_LIBRARY=%s,HOME=/tmp" % (self.site, self.path("package", "cistern"), self.path("libcistern.so"))
        out = self.slurm("sbatch", "--parsable", "--uid=%s" % USER.pw_name, "--gid=%d" % USER.pw_gid, "--chdir", self.path("job"), "--output", self.path("job", "%j.log"),
                         "--export", "PATH," + more, *options)
        job = out.strip()
        self.wait_for("the end of job " + job, lambda: not self.slurm("squeue", "-h", "-j", job, check=False).strip())
        self.wait_for("idle nodes", lambda: self.slurm("sinfo", "-h", "-o", "%t %D").strip() == "idle 2")
        return job

    def test_ranks(self):
        job = self.submit("--ntasks-per-node=2", self.script("train.sbatch"))
        with open(self.path("job", job + ".log")) as f:
            log = f.read()
        shared = self.path("shared", job)
        self.assertTrue(os.path.isdir(shared), log + self.logs())
        answer = json.loads(self.slurm(self.path("bin", "cistern"), "fleet", "--json", shared))
        self.assertEqual((answer["job"], answer["world_size"]), (job, 4), log)
        ranks = {r["identity"]["rank"]: r for r in answer["ranks"]}
        self.assertEqual(sorted(ranks), [0, 1, 2, 3])
        self.assertEqual([(ranks[n]["identity"]["node_rank"], ranks[n]["identity"]["local_rank"]) for n in range(4)], [(0, 0), (0, 1), (1, 0), (1, 1)])
        self.assertEqual([ranks[n]["ended"] for n in range(4)], ["exit"] * 3 + [""])
        self.assertEqual([ranks[n]["peak_allocated_bytes"] >> 30 for n in range(4)], [1, 2, 3, 4])
        self.assertEqual((answer["limit"]["identity"]["rank"], answer["limit"]["failure"]["requested_bytes"]), (3, 1 << 40))
        # They are the user's, and no node has any left.
        self.assertEqual({os.stat(os.path.join(shared, n)).st_uid for n in os.listdir(shared)}, {USER.pw_uid})
        self.assertEqual([os.listdir(self.path("local-" + node)) for node in NODES], [[], []])

    def test_epilog_that_fails(self):
        os.chmod(self.path("shared"), 0o700)  # the job's user cannot write there
        job = self.submit("--ntasks-per-node=2", self.script("train.sbatch"))
        for node in NODES:
            left = os.listdir(self.path("local-" + node, job))
            self.assertEqual(len([n for n in left if n.endswith(".summary.json")]), 2, left)
        os.chmod(self.path("shared"), 0o1777)
        job = self.submit("--nodes=1", "--wrap", "true")  # the nodes go on, and a job that records nothing leaves nothing
        self.assertFalse(os.path.exists(self.path("shared", job)))
        self.assertFalse(os.path.exists(self.path("local-n1", job)))


if __name__ == "__main__":
    unittest.main()
