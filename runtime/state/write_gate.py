"""The write gate of a task: writing stages wait while all tasks take the references of a snapshot.

Wanted: a snapshot of all tasks with each training step wholly in or wholly out, while training
continues.

Two simpler ways do not work. If each task takes references at once, a step that writes on two tasks
may be in on the first task and out on the second. If every task just pauses, the same step may have
written on the first task before the pause, and wait at the gate of the second.

The solution has three phases. Every task pauses, and reports the writes of recent steps. The chief
compares the reports: steps that have written on some tasks only are let through until each has all
its writes. Then all tasks take their references, which takes microseconds, and open.

A pause belongs to one snapshot, and has the number of the snapshot. The pause ends when the
snapshot ends, when another snapshot begins, or when its time is up and a stage comes. If the pause
of a snapshot still holds on every task, no task has written since. Otherwise the snapshot has
failed, and another attempt may succeed.

The limit of the solution: a worker that dies half-way through a step leaves a step that never gets
all its writes. Such a step counts as ended after ``times.RECENT_SECS``.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from runtime import concurrency
from runtime.errors import SnapshotError
from runtime.state import times

StepKey = tuple[int, int]
"""(session, step)."""

STEPS_PER_SESSION = 32
"""Most steps of a session that the gate remembers."""
STEPS_UNDER_WAY = 16
"""Newest steps of a session that may be half done: fewer than the gate remembers, so that no such step is lost."""
SESSIONS = 4096
"""Most sessions that the gate remembers; a session that wrote nothing for ``times.REMEMBER_SECS`` is forgotten earlier."""
NO_SNAPSHOT = "no consistent snapshot"
"""The first words of the error of a snapshot that is not of one instant; another attempt may succeed."""


@dataclass
class StepWrites:
    """The writes of one step on this task so far.

    Attributes:
        done: writing stages that have run here.
        expected: by task, how many writing stages the whole step has.
        at: ``time.monotonic()`` of the last write.
    """

    expected: Mapping[str, int]
    done: int = 0
    at: float = 0.0


class WriteGate:
    """The gate of a task: writing stages enter and leave, and wait while a snapshot pauses the gate. Thread safe."""

    def __init__(self, task: str = "") -> None:
        self._task = task
        self._changed = concurrency.Condition()
        # The number of the snapshot that pauses the gate; 0 while the gate is open.
        self._snapshot = 0
        # The end of the pause, so that a coordinator that dies does not stop training.
        self._open_at = 0.0
        self._allowed: Collection[StepKey] = ()
        self._running = 0
        self._entered = 0
        self._sessions: OrderedDict[int, OrderedDict[int, StepWrites]] = OrderedDict()
        """The sessions, and the steps of each, in the order of their last writes; none is empty."""

    def enter(self, key: StepKey) -> None:
        """Waits while the gate is paused, and notes that a writing stage runs."""
        with self._changed:
            # A coordinator that dies opens no gate, so each stage looks at the end of the pause
            # itself.
            while self._snapshot and key not in self._allowed:
                left = self._open_at - concurrency.monotonic()
                if left <= 0:
                    self._open_gate()
                else:
                    self._changed.wait(left)
            self._running += 1
            self._entered += 1

    @property
    def entered(self) -> int:
        """Writing stages that have passed so far; while the number grows, training continues."""
        return self._entered

    def leave(self, key: StepKey, expected: Mapping[str, int] | None) -> None:
        """Notes that a writing stage has run.

        Args:
            key: session and step.
            expected: by task, the writing stages of the whole step; None for a step with one stage,
                or a failed stage.
        """
        with self._changed:
            self._running -= 1
            # A step with a single stage cannot be half done.
            if expected:
                self._record_write(key, expected)
            # Notifications cost time in every step, and only a pause has calls that wait.
            if self._snapshot:
                self._changed.notify_all()

    @contextlib.contextmanager
    def passing(self, key: StepKey, expected: Mapping[str, int] | None) -> Iterator[None]:
        """Enters, and leaves behind the block; arguments as of ``leave``."""
        self.enter(key)
        has_run = False
        try:
            yield
            has_run = True
        finally:
            self.leave(key, expected if has_run else None)

    def _record_write(self, key: StepKey, expected: Mapping[str, int]) -> None:
        session, step = key
        steps = self._sessions.setdefault(session, OrderedDict())
        # The oldest session stands first, so that the old ones are found without a search.
        self._sessions.move_to_end(session)
        writes = steps.setdefault(step, StepWrites(expected))
        steps.move_to_end(step)
        writes.done += 1
        writes.at = concurrency.monotonic()
        # A session sends its steps in order, so an older step has ended.
        if len(steps) > STEPS_PER_SESSION:
            steps.popitem(last=False)
        # A session is forgotten by its age and not at its end: another task may still report its
        # last steps, which would look half done then.
        while len(self._sessions) > SESSIONS or writes.at - self._oldest_at() > times.REMEMBER_SECS:
            self._sessions.popitem(last=False)

    def _oldest_at(self) -> float:
        """Returns when the session that has been silent for longest wrote last."""
        steps = next(iter(self._sessions.values()))
        return next(reversed(steps.values())).at

    def pause(self, snapshot: int, secs: float, timeout: float) -> None:
        """Holds new writing stages for at most ``secs`` and waits until those under way have ended.

        Args:
            snapshot: number of the snapshot, not 0. The pause of the snapshot before ends.
            secs: most seconds of the pause.
            timeout: how long stages that are under way may take, seconds.

        Raises:
            SnapshotError: The stages did not end in time, or another snapshot has begun. The pause
                has ended.
        """
        with self._changed:
            self._snapshot, self._open_at, self._allowed = (
                snapshot,
                concurrency.monotonic() + secs,
                (),
            )
            # The snapshot before learns that its pause has ended.
            self._changed.notify_all()
            if not self._changed.wait_for(
                lambda: self._snapshot != snapshot or not self._running, timeout
            ):
                self._open_gate()
                raise SnapshotError(
                    f"{NO_SNAPSHOT}: {self._running} writing stages still run after {timeout:.1f} "
                    "s",
                    task=self._task,
                )
            self._check_holds(snapshot)

    def let_through(
        self, snapshot: int, steps: Mapping[StepKey, int], timeout: float
    ) -> list[StepKey]:
        """Lets some steps continue during a pause until each has ``steps[key]`` writes here.

        Args:
            snapshot: number of the snapshot.
            steps: writes on this task, by step.
            timeout: most seconds to wait for these writes.

        Returns:
            The steps without these writes in time: their worker is gone.

        Raises:
            SnapshotError: The pause has ended meanwhile.
        """

        def missing() -> list[StepKey]:
            return [k for k, n in steps.items() if self._count_done(k) < n]

        with self._changed:
            self._check_holds(snapshot)
            # These steps have written on other tasks, and wait at this gate.
            self._allowed = set(steps)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._snapshot != snapshot or (not missing() and not self._running), timeout
            )
            self._check_holds(snapshot)
            self._allowed = ()
            return missing()

    def _check_holds(self, snapshot: int) -> None:
        if self._snapshot != snapshot:
            raise lapsed(self._task)

    def _count_done(self, key: StepKey) -> int:
        steps = self._sessions.get(key[0])
        writes = steps.get(key[1]) if steps else None
        return writes.done if writes else 0

    def recent(self) -> Iterator[tuple[StepKey, StepWrites]]:
        """Returns the steps of several writes that wrote here in the last ``times.REMEMBER_SECS``."""
        with self._changed:
            # Another task may report the last writes of the same step somewhat later.
            since = concurrency.monotonic() - times.REMEMBER_SECS
            found = [
                ((s, n), w)
                for s, steps in self._sessions.items()
                for n, w in steps.items()
                if w.at >= since
            ]
        return iter(found)

    def state(self) -> list[tuple[int, int, int, dict[str, int], float]]:
        """Returns the steps that may be half done, for another process of the task.

        Each has a session, a step, the writes so far, the expected writes by task and an age in
        seconds.
        """
        now = concurrency.monotonic()
        with self._changed:
            return [
                (session, step, writes.done, dict(writes.expected), now - writes.at)
                for session, steps in self._sessions.items()
                # Older steps of the session have all their writes.
                for step, writes in list(steps.items())[-STEPS_UNDER_WAY:]
                if now - writes.at < times.REMEMBER_SECS
            ]

    def take_up(self, state: Iterable[tuple[int, int, int, Mapping[str, int], float]]) -> None:
        """Continues from the ``state`` of an earlier process of the task."""
        now = concurrency.monotonic()
        with self._changed:
            for session, step, done, expected, age in state:
                steps = self._sessions.setdefault(session, OrderedDict())
                # Clocks of two processes differ, so the state has ages.
                steps[step] = StepWrites(dict(expected), done, now - age)

    def forget(self) -> None:
        """Forgets all steps so far: the variables have new values that no step has written."""
        with self._changed:
            self._sessions.clear()

    def resume(self, snapshot: int) -> bool:
        """Ends the pause of a snapshot, and no other.

        Returns:
            True if the pause had held until now: only the steps that were let through have written
            meanwhile.
        """
        with self._changed:
            # A pause that has lapsed let writes through, and the snapshot is not of one instant.
            held = self._snapshot == snapshot
            if held:
                self._open_gate()
            return held

    def open(self) -> None:
        """Opens the gate, whoever has paused it."""
        with self._changed:
            self._open_gate()

    def _open_gate(self) -> None:
        self._snapshot, self._allowed = 0, ()
        self._changed.notify_all()


def lapsed(task: str) -> SnapshotError:
    """Returns the error of a snapshot whose pause has ended."""
    return SnapshotError(
        f"{NO_SNAPSHOT}: the pause of this checkpoint has ended before it was taken (its chief "
        "stood still for too long, or another checkpoint was begun)",
        task=task,
    )
