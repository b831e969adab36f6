"""The checkpoint jobs of a task: saves and restores from the order that begins a job to the end of the job.

The participant of a task finds the job of each order here. A job belongs to a session and to a
leadership. Whatever ends a job ends it by ``end``: an order that drops or commits it, another
leadership, the end of its session, the stop of the task. An ended job accepts no order, and its
arrays are free as soon as no order works on them.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from absl import logging

from runtime import concurrency
from runtime.checkpoint import times
from runtime.checkpoint.byte_ranges import IncomingArray
from runtime.checkpoint.snapshot import VariableSlice
from runtime.errors import AbortedError, NotFoundError, TakeoverError, UnavailableError
from runtime.limits import Limits
from runtime.proto import services_pb2 as pb
from runtime.state.cancellation import Cancellation
from runtime.state.leadership import NOBODY, Leadership
from runtime.state.write_gate import WriteGate


class Sender(NamedTuple):
    """The leadership under which an order comes, and the session that sends the order."""

    leadership: Leadership
    session: int


@dataclass
class CheckpointJob:
    """A save or restore on this task, from the order that begins it to its end.

    Attributes:
        sender: sender of the order that began the job. The job ends with this session, and under
            another leadership.
        slices: parts of variables that are saved or restored.
        arrays: for each slice, the value that was taken or read. None before the bytes of a slice
            have arrived.
        incoming: for each slice, the bytes received so far; empty if the task reads files itself.
        first: index of the first slice whose array is still held; earlier arrays were sent.
        used_at: ``time.monotonic()`` of the last order that named the job.
        why: reason of the end; empty while the job is under way.
        ended: event that is set together with ``why``.
        at_work: True while an order writes, reads or commits it.
        taken: the reply to the order to take, for the same order again after its reply was lost.
        written: the reply to the order to write.
    """

    sender: Sender
    slices: list[VariableSlice]
    arrays: list[Any] = field(default_factory=list)
    incoming: list[IncomingArray] = field(default_factory=list)
    first: int = 0
    used_at: float = field(default_factory=concurrency.monotonic)
    why: str = ""
    ended: concurrency.Event = field(default_factory=concurrency.Event)
    at_work: bool = False
    taken: pb.CheckpointReply.Taken | None = None
    written: pb.CheckpointReply.Written | None = None


class JobTable:
    """The jobs of one task. Thread safe.

    Args:
        task: name of the task, for errors.
        gate: gate of the task, whose pause ends with the job that has paused the gate.
        check: raises AbortedError unless the task obeys a leadership.
        limits: bound of the number of jobs.
        connected: returns True while a session has a connection to this task. A session without a
            connection owns no job, because the task would not notice the end of the session.

    Attributes:
        resumed: True while the task continues as another process, whose jobs are lost.
    """

    def __init__(
        self,
        task: str,
        gate: WriteGate,
        check: Callable[[Leadership], None],
        limits: Limits,
        connected: Callable[[int], bool],
    ) -> None:
        self.resumed = False
        self._task = task
        self._gate = gate
        self._check = check
        self._limits = limits
        self._connected = connected
        self._changed = concurrency.Condition()
        # Leadership of the last order; jobs of earlier leaderships are ended.
        self._served = NOBODY
        self._jobs: dict[int, CheckpointJob] = {}
        """Jobs under way, and ended jobs while an order works on them."""
        self._why_ended: OrderedDict[int, str] = OrderedDict()
        """Reason of the end by number of a job, for orders that come late."""

    def serve(self, leadership: Leadership, named: int, cancelled: Cancellation) -> None:
        """Checks the leadership of an order and ends lost jobs, but for the named job, and those of earlier chiefs."""
        with self._changed:
            self._check(leadership)
            if leadership != self._served:
                # A chief that paused the gate and lost the lead takes nothing any more.
                self._gate.open()
            self._served = leadership
            # The order to drop a job may get lost while its session lives, so that no other end
            # comes. A task that has written its part long before the others hears of the job again
            # at the end of the save only.
            unused = concurrency.monotonic() - times.UNUSED_SECS
            lost = [
                n
                for n, job in self._jobs.items()
                if job.used_at < unused and not job.at_work and n != named
            ]
            self.end(lost, f"no order has named it in {times.UNUSED_SECS:.0f} s")
            earlier = [n for n, job in self._jobs.items() if job.sender.leadership != leadership]
            self.end(earlier, "another chief has taken the lead")
            what, until = (
                "waiting for an earlier chief's job",
                concurrency.monotonic() + times.JOIN_SECS,
            )
            if not cancelled.wait_for(
                self._changed, lambda: self._jobs.keys().isdisjoint(earlier), what, until
            ):
                raise UnavailableError(
                    f"an earlier chief's job still writes after {times.JOIN_SECS:.0f} s",
                    task=self._task,
                )

    def check_connected(self, session: int) -> None:
        """Raises UnavailableError if a session has no connection, so that its end would not be noticed."""
        if not self._connected(session):
            raise UnavailableError(
                f"session {session:x} has no connection here, by which its end would be noticed",
                task=self._task,
            )

    def begin(self, number: int, job: CheckpointJob) -> CheckpointJob:
        """Adds a job; returns the existing job of that number if the order comes again."""
        with self._changed:
            self._check(job.sender.leadership)
            # The order comes again after its reply was lost, or comes after the order to drop the
            # job.
            if number in self._why_ended or number in self._jobs:
                return self.find(number)
            self.check_connected(job.sender.session)
            # Each job holds arrays, so a client must not begin jobs without end.
            if len(self._jobs) >= self._limits.checkpoint_jobs:
                raise self._limits.exceeded(
                    "checkpoint_jobs", f"{len(self._jobs)} saves and restores are under way"
                )
            assert not job.why and not job.at_work, "a job begins once"
            assert {len(job.arrays), len(job.incoming)} <= {0, len(job.slices)}
            self._jobs[number] = job
            return job

    def list_jobs(self) -> list[CheckpointJob]:
        """Returns the jobs that hold arrays or files."""
        with self._changed:
            return list(self._jobs.values())

    def get(self, number: int) -> CheckpointJob | None:
        """Returns the job of a number; None if there is no such job."""
        with self._changed:
            return self._jobs.get(number)

    def find(self, number: int) -> CheckpointJob:
        """Returns the job of a number and notes the time of use."""
        with self._changed:
            job, why = self._jobs.get(number), self._why_ended.get(number)
        if why is not None:
            raise self._has_ended(why)
        if job is None and self.resumed:
            raise TakeoverError(
                "the task goes on from its backup: the checkpoint job that was under way is lost",
                task=self._task,
            )
        if job is None:
            raise NotFoundError(f"no such checkpoint job: {number:x}", task=self._task)
        job.used_at = concurrency.monotonic()
        return job

    @contextmanager
    def reserve(self, job: CheckpointJob, order: Cancellation, what: str) -> Iterator[None]:
        """Waits until no other order works on a job, then reserves the job for the block."""
        with self._changed:
            # An order that was repeated after a broken connection meets the first one at work.
            order.wait_for(self._changed, lambda: not job.at_work, what)
            self.check_alive(job)
            job.at_work = True
        try:
            yield
        finally:
            with self._changed:
                assert job.at_work, "two orders work on one job"
                job.at_work = False
                job.used_at = concurrency.monotonic()
                self._forget_ended()

    def check_alive(self, job: CheckpointJob) -> None:
        """Raises AbortedError if a job has ended."""
        if job.why:
            raise self._has_ended(job.why)

    def _has_ended(self, why: str) -> AbortedError:
        return AbortedError(f"this checkpoint job has ended: {why}", task=self._task)

    def end(self, numbers: Iterable[int], why: str, *, ordered: bool = False) -> None:
        """Ends jobs; every end of a job comes by this method.

        Args:
            numbers: numbers of the jobs. A number without a job is noted for late orders, too.
            why: reason of the end, for orders that come later.
            ordered: True if the job's own client ends the job, as every save ends. Only other ends
                are logged.
        """
        with self._changed:
            for number in numbers:
                # An order to drop may overtake the order that begins the job. That order must begin
                # nothing then.
                self._why_ended.setdefault(number, why)
                job = self._jobs.get(number)
                if job is not None and not job.why:
                    if not ordered:
                        logging.info("%s: checkpoint job %x ends: %s", self._task, number, why)
                    job.why = why
                    job.ended.set()
                # A job may end during its snapshot, and updates must not wait for the rest of the
                # pause.
                self._gate.resume(number)
            while len(self._why_ended) > self._limits.checkpoint_jobs:
                # An order that comes later than so many jobs finds no job, which ends the order as
                # well.
                self._why_ended.popitem(last=False)
            self._forget_ended()

    def _forget_ended(self) -> None:
        assert concurrency.holds(self._changed)
        self._jobs = {
            number: job for number, job in self._jobs.items() if job.at_work or not job.why
        }
        self._changed.notify_all()

    def end_session(self, session: int, why: str) -> None:
        """Ends the jobs of a session that is not expected back.

        Args:
            session: owner of the jobs.
            why: reason of the end, for late orders of the session.
        """
        with self._changed:
            numbers = [
                number for number, job in self._jobs.items() if job.sender.session == session
            ]
        self.end(numbers, why)

    def close(self) -> None:
        """Ends all jobs because the task stops; waits for nothing."""
        self.end(list(self._jobs), "its server has stopped")

    def validate(self) -> None:
        """Asserts the invariants; for tests."""
        with self._changed:
            assert max(len(self._jobs), len(self._why_ended)) <= self._limits.checkpoint_jobs
            for job in self._jobs.values():
                assert bool(job.why) == job.ended.is_set()
                assert job.at_work or not job.why, "an ended job keeps its arrays"
                assert 0 <= job.first <= len(job.slices)
                # The fence: a late order of a dead chief finds no job.
                assert job.why or job.sender.leadership == self._served
