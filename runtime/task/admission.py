"""Admission control: workers that crowd the cores of a host with their ps train a few at a time.

Many workers on few cores evict each other's data from the cores' caches: eight workers on two cores take 20 to 40 %
more processor time for a step than four. So a ps lets a few of its host's workers at a time begin steps: it gives each
of them a permit for a tenth of a second. The others wait in their read, which gives them the values of the moment of
their admission. Fewer steps overlap, so gradients are fresher, too.

No worker waits needlessly: a permit ends early when its holder has not called for a while (it reads data, it computes
for long, it is dead), nobody waits longer than half a second, and while the cores have time to spare nobody waits at
all. Steps that may wait for other workers (synchronous training, queues) need no admission, nor do steps that read from
several ps, which would each admit other workers first.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
from absl import logging

from runtime.plan.plan import Plan, StageCall

VARIABLE = "BELLWETHER_TURNS"
"""Environment variable of a ps: 0 admits every step at once, where ``Server(admission=...)`` says nothing."""

AT_ONCE = 2
"""Permits for each core: while one worker waits for the ps, another has the core."""
WINDOW_SECS = 0.1
"""The cores are measured for so long to tell whether they are crowded."""
SPARE_SECS = 1.0
"""Nobody waits for so long after a measurement that found time to spare."""
SPARE = 0.2
"""The cores are crowded when less than this part of their time is idle."""


@dataclass(frozen=True)
class AdmissionLimits:
    """Times of an admission queue, in seconds.

    Attributes:
        permit: how long a session may begin steps; long enough that filling the caches costs little beside it.
        quiet: a session that is silent for so long does not need a core all the time, and loses its permit.
        longest: the longest that a session waits.
    """

    permit: float = 0.1
    quiet: float = 0.015
    longest: float = 0.5


def is_subject_to_admission(plan: Plan, call: StageCall) -> bool:
    """Whether a stage call is the read that begins a training step, and may wait for admission.

    Args:
        plan: of the step.
        call: one of its stages, on a task of the worker's host.
    """
    calls = plan.stages
    elsewhere = {c.stage.device.task_name for c in calls if c.stage.variables}
    waits = any(c.stage.host for c in calls)
    return call.only_reads and plan.is_training and not waits and elsewhere == {call.stage.device.task_name}


@dataclass(eq=False)
class Ticket:
    """A step that waits for admission.

    Attributes:
        session: whose step.
        since: when it came.
        admitted: whether it may begin.
        changed: set when it was admitted, or has become the first of those who wait.
    """

    session: int
    since: float
    admitted: bool = False
    changed: threading.Event = field(default_factory=threading.Event)


class AdmissionQueue:
    """The sessions that may begin steps, and the queue of those that wait. Not thread safe; callers tell it the time.

    Args:
        at_once: how many sessions may begin steps at the same time.
        limits: its times.
    """

    def __init__(self, at_once: int, limits: AdmissionLimits) -> None:
        self._at_once = at_once
        self._limits = limits
        self._permits: dict[int, list[float]] = {}  # by session: since when it has one, when it was last heard of
        self._waiting: deque[Ticket] = deque()

    def request(self, session: int, now: float) -> Ticket | None:
        """A session wants to begin a step: None when it may, else its ticket, which ``admit`` admits."""
        permit = self._permits.get(session)
        if permit is not None:
            permit[1] = now
            if now < permit[0] + self._limits.permit:
                return None
            del self._permits[session]
        if not self._waiting and self._has_room(now):
            self._permits[session] = [now, now]
            return None
        ticket = Ticket(session, now)
        self._waiting.append(ticket)
        return ticket

    def heard_of(self, session: int, now: float) -> None:
        """A session was answered: its holder is not silent."""
        permit = self._permits.get(session)
        if permit is not None:
            permit[1] = now

    def forget(self, session: int) -> None:
        """A session has ended: so has its permit."""
        self._permits.pop(session, None)

    def is_first(self, ticket: Ticket) -> bool:
        """Whether this ticket is the first in the queue."""
        return bool(self._waiting) and self._waiting[0] is ticket

    def admit(self, now: float, everybody: bool = False) -> float:
        """Admits sessions as long as there are permits, and those that have waited the longest time allowed.

        Args:
            now: the time.
            everybody: admits all who wait.

        Returns:
            When to look again if nothing happens until then.
        """
        waiting, limits = self._waiting, self._limits
        while waiting and (everybody or self._has_room(now) or now >= waiting[0].since + limits.longest):
            ticket = waiting.popleft()
            self._permits[ticket.session] = [now, now]
            ticket.admitted = True
            ticket.changed.set()
            if waiting:
                waiting[0].changed.set()
        if not waiting:
            return now + limits.longest
        heard = min((heard for _, heard in self._permits.values()), default=now)
        return min(waiting[0].since + limits.longest, heard + limits.quiet)

    def _has_room(self, now: float) -> bool:
        if len(self._permits) >= self._at_once:
            for session in [s for s, (_, heard) in self._permits.items() if now >= heard + self._limits.quiet]:
                del self._permits[session]
        return len(self._permits) < self._at_once


def core_seconds() -> tuple[float, float]:
    """Seconds since the host started that its cores were idle, and all their seconds."""
    times = psutil.cpu_times()
    idle = float(times.idle + getattr(times, "iowait", 0.0))
    busy = times.user + times.nice + times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
    return idle, idle + float(busy + getattr(times, "steal", 0.0))


class CpuPressure:
    """Whether the cores are crowded. They are measured only when it is called.

    Args:
        read: gives what ``core_seconds`` does.
    """

    def __init__(self, read: Callable[[], tuple[float, float]] = core_seconds) -> None:
        self._read = read
        self._at = -SPARE_SECS
        self._seen = (0.0, 0.0)
        self._overloaded: bool | None = None  # not known

    def __call__(self, now: float) -> bool:
        """Whether they were in the last window; False while that is not known."""
        age = now - self._at
        if age < (SPARE_SECS if self._overloaded is False else WINDOW_SECS):
            return bool(self._overloaded)
        before, self._seen, self._at = self._seen, self._read(), now
        idle, total = (after - earlier for after, earlier in zip(self._seen, before, strict=True))
        self._overloaded = None if age >= SPARE_SECS else idle < SPARE * total
        return bool(self._overloaded)


class AdmissionControl:
    """Admits the steps of the sessions that train on one ps's host. Thread safe.

    Args:
        at_once: how many sessions may begin steps at the same time; `AT_ONCE` for each core by default.
        overloaded: whether the cores are crowded at a given time; while they are not, nobody waits.
        limits: the times.

    Attributes:
        enabled: whether steps ask for admission; what the environment says at first.
    """

    def __init__(
        self, at_once: int = 0, overloaded: Callable[[float], bool] | None = None, limits: AdmissionLimits | None = None
    ) -> None:
        self._at_once = at_once or AT_ONCE * len(os.sched_getaffinity(0))
        self._queue = AdmissionQueue(self._at_once, limits or AdmissionLimits())
        self._overloaded = overloaded or CpuPressure()
        self._lock = threading.Lock()
        self._logged = False
        self.enabled = os.environ.get(VARIABLE, "1") != "0"

    def begin(self, session: int) -> None:
        """Before the read of a step: waits until the session is admitted."""
        now = time.monotonic()
        with self._lock:
            ticket = self._queue.request(session, now)
        while ticket is not None:
            with self._lock:
                now = time.monotonic()
                ticket.changed.clear()
                overloaded = self._overloaded(now)
                again = self._queue.admit(now, everybody=not overloaded)
                if ticket.admitted:
                    return
                first = self._queue.is_first(ticket)
                log, self._logged = not self._logged, True
            if log:
                logging.info(
                    "More than %d workers train on this host's cores: a few at a time begin steps "
                    "(Server(admission=False) or %s=0: all at once)",
                    *(self._at_once, VARIABLE),
                )
            ticket.changed.wait(again - now if first else None)

    def heard_of(self, session: int) -> None:
        """After an answer to a session."""
        self._queue.heard_of(session, time.monotonic())

    def forget(self, session: int) -> None:
        """A session has ended: another one is admitted."""
        with self._lock:
            self._queue.forget(session)
            self._queue.admit(time.monotonic())
