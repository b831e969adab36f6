"""The processes of a test cluster: starts, output and ends, for any waiting thread."""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing.connection
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import psutil

from harness.launch import guard
from harness.launch.output import LineBuffer
from harness.launch.tasks import start_guarded
from runtime import concurrency
from tests.faults import zygote

TIMEOUT_SECS = 60.0
"""How long waits for lines, steps and ends last by default."""
START_SECS = 120.0
"""How long the zygote may take to import its modules, and a process to exist."""
_READ_BYTES = 1 << 16
_SHOWN_LINES = 20
_END_SECS = 10.0
_FREEZE_SECS = 100.0
_FREEZE_POLL_SECS = 0.001


@dataclass(frozen=True)
class Line:
    """A line that a task has written.

    Attributes:
        at: ``time.monotonic()`` of its arrival.
        life: Number of the start of the task that wrote the line, from 0.
        text: Text without the end of the line.
    """

    at: float
    life: int
    text: str


@dataclass
class Life:
    """A process of a task, from its start to its end.

    Attributes:
        task: Name of the task, such as "worker:1".
        number: Number of the start, from 0.
        pid: Process id.
        started_at: ``time.monotonic()`` of the start.
        code: Exit code, negative for a signal; None while the process runs.
        frozen: True while the process is stopped by SIGSTOP.
        channel: Socket on which the zygote receives signals for the process, and reports its end.
    """

    task: str
    number: int
    channel: socket.socket = field(repr=False)
    pid: int
    started_at: float
    code: int | None = None
    frozen: bool = False


IMPORT_TIME = ("JAX_", "XLA_", "TF_CPP_", "GRPC_", "PYTHON", "LD_", "OMP_", "OPENBLAS_", "MKL_")
"""Beginnings of the names of environment variables that imported modules may have read already."""
_LINES_ONLY = "PYTHONUNBUFFERED"
"""It changes how lines are written and nothing else, and the zygote's tasks write whole lines at once."""


def read_on_import(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that modules may read on import.

    A fork comes too late to change these.
    """
    return {
        name: value
        for name, value in env.items()
        if name.startswith(IMPORT_TIME) and name != _LINES_ONLY
    }


class ZygoteProcess:
    """A process with imported modules, from which the tasks of any number of clusters are forked.

    The zygote and its tasks end with this process, also after ``kill -9``.

    Args:
        preload: Names of the modules.
        env: Environment of the zygote.
    """

    _lasting: ClassVar[dict[tuple[object, ...], ZygoteProcess]] = {}
    _lock: ClassVar[concurrency.Lock] = concurrency.Lock()

    def __init__(self, preload: Sequence[str], env: Mapping[str, str]) -> None:
        self.preload = tuple(preload)
        self.env = dict(env)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ready = concurrency.Event()
        self._failure: BaseException | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        # The guard ends with the thread that starts it, and takes the zygote and all tasks along.
        self._thread = concurrency.ThreadGroup("zygote").start(
            self._run_zygote, theirs, name="zygote"
        )
        self._ready.wait()
        if self._failure is not None:
            self._control.close()
            raise self._failure

    @classmethod
    def lasting(cls, preload: Sequence[str], env: Mapping[str, str]) -> ZygoteProcess:
        """Returns the zygote of this process for some modules. It lives as long as this process.

        ``no_leaks`` does not count the zygote. Each set of variables that modules may read on
        import has its own.
        """
        key = (tuple(preload), *sorted(read_on_import(env).items()))
        with cls._lock:
            found = cls._lasting.get(key)
            if found is None or not found._thread.is_alive():
                if found is not None:
                    found.close()
                elif not cls._lasting:
                    atexit.register(cls._close_lasting)
                found = cls._lasting[key] = cls(preload, env)
            return found

    @classmethod
    def lasting_processes(cls) -> set[int]:
        """Returns the ids of the zygotes of ``lasting``, without tasks and orphans."""
        found = set()
        for one in list(cls._lasting.values()):
            if one._popen is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.add(one._popen.pid)
                    children = psutil.Process(one._popen.pid).children()
                    # The first is the zygote; the guard adopts others.
                    found |= {
                        child.pid for child in sorted(children, key=psutil.Process.create_time)[:1]
                    }
        return found

    @classmethod
    def lasting_threads(cls) -> set[concurrency.Thread]:
        """Returns the threads of the zygotes of ``lasting``."""
        return {one._thread for one in list(cls._lasting.values())}

    @classmethod
    def lasting_descriptors(cls) -> set[int]:
        """Returns the open descriptors of the zygotes of ``lasting``."""
        return {one._control.fileno() for one in list(cls._lasting.values())}

    @classmethod
    def _close_lasting(cls) -> None:
        while cls._lasting:
            cls._lasting.popitem()[1].close()

    def _run_zygote(self, theirs: socket.socket) -> None:
        program = f"import sys; from {zygote.__name__} import main; main(sys.argv[1:])"
        command = [sys.executable, "-c", program, str(theirs.fileno()), *self.preload]
        try:
            with theirs:
                self._popen = start_guarded(command, self.env, pass_fds=[theirs.fileno()])
        except BaseException as error:
            self._failure = error
            return
        finally:
            self._ready.set()
        self._popen.wait()

    def start(
        self, message: Mapping[str, object], descriptors: Sequence[int]
    ) -> tuple[socket.socket, int]:
        """Starts a task as the module ``zygote`` describes.

        Returns:
            The socket of the starter, and the process id.

        Raises:
            OSError: The zygote has ended, or does not answer.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as on_error:
            on_error.callback(ours.close)
            with theirs:
                socket.send_fds(
                    self._control, [json.dumps(message).encode()], [theirs.fileno(), *descriptors]
                )
            # The zygote may still import its modules.
            ours.settimeout(START_SECS)
            pid = ours.recv(zygote.MESSAGE_BYTES)
            if not pid:
                raise ConnectionError("the zygote has ended")
            ours.settimeout(None)
            on_error.pop_all()
        return ours, int(pid)

    def starts(self, argv: Sequence[str], env: Mapping[str, str]) -> bool:
        """Returns True if the zygote runs a command in a fork of itself, and does not execute it."""
        return (
            bool(self.preload)
            and zygote.can_fork(argv)
            and read_on_import(env) == read_on_import(self.env)
        )

    def close(self) -> None:
        """Ends the zygote with all its tasks."""
        # The zygote ends with its control socket.
        self._control.close()
        self._thread.join(_END_SECS)
        if self._thread.is_alive() and self._popen is not None:
            self._popen.send_signal(guard.KILL_SIGNAL)
            self._thread.join()


class TaskProcesses:
    """The processes of some tasks, each with a thread that reads its output.

    Args:
        zygote: Zygote of the processes, which outlives this object.
        tasks: Names of the tasks.
        show: Function for (task, line), called by the reading thread for each line.
    """

    def __init__(
        self,
        zygote: ZygoteProcess,
        tasks: Collection[str],
        show: Callable[[str, str], object] | None = None,
    ) -> None:
        self._zygote = zygote
        self._show = show
        self._lives: list[Life] = []
        self._threads = concurrency.ThreadGroup("processes")
        self._lines: dict[str, list[Line]] = {task: [] for task in tasks}
        self._seen = dict.fromkeys(tasks, 0)
        self.changed = concurrency.Condition()
        """Notified of every line, start and end."""
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process and its thread. Does nothing the second time."""
        with self.changed:
            self._closed = True
            for life in self._lives:
                # The end of the channel is the order to kill.
                if life.code is None:
                    life.channel.shutdown(socket.SHUT_WR)
        self._threads.close()

    def spawn(
        self,
        task: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        stdin: int | None = None,
    ) -> Life:
        """Starts a process of a task and waits until it exists.

        Args:
            task: Name of the task.
            argv: Command.
            env: Environment.
            cwd: Working directory; that of the zygote by default.
            stdin: Descriptor of this process that becomes the standard input.

        Raises:
            RuntimeError: The task runs already, or the cluster is closed.
        """
        with self.changed:
            if self._closed:
                raise RuntimeError(f"{task} cannot be started: the cluster is closed")
            if (running := self.running(task)) is not None:
                raise RuntimeError(f"{task} runs already, as process {running.pid}")
            message: dict[str, object] = {
                "argv": list(argv),
                "env": dict(env),
                "cwd": None if cwd is None else os.fspath(cwd),
                "fork": self._zygote.starts(argv, env),
                "input": stdin is not None,
            }
            started_at = concurrency.monotonic()
            # Each life has a pipe, so that the lines of two lives do not mix.
            reader, writer = os.pipe()
            try:
                channel, pid = self._zygote.start(
                    message, [writer] if stdin is None else [writer, stdin]
                )
            except OSError as error:
                os.close(reader)
                raise RuntimeError(f"{task} cannot be started: {error}") from error
            finally:
                os.close(writer)
            life = Life(task, len(self.lives(task)), channel, pid, started_at)
            self._lives.append(life)
            self._threads.start(self._follow_output, life, reader, name=task)
            self.changed.notify_all()
        return life

    def _follow_output(self, life: Life, output: int) -> None:
        """Reads the output of a process until its end, on a thread of its own."""
        buffer = LineBuffer()
        sources: list[Any] = [output, life.channel]
        # The end of the process is looked at where there is no output: what was written before it
        # comes first. A process that the task has left behind may hold the other end of the output
        # for ever.
        while output in multiprocessing.connection.wait(sources):
            if data := os.read(output, _READ_BYTES):
                self._add_lines(life, buffer.feed(data))
            else:
                sources.remove(output)
        os.close(output)
        self._add_lines(life, buffer.flush())
        try:
            code = life.channel.recv(zygote.MESSAGE_BYTES)
        # The error belongs to a signal that came too late. What was sent before can still be read.
        except ConnectionError:
            code = life.channel.recv(zygote.MESSAGE_BYTES)
        with self.changed:
            assert life.code is None, "a process ends once"
            life.code = int(code or -signal.SIGKILL)
            life.channel.close()
            self.changed.notify_all()

    def _add_lines(self, life: Life, texts: Sequence[str]) -> None:
        with self.changed:
            self._lines[life.task] += [
                Line(concurrency.monotonic(), life.number, text) for text in texts
            ]
            self.changed.notify_all()
        if self._show is not None:
            for text in texts:
                self._show(life.task, text)

    # -- faults ------------------------------------------------------------------------------------

    def signal(self, task: str, signum: int) -> None:
        """Sends a signal to the process group of a task.

        Does nothing when the task does not run.
        """
        # The process may have ended just now.
        with self.changed, contextlib.suppress(OSError):
            if (life := self.running(task)) is not None:
                life.frozen = signum == signal.SIGSTOP or (life.frozen and signum != signal.SIGCONT)
                life.channel.send(str(int(signum)).encode())

    def kill(self, task: str) -> None:
        """Sends SIGKILL, and waits for the end of the task."""
        self._living_process(task)
        self.signal(task, signal.SIGKILL)
        self.wait(task)

    def stop(self, task: str) -> None:
        """Sends SIGTERM. Does not wait."""
        self._living_process(task)
        self.signal(task, signal.SIGTERM)

    def freeze(self, task: str) -> None:
        """Stops a task by SIGSTOP until ``thaw``. Returns when no thread of the task runs."""
        self._signal_and_wait(
            self._living_process(task), signal.SIGSTOP, lambda states: states == {"T"}
        )

    def thaw(self, task: str) -> None:
        """Continues a task by SIGCONT. Returns when the task runs again, or has ended."""
        if (life := self.running(task)) is not None:
            self._signal_and_wait(life, signal.SIGCONT, lambda states: "T" not in states)

    def _signal_and_wait(
        self, life: Life, signum: int, reached: Callable[[set[str]], bool]
    ) -> None:
        # The zygote sends the signal, and it alone is told of the stop. A second signal that did
        # not wait for the effect of the first would find the state from before that one.
        self.signal(life.task, signum)
        deadline = concurrency.monotonic() + _FREEZE_SECS
        while life.code is None and not reached(thread_states(life.pid)):
            if concurrency.monotonic() > deadline:
                name = signal.Signals(signum).name
                raise TimeoutError(f"{life.task} has not followed {name} for {_FREEZE_SECS:g} s")
            concurrency.sleep(_FREEZE_POLL_SECS)

    # -- what they do ------------------------------------------------------------------------------

    def lives(self, task: str = "") -> list[Life]:
        """Returns the processes of a task, or of all tasks, in the order of their starts."""
        if task and task not in self._lines:
            raise ValueError(f"no task {task!r} in this cluster: {', '.join(self._lines)}")
        with self.changed:
            return [life for life in self._lives if task in ("", life.task)]

    def running(self, task: str) -> Life | None:
        """Returns the running process of a task; None if there is none."""
        return next((life for life in self.lives(task) if life.code is None), None)

    def _living_process(self, task: str) -> Life:
        life = self.running(task)
        if life is None:
            raise RuntimeError(f"{task} does not run")
        return life

    def lines(self, task: str, pattern: str = "") -> list[Line]:
        """Returns the lines of a task so far, in all its lives, or the matching lines."""
        with self.changed:
            return [line for line in self._lines[task] if re.search(pattern, line.text)]

    def _last_lines(self, task: str) -> str:
        return "\n".join(
            ["; its last lines:", *(line.text for line in self._lines[task][-_SHOWN_LINES:])]
        )

    def expect(self, task: str, pattern: str, secs: float = TIMEOUT_SECS) -> re.Match[str]:
        """Waits for a line that matches, after the line that was found last.

            step = cluster.expect("worker:0", "step (.*)")[1]

        Raises:
            TimeoutError: No such line came within ``secs``. The message has the last lines.
            RuntimeError: The task has ended without such a line.
        """
        wanted, deadline = re.compile(pattern), concurrency.monotonic() + secs
        with self.changed:
            while True:
                lines = self._lines[task]
                while self._seen[task] < len(lines):
                    self._seen[task] += 1
                    if found := wanted.search(lines[self._seen[task] - 1].text):
                        return found
                if self.running(task) is None:
                    raise RuntimeError(
                        f"{task} has ended without a line like {pattern!r}{self._last_lines(task)}"
                    )
                left = deadline - concurrency.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"{task} wrote no line like {pattern!r} within {secs:g} s{self._last_lines(task)}"
                    )
                self.changed.wait(left)

    def wait(self, task: str, secs: float = TIMEOUT_SECS) -> int:
        """Waits for the end of the last process of a task.

        Returns:
            The exit code, negative for a signal.

        Raises:
            TimeoutError: The process did not end within ``secs``. The message has the last lines.
        """
        if not (lives := self.lives(task)):
            raise RuntimeError(f"{task} was never started")
        with self.changed:
            if not self.changed.wait_for(lambda: lives[-1].code is not None, secs):
                raise TimeoutError(f"{task} did not end within {secs:g} s{self._last_lines(task)}")
            assert lives[-1].code is not None
            return lives[-1].code


def thread_states(pid: int) -> set[str]:
    """Returns the states of the threads of a process, as letters of /proc."""
    states: set[str] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        for thread in psutil.Process(pid).threads():
            # The thread may end just now.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                stat = pathlib.Path(f"/proc/{pid}/task/{thread.id}/stat").read_text()
                # The name, in brackets, may hold anything; after its closing bracket comes the
                # state.
                states.add(stat.rpartition(")")[2].split()[0])
    return states
