"""Cases in forks of a process that has imported torch and not started CUDA: importing it takes longer than most cases."""
import json
import os
import subprocess
import sys
import tempfile
import time

import common


class Forks:
    """A process that forks for each case; argv is what starts it."""

    def __init__(self, argv, env):
        self.process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def run(self, name, timeout):
        """How the case ended, a common.Finished."""
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            ask = {"name": name, "out": os.path.join(folder, "out"), "err": os.path.join(folder, "err"), "timeout": timeout}
            self.process.stdin.write(json.dumps(ask) + "\n")
            self.process.stdin.flush()
            rc = json.loads(self.process.stdout.readline())
            wrote = []
            for path in (ask["out"], ask["err"]):
                with open(path, errors="replace") as f:
                    wrote.append(f.read())
        return common.Finished(rc, *wrote, time.monotonic() - start)

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


def serve(run_one):
    """The other end: what a case returns is what this process, then a fork, exits with."""
    import torch  # noqa: F401

    for line in sys.stdin:
        ask = json.loads(line)
        files = [os.open(os.devnull, os.O_RDONLY)] + [os.open(ask[f], os.O_WRONLY | os.O_CREAT) for f in ("out", "err")]
        pid = os.fork()
        if pid == 0:
            os.setsid()
            for to, fd in enumerate(files):
                os.dup2(fd, to)
                os.close(fd)
            return run_one(ask["name"])
        for fd in files:
            os.close(fd)
        print(json.dumps(status(pid, time.monotonic() + ask["timeout"])), flush=True)
    return 0


def status(pid, deadline):
    """The child's exit status, negative for a signal; None where it was ended for time."""
    done = 0
    while not done and time.monotonic() < deadline:
        done, code = os.waitpid(pid, os.WNOHANG)
        time.sleep(0 if done else 0.01)
    for p in common.descendants(pid) - {pid} | (set() if done else {pid}):
        try:
            os.kill(p, 9)
        except ProcessLookupError:
            pass
    if done:
        return os.waitstatus_to_exitcode(code)
    os.waitpid(pid, 0)
    return None
