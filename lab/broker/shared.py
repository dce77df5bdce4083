"""What the programs in this folder share: a broker of their own, and processes with memory that do what they are asked.

All of them take --sim: the same over one simulated device that the processes share, so that the programs can be tried without a
GPU. Times of a simulated device say nothing of a GPU, so they are shown and not judged.
"""
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "../see"))

import seen  # noqa: E402  programs that are asked, and lines of PASS and FAIL
from seen import common  # noqa: E402

MiB, GiB = common.MiB, common.GiB
NEAR = 32 * MiB  # a ballast leaves at most this much more than it shall


def arguments(parser, capacity):
    """Adds --sim; without a value the device has the capacity."""
    parser.add_argument("--sim", nargs="?", type=int, const=capacity // MiB, metavar="MIB", help="over a simulated device of so many MiB")


class Node:
    """A folder of this run, with the simulated device where there is one, and the processes that have to be ended."""

    def __init__(self, name, sim, devices=1):
        self.folder = tempfile.mkdtemp(prefix="cistern-%s-" % name)  # short, as the path of a socket has to be
        self.sim, self.devices = sim, devices
        self.started = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for p in reversed(self.started):
            common.end_session(p)
        for name in os.listdir(self.folder):
            os.unlink(os.path.join(self.folder, name))
        os.rmdir(self.folder)

    def conf(self, *settings):
        """Settings of a process on this node's device."""
        driver = ["driver:sim:%dMiBx%d@%s" % (self.sim, self.devices, os.path.join(self.folder, "gpu"))] if self.sim else []
        return ",".join([*driver, *settings])

    def talker(self, argv, env):
        t = seen.Talker(argv, env)
        self.started.append(t.process)
        return t

    def holder(self, *settings, **variables):
        """A process that allocates through the C library."""
        env = common.environment("native", {"CISTERN_CONF": self.conf(*settings), "CISTERN_LIBRARY": common.library(), **variables})
        return Process(self.talker([sys.executable, os.path.join(HERE, "holder.py")], env), "holder.py")

    def ballast(self):
        """A process that takes no part and holds memory."""
        return self.holder("node:off")

    def tensors(self, broker, mode="native"):
        """A process with named objects, over PyTorch, or without it over a simulated device."""
        env = common.environment(mode, {"CISTERN_CONF": self.conf(broker.setting), "CISTERN_LIBRARY": common.library(),
                                        "CISTERN_COMMAND": common.cistern_command()})
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (common.package_folder(), env.get("PYTHONPATH"))))
        argv = [sys.executable, os.path.join(HERE, "tensors.py"), *(["--plain"] if self.sim else [])]
        return Process(self.talker(common.command(mode, argv), env), "tensors.py")

    def broker(self, policy=None, manager=None):
        return Broker(self, policy, manager)


class Process:
    """A process of this folder: one command a line, one answer a line."""

    def __init__(self, talker, name):
        self.talker, self.name = talker, name

    def send(self, do, **what):
        self.talker.tell(json.dumps({"do": do, **what}))

    def answer(self, timeout=120):
        """What it answered; an error for a process that ended or does not answer."""
        found = self.talker.answer(timeout)
        if found is None:
            raise RuntimeError("%s does not answer: %s" % (self.name, self.talker.why()))
        return found

    def ask(self, do, timeout=120, **what):
        self.send(do, **what)
        return self.answer(timeout)

    def end(self):
        return self.talker.end()


class Manager:
    """Keeps the broker's socket and the descriptors that it stores, as systemd does. It uses no GPU."""

    def __init__(self, node):
        self.path = os.path.join(node.folder, "listens")
        self.notify = os.path.join(node.folder, "notify")
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listening.bind(self.path)
        self.listening.listen(128)
        self.heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.heard.bind(self.notify)
        self.lock, self.stored = threading.Lock(), []
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        while True:
            text, fds, _, _ = socket.recv_fds(self.heard, 4096, 4)
            said = dict(line.partition("=")[::2] for line in text.decode().splitlines())
            with self.lock:
                if said.get("FDSTORE") == "1":
                    self.stored += [(said["FDNAME"], fd) for fd in fds]
                elif said.get("FDSTOREREMOVE") == "1":
                    for name, fd in self.stored:
                        if name == said["FDNAME"]:
                            os.close(fd)
                    self.stored = [(name, fd) for name, fd in self.stored if name != said["FDNAME"]]

    def count(self):
        with self.lock:
            return len(self.stored)

    # Descriptors have to be 3, 4, and so on, of a process that is named.
    STARTER = ("import fcntl, json, os, sys\n"
               "fds = json.loads(sys.argv[1])\n"
               "high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3 + len(fds) + max(fds)) for fd in fds]\n"
               "for i, fd in enumerate(high): os.dup2(fd, 3 + i)\n"
               "os.environ['LISTEN_PID'] = str(os.getpid())\n"
               "os.execv(sys.argv[2], sys.argv[2:])\n")

    def start(self, argv, **how):
        with self.lock:
            names, fds = ["cistern-node.socket"], [self.listening.fileno()]
            for name, fd in self.stored:
                names.append(name)
                fds.append(os.dup(fd))  # a message that is under way may close the other
        env = {"LISTEN_FDS": str(len(fds)), "LISTEN_FDNAMES": ":".join(names), "NOTIFY_SOCKET": self.notify}
        try:
            return subprocess.Popen([sys.executable, "-c", self.STARTER, json.dumps(fds), *argv], pass_fds=fds, **{**how, "env": {**how["env"], **env}})
        finally:
            for fd in fds[1:]:
                os.close(fd)


class Broker:
    """cistern serve at a socket of its own, with metrics. With a manager it takes over what that has kept."""

    def __init__(self, node, policy=None, manager=None):
        self.socket = manager.path if manager else os.path.join(node.folder, "broker%d" % len(node.started))
        with socket.socket() as s:  # a port that is free
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        argv = [common.cistern_command(), "serve", *([] if manager else ["--socket", self.socket]), "--metrics", str(self.port)]
        if policy:
            path = self.socket + ".policy"
            with open(path, "w") as f:
                f.write(policy)
            argv += ["--policy", path]
        self.errors = tempfile.TemporaryFile()
        env = {k: v for k, v in os.environ.items() if k != "NOTIFY_SOCKET"}
        env["CISTERN_CONF"] = node.conf()
        self.process = (manager.start if manager else subprocess.Popen)(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.errors, start_new_session=True, env=env)
        node.started.append(self.process)
        end = time.monotonic() + 30
        while seen.cistern("node", "ls", "--json", "--socket", self.socket).rc != 0:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("cistern serve did not begin: " + self.said())
            time.sleep(0.05)

    @property
    def setting(self):
        return "node:" + self.socket

    def said(self):
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace").strip()[-4000:]

    def entries(self):
        """What cistern node ls has: one entry for each client and device."""
        done = seen.cistern("node", "ls", "--json", "--socket", self.socket)
        if done.rc != 0:
            raise RuntimeError("cistern node ls: %s; the broker says: %s" % (done.why(), self.said()))
        return json.loads(done.out)["clients"]

    def clients(self):
        """{pid: entry}, where each client has one device."""
        return {e["pid"]: e for e in self.entries()}

    def until(self, holds, timeout=30):
        """Waits until the clients are so, and returns whether they are."""
        end = time.monotonic() + timeout
        while not holds(self.clients()):
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def metric(self, name):
        """The sum of all series of a metric."""
        with urllib.request.urlopen("http://127.0.0.1:%d/metrics" % self.port, timeout=30) as f:
            lines = f.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ")))

    def open(self):
        """Its descriptors and its resident memory."""
        folder = "/proc/%d/" % self.process.pid
        with open(folder + "statm") as f:
            resident = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return {"descriptors": len(os.listdir(folder + "fd")), "resident": resident}

    def kill(self):
        self.process.kill()
        self.process.wait()

    def used(self):
        """Its CPU time in seconds."""
        with open("/proc/%d/stat" % self.process.pid) as f:
            fields = f.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(10)
        finally:
            common.end_session(self.process)
