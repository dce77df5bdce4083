"""Programs in forks of a process that has imported torch and not started CUDA: importing it takes longer than most of them.

python.c starts one. Its fork has the environment that it asks for, but what was read while torch was imported is that of the process
that forks.
"""
import fcntl
import gc
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import types

import common

# Descriptors of the process that forks, and those that came with a request, are above the numbers that programs ask for.
OWN, GIVEN, MOST = 2000, 3000, 250


class Forks:
    """The process that forks; argv is what starts it, less a descriptor."""

    def __init__(self, argv, env):
        with socket.socket(socket.AF_UNIX) as listener:
            self.name = f"cistern-forks-{os.getpid()}-{id(self)}"
            listener.bind("\0" + self.name)
            listener.listen(100)
            self.process = subprocess.Popen([*argv, str(listener.fileno())], env=env, stdin=subprocess.PIPE,
                                            pass_fds=[listener.fileno()], start_new_session=True)

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)


def serve(inherited):
    """Forks until standard input ends, and returns None then. In a fork it returns the program's arguments."""
    prepare()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (GIVEN + MOST, limits[1]))
    listener = socket.socket(fileno=moved(inherited, OWN))
    poll, running = select.poll(), {}  # by descriptors: the program's pid, its connection and its pidfd
    poll.register(0, select.POLLIN)
    poll.register(listener, select.POLLIN)
    while True:
        ready = poll.poll()[0][0]  # one at a time: what it does may close the others
        if ready == 0:
            return None
        if ready != listener.fileno():
            end(ready, running, poll)
            continue
        connection, _ = listener.accept()
        request, given = received(connection)
        pid = os.fork()
        if pid == 0:
            listener.close()
            connection.close()
            become(*request, given)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            return request[2]
        for fd in given:
            os.close(fd)
        answer(connection.fileno(), pid)
        own = moved(connection.detach(), OWN), moved(os.pidfd_open(pid), OWN)
        for fd in own:
            running[fd] = pid, *own
            poll.register(fd, select.POLLIN)


def prepare():
    """Does once what each fork would do."""
    import torch  # noqa: F401
    import standin_operators  # after torch, which imports it as well

    standin_operators.register()
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"{len(threads)} threads: a fork would have one")
    gc.collect()
    gc.freeze()  # a collection in a fork would look at all of torch, and copy its pages


def moved(fd, lowest):
    """The descriptor by a number that is no lower."""
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
    os.close(fd)
    return high


def received(connection):
    """What python.c asks for: the descriptors' numbers, the folder, the arguments, the environment; and the descriptors."""
    data, fds, _, _ = socket.recv_fds(connection, 1 << 16, MOST)
    size, arguments, n = struct.unpack_from("III", data)
    while len(data) < size:
        data += connection.recv(size - len(data), socket.MSG_WAITALL)
    folder, *words = [os.fsdecode(w) for w in data[12 + 4 * n:-1].split(b"\0")]
    request = struct.unpack_from(f"{n}i", data, 12), folder, words[:arguments], dict(w.split("=", 1) for w in words[arguments:])
    return request, [moved(fd, GIVEN) for fd in fds]


def become(numbers, folder, _, env, fds):
    """Makes this fork the process that was asked for."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs in the background start with it ignored
    os.closerange(OWN, GIVEN)
    for fd, number in zip(fds, numbers):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(folder)
    for name in set(os.environ) - set(env):
        del os.environ[name]
    os.environ.update(env)


def end(fd, running, poll):
    """A program has ended, or it has to: its status is not waited for."""
    pid, connection, pidfd = running[fd]
    if fd == connection:
        for p in common.descendants(pid):
            kill(os.kill, p)
    kill(os.killpg, pid)  # what it left; nothing else has this number before it was waited for
    _, status = os.waitpid(pid, 0)
    answer(connection, status)
    for fd in (connection, pidfd):
        poll.unregister(fd)
        del running[fd]
        os.close(fd)


def answer(connection, value):
    try:
        os.write(connection, struct.pack("i", value))
    except BrokenPipeError:
        pass  # its status is not waited for; end() sees that


def kill(how, pid):
    try:
        how(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run_text(argv):
    """A program as `python -c` runs it."""
    sys.argv, sys.path[0] = ["-c", *argv[1:]], ""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(argv[0], "<string>", "exec"), module.__dict__)
