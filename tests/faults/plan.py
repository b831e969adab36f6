"""Fault plans: what is to go wrong, when, and for how long - as values that can be printed and repeated."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

from runtime import concurrency


class Kind(enum.Enum):
    """The kinds of faults."""

    KILL = "kill"
    """SIGKILL, as a power cut."""
    STOP = "stop"
    """SIGTERM, as a scheduler that takes a machine back."""
    FREEZE = "freeze"
    """SIGSTOP: alive, connected and silent."""
    CUT = "cut"
    """The network between two tasks."""


_SHARES = {Kind.KILL: 0.7, Kind.FREEZE: 0.15, Kind.CUT: 0.15}
"""The kinds of a random plan, and the share of each."""
_RESTART_SECS = (0.0, 1.0)
"""The least and the most seconds until a killed task is started again."""
_LASTING_SECS = (0.5, 4.0)
"""The least and the most seconds of a freeze or a cut."""


@dataclass(frozen=True)
class Fault:
    """A fault of a plan.

    Attributes:
        kind: Kind of the fault.
        task: Name of the task, such as "worker:1".
        peer: Other end of a cut.
        at_step: Global step at which the fault comes; None for a fault that waits for no step.
        at_secs: Seconds after the begin of the plan; None for a fault that waits for no time.
        after_secs: Seconds after the fault before it in the plan, where neither of those is given.
        secs: Seconds of a freeze or a cut, or until a killed task is started again; None for no
            end.
        reset: True if a cut resets connections instead of letting nothing through.
    """

    kind: Kind
    task: str
    peer: str = ""
    at_step: int | None = None
    at_secs: float | None = None
    after_secs: float = 0.0
    secs: float | None = None
    reset: bool = False

    def __post_init__(self) -> None:
        if self.at_step is not None and self.at_secs is not None:
            raise ValueError(f"{self}: give at_step or at_secs, not both")
        for name in ("at_step", "at_secs", "after_secs", "secs"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(
                    f"{self.kind.value} {self.task}: {name}={getattr(self, name)} is below 0"
                )

    def __str__(self) -> str:
        when = ""
        if self.at_step is not None:
            when = f" at step {self.at_step}"
        elif self.at_secs is not None:
            when = f" at {self.at_secs:g} s"
        elif self.after_secs:
            when = f" {self.after_secs:g} s later"
        between = f" from {self.peer}" if self.peer else ""
        how = " (reset)" if self.reset else ""
        again = ", again after" if self.kind in (Kind.KILL, Kind.STOP) else " for"
        long = "" if self.secs is None else f"{again} {self.secs:g} s"
        return f"{self.kind.value} {self.task}{between}{how}{when}{long}"


class FaultTime(TypedDict, total=False):
    """The time of a fault, as ``Fault`` explains it.

    By default a fault comes right after the one before it has begun.
    """

    at_step: int | None
    at_secs: float | None
    after_secs: float


@dataclass(frozen=True)
class FaultPlan:
    """Faults in their order. Every method returns a new plan with one fault more.

        FaultPlan(seed=7).kill("worker", 1, at_step=200, restart_secs=1).freeze("ps", 0, secs=5)
        FaultPlan().cut("worker:0", "ps:1", secs=9).kill("ps", 0, after_secs=2, restart_secs=0)

    Attributes:
        seed: Seed of random plans; a new one by default.
        faults: The faults.
    """

    seed: int | None = None
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        # A plan without a seed can be repeated, too: the seed is printed.
        if self.seed is None:
            object.__setattr__(self, "seed", concurrency.random_id(32))

    def kill(
        self, job: str, index: int, *, restart_secs: float | None = None, **when: Unpack[FaultTime]
    ) -> FaultPlan:
        """Adds a SIGKILL to a task, which is started again after ``restart_secs`` if that is given."""
        return self.add(Fault(Kind.KILL, f"{job}:{index}", secs=restart_secs, **when))

    def stop(
        self, job: str, index: int, *, restart_secs: float | None = None, **when: Unpack[FaultTime]
    ) -> FaultPlan:
        """Adds a SIGTERM to a task, which is started again after ``restart_secs`` if that is given."""
        return self.add(Fault(Kind.STOP, f"{job}:{index}", secs=restart_secs, **when))

    def freeze(
        self, job: str, index: int, *, secs: float | None = None, **when: Unpack[FaultTime]
    ) -> FaultPlan:
        """Adds a SIGSTOP to a task, for ``secs`` seconds or until ``LocalCluster.thaw``."""
        return self.add(Fault(Kind.FREEZE, f"{job}:{index}", secs=secs, **when))

    def cut(
        self,
        one: str,
        other: str,
        *,
        secs: float | None = None,
        reset: bool = False,
        **when: Unpack[FaultTime],
    ) -> FaultPlan:
        """Adds a cut between two tasks, for ``secs`` seconds or until ``LocalCluster.heal``.

        plan = plan.cut("worker:0", "ps:1", secs=2)
        """
        return self.add(Fault(Kind.CUT, one, other, secs=secs, reset=reset, **when))

    def add(self, fault: Fault) -> FaultPlan:
        """Returns the plan with one fault more."""
        return replace(self, faults=(*self.faults, fault))

    @classmethod
    def random(
        cls,
        tasks: Sequence[str],
        count: int,
        over_secs: float,
        *,
        seed: int | None = None,
    ) -> FaultPlan:
        """Returns a plan of random faults, spread evenly over a time.

            plan = FaultPlan.random(["ps:0", "worker:0"], 10, 60.0, seed=7)

        Each task is hit about as often as any other.

        Args:
            tasks: Names of the tasks.
            count: Number of faults.
            over_secs: Seconds from the first fault to the last.
            seed: Seed; a new one by default.
        """
        plan = cls(seed)
        chance = concurrency.Random(plan.seed)
        victims: list[str] = []
        for number in range(count):
            # Every task is hit once before one is hit again.
            if not victims:
                victims = chance.sample(list(tasks), len(tasks))
            task = victims.pop()
            at = (number + chance.random() * 0.5) * over_secs / max(count, 1)
            kind = chance.choices(list(_SHARES), list(_SHARES.values()))[0]
            lasting = round(chance.uniform(*_LASTING_SECS), 2)
            fault = Fault(kind, task, at_secs=round(at, 2), secs=lasting)
            # Tasks of one job need no link between them.
            others = [t for t in tasks if t.partition(":")[0] != task.partition(":")[0]]
            if kind is Kind.CUT and others:
                reset = chance.random() < 0.5
                fault = replace(fault, peer=chance.choice(others), reset=reset)
            elif kind is not Kind.FREEZE:
                fault = replace(
                    fault, kind=Kind.KILL, secs=round(chance.uniform(*_RESTART_SECS), 2)
                )
            plan = plan.add(fault)
        return plan

    def __str__(self) -> str:
        return f"seed {self.seed}: " + ("; ".join(map(str, self.faults)) or "no faults")
