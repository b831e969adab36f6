"""The parent of the tasks of test clusters: starts them when told to, tells when they end, takes them along.

    python -c "from harness.testing.zygote import main; main(sys.argv[1:])" FD [MODULE...]

It imports the modules once, so that a Python program starts by a fork in milliseconds; any other command is executed
as it is. It starts neither JAX's backend nor gRPC, and no thread but those of OpenBLAS, which sees to forks itself: a
task begins with imported modules and nothing else.

FD is a Unix socket. Each message on it brings the descriptor of another Unix socket: a client, for messages in JSON:

    {"start": number, "argv": [...], "env": {...}, "cwd": path or null, "fork": bool, "input": bool}
        with the descriptor for the task's output and, with "input", one for its standard input
    {"signal": number, "signum": 9}                                   to the task's whole process group
    {"started": number, "pid": 123}     {"ended": number, "code": -9}     the answers

What a task leaves behind in its process group is killed when it ends. A client that sends no more loses its tasks, and
its socket is closed when the last has ended. When this process dies, its tasks die: the kernel sees to that.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any

MESSAGE_BYTES = 1 << 18
_PR_SET_PDEATHSIG = 1
_CANNOT_START = 127


class _Server:
    """Clients and their tasks."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._clients: dict[socket.socket, dict[int, int]] = {}
        """The tasks of each client that run: number by process."""

    def serve(self) -> dict[str, Any] | None:
        """Serves until the control socket is closed.

        Returns:
            None in this process; in a forked task that is to run a Python program, the message that asked for it.
        """
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for sock in (self._control, self._wake):
            self._selector.register(sock, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in self._selector.select()}
            if self._wake in ready:
                self._wake.recv(MESSAGE_BYTES)
                self._reap()
            if self._control in ready and not self._accept():
                break
            for client in [client for client in self._clients if client in ready]:
                message = self._receive(client)
                if message is not None:
                    return message
        signal.set_wakeup_fd(-1)
        for tasks in self._clients.values():
            for pid in tasks:
                _kill_group(pid, signal.SIGKILL)
        return None

    def _accept(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if not data:
            return False
        os.set_inheritable(descriptors[0], False)
        client = socket.socket(fileno=descriptors[0])
        self._clients[client] = {}
        self._selector.register(client, selectors.EVENT_READ)
        return True

    def _receive(self, client: socket.socket) -> dict[str, Any] | None:
        """Does what a client says; gives the message in a forked task that is to run a Python program."""
        tasks = self._clients[client]
        try:
            data, descriptors, _, _ = socket.recv_fds(client, MESSAGE_BYTES, 2)
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            self._selector.unregister(client)
            for pid in tasks:
                _kill_group(pid, signal.SIGKILL)
            self._close_when_done(client)
            return None
        message = json.loads(data)
        if "signal" in message:
            target = next((pid for pid, number in tasks.items() if number == message["signal"]), None)
            if target is not None:  # not reaped, so the number cannot be another's
                _kill_group(target, message["signum"])
            return None
        task = _fork()
        if task == 0:
            for sock in (self._control, self._wake, self._waker, *self._clients):
                sock.close()
            self._selector.close()
            _become(message, descriptors)
            return dict(message)
        for descriptor in descriptors:
            os.close(descriptor)
        tasks[task] = message["start"]
        _send(client, {"started": message["start"], "pid": task})
        return None

    def _reap(self) -> None:
        """Tells of the tasks that have ended."""
        for client, tasks in list(self._clients.items()):
            for pid, number in list(tasks.items()):
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    continue
                _kill_group(pid, signal.SIGKILL)  # not reaped yet, so the group cannot be another's
                _, status = os.waitpid(pid, 0)
                del tasks[pid]
                _send(client, {"ended": number, "code": os.waitstatus_to_exitcode(status)})
            self._close_when_done(client)

    def _close_when_done(self, client: socket.socket) -> None:
        """Closes a client that sends no more once all its tasks have ended."""
        if not self._clients[client] and client not in self._selector.get_map():
            del self._clients[client]
            client.close()


def _send(client: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the other end is gone: that is heard on the same socket
        client.send(json.dumps(message).encode())


def _kill_group(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)


def _fork() -> int:
    """Forks a task with a process group of its own that dies with this process; 0 in the task."""
    zygote = os.getpid()
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and Python warn of threads: see above
        pid = os.fork()
    if pid:
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # the task does it too: whoever is first
        return pid
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != zygote:
        os._exit(1)
    return 0


def _become(message: dict[str, Any], descriptors: Sequence[int]) -> None:
    """In a new task: takes its place, and executes the command unless it is to be run in this process."""
    try:
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        output, *given = descriptors
        source = given[0] if message["input"] else os.open(os.devnull, os.O_RDONLY)
        os.dup2(source, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for descriptor in {source, output} - {0, 1, 2}:
            os.close(descriptor)
        if message["cwd"] is not None:
            os.chdir(message["cwd"])
        os.environ.clear()
        os.environ.update(message["env"])
        if message["fork"]:
            return
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it; another program does not expect that
        os.execvp(message["argv"][0], message["argv"])
    except OSError as error:
        os.write(2, f"cannot start {message['argv'][0]}: {error.strerror}\n".encode())
    os._exit(_CANNOT_START)


def can_fork(argv: Sequence[str]) -> bool:
    """Whether ``run`` can run a command: this interpreter with ``-m MODULE``, ``-c CODE`` or a file."""
    return (
        len(argv) > 1
        and argv[0] == sys.executable
        and ((len(argv) > 2 and argv[1] in ("-m", "-c")) or not argv[1].startswith("-"))
    )


def run(argv: Sequence[str]) -> None:
    """Runs a Python program in this process as the interpreter would have run it."""
    # Two tasks that were forked from one process would draw the same numbers.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    assert sys.stdout is not None
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    _, kind, *rest = argv
    if kind == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        program = types.ModuleType("__main__")
        sys.modules["__main__"] = program
        exec(compile(rest[0], "<string>", "exec"), program.__dict__)
    else:
        sys.argv, sys.path[0] = [kind, *rest], os.path.dirname(os.path.abspath(kind))
        runpy.run_path(kind, run_name="__main__")


def main(arguments: Sequence[str]) -> None:
    """Serves; in a forked task, runs its program."""
    control = socket.socket(fileno=int(arguments[0]))
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in arguments[1:]:
            importlib.import_module(name)
    task = _Server(control).serve()
    if task is not None:
        run(task["argv"])
