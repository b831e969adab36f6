"""A cluster of real processes on this machine, for tests that kill, freeze and cut tasks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import psutil

import runtime as rt
from harness.launch.policy import PS, WORKER
from harness.launch.ports import hold_ports
from harness.launch.tasks import Topology, arguments, environment
from harness.testing.links import How, Links
from harness.testing.plan import Fault, FaultPlan, Kind
from harness.testing.processes import Life, Line, Processes, Zygote

TIMEOUT_SECS = 60.0
"""How long waits for lines, steps and ends last by default."""
PRELOAD = (
    *(
        "harness.training.supervisor",
        "harness.checkpoints.saver",
        "harness.checkpoints.orbax",
        "harness.tensorboard.writer",
        "tensorstore",
    ),
    "scipy.linalg",
)
"""What training programs import; a task that is forked from a process that has it starts in a tenth of the time."""
_POLL_SECS = 0.02
_PROBE_SECS = 1.0
_NEED_A_PROCESS = (Kind.KILL, Kind.STOP, Kind.FREEZE)
"""Faults that wait for a task that is about to be started again."""


@dataclass(frozen=True)
class Injected:
    """A fault that was injected.

    Attributes:
        fault: The fault.
        at: ``time.monotonic()`` of the injection.
        skipped: Reason why the fault was not injected after all; empty when it was.
    """

    fault: Fault
    at: float
    skipped: str = ""


class LocalCluster:
    """A cluster of real processes, one per task, with the cluster flags of ``harness.launch``.

        with LocalCluster(["python", "train.py"], ps=2, workers=2) as cluster:
            cluster.run(FaultPlan(seed=1).kill("worker", 1, at_step=200).restart("worker", 1))
            assert cluster.wait("worker:0") == 0

    At the end of the block every process is ended.

    Args:
        command: Program and arguments; a bare ``python`` is this interpreter. The flags --ps_hosts, --worker_hosts,
            --job_name and --task_index are added.
        ps: Number of ps tasks.
        workers: Number of workers.
        env: Environment variables beside those of this process.
        links: True puts a network between the tasks that can be cut.
        preload: Modules that are imported once, for all tasks of all clusters of this process. The command must be a
            Python program. A task whose environment differs in what modules read on import (JAX's variables) imports
            them itself.
        start: True starts all tasks at once.
        echo: Function that is called with (task, line) for each line of a task.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        ps: int = 1,
        workers: int = 1,
        env: Mapping[str, str] | None = None,
        links: bool = False,
        preload: Sequence[str] = (),
        start: bool = True,
        echo: Callable[[str, str], object] | None = None,
    ) -> None:
        self._command = list(command)
        self._env = {**os.environ, **(env or {})}
        self._security = rt.Security.from_environ(self._env)
        held = hold_ports(ps + workers)
        hosts = [f"127.0.0.1:{holder.getsockname()[1]}" for holder in held]
        self._topology = Topology(tuple(hosts[:ps]), tuple(hosts[ps:]))
        self._ids = {f"{task.job}:{task.index}": task for task in self._topology.tasks()}
        self.addresses = dict(zip(self._ids, hosts, strict=True))
        """Address of each task."""
        self._held: dict[str, socket.socket] = dict(zip(self._ids, held, strict=True))
        self._links: Links | None = None
        self._processes = Processes(Zygote.lasting(preload, self._env), echo)
        try:
            if links:
                self._links = Links(list(self._ids), self._owner)
            if start:
                for task in self._ids:
                    self.start(task)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process and closes every port. Does nothing the second time."""
        self._processes.close()
        if self._links is not None:
            self._links.close()
            self._links = None
        while self._held:
            self._held.popitem()[1].close()

    # -- tasks -------------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, such as "ps:0", the ps tasks first."""
        return list(self._ids)

    def start(self, task: str, **env: str) -> Life:
        """Starts a task, the first time or again.

            cluster.start("worker:1", MODE="slow")

        Args:
            task: Name of the task, such as "worker:1".
            **env: Environment variables of this start.

        Raises:
            RuntimeError: The task runs already.
        """
        identity = self._ids[self._name(task)]
        attempt = len(self._processes.lives(task))
        environ = {**environment(self._env, self._topology, identity, attempt), **env}
        if self._links is not None:
            proxy = f"127.0.0.1:{self._links.ports[task]}"
            environ |= {"BELLWETHER_PROXY": proxy, "BELLWETHER_FAST_PATH": "0", "no_grpc_proxy": "", "no_proxy": ""}
        if task in self._held:
            self._held.pop(task).close()
        argv = arguments(self._command, self._topology, identity)
        if argv[0] in ("python", "python3"):
            argv[0] = sys.executable
        return self._processes.start(task, argv, environ)

    def kill(self, task: str) -> None:
        """Sends SIGKILL, and waits for the end of the task."""
        self._processes.signal(life := self._alive(task), signal.SIGKILL)
        self._processes.wait(life, TIMEOUT_SECS)

    def stop(self, task: str) -> None:
        """Sends SIGTERM. Does not wait."""
        self._processes.signal(self._alive(task), signal.SIGTERM)

    def freeze(self, task: str) -> None:
        """Stops a task by SIGSTOP until ``thaw``. Returns when no thread of the task runs."""
        self._processes.freeze(self._alive(task))

    def thaw(self, task: str) -> None:
        """Continues a task by SIGCONT. Returns when the task runs again, or has ended."""
        if (life := self._processes.running(self._name(task))) is not None:
            self._processes.thaw(life)

    def cut(self, one: str, other: str, *, reset: bool = False) -> None:
        """Cuts the network between two tasks until ``heal``; see ``harness.testing.links.How``."""
        self._network().cut(self._name(one), self._name(other), How.RESET if reset else How.DROP)

    def heal(self, one: str, other: str) -> None:
        """Ends a cut."""
        self._network().heal(self._name(one), self._name(other))

    # -- what they do ------------------------------------------------------------------------------------------

    def lives(self, task: str = "") -> list[Life]:
        """Returns the processes of a task, or of all tasks, in the order of their starts."""
        return self._processes.lives(task)

    def running(self, task: str) -> bool:
        """Returns True if a process of the task runs now."""
        return self._processes.running(self._name(task)) is not None

    def lines(self, task: str, pattern: str = "") -> list[Line]:
        """Returns the lines of a task in all its lives, or the matching lines."""
        return self._processes.lines(self._name(task), pattern)

    def expect(self, task: str, pattern: str, secs: float = TIMEOUT_SECS) -> re.Match[str]:
        """Waits for a line that matches, after the line that was found last.

            step = cluster.expect("worker:0", "step (.*)")[1]

        Raises:
            TimeoutError: No such line came within ``secs``.
            RuntimeError: The task has ended without such a line.
        """
        return self._processes.expect(self._name(task), pattern, secs)

    def wait(self, task: str, secs: float = TIMEOUT_SECS) -> int:
        """Waits for the end of the last process of a task.

        Returns:
            The exit code, negative for a signal.

        Raises:
            TimeoutError: The process did not end within ``secs``.
        """
        lives = self._processes.lives(self._name(task))
        if not lives:
            raise RuntimeError(f"{task} was never started")
        return self._processes.wait(lives[-1], secs)

    def step(self) -> int | None:
        """Returns the global step from its task; None when the task does not answer now."""
        holders = [task for task, identity in self._ids.items() if identity.job == PS] or list(self._ids)
        for task in holders:
            life = self._processes.running(task)
            if life is None or life.frozen:
                continue
            try:
                found = rt.probe(self.addresses[task], _PROBE_SECS, security=self._security).values.get("global_step")
            except rt.OpError:
                continue
            if found is not None:
                return int(found)
        return None

    def wait_step(self, step: int, secs: float = TIMEOUT_SECS) -> int:
        """Waits until the global step has reached a number.

        Returns:
            The global step then.

        Raises:
            TimeoutError: The step was not reached within ``secs``.
            RuntimeError: No worker runs any more.
        """
        deadline = time.monotonic() + secs
        while True:
            now = self.step()
            if now is not None and now >= step:
                return now
            if not any(self.running(task) for task, identity in self._ids.items() if identity.job == WORKER):
                raise RuntimeError(f"no worker runs any more, and the global step has not reached {step}")
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the global step has not reached {step} within {secs:g} s: it is {now}")
            self._pause(_POLL_SECS)

    # -- faults ------------------------------------------------------------------------------------------------

    def run(
        self,
        plan: FaultPlan,
        *,
        secs: float = 600.0,
        say: Callable[[str], object] = lambda text: print(text, flush=True),
    ) -> list[Injected]:
        """Injects the faults of a plan, one after the other.

        Waits until all faults that have an end have ended.

        Args:
            plan: Faults in their order. The seed is reported.
            secs: Seconds until the wait for a fault's step is given up.
            say: Function that is called with a line for each fault.

        Returns:
            The injected faults. A fault waits for a task that is about to be started again. A fault is skipped if its
            task does not run at all; a restart is skipped if the task runs.

        Raises:
            TimeoutError: The step of a fault did not come.
        """
        say(f"fault plan: seed {plan.seed}")
        began = last = time.monotonic()
        done: list[Injected] = []
        undo: list[tuple[float, Fault]] = []
        for fault in plan.faults:
            due = began + fault.at_secs if fault.at_secs is not None else last + fault.after_secs
            give_up = max(due, time.monotonic()) + secs
            while not self._is_due(fault, due):
                if time.monotonic() >= give_up:
                    raise TimeoutError(f"{fault}: not reached within {secs:g} s")
                self._go_on(undo)
            while fault.kind in _NEED_A_PROCESS and not self.running(fault.task) and _comes_back(fault.task, undo):
                self._go_on(undo)
            last = time.monotonic()
            skipped = self._inject(fault)
            say(f"fault {len(done) + 1} at {last - began:.1f} s: {fault}{skipped and ' - skipped: ' + skipped}")
            done.append(Injected(fault, last, skipped))
            if fault.secs is not None and not skipped:
                undo.append((last + fault.secs, fault))
        while undo:
            self._go_on(undo)
        return done

    def _is_due(self, fault: Fault, due: float) -> bool:
        if fault.at_step is None:
            return time.monotonic() >= due
        step = self.step()
        return step is not None and step >= fault.at_step

    def _go_on(self, undo: list[tuple[float, Fault]]) -> None:
        """Waits a moment, and ends the faults whose time is over."""
        self._pause(_POLL_SECS)
        self._undo(undo, time.monotonic())

    def _pause(self, secs: float) -> None:
        with self._processes.changed:
            self._processes.changed.wait(secs)

    def _inject(self, fault: Fault) -> str:
        """Injects a fault. Returns the reason of a failure, or an empty text."""
        runs = self.running(fault.task)
        if fault.kind is Kind.RESTART and runs:
            return "it runs"
        if fault.kind in _NEED_A_PROCESS and not runs:
            return "it does not run"
        actions: dict[Kind, Callable[[str], object]] = {
            Kind.RESTART: self.start,
            Kind.KILL: self.kill,
            Kind.STOP: self.stop,
            Kind.FREEZE: self.freeze,
            Kind.THAW: self.thaw,
        }
        if fault.kind is Kind.CUT:
            self.cut(fault.task, fault.peer, reset=fault.reset)
        elif fault.kind is Kind.HEAL:
            self.heal(fault.task, fault.peer)
        else:
            actions[fault.kind](fault.task)
        return ""

    def _undo(self, undo: list[tuple[float, Fault]], now: float) -> None:
        for at, fault in list(undo):
            if at > now:
                continue
            if fault.kind is Kind.CUT:
                self.heal(fault.task, fault.peer)
            elif fault.kind is Kind.FREEZE:
                self.thaw(fault.task)
            elif not self.running(fault.task):
                self.start(fault.task)
            elif fault.kind is Kind.STOP and self._alive(fault.task).started_at < at - (fault.secs or 0.0):
                # The process of before the SIGTERM still runs.
                continue
            undo.remove((at, fault))

    # -- names -------------------------------------------------------------------------------------------------

    def _name(self, task: str) -> str:
        if task not in self._ids:
            raise ValueError(f"no task {task!r} in this cluster: {', '.join(self._ids)}")
        return task

    def _alive(self, task: str) -> Life:
        life = self._processes.running(self._name(task))
        if life is None:
            raise RuntimeError(f"{task} does not run")
        return life

    def _network(self) -> Links:
        if self._links is None:
            raise RuntimeError("this cluster has no network that can be cut: make it with links=True")
        return self._links

    def _owner(self, port: int) -> str:
        """Returns the task that listens on a port.

        The ports of the control plane are known. The tensor ports are looked up.
        """
        for task, address in self.addresses.items():
            if address.endswith(f":{port}"):
                return task
        for life in self._processes.lives():
            with contextlib.suppress(psutil.Error):
                if (
                    life.code is None
                    and life.pid
                    and any(
                        held.status == psutil.CONN_LISTEN and held.laddr.port == port
                        for held in psutil.Process(life.pid).net_connections("tcp")
                    )
                ):
                    return life.task
        return ""


def _comes_back(task: str, undo: Sequence[tuple[float, Fault]]) -> bool:
    """Returns True if a task is about to be started again."""
    return any(fault.task == task and fault.kind in (Kind.KILL, Kind.STOP) for _, fault in undo)
