"""A program that tries, in a sandbox or without one, what nobody may there, and says of each how it went.

Run as ``python -m tests.runtime.sandboxed KIND DIRECTORY``: KIND is none, modules or files; the directory holds a file
``here`` and a Unix socket ``unix`` that listens, and ``port`` with the port of a TCP socket that does.
"""

import ctypes
import errno
import fcntl
import json
import os
import pathlib
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

PTRACE_SEIZE = 0x4206
PR_SET_DUMPABLE = 4
F_SETSIG = 10
libc = ctypes.CDLL(None, use_errno=True)


def checked(code: int) -> None:
    if code < 0:
        raise OSError(ctypes.get_errno(), "")


def connect(family: int, address: Any) -> None:
    with socket.socket(family) as sock:
        sock.connect(address)


def fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def create(path: pathlib.Path, flags: int) -> None:
    os.close(os.open(path, flags, 0o600))


def attempts(directory: pathlib.Path, port: int, other: int) -> dict[str, Callable[[], object]]:
    """By what they are. The last ends ``other``, a process of this one's user."""
    here, new = directory / "here", directory / "new"
    return {
        "look: open a file": lambda: here.read_bytes(),
        "look: look into a directory": lambda: os.listdir(directory),
        "look: look whether a file is there": lambda: os.stat(here),
        "write: open a file for writing": lambda: create(here, os.O_WRONLY),
        "write: open a file for both": lambda: create(here, os.O_RDWR),
        "write: make a file": lambda: create(new, os.O_RDONLY | os.O_CREAT),
        "write: empty a file": lambda: create(here, os.O_RDONLY | os.O_TRUNC),
        "write: a file without a name": lambda: create(directory, os.O_TMPFILE | os.O_RDWR),
        "write: a file in memory": lambda: os.close(os.memfd_create("new")),
        "write: make a directory": lambda: os.mkdir(directory / "made"),
        "write: make a link": lambda: os.symlink("here", directory / "link"),
        "write: rename": lambda: os.rename(directory / "link", directory / "renamed"),
        "write: change a mode": lambda: os.chmod(here, 0o600),
        "write: change a time": lambda: os.utime(here),
        "write: delete": lambda: os.unlink(directory / "renamed"),
        "connect by a Unix socket": lambda: connect(socket.AF_UNIX, str(directory / "unix")),
        "connect by TCP": lambda: connect(socket.AF_INET, ("127.0.0.1", port)),
        "make two sockets": lambda: [sock.close() for sock in socket.socketpair()],
        "make a pipe": lambda: [os.close(fd) for fd in os.pipe()],
        "fork": fork,
        "start a process": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
        "exec what is not there": lambda: os.execv(directory / "none", ["none"]),
        "trace another process": lambda: checked(libc.ptrace(PTRACE_SEIZE, other, None, None)),
        "read another's memory": lambda: checked(libc.process_vm_readv(other, None, 0, None, 0, 0)),
        "refer to another process": lambda: os.close(os.pidfd_open(other)),
        "limit another process": lambda: resource.prlimit(other, resource.RLIMIT_CORE, (0, 0)),
        "change its own limits": lambda: resource.prlimit(0, resource.RLIMIT_CORE, (0, 0)),
        "choose the signal that a file sends": lambda: fcntl.fcntl(0, F_SETSIG, signal.SIGUSR1),
        "change what others see of it": lambda: checked(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)),
        "change its directory": lambda: os.chdir(directory),
        "kill another process": lambda: os.kill(other, signal.SIGKILL),
    }


def outcome(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, repr(error))
    except Exception as error:
        return repr(error)
    return "done"


def main(kind: str, directory: pathlib.Path) -> None:
    port = int((directory / "port").read_text())
    end, held = os.pipe()
    if (other := os.fork()) == 0:
        os.close(held)
        os.read(end, 1)  # until this process ends
        os._exit(0)
    calls: queue.Queue[Callable[[], object]] = queue.Queue()
    told: queue.Queue[str] = queue.Queue()

    def older() -> None:
        """A thread that is there before the sandbox."""
        while True:
            told.put(outcome(calls.get()))

    threading.Thread(target=older, daemon=True).start()
    if kind == "files":
        from runtime.checkpoint import trial_program

        problem = trial_program.confine()
    else:
        problem = ""
    result = {"problem": problem}
    for name, attempt in attempts(directory, port, other).items():
        if name not in ("trace another process", "kill another process"):  # once only
            calls.put(attempt)
            result[f"thread: {name}"] = told.get()
        result[name] = outcome(attempt)
    worked: queue.Queue[int] = queue.Queue()
    younger = threading.Thread(target=lambda: worked.put(sum(bytes(1 << 24)) + 1))
    younger.start()
    younger.join()
    print(json.dumps({**result, "a new thread": worked.get(), "again": "" if kind == "none" else again()}), flush=True)
    os.abort()


def again() -> str:
    """What the sandbox says where the kernel takes no filter: from within one."""
    from runtime import sandbox

    return sandbox.confine()


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
