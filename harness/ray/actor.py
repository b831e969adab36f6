"""The actor of one task, which keeps the task's place on a node and runs the task's process there.

The task is a process below the actor, under the launcher's guard. The end of the actor ends the
task with all its processes, whether Ray, the node or the driver ended the actor. The actor outlives
the task.
"""

import asyncio
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import ray

from harness.launch import guard
from harness.launch.policy import LaunchTask
from harness.launch.ports import hold_ports
from harness.launch.tasks import ClusterTopology, arguments, environment, start_guarded

LOWEST_PORT = 20_000
"""Ports below are those that Ray gives its own workers (10002 to 19999)."""
SECURITY_VARIABLE = "BELLWETHER_SECURITY"
BIND_VARIABLE = "BELLWETHER_BIND"


@dataclass(frozen=True)
class TaskEnd:
    """The end of a task's process.

    Attributes:
        returncode: Return code, as in subprocess.
        result: Pickled result of the function; None if it has not returned.
        error: Pickled error of the function; None if it has not raised.
    """

    returncode: int
    result: bytes | None
    error: bytes | None


class TaskActor:
    """The place of one task on a node.

    Args:
        name: Name of the task, which Ray puts before its lines.
        program: Pickled function, or a command.
        token: Token of the cluster, where the environment names no credential.
    """

    def __init__(self, name: str, program: bytes | Sequence[str], token: str) -> None:
        self._name = name
        self._command = None if isinstance(program, bytes) else program
        self._held: list[socket.socket] = []
        self._popen: subprocess.Popen[bytes] | None = None
        self._files = tempfile.TemporaryDirectory(prefix="bellwether-")  # of mode 0700
        self._directory = pathlib.Path(self._files.name)
        self._function, self._result, self._error = (
            self._directory / name for name in ("function", "result", "error")
        )
        if isinstance(program, bytes):
            self._function.write_bytes(program)
        self._token = self._directory / "token"
        self._token.touch(mode=0o600)
        self._token.write_text(token)

    # Ray writes this before the lines of the task.
    def __repr__(self) -> str:
        return self._name

    def hold(self, before: str) -> str:
        """Returns an address (`host:port`) of this node for the task, the earlier address if possible."""
        host = ray.util.get_node_ip_address()
        # An IPv6 address stands in brackets before a port.
        host = f"[{host}]" if ":" in host else host
        if before.rpartition(":")[0] == host:
            return before
        self._held = hold_ports(1, LOWEST_PORT)
        return f"{host}:{self._held[0].getsockname()[1]}"

    async def run(
        self, topology: ClusterTopology, task: LaunchTask, attempt: int, number: int, bind: str
    ) -> TaskEnd:
        """Runs the task's process until it ends.

        Args:
            topology: Cluster.
            task: Task of this actor.
            attempt: Number of the start, from 0.
            number: Number of the task among all.
            bind: Address at which the task listens, if not that in the cluster.
        """
        while self._held:
            self._held.pop().close()
        for left in (self._result, self._error):
            left.unlink(missing_ok=True)
        if self._command is None:
            files = map(str, (self._function, self._result, self._error))
            command = [sys.executable, "-m", "harness.ray.task", *files]
        else:
            command = arguments(self._command, topology, task)
        env = environment(os.environ, topology, task, attempt, number)
        env.setdefault(SECURITY_VARIABLE, str(self._token))
        if bind:
            env[BIND_VARIABLE] = bind
        # what Ray lets this process import
        env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        # From the thread of the event loop, which lives as long as the actor: the guard ends with
        # the thread.
        self._popen = start_guarded(command, env)
        returncode = await asyncio.to_thread(self._popen.wait)
        return TaskEnd(returncode, _content(self._result), _content(self._error))

    def send(self, signum: int) -> None:
        """Sends the process a signal. SIGKILL means the whole process tree."""
        if self._popen is not None:
            self._popen.send_signal(guard.KILL_SIGNAL if signum == signal.SIGKILL else signum)

    def close(self) -> None:
        """Removes the files of the actor."""
        self._files.cleanup()


def _content(path: pathlib.Path) -> bytes | None:
    """Returns the content of a file; None if there is no file."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return None
