"""Counters of a task and of its sessions, for status and metrics.

The counters are plain integers, because each step changes some of them.
"""

from runtime import concurrency
from runtime.plan.plan import COMPUTE, PULL, PUSH

STALENESS_BUCKETS = 65
"""Number of staleness counters: for updates that were 0, 1 ...

63, and 64 or more updates behind.
"""


class StepTimes:
    """The times of the steps of one session.

    No lock is taken for a step, so two threads that add at the same moment may lose a count.

    Attributes:
        steps: Number of steps.
        total_ns: Time of all steps, nanoseconds.
        parts_ns: Time for pull, compute and push, by their index in a plan, nanoseconds.
        wire_bytes: Tensor bytes that the steps sent and received.
    """

    __slots__ = ("steps", "total_ns", "parts_ns", "wire_bytes")

    def __init__(self) -> None:
        self.steps = 0
        self.total_ns = 0
        self.parts_ns = [0, 0, 0]
        self.wire_bytes = 0

    def add_step(self, total_ns: int, wire_bytes: int) -> None:
        """Counts one step.

        Args:
            total_ns: Time of the step, nanoseconds.
            wire_bytes: Tensor bytes that the step sent and received.
        """
        self.total_ns += total_ns
        self.steps += 1
        self.wire_bytes += wire_bytes


class TaskCounters:
    """The counters of one task. Thread safe.

    Attributes:
        updates: Number of updates of the task's variables.
        staleness: Numbers of updates that were 0, 1 ... 63, and 64 or more updates behind.
        calls: Number of finished calls of the tensor channel.
        apply_ns: Time of the calls that have applied an update, nanoseconds.
        applied: Number of calls that have applied an update.
        errors: Number of failed calls.
        active: Number of calls that run or wait now.
        most_active: Most calls at once since the last ``values``.
    """

    def __init__(self) -> None:
        self._lock = concurrency.Lock()
        self.updates = 0
        self.staleness = [0] * STALENESS_BUCKETS
        self.calls = 0
        self.apply_ns = 0
        self.applied = 0
        self.errors = 0
        self.active = 0
        self.most_active = 0
        self._seen: dict[int, int] = {}
        self._times: dict[int, tuple[StepTimes, StepTimes]] = {}
        self._past = (StepTimes(), StepTimes())

    # -- stages -----------------------------------------------------------------------------------

    def read(self, session: int) -> None:
        """Notes that a session reads variables now.

        The session's next update comes from these values.
        """
        # A single assignment needs no lock, and this runs in every pull.
        self._seen[session] = self.updates

    def updated(self, session: int) -> None:
        """Counts an applied update of a session, and its staleness: the updates since the session's last read."""
        with self._lock:
            # A session that only writes has no age: its update counts as fresh.
            behind = self.updates - self._seen.get(session, self.updates)
            assert behind >= 0, "a session has read values of the future"
            self.updates += 1
            self.staleness[min(behind, STALENESS_BUCKETS - 1)] += 1

    def forget(self, session: int) -> None:
        """Forgets the last read of a session."""
        self._seen.pop(session, None)

    def begin(self) -> int:
        """Counts the begin of a call of the tensor channel.

        Returns:
            The present time for ``end``, nanoseconds of ``time.perf_counter_ns``.
        """
        with self._lock:
            self.active += 1
            if self.active > self.most_active:
                self.most_active = self.active
        return concurrency.perf_counter_ns()

    def end(self, began: int, applied: bool, failed: bool) -> None:
        """Counts the end of a call of the tensor channel.

        Args:
            began: Time from ``begin``, nanoseconds.
            applied: True if the call has applied an update.
            failed: True if the call has failed.
        """
        elapsed_ns = concurrency.perf_counter_ns() - began
        with self._lock:
            self.active -= 1
            assert self.active >= 0, "a call has ended twice"
            self.calls += 1
            # The time of a failed call would distort the mean of the updates.
            if failed:
                self.errors += 1
            elif applied:
                self.applied += 1
                self.apply_ns += elapsed_ns

    # -- steps ------------------------------------------------------------------------------------

    def begin_session(self, session: int) -> tuple[StepTimes, StepTimes]:
        """Returns the times of a session's training steps, and of its other steps."""
        with self._lock:
            return self._times.setdefault(session, (StepTimes(), StepTimes()))

    def end_session(self, session: int) -> None:
        """Adds the times of an ended session to the task's sums, and forgets the session."""
        with self._lock:
            self._seen.pop(session, None)
            # A session may end without a step, or end twice. There are no times then.
            for past, times in zip(self._past, self._times.pop(session, ()), strict=False):
                _add(past, times)

    def values(self) -> dict[str, float]:
        """Returns all counters, by the names in ``METRICS``. Times are in seconds.

        Sets ``most_active`` back to the calls that are active now.
        """
        with self._lock:
            sums = (StepTimes(), StepTimes())
            for pair in (self._past, *self._times.values()):
                for total, times in zip(sums, pair, strict=True):
                    _add(total, times)
            training, other = sums
            # Each reader gets the maximum since the last reading, so a short burst shows up in a
            # graph once.
            most_active, self.most_active = self.most_active, self.active
            return {
                "steps_total": training.steps,
                "step_seconds_total": training.total_ns / 1e9,
                "pull_seconds_total": training.parts_ns[PULL] / 1e9,
                "compute_seconds_total": training.parts_ns[COMPUTE] / 1e9,
                "push_seconds_total": training.parts_ns[PUSH] / 1e9,
                "step_bytes_total": training.wire_bytes,
                "other_steps_total": other.steps,
                "other_step_seconds_total": other.total_ns / 1e9,
                "sessions": len(self._times),
                "updates_total": self.updates,
                "calls_total": self.calls,
                "applied_total": self.applied,
                "apply_seconds_total": self.apply_ns / 1e9,
                "errors_total": self.errors,
                "queue_depth": self.active,
                "queue_depth_max": most_active,
            }


def _add(total: StepTimes, times: StepTimes) -> None:
    total.steps += times.steps
    total.total_ns += times.total_ns
    total.wire_bytes += times.wire_bytes
    total.parts_ns = [a + b for a, b in zip(total.parts_ns, times.parts_ns, strict=True)]
