"""Counters of a task and its sessions: plain integers, from which status and metrics are made."""

from __future__ import annotations

import threading
import time

from runtime.plan.plan import COMPUTE, PULL, PUSH

STALENESS_BUCKETS = 65
"""How often updates were 0, 1 ... 63 and 64 or more updates behind."""


class StepTimes:
    """Times of the steps that one session ran, nanoseconds. Two threads that add at once may lose a count."""

    __slots__ = ("steps", "total_ns", "parts_ns", "wire_bytes")

    def __init__(self) -> None:
        self.steps = 0
        self.total_ns = 0
        self.parts_ns = [0, 0, 0]
        self.wire_bytes = 0

    def add_step(self, total_ns: int, wire_bytes: int) -> None:
        """Counts a step."""
        self.total_ns += total_ns
        self.steps += 1
        self.wire_bytes += wire_bytes


class TaskCounters:
    """What one task counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
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

    # -- stages ------------------------------------------------------------------------------------------------

    def read(self, session: int) -> None:
        """Notes that a session reads variables: what it sends next was computed from values of this age."""
        self._seen[session] = self.updates

    def updated(self, session: int) -> None:
        """A session's update was applied: notes how many others were since its last read."""
        with self._lock:
            behind = self.updates - self._seen.get(session, self.updates)
            self.updates += 1
            self.staleness[min(behind, STALENESS_BUCKETS - 1)] += 1

    def forget(self, session: int) -> None:
        """Forgets when a session has read."""
        self._seen.pop(session, None)

    def begin(self) -> int:
        """A call of the tensor channel begins; gives what ``end`` takes."""
        with self._lock:
            self.active += 1
            if self.active > self.most_active:
                self.most_active = self.active
        return time.perf_counter_ns()

    def end(self, began: int, applied: bool, failed: bool) -> None:
        """A call of the tensor channel ended."""
        elapsed_ns = time.perf_counter_ns() - began
        with self._lock:
            self.active -= 1
            self.calls += 1
            if failed:
                self.errors += 1
            elif applied:
                self.applied += 1
                self.apply_ns += elapsed_ns

    # -- steps -------------------------------------------------------------------------------------------------

    def begin_session(self, session: int) -> tuple[StepTimes, StepTimes]:
        """The times of a session's training steps, and of its other steps."""
        with self._lock:
            return self._times.setdefault(session, (StepTimes(), StepTimes()))

    def end_session(self, session: int) -> None:
        """Keeps the sums of a session that has ended."""
        with self._lock:
            self._seen.pop(session, None)
            for past, times in zip(self._past, self._times.pop(session, ()), strict=False):
                _add(past, times)

    def values(self) -> dict[str, float]:
        """All sums under the names that a reader sees. Seconds and bytes."""
        with self._lock:
            sums = (StepTimes(), StepTimes())
            for pair in (self._past, *self._times.values()):
                for total, times in zip(sums, pair, strict=True):
                    _add(total, times)
            training, other = sums
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
