"""A cluster of real processes on this machine, for tests that kill, freeze and cut tasks."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil

import runtime as rt
from harness.launch.policy import PS, WORKER
from harness.launch.ports import hold_ports
from harness.launch.tasks import ClusterTopology, arguments, environment
from runtime import concurrency
from tests.faults.links import Links
from tests.faults.plan import Fault, FaultPlan, Kind
from tests.faults.processes import TIMEOUT_SECS, Life, TaskProcesses, ZygoteProcess

PRELOAD = (
    "harness.training.run.supervisor",
    "harness.checkpoints.saver",
    "harness.checkpoints.orbax",
    "harness.tensorboard.writer",
    "tensorstore",
    "scipy.linalg",
)
"""What training programs import; a task that is forked from a process that has it starts in a tenth of the time."""
_POLL_SECS = 0.02
_PROBE_SECS = 1.0


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


class LocalCluster(TaskProcesses):
    """A cluster of real processes, one per task, with the cluster flags of ``harness.launch``.

        with LocalCluster(["python", "train.py"], ps=2, workers=2) as cluster:
            cluster.run(FaultPlan(seed=1).kill("worker", 1, at_step=200).restart("worker", 1))
            assert cluster.wait("worker:0") == 0

    At the end of the block every process is ended.

    Args:
        command: Program and arguments; a bare ``python`` is this interpreter. The flags --ps_hosts,
            --worker_hosts, --job_name and --task_index are added.
        ps: Number of ps tasks.
        workers: Number of workers.
        env: Environment variables beside those of this process.
        links: True puts a network between the tasks that can be cut.
        preload: Modules that are imported once, for all tasks of all clusters of this process. The
            command must be a Python program. A task whose environment differs in what modules read
            on import (JAX's variables) imports them itself.
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
        # Ports stay taken until their tasks start.
        held = hold_ports(ps + workers)
        hosts = [f"127.0.0.1:{holder.getsockname()[1]}" for holder in held]
        self._topology = ClusterTopology(tuple(hosts[:ps]), tuple(hosts[ps:]))
        self._ids = {f"{task.job}:{task.index}": task for task in self._topology.tasks()}
        self.addresses = dict(zip(self._ids, hosts, strict=True))
        """Address of each task."""
        self._held: dict[str, socket.socket] = dict(zip(self._ids, held, strict=True))
        self._links: Links | None = None
        super().__init__(ZygoteProcess.lasting(preload, self._env), self._ids, echo)
        try:
            if links:
                self._links = Links(list(self._ids), self._owner_of_port)
            if start:
                for task in self._ids:
                    self.start(task)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends every process and closes every port. Does nothing the second time."""
        super().close()
        if self._links is not None:
            self._links.close()
            self._links = None
        while self._held:
            self._held.popitem()[1].close()

    # -- tasks -------------------------------------------------------------------------------------

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
        attempt = len(self.lives(task))
        identity = self._ids[task]
        environ = {**environment(self._env, self._topology, identity, attempt), **env}
        if self._links is not None:
            proxy = f"127.0.0.1:{self._links.ports[task]}"
            # Sockets of one host would pass the proxy by.
            environ |= {
                "BELLWETHER_PROXY": proxy,
                "BELLWETHER_FAST_PATH": "0",
                "no_grpc_proxy": "",
                "no_proxy": "",
            }
        if task in self._held:
            self._held.pop(task).close()
        return self.spawn(task, arguments(self._command, self._topology, identity), environ)

    def cut(self, one: str, other: str, *, reset: bool = False) -> None:
        """Cuts the network between two tasks until ``heal``; ``reset`` resets connections."""
        self._network().cut(self._checked_name(one), self._checked_name(other), reset)

    def heal(self, one: str, other: str) -> None:
        """Ends a cut."""
        self._network().heal(self._checked_name(one), self._checked_name(other))

    # -- what they do ------------------------------------------------------------------------------

    def step(self) -> int | None:
        """Returns the global step from its task; None when the task does not answer now."""
        # Without a ps the variables lie on the workers.
        holders = [task for task, identity in self._ids.items() if identity.job == PS] or list(
            self._ids
        )
        for task in holders:
            life = self.running(task)
            if life is None or life.frozen:
                continue
            try:
                found = rt.probe(
                    self.addresses[task], _PROBE_SECS, security=self._security
                ).values.get("global_step")
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
        deadline = concurrency.monotonic() + secs
        while True:
            now = self.step()
            if now is not None and now >= step:
                return now
            if not any(
                self.running(task) for task, identity in self._ids.items() if identity.job == WORKER
            ):
                raise RuntimeError(
                    f"no worker runs any more, and the global step has not reached {step}"
                )
            if concurrency.monotonic() >= deadline:
                raise TimeoutError(
                    f"the global step has not reached {step} within {secs:g} s: it is {now}"
                )
            self._await_change()

    # -- faults ------------------------------------------------------------------------------------

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
            The injected faults. A fault waits for a task that is about to be started again. A fault
            is skipped if its task does not run at all.

        Raises:
            TimeoutError: The step of a fault did not come.
        """
        say(f"fault plan: seed {plan.seed}")
        began = last = concurrency.monotonic()
        done: list[Injected] = []
        undo: list[tuple[float, Fault]] = []
        for fault in plan.faults:
            due = began + fault.at_secs if fault.at_secs is not None else last + fault.after_secs
            give_up = max(due, concurrency.monotonic()) + secs
            while not self._is_due(fault, due):
                if concurrency.monotonic() >= give_up:
                    raise TimeoutError(f"{fault}: not reached within {secs:g} s")
                self._go_on(undo)
            # A fault is meant for a living task, so a task that is about to come back is awaited.
            while (
                fault.kind is not Kind.CUT
                and not self.running(fault.task)
                and _comes_back(fault.task, undo)
            ):
                self._go_on(undo)
            last = concurrency.monotonic()
            skipped = (
                "" if fault.kind is Kind.CUT or self.running(fault.task) else "it does not run"
            )
            if not skipped:
                self._inject_fault(fault)
            say(
                f"fault {len(done) + 1} at {last - began:.1f} s: "
                f"{fault}{skipped and ' - skipped: ' + skipped}"
            )
            done.append(Injected(fault, last, skipped))
            if fault.secs is not None and not skipped:
                undo.append((last + fault.secs, fault))
        while undo:
            self._go_on(undo)
        return done

    def _is_due(self, fault: Fault, due: float) -> bool:
        if fault.at_step is None:
            return concurrency.monotonic() >= due
        step = self.step()
        return step is not None and step >= fault.at_step

    def _await_change(self) -> None:
        with self.changed:
            self.changed.wait(_POLL_SECS)

    def _inject_fault(self, fault: Fault) -> None:
        if fault.kind is Kind.CUT:
            self.cut(fault.task, fault.peer, reset=fault.reset)
        else:
            {Kind.KILL: self.kill, Kind.STOP: self.stop, Kind.FREEZE: self.freeze}[fault.kind](
                fault.task
            )

    def _go_on(self, undo: list[tuple[float, Fault]]) -> None:
        """Waits a moment, and ends the faults whose time is over."""
        self._await_change()
        for at, fault in list(undo):
            if at > concurrency.monotonic():
                continue
            if fault.kind is Kind.CUT:
                self.heal(fault.task, fault.peer)
            elif fault.kind is Kind.FREEZE:
                self.thaw(fault.task)
            elif not self.running(fault.task):
                self.start(fault.task)
            elif fault.kind is Kind.STOP and self._living_process(fault.task).started_at < at - (
                fault.secs or 0.0
            ):
                # The process of before the SIGTERM still runs.
                continue
            undo.remove((at, fault))

    # -- names -------------------------------------------------------------------------------------

    def _checked_name(self, task: str) -> str:
        self.lives(task)
        return task

    def _network(self) -> Links:
        if self._links is None:
            raise RuntimeError(
                "this cluster has no network that can be cut: make it with links=True"
            )
        return self._links

    def _owner_of_port(self, port: int) -> str:
        """Returns the task that listens on a port.

        The ports of the control plane are known. The tensor ports are looked up.
        """
        for task, address in self.addresses.items():
            if address.endswith(f":{port}"):
                return task
        for life in self.lives():
            with contextlib.suppress(psutil.Error):
                held = psutil.Process(life.pid).net_connections("tcp") if life.code is None else []
                if any(
                    each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in held
                ):
                    return life.task
        return ""


def _comes_back(task: str, undo: Sequence[tuple[float, Fault]]) -> bool:
    """Returns True if a task is about to be started again."""
    return any(fault.task == task and fault.kind in (Kind.KILL, Kind.STOP) for _, fault in undo)
