"""The parent of the tasks of test clusters, which starts tasks on request and reports their ends.

    python -c "from tests.faults.zygote import main; main(sys.argv[1:])" FD [MODULE...]

The zygote imports the modules once, so a Python program starts by a fork in milliseconds. Any other
command is executed. The zygote starts neither JAX's backend nor gRPC, and no thread but those of
OpenBLAS, which handles forks itself. So a task begins with imported modules and nothing else.

FD is a Unix socket. Each message on FD requests a task, in JSON:

    {"argv": [...], "env": {...}, "cwd": path or null, "fork": bool, "input": bool}

The message carries descriptors: another Unix socket, the task's output and, with "input", its
standard input. The second socket carries the task's process id and, at its end, the exit code,
negative for a signal. A number that the starter sends there is a signal for the task's whole
process group. A starter that closes the socket ends the task.

A task's process group is killed when the task ends. When the zygote dies, the kernel kills the
tasks.
"""

from __future__ import annotations

import contextlib
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

from harness.launch import guard

MESSAGE_BYTES = 1 << 18


class _ZygoteServer:
    """The running tasks, and the sockets of their starters."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._tasks: dict[socket.socket, int] = {}
        """The process of each task, by the socket of its starter."""

    def serve(self) -> dict[str, Any] | None:
        """Serves until the control socket is closed.

        Returns:
            None in this process; in a forked task that is to run a Python program, the message that
            asked for it.
        """
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for sock in (self._control, self._wake):
            self._selector.register(sock, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in self._selector.select()}
            if self._wake in ready:
                self._wake.recv(MESSAGE_BYTES)
                self._reap_tasks()
            for starter in [starter for starter in self._tasks if starter in ready]:
                self._send_signal(starter)
            if self._control in ready:
                data, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 3)
                if not data:
                    break
                message: dict[str, Any] = json.loads(data)
                if self._start_task(message, *descriptors):
                    return message
        signal.set_wakeup_fd(-1)
        for pid in self._tasks.values():
            guard.signal_group(pid, signal.SIGKILL)
        return None

    def _start_task(self, message: dict[str, Any], channel: int, *standard: int) -> bool:
        """Starts a task. Returns True in a fork that is to run a Python program."""
        pid = _fork_task()
        if pid == 0:
            for sock in (self._control, self._wake, self._waker, *self._tasks):
                sock.close()
            self._selector.close()
            os.close(channel)
            _become_task(message, standard)
            return True
        for descriptor in standard:
            os.close(descriptor)
        os.set_inheritable(channel, False)
        starter = socket.socket(fileno=channel)
        self._tasks[starter] = pid
        self._selector.register(starter, selectors.EVENT_READ)
        _send_number(starter, pid)
        return False

    def _send_signal(self, starter: socket.socket) -> None:
        """Sends a task the signal that its starter requests; SIGKILL when the starter has gone."""
        try:
            data = starter.recv(MESSAGE_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            self._selector.unregister(starter)
        # The task is not reaped, so its number cannot be that of another group.
        guard.signal_group(self._tasks[starter], int(data or signal.SIGKILL))

    def _reap_tasks(self) -> None:
        """Reports the tasks that have ended."""
        for starter, pid in list(self._tasks.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            # The task is not reaped yet, so its number cannot be that of another group.
            guard.signal_group(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            _send_number(starter, os.waitstatus_to_exitcode(status))
            if starter in self._selector.get_map():
                self._selector.unregister(starter)
            del self._tasks[starter]
            starter.close()


def _send_number(starter: socket.socket, number: int) -> None:
    # The starter may have gone. The same socket reports that.
    with contextlib.suppress(OSError):
        starter.send(str(number).encode())


def _fork_task() -> int:
    """Forks a task with its own process group, which dies with this process.

    Returns 0 in the task.
    """
    zygote = os.getpid()
    sys.stdout.flush()
    with warnings.catch_warnings():
        # JAX and Python warn of threads at a fork. The zygote has none but those of OpenBLAS.
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid:
        with contextlib.suppress(PermissionError, ProcessLookupError):
            # Zygote and task both set the group, so that it exists whichever runs first.
            os.setpgid(pid, pid)
        return pid
    os.setpgid(0, 0)
    guard.prctl(guard.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != zygote:
        os._exit(1)
    return 0


def _become_task(message: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Sets up a new task. Executes the command unless it is to be run in this process."""
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
        # Python ignores SIGPIPE. Another program does not expect that.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execvp(message["argv"][0], message["argv"])
    except OSError as error:
        os.write(2, f"cannot start {message['argv'][0]}: {error.strerror}\n".encode())
    os._exit(guard.CANNOT_START)


def can_fork(argv: Sequence[str]) -> bool:
    """Returns True if ``run_program`` can run a command: this interpreter with ``-m MODULE``, ``-c CODE`` or a file."""
    return (
        len(argv) > 1
        and argv[0] == sys.executable
        and ((len(argv) > 2 and argv[1] in ("-m", "-c")) or not argv[1].startswith("-"))
    )


def run_program(argv: Sequence[str]) -> None:
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
    """Serves. Runs the program of a task in each fork."""
    control = socket.socket(fileno=int(arguments[0]))
    # A signal that is ignored here would be ignored by every task.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in arguments[1:]:
            importlib.import_module(name)
    task = _ZygoteServer(control).serve()
    if task is not None:
        run_program(task["argv"])
