"""The parent of the tasks of a test cluster: starts them when told to, tells when they end, takes them along.

    python -c "from harness.testing.zygote import main; main(sys.argv[1:])" FD [MODULE...]

It imports the modules once, so that a task ``python -m NAME ...`` starts by a fork in milliseconds; any other command
is executed as it is. FD is a Unix socket for messages in JSON, one each:

    {"start": number, "argv": [...], "env": {...}, "module": bool}   with the descriptor for the task's output
    {"signal": number, "signum": 9}                                   to the task's whole process group
    {"started": number, "pid": 123}     {"ended": number, "code": -9}     its answers

When it dies, its tasks die: the kernel sees to that.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import warnings
from collections.abc import Sequence
from typing import Any

MESSAGE_BYTES = 1 << 18
_PR_SET_PDEATHSIG = 1
_CANNOT_START = 127


def serve(channel: socket.socket) -> dict[str, Any] | None:
    """Serves until the other end closes.

    Returns:
        None in this process; in a forked task that is to run a module, the message that asked for it.
    """
    running: dict[int, int] = {}  # number by pid
    wake, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    import selectors

    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if wake in ready:
                wake.recv(MESSAGE_BYTES)
                _reap(channel, running)
            if channel not in ready:
                continue
            data, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 1)
            if not data:
                signal.set_wakeup_fd(-1)
                break
            message = json.loads(data)
            if "signal" in message:
                pid = next((p for p, number in running.items() if number == message["signal"]), None)
                if pid is not None:  # not reaped, so the number cannot be another's
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, message["signum"])
                continue
            pid = _start(message, descriptors[0])
            if pid == 0:
                for sock in (channel, wake, waker):
                    sock.close()
                return dict(message)
            os.close(descriptors[0])
            running[pid] = message["start"]
            channel.send(json.dumps({"started": message["start"], "pid": pid}).encode())
    for pid in running:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    return None


def _reap(channel: socket.socket, running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        number = running.pop(pid, None)
        if number is not None:
            with contextlib.suppress(OSError):  # the other end is gone, so are we soon
                channel.send(json.dumps({"ended": number, "code": os.waitstatus_to_exitcode(status)}).encode())


def _start(message: dict[str, Any], output: int) -> int:
    """Forks; gives 0 in a task that is to run a module, and does not return in one that executes a program."""
    zygote = os.getpid()
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and Python warn of threads: this process has none
        pid = os.fork()
    if pid:
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # the task does it too: whoever is first
        return pid
    try:
        os.setpgid(0, 0)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != zygote:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ.clear()
        os.environ.update(message["env"])
        if message["module"]:
            return 0
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it; another program does not expect that
        os.execvp(message["argv"][0], message["argv"])
    except OSError as error:
        os.write(2, f"cannot start {message['argv'][0]}: {error.strerror}\n".encode())
    os._exit(_CANNOT_START)


def main(arguments: Sequence[str]) -> None:
    """Serves; in a forked task, runs its module as the main program."""
    channel = socket.socket(fileno=int(arguments[0]))
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in arguments[1:]:
            importlib.import_module(name)
    task = serve(channel)
    if task is not None:
        _, _, module, *rest = task["argv"]
        sys.argv = [module, *rest]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
