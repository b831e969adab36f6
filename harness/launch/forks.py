"""Tasks as forks of a fork server, for the launcher.

`harness.launch.runner` starts one server and asks the server for each task. Where `ForkServer.start`
returns None, the runner starts the task in the ordinary way.
"""

import contextlib
import json
import os
import pathlib
import re
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import util

from harness.launch import fork_server, times

_IMPORTS = re.compile(r"^ *(import|from) +(harness|runtime|jax)\b", re.MULTILINE)


class ForkedGuard:
    """The guard of a forked task, a child of this process. Its methods are those of ``Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Reaps the guard. Returns the return code as ``Popen`` does, or None while the guard runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Sends a signal. Does nothing when the guard has ended."""
        # A guard that is not reaped keeps its number.
        if self.poll() is None:
            os.kill(self.pid, signum)


class ForkServer:
    """The fork server of a launcher.

    Args:
        command: Command line of the tasks, for which ``can_fork`` is True.
        environ: Variables that all tasks have in common.
        longest: Number of characters of the longest command line of a task.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], longest: int) -> None:
        assert command[1] == "-m" or command[1].endswith(".py"), "can_fork"
        self._environ = environ
        script = os.path.dirname(os.path.realpath(command[1]))
        first_path = os.getcwd() if command[1] == "-m" else script
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptor = theirs.fileno()
            self._popen = subprocess.Popen(
                [sys.executable, fork_server.__file__, str(descriptor), first_path, " " * longest],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[descriptor],
                start_new_session=True,
            )

    def wait_ready(self, wake: socket.socket) -> None:
        """Waits until the server has imported its modules, has died, or ``wake`` is readable."""
        select.select([self._control, wake], [], [], times.IMPORT_SECS)
        self._control.setblocking(False)
        try:
            is_ready = self._control.recv(fork_server.MESSAGE_BYTES) == fork_server.READY
        except OSError:
            is_ready = False
        if not is_ready:
            self._control.close()

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], output: int
    ) -> ForkedGuard | None:
        """Forks a task and its guard. Returns None if the server cannot."""
        own = {name: value for name, value in environ.items() if self._environ.get(name) != value}
        message = {"launcher": os.getpid(), "argv": command, "env": own}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(times.FORK_SECS)
        with ours, contextlib.suppress(OSError):
            with theirs:
                data = json.dumps(message).encode()
                socket.send_fds(self._control, [data], [theirs.fileno(), output])
            if pid := ours.recv(fork_server.MESSAGE_BYTES):
                ours.send(fork_server.READY)
                return ForkedGuard(int(pid))
        self._control.close()
        return None


def can_fork(
    command: Sequence[str], files: Iterable[pathlib.Path], environ: Mapping[str, str]
) -> bool:
    """Returns True if a fork runs a command as a new process would.

    The command runs a module or a file with this interpreter, without options. The file imports
    JAX, the runtime or the harness itself. The tasks load no plugin of an accelerator, which may
    start threads.

    Args:
        command: Program and arguments.
        files: Files that may be the program's.
        environ: Variables that all tasks have in common.
    """
    program, kind = shutil.which(command[0]), [*command, ""][1]
    return (
        sys.platform == "linux"
        and program is not None
        and os.path.abspath(program) == sys.executable
        and (kind == "-m" or kind.endswith(".py"))
        and (environ.get("JAX_PLATFORMS") == "cpu" or not _has_plugin())
        and any(_IMPORTS.search(file.read_text(errors="replace")) for file in files)
    )


def _has_plugin() -> bool:
    return any(util.find_spec(name) is not None for name in ("jax_plugins", "libtpu"))
