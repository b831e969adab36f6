"""The launcher's event loop: signals, exits, output and time in; processes and lines out.

`harness.launch.__main__` runs the loop in the main thread, for two reasons. Signals arrive there,
and the kernel counts a guard's parent as dead when the starting thread ends. Nothing is polled: the
loop sleeps until a pipe, a signal or the next due time wakes it. `harness.launch.policy` makes all
decisions.
"""

import contextlib
import functools
import operator
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType

from harness.launch import guard, policy
from harness.launch.forks import ForkedGuard, ForkServer, can_fork
from harness.launch.gpus import describe_shares
from harness.launch.output import LineBuffer, LinePrinter
from harness.launch.policy import Event, Instruction, LaunchTask
from harness.launch.ports import listens
from harness.launch.tasks import (
    PER_TASK_VARIABLE,
    ClusterTopology,
    arguments,
    environment,
    program_files,
    start_guarded,
    watching,
)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_INTERRUPTS = 3
"""At this many stop signals the launcher leaves on the spot, even if its own output is stuck; the guards clean up."""
LAUNCHER_NAME = "launch"
_READ_BYTES = 1 << 16


class _TaskProcess:
    """A running task: its guard, and its output so far."""

    def __init__(
        self, guard: subprocess.Popen[bytes] | ForkedGuard, output: int, lines: LineBuffer
    ) -> None:
        os.set_blocking(output, False)
        self.guard = guard
        # Unbuffered: the selector sees the pipe, not a buffer of Python.
        self.output = open(output, "rb", buffering=0)
        self.lines = lines

    def read(self) -> tuple[list[str], bool]:
        """Returns the lines that are complete now, and True while more may follow."""
        # The pipe is unbuffered and does not block: None means that there is nothing yet.
        data: bytes | None = self.output.read(_READ_BYTES)
        if data is None:
            return [], True
        return self.lines.feed(data), bool(data)

    def read_rest(self) -> list[str]:
        """Returns all lines left in the pipe of an ended process, the unfinished line too."""
        lines: list[str] = []
        while data := self.output.read(_READ_BYTES):
            lines += self.lines.feed(data)
        return lines + self.lines.flush()


class ClusterRunner:
    """The event loop that runs the tasks of a cluster, or one task, from start to end."""

    def __init__(
        self,
        command: Sequence[str],
        topology: ClusterTopology,
        options: policy.LaunchOptions,
        tasks: Mapping[LaunchTask, int],
        held: Mapping[LaunchTask, socket.socket],
        *,
        environ: Mapping[str, str],
        shares: Mapping[LaunchTask, Mapping[str, str]],
        tasks_out: LinePrinter,
        messages: LinePrinter,
    ) -> None:
        """Keeps the arguments. Starts nothing.

        Args:
            command: Program and arguments, the same for every task.
            topology: Addresses of all tasks of the cluster.
            tasks: Tasks of this launcher, in the order of their start, each with its number on this
                host.
            options: Restarts and grace periods.
            held: Sockets that keep the tasks' ports free until the first start.
            environ: Environment of the tasks, beside what the launcher sets.
            shares: Variables of single tasks, which give them their GPUs.
            tasks_out: Printer of the tasks' lines.
            messages: Printer of the launcher's own lines, under the name LAUNCHER_NAME, and of the
                last lines of a task that failed for good.
        """
        self._command = command
        self._topology = topology
        self._options = options
        self._tasks = dict(tasks)
        self._held = dict(held)
        self._environ = environ
        self._shares = shares
        self.failure: policy.TaskFailure | None = None
        """After ``run``: the first task that failed for good."""
        self._tasks_out = tasks_out
        self._messages = messages
        self._reader_left = False
        self._processes: dict[LaunchTask, _TaskProcess] = {}
        self._lines: dict[LaunchTask, LineBuffer] = {}
        self._selector = selectors.DefaultSelector()
        self._forks: ForkServer | None = None

    def run(self) -> int:
        """Runs until every task is done. Returns the exit code.

        No task is left when the call returns or raises.

        Raises:
            OSError: The system cannot start one more process.
        """
        with self._selector, _wakeup_socket() as wake, contextlib.ExitStack() as at_end:
            # An error of the launcher itself leaves no task behind either.
            at_end.callback(self._end_tasks)
            self._selector.register(wake, selectors.EVENT_READ)
            if PER_TASK_VARIABLE not in self._environ:
                for line in watching(self._topology, self._command):
                    self._log_line(line)
            if self._shares:
                self._log_line(describe_shares(self._shares))
            self._forks = self._fork_server(wake)
            state, instructions = policy.begin(self._tasks, time.monotonic())
            self._follow_instructions(instructions)
            while state.stage is not policy.RunStage.FINISHED:
                self._selector_wait(policy.next_due(state))
                # Signals come before ends: a task that ends by Ctrl-C has not failed.
                for event in (*self._stop_events(wake), *self._end_events(), policy.ClockTick()):
                    state, instructions = policy.react(
                        state, event, time.monotonic(), self._options
                    )
                    self._follow_instructions(instructions)
            self.failure = state.failure
            return state.exit_code

    def _fork_server(self, wake: socket.socket) -> ForkServer | None:
        """Returns the server that forks the tasks, or None where a fork cannot run the command."""
        commands, environs = zip(*(self._program(task, 0) for task in self._tasks), strict=True)
        environ = dict(functools.reduce(operator.and_, (set(e.items()) for e in environs)))
        if not can_fork(commands[0], program_files(self._command), environ):
            return None
        longest = max(len(" ".join(command)) for command in commands)
        forks = ForkServer(commands[0], environ, longest)
        forks.wait_ready(wake)
        return forks

    def _selector_wait(self, due: float | None) -> None:
        """Sleeps until an event comes or time is due. Shows the lines that came meanwhile."""
        timeout = None if due is None else max(0.0, due - time.monotonic())
        for key, _ in self._selector.select(timeout):
            # The wake-up socket belongs to no task; `_stop_events` reads it.
            if key.data is not None:
                task: LaunchTask = key.data
                lines, more = self._processes[task].read()
                self._show_lines(task, lines)
                if not more:
                    self._selector.unregister(key.fileobj)

    def _stop_events(self, wake: socket.socket) -> list[Event]:
        """Returns the stop signals since the last call."""
        with contextlib.suppress(BlockingIOError):
            signums = wake.recv(_READ_BYTES)
            stops = [signum for signum in signums if signum in STOP_SIGNALS]
            # A task that starts listens at no port yet.
            starting = frozenset(
                task
                for task in self._processes
                if stops and not listens(self._topology.address(task))
            )
            return [policy.StopSignal(signum, starting) for signum in stops]
        return []

    def _end_events(self) -> Iterator[Event]:
        """Yields the ends of tasks since the last call, after showing all their output."""
        for task, process in list(self._processes.items()):
            returncode = process.guard.poll()
            if returncode is not None:
                # The output comes first: its last lines often say why the task has ended.
                self._show_lines(task, process.read_rest())
                self._forget_task(task)
                yield policy.TaskExited(task, returncode)

    def _show_lines(self, task: LaunchTask, lines: Sequence[str]) -> None:
        if self._reader_left:
            return
        before = self._tasks_out.failure
        try:
            self._tasks_out.write(str(task), lines)
        except BrokenPipeError:
            # SIGPIPE would end any other program here; this one ends in order, by the way that a
            # signal takes.
            self._reader_left = True
            self._log_line("nobody reads the output any more")
            signal.raise_signal(signal.SIGTERM)
        if self._tasks_out.failure and not before:
            self._log_line(
                f"the tasks' output cannot be written: {self._tasks_out.failure}; the tasks go on, "
                "their lines are lost until there is room"
            )

    def _log_line(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._messages.write(LAUNCHER_NAME, [text])

    def _follow_instructions(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case policy.StartTask(task, attempt):
                    self._start_task(task, attempt)
                case policy.SendSignal(task, signum):
                    # Several tasks may end at once; the policy hears of one after the other.
                    if task in self._processes:
                        kind = guard.KILL_SIGNAL if signum == signal.SIGKILL else signum
                        self._processes[task].guard.send_signal(kind)
                case policy.LogLine(text):
                    self._log_line(text)
                case policy.ShowTail(task):
                    if self._tasks_out.last == str(task) and self._tasks_out.shares_output_with(
                        self._messages
                    ):
                        # The lines are on the screen, with no line of another task below them.
                        continue
                    tail = self._lines[task].tail
                    self._log_line(
                        f"the last lines of {task}:" if tail else f"{task} wrote nothing"
                    )
                    with contextlib.suppress(BrokenPipeError):
                        self._messages.write(str(task), list(tail))

    def _start_task(self, task: LaunchTask, attempt: int) -> None:
        assert task not in self._processes, "a task has one process"
        if task in self._held:
            # The socket has kept the port free until now. It is closed just before the task binds
            # the port.
            self._held.pop(task).close()
        command, environ = self._program(task, attempt)
        reader, writer = os.pipe()
        try:
            forked = None if self._forks is None else self._forks.start(command, environ, writer)
            started = forked or start_guarded(command, environ, stdout=writer, stderr=writer)
        finally:
            os.close(writer)
        self._lines[task] = LineBuffer()
        process = self._processes[task] = _TaskProcess(started, reader, self._lines[task])
        self._selector.register(process.output, selectors.EVENT_READ, task)

    def _program(self, task: LaunchTask, attempt: int) -> tuple[list[str], dict[str, str]]:
        """Returns the command line and the environment of a task."""
        environ = {**self._environ, **self._shares.get(task, {})}
        return (
            arguments(self._command, self._topology, task),
            environment(environ, self._topology, task, attempt, self._tasks[task]),
        )

    def _forget_task(self, task: LaunchTask) -> None:
        process = self._processes.pop(task)
        # The output may have ended before the process, and is not registered then.
        with contextlib.suppress(KeyError):
            self._selector.unregister(process.output)
        process.output.close()

    def _end_tasks(self) -> None:
        """Ends the tasks that still run after an error of the launcher itself.

        After an orderly end there are none.
        """
        for holder in self._held.values():
            holder.close()
        for process in self._processes.values():
            process.guard.send_signal(guard.KILL_SIGNAL)
        guard.end_children()
        for task in list(self._processes):
            self._forget_task(task)


@contextlib.contextmanager
def _wakeup_socket() -> Iterator[socket.socket]:
    """Opens a socket that receives the number of every stop signal and SIGCHLD as one byte.

    Restores the handlers.
    """
    count = 0

    def count_stops(signum: int, frame: FrameType | None) -> None:
        nonlocal count
        count += signum in STOP_SIGNALS
        if count >= MAX_INTERRUPTS:
            os._exit(128 + signum)

    # Whoever started us with SIGHUP ignored (nohup) wants it ignored.
    wanted = [
        s
        for s in (*STOP_SIGNALS, signal.SIGCHLD)
        if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN
    ]
    receiver, sender = socket.socketpair()
    with receiver, sender:
        receiver.setblocking(False)
        sender.setblocking(False)
        old_descriptor = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        old_handlers = {signum: signal.signal(signum, count_stops) for signum in wanted}
        try:
            yield receiver
        finally:
            for signum, handler in old_handlers.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(old_descriptor)
