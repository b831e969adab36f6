"""TaskRun: the part of one task in a run, from the opening of its session to the report of its end.

``Lifecycle`` makes a ``TaskRun`` with each session. ``waiting`` and ``ending`` read and change it.
"""

from dataclasses import dataclass

from absl import logging

from harness.training import times
from harness.training.start.managed_session import ManagedSession
from harness.training.start.session_source import RunSessions
from harness.training.start.session_start import LOST_CONTACT
from runtime import concurrency
from runtime.lowlevel import RunRecords

ELASTIC = "elastic"
"""Collection of a graph that is not empty where workers come and go.

A worker that leaves is not waited for then.
"""


@dataclass(eq=False)
class TaskRun:
    """The part of one task in a run.

    Attributes:
        session: Session of training.
        sessions: Sessions of the run; ``restore`` serves the other tasks.
        records: Run records; None when no other task takes part.
        is_chief: True on the chief, which waits for the other tasks at the end and then ends the
            run.
        is_elastic: True where workers come and go.
        grace_secs: Seconds that a task may be silent at the end, and that a step may take after a
            stop.
        reached: Highest known step; None before the first step.
        silenced: Words for the silence of a task, after the silence has closed the session; empty
            before.
        answered_at: Time of the last answer to ``silent_secs``; None before the first question.
    """

    session: ManagedSession
    sessions: RunSessions
    records: RunRecords | None
    is_chief: bool
    is_elastic: bool
    grace_secs: float
    reached: int | None = None
    silenced: str = ""
    answered_at: float | None = None

    @property
    def late(self) -> bool:
        """True if the run had finished before the task came."""
        return self.sessions.late

    @property
    def answer_secs(self) -> float:
        """Seconds that a question may take once training needs no answer any more."""
        # With a grace period of a second a healthy ps on a busy host would count as gone.
        return min(times.ANSWER_SECS, max(2.0, self.grace_secs))

    @property
    def silence_secs(self) -> float:
        """Silence, in seconds, after which a task is not waited for at the end."""
        return max(self.grace_secs, times.LEAST_SILENCE_SECS)

    @property
    def worker_silence_secs(self) -> float:
        """Silence, in seconds, after which a worker is not waited for at the end."""
        return (
            min(self.silence_secs, times.ELASTIC_SILENCE_SECS)
            if self.is_elastic
            else self.silence_secs
        )

    def silent_secs(self) -> float:
        """Returns the seconds since the last sign of life of the most silent task; 0 when all tasks live."""
        # The master of a session in this process knows the silence. Otherwise the records are
        # asked.
        known = self.session.raw.silent_secs
        if known is not None or self.records is None:
            return known or 0.0
        if self.answered_at is None:
            self.answered_at = concurrency.monotonic()
        try:
            self.records.inspect()
            self.answered_at = concurrency.monotonic()
        except LOST_CONTACT as error:
            logging.info("looking whether all tasks live: %s", error)
        return concurrency.monotonic() - self.answered_at

    def note_reached(self, step: int | None) -> None:
        """Notes a step of training. The highest step counts, as the end names the lost steps."""
        if step is not None:
            self.reached = max(step, self.reached or 0)
