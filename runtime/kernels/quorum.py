"""The quorum of a task: the gradients of a synchronous step, applied once when enough distinct workers are in.

Wanted: a step applies the mean of N gradients of distinct workers, at most one time, on all tasks
with variables.

Two simpler ways do not work. If each task takes the first N gradients to arrive, two tasks take
different workers, and the step mixes gradients of different batches. If a chief only orders the
application, a worker may die between question and order, and a task then lacks a gradient that
another task has applied.

The solution. Each worker pushes gradients with the step at which the worker read the variables.
Gradients of the present step wait here. A gradient of another step is dropped and counted, and the
push is answered at once. After the mean is applied the step advances by one, and every waiting push
is answered.

* A step on one task (``LoneQuorum``) needs no chief: the task decides as the last gradient arrives.
* On several tasks (``LedQuorum``) a chief decides in two phases. ``gather`` reports the gradients
  of a task, and promises to keep the gradients after the death of a worker. ``commit`` applies the
  gradients that the chief has chosen from the reports of all tasks.
* Where the mean is clipped, the chief asks each task between the two phases for the norm of its part
  (``norm``), which changes nothing. The decision holds the norm of all parts.
* The task with the step counter leads (``LeadingQuorum``), and the chief commits there last. So a
  worker that reads step s from the leader reads step s, or a later step, on every other task. After
  a later step the gradient comes too late at the leader. So the other tasks need no counter.

The limit of the solution: a chief may die between the commits of two tasks. The next chief finds
the last decision of each task when it claims the tasks, and repeats the decision where it is
missing.
"""

import abc
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from absl import logging

from runtime import concurrency, timeouts
from runtime.errors import (
    AbortedError,
    CancelledError,
    FailedPreconditionError,
    InternalError,
    OpError,
    OutOfRangeError,
)
from runtime.kernels.contributions import (
    Contribution,
    GradientCounts,
    StepGradients,
    clip,
    squared_norm,
)
from runtime.kernels.roster import ElasticRoster, Roster
from runtime.state.cancellation import Cancellation
from runtime.state.store import Resource
from runtime.task.host_kernels import UpdateTarget
from runtime.tensor_spec import Array

UNKNOWN = -1
"""The step of a task without a counter before the first push."""


@dataclass(frozen=True)
class QuorumRules:
    """The conditions under which a quorum applies an aggregate.

    Attributes:
        needed: gradients in an aggregate.
        total: number of workers. Below ``needed``, a worker may give several gradients to an
            aggregate.
        timeout_secs: seconds after the first gradient until a step continues without missing
            workers; None waits for all workers.
        tasks: the tasks of all quorums of the step.
        group: name shared by the quorums of the tasks.
        elastic: True if workers come and go, whatever ``total``. A step waits for a worker from the
            first gradient on, until the worker stops training or gives no sign of life. ``needed``
            is ``ALL_WORKERS``, or the most gradients of an aggregate.
        clip_norm: largest global norm of the mean; None for no limit.
        clipped: number of the arrays, the first ones, that are gradients and count for the norm.
        of_rows: True for the rows of a table; see ``StepGradients``.
    """

    needed: int
    total: int
    timeout_secs: float | None = None
    tasks: tuple[str, ...] = ()
    group: str = ""
    elastic: bool = False
    clip_norm: float | None = None
    clipped: int = 0
    of_rows: bool = False

    def new_roster(self, name: str, lives: Callable[[int], bool]) -> Roster:
        """Returns the roster of a quorum with these rules; arguments as of ``QuorumResource``."""
        return ElasticRoster(name, lives) if self.elastic else Roster(name, self.needed, self.total)


@dataclass(frozen=True)
class GradientSelection:
    """The workers of the gradients that a step has applied, one entry for each gradient.

    ``norm_bits`` is the squared norm of their mean over all tasks: a float64 as an int64, whose
    equality holds for every value.
    """

    step: int
    workers: tuple[int, ...]
    norm_bits: int = 0


@dataclass(frozen=True)
class GatheredGradients:
    """The report of a task to its chief.

    Attributes:
        step: the present step of the task.
        workers: the workers of the gradients here, an entry for each gradient, in the order of
            arrival.
        seen: the workers that have pushed since the last report; where workers come and go, all
            present workers.
        waited_secs: seconds for which the first gradient has waited.
        changes: number of changes of the roster.
    """

    step: int
    workers: tuple[int, ...]
    seen: tuple[int, ...]
    waited_secs: float
    changes: int = 0


class QuorumResource(Resource, abc.ABC):
    """The gradients of one step, from push to application. Thread safe.

    A push is the same for all kinds of quorums. The kinds differ in the step and in the decision.

    Args:
        name: for messages.
        rules: the conditions of an aggregate.
        lives: tells whether a session gives signs of life; asked where workers come and go.
    """

    def __init__(
        self, name: str, rules: QuorumRules, lives: Callable[[int], bool] = lambda session: True
    ) -> None:
        self._name = name
        self._rules = rules
        self._roster = rules.new_roster(name, lives)
        self._gradients = StepGradients(self._roster.each, rules.of_rows)
        # Pushes wait here until their fate is known. The lock is re-entrant, as a signal's handler
        # in the main thread may cancel a call of that thread while it holds the lock.
        lock = concurrency.RLock()
        self._lock, self._changed = lock, concurrency.Condition(lock)
        self._step = UNKNOWN
        self._target: UpdateTarget | None = None
        self._last: GradientSelection | None = None
        self._generation = 0
        # The most gradients that a decision waits for.
        self._wanted = rules.needed
        self._id = zlib.crc32(rules.group.encode())
        self._log_at = 0.0
        self._look_at = concurrency.monotonic() + self._roster.look_secs
        self._ended: type[OpError] | None = None

    @property
    def counts(self) -> GradientCounts:
        """The fate of all gradients so far."""
        return self._gradients.counts

    @property
    def waiting(self) -> int:
        """Gradients that no decision has applied or dropped."""
        return len(self._gradients.entries)

    @property
    def dropped_gradients(self) -> int:
        """Gradients that were dropped as stale or repeated."""
        return self.counts.dropped + self.counts.repeated

    # -- what the kinds of quorums do differently --------------------------------------------------------------

    @abc.abstractmethod
    def _present_step(self, stamp: int, target: UpdateTarget) -> int:
        """Returns the step of the variables, for gradients of step ``stamp``."""

    @abc.abstractmethod
    def _can_decide(self) -> bool:
        """Returns True if a push may end the step without an order."""

    def _wake_waiting(self) -> None:
        """Wakes all calls that wait, as fewer gradients may be enough now."""
        self._changed.notify_all()

    # -- workers -----------------------------------------------------------------------------------------------

    def push(
        self,
        worker: int,
        stamp: int,
        arrays: Sequence[Array],
        target: UpdateTarget,
        cancelled: Cancellation,
        client: int = 0,
    ) -> tuple[int, bool]:
        """Pushes gradients, and waits until the step has ended.

        A worker that owes the aggregate more gradients is answered at once.

        Args:
            worker: number of the worker; the same number after a restart.
            stamp: the step at which the variables were read.
            arrays: the gradients, unchanged during the call.
            target: the variables.
            cancelled: ends the wait; the gradients are withdrawn then, unless a chief was promised
                them.
            client: the session of the worker.

        Returns:
            The present step of the variables, and True if the gradients were applied or will be.

        Raises:
            CancelledError, DeadlineExceededError: The wait was ended.
            AbortedError: the variables were restored meanwhile, or have lost their values.
            OutOfRangeError: training is over, or too few workers are left for an aggregate.
        """
        with self._changed:
            # Also a push that comes too late tells that its worker is alive and trains.
            self._roster.meet(worker, client)
            self._check_open()
            self._target = target
            # The generation comes first: after a restore the gradients here belong to values that
            # are gone.
            self._renew_generation(target.generation)
            step = self._refresh_step(self._present_step(stamp, target))
            if stamp != step:
                self.counts.dropped += 1
                return step, False
            contribution = self._add_contribution(worker, arrays)
            # A caller that stops waiting takes its gradients along, as its next life pushes them
            # again.
            try:
                while contribution.counted is None:
                    if self._can_decide():
                        self._apply_decision(self._gradients.entries[: self._count_needed()])
                    elif self._gradients.owes(worker):
                        # The worker owes this step more, and computes meanwhile in the same memory.
                        contribution.keep()
                        return step, True
                    else:
                        self._wait_decided(contribution, cancelled)
            except BaseException:
                self._gradients.withdraw(contribution)
                raise
            # The session has to learn of the restore, as its own read of the variables is older.
            if contribution.fenced:
                raise AbortedError(
                    "its variables were restored or have lost their values since the session began"
                )
            return self._step, bool(contribution.counted)

    def _add_contribution(self, worker: int, arrays: Sequence[Array]) -> Contribution:
        if not self._gradients.entries:
            self._log_at = concurrency.monotonic() + timeouts.LOG_EVERY_SECS
        # A gradient that was replaced has its answer, and its push waits for the notification.
        repeated = self.counts.repeated
        contribution = self._gradients.add(worker, arrays)
        if self.counts.repeated > repeated:
            self._changed.notify_all()
        return contribution

    def _wait_decided(self, contribution: Contribution, cancelled: Cancellation) -> None:
        """Waits until there is something to decide, or the contribution is decided; looks for dead workers."""

        def ready() -> bool:
            return contribution.counted is not None or self._can_decide()

        what = f"waiting for step {self._step} of {self._name}"
        while not cancelled.wait_for(
            self._changed,
            lambda: self._ended is not None or ready() or bool(self._too_few()),
            what,
            self._next_look(),
        ):
            self._look_around(concurrency.monotonic())
        # The wait has ended for another reason: the quorum has ended, or too few workers are left.
        if not ready():
            self._check_open()

    def _next_look(self) -> float:
        return min(self._log_at, self._look_at)

    def _look_around(self, now: float) -> None:
        """Logs the missing workers, and drops dead workers from the roster."""
        if now >= self._log_at:
            self._log_at = now + timeouts.LOG_EVERY_SECS
            logging.warning("%s", self._waiting_for(now))
        if now >= self._look_at:
            self._look_at = now + self._roster.look_secs
            if self._roster.look(self._gradients.workers):
                self._wake_waiting()

    def _gathered_since(self, now: float) -> str:
        waited = (
            f"{self._name}: step {self._step} waits for {now - self._gradients.since:.0f} s now"
        )
        return f"{waited}, gradients of workers {sorted(self._gradients.workers)} are in"

    def _waiting_for(self, now: float) -> str:
        missing = self._roster.missing(self._gradients.workers)
        return f"{self._gathered_since(now)}, {self._count_needed()} gradients are needed; missing: {missing}"

    # -- the step ----------------------------------------------------------------------------------------------

    def _renew_generation(self, generation: int, forget: bool = False) -> None:
        """Notes the generation of the variables; a new generation drops all contributions, and the step."""
        if renewed := generation != self._generation:
            self._generation = generation
        if renewed or forget:
            self._drop_gradients(fenced=renewed)
            self._step, self._last = UNKNOWN, None

    def _refresh_step(self, step: int) -> int:
        """Notes the variables' step; contributions to another step are dropped."""
        if step != self._step:
            self._drop_gradients()
            self._step = step
        return step

    def _drop_gradients(self, fenced: bool = False) -> None:
        self._gradients.drop(fenced)
        self._changed.notify_all()

    def _count_needed(self) -> int:
        return self._roster.within_reach(self._wanted)

    def _has_enough(self) -> bool:
        return len(self._gradients.entries) >= max(1, self._count_needed())

    def _apply_decision(
        self,
        chosen: Sequence[Contribution],
        expected: Mapping[str, int] | None = None,
        squared: float | None = None,
    ) -> None:
        """Applies the mean of the chosen gradients, and ends the step.

        Args:
            chosen: the gradients.
            expected: by task, the applications of the decision; None if no other task applies
                gradients.
            squared: squared norm of the mean over all tasks; None if this task has all of the mean.
        """
        assert self._target is not None
        mean = self._gradients.mean_of(chosen)
        if self._rules.clip_norm is not None:
            part = mean[: self._rules.clipped]
            clip(part, squared_norm(part) if squared is None else squared, self._rules.clip_norm)
        try:
            self._target.apply(mean, (self._id, self._step), expected)
        except AbortedError:
            # The gradients are not for these variables any more, and every waiting push must know.
            self._drop_gradients(fenced=True)
            raise
        # From here on the decision counts: the next chief finds it when it claims the task.
        self._last = GradientSelection(self._step, tuple(c.worker for c in chosen))
        self._gradients.settle(chosen)
        self._step += 1
        self._changed.notify_all()

    # -- life --------------------------------------------------------------------------------------------------

    def status(self) -> str:
        """Returns the missing workers of the present step in words; empty if no gradients wait."""
        with self._changed:
            return self._waiting_for(concurrency.monotonic()) if self._gradients.entries else ""

    def clear(self) -> None:
        """Ends all waits: the container was cleared."""
        with self._changed:
            self._ended = CancelledError
            self._wake_waiting()

    def end_client(self, client: int) -> None:
        """Notes the end of a session, and so of an elastic worker."""
        with self._changed:
            if self._roster.end_client(client, self._gradients.workers):
                self._wake_waiting()

    def retire(self, client: int, index: int) -> None:
        """Notes that a session trains no more, so that no step waits for the worker before the next gradient.

        Args:
            client: the session.
            index: index of the session's task, which is the number of a worker without gradients so
                far.
        """
        with self._changed:
            if self._roster.retire(client, index, self._gradients.workers):
                self._wake_waiting()

    def set_finished(self, finished: bool) -> None:
        """Notes the end of training, after which no worker comes, or the next beginning."""
        with self._changed:
            if self._ended is not CancelledError:
                self._ended = OutOfRangeError if finished else None
                self._changed.notify_all()

    def _too_few(self) -> list[int]:
        # With a time limit a step goes on with the gradients that are here, however few.
        if self._rules.timeout_secs is not None:
            return []
        return self._roster.too_few([c.worker for c in self._gradients.entries])

    def _check_open(self) -> None:
        if self._ended is not None:
            over = (
                "was cleared away"
                if self._ended is CancelledError
                else "waits no more: training is over"
            )
            raise self._ended(f"{self._name} {over}")
        if through := self._too_few():
            raise OutOfRangeError(
                f"{self._name} waits no more: {self._rules.needed} gradients are needed, and of "
                f"{self._rules.total} workers {through} are through with training"
            )

    def validate(self) -> None:
        """Asserts the invariants; for tests."""
        with self._changed:
            self._gradients.validate()
            self._roster.validate()
            assert self._gradients.workers <= self._roster.known, (
                "a worker gives gradients and is not known"
            )
            assert self._step != UNKNOWN or not self._gradients.entries
            # Only a restore sets the counter back, and a restore begins a generation.
            assert self._last is None or self._last.step < self._step, (
                "a decision would be applied twice"
            )


class LoneQuorum(QuorumResource):
    """The quorum of the only task of a step. The task decides as the last gradient arrives."""

    def _present_step(self, stamp: int, target: UpdateTarget) -> int:
        return target.step()

    def _can_decide(self) -> bool:
        return self._has_enough()

    def validate(self) -> None:
        """Asserts the invariants; for tests."""
        super().validate()
        with self._changed:
            assert not any(c.promised for c in self._gradients.entries)
            # After a change of the roster the pushes that wait have to wake up before one of them
            # decides.
            assert self._roster.changes or not self._has_enough(), (
                "enough gradients wait, and no push decides"
            )

    def _time_up(self) -> float:
        limit = self._rules.timeout_secs
        return (
            float("inf")
            if limit is None or not self._gradients.entries
            else self._gradients.since + limit
        )

    def _next_look(self) -> float:
        return min(super()._next_look(), self._time_up())

    def _look_around(self, now: float) -> None:
        """Looks for dead workers, and applies the gradients here when time is up."""
        super()._look_around(now)
        if now >= self._time_up():
            here = self._gradients.workers
            logging.warning(
                "%s: step %s goes on after %.0f s with %d of %d gradients, of workers %s",
                *(self._name, self._step, self._rules.timeout_secs),
                *(len(self._gradients.entries), self._count_needed(), sorted(here)),
            )
            # The next steps do not wait for the missing workers again.
            self._roster.keep_only(here)
            self._apply_decision(list(self._gradients.entries))


class LedQuorum(QuorumResource):
    """The quorum of a task without the step counter, led by a chief.

    The step is the latest step of a push or a commit.
    """

    def __init__(
        self, name: str, rules: QuorumRules, lives: Callable[[int], bool] = lambda session: True
    ) -> None:
        super().__init__(name, rules, lives)
        # The chief waits here until there is enough. Its lock is that of the pushes, which wake
        # nobody for nothing.
        self._gathered = concurrency.Condition(self._lock)
        self._claims = 0
        # 0 while no chief leads.
        self._session = 0

    def _present_step(self, stamp: int, target: UpdateTarget) -> int:
        return max(stamp, self._step)

    def _can_decide(self) -> bool:
        return False

    def _note_counter(self, step_now: Callable[[], int]) -> None:
        """Notes the step of the counter where this task has the counter."""

    def _wake_waiting(self) -> None:
        super()._wake_waiting()
        self._gathered.notify_all()

    def _add_contribution(self, worker: int, arrays: Sequence[Array]) -> Contribution:
        contribution = super()._add_contribution(worker, arrays)
        if self._has_enough():
            self._gathered.notify_all()
        return contribution

    def _renew_generation(self, generation: int, forget: bool = False) -> None:
        if generation != self._generation:
            self._session = 0
            self._gathered.notify_all()
        super()._renew_generation(generation, forget)

    def _refresh_step(self, step: int) -> int:
        if step < self._step:
            self._gathered.notify_all()
        return super()._refresh_step(step)

    def _waiting_for(self, now: float) -> str:
        if self._has_enough():
            return f"{self._gathered_since(now)}; waiting for the chief to apply them"
        return super()._waiting_for(now)

    # -- the chief's orders ------------------------------------------------------------------------------------

    def claim(
        self,
        check: Callable[[], None],
        step_now: Callable[[], int],
        generation: int,
        wanted: int,
        forget: bool = False,
    ) -> tuple[int, int, GradientSelection | None]:
        """Begins a session of the chief; orders of an earlier session are refused from now on.

        Args:
            check: raises unless the caller leads. Every order calls the check after the wait of the
                order.
            step_now: reads the step counter, where this task leads.
            generation: generation of the task's variables.
            wanted: most gradients that a decision waits for.
            forget: True to drop the gradients here, which do not fit the gradients at the leader.

        Returns:
            The number of the session, the step, and the last decision of this task.

        Raises:
            PermissionDeniedError: another chief leads.
            FailedPreconditionError: the caller must claim the task again.
        """
        with self._changed:
            check()
            self._wanted = wanted
            self._renew_generation(generation, forget)
            # No number is given twice, so a chief of before a restore stays refused.
            self._claims += 1
            self._session = self._claims
            self._note_counter(step_now)
            self._gathered.notify_all()
            # The chief repeats the last decision on tasks that lack it.
            return self._session, self._step, self._last

    def gather(
        self,
        session: int,
        check: Callable[[], None],
        generation: int,
        known: tuple[int, int],
        cancelled: Cancellation,
        limit_secs: float = timeouts.LOG_EVERY_SECS,
        changes: int = 0,
    ) -> GatheredGradients:
        """Waits for a change that the chief does not know, reports the gradients, and promises to keep them.

        The wait ends when enough gradients are here, and more gradients of the step than the chief
        knows.

        Args:
            session: of the caller.
            check: as in ``claim``.
            generation: generation of the task's variables.
            known: the step, and the number of gradients of the step, known to the caller.
            cancelled: ends the wait.
            limit_secs: longest wait in seconds.
            changes: number of changes of the roster known to the caller.

        Raises:
            PermissionDeniedError: another chief leads.
            FailedPreconditionError: the task has restarted, was restored, or was claimed again.
        """

        def ready() -> bool:
            step, count = self._step, len(self._gradients.entries)
            return (
                self._ended is CancelledError
                or session != self._session
                or step < known[0]
                or self._has_enough()
                and (step > known[0] or count > known[1] or self._roster.changes != changes)
            )

        with self._changed:
            until = concurrency.monotonic() + limit_secs
            cancelled.wait_for(
                self._gathered, ready, f"waiting for gradients in {self._name}", until
            )
            if self._ended is CancelledError:
                self._check_open()
            self._check_chief(session, check, generation)
            here = self._gradients
            # From here on the gradients stay, whatever becomes of their workers: the chief decides
            # by this report.
            for contribution in here.entries:
                contribution.promised = True
            waited = concurrency.monotonic() - here.since if here.entries else 0.0
            workers = tuple(c.worker for c in here.entries)
            return GatheredGradients(
                self._step, workers, self._roster.take_heard(), waited, self._roster.changes
            )

    def norm(
        self,
        session: int,
        check: Callable[[], None],
        generation: int,
        decision: GradientSelection,
    ) -> float:
        """Returns the squared norm of this task's part of the mean of promised gradients; arguments as of ``commit``."""
        with self._changed:
            self._check_chief(session, check, generation)
            chosen = self._promised_gradients(decision)
            return squared_norm(self._gradients.mean_of(chosen)[: self._rules.clipped])

    def commit(
        self,
        session: int,
        check: Callable[[], None],
        generation: int,
        decision: GradientSelection,
        wanted: int,
    ) -> int:
        """Applies the gradients of a decision. The last decision is applied no second time.

        Args:
            session: of the caller.
            check: as in ``claim``.
            generation: generation of the task's variables.
            decision: the step, and the workers of the gradients to apply.
            wanted: most gradients that the next decision waits for. Where workers come and go, 0
                ends the wait for workers outside the decision.

        Returns:
            The step afterwards.

        Raises:
            PermissionDeniedError: another chief leads.
            FailedPreconditionError: the task is at another step, has restarted, or was restored.
            InternalError: a promised gradient is missing.
        """
        with self._changed:
            self._check_chief(session, check, generation)
            self._wanted = wanted or self._wanted
            if not wanted:
                self._roster.go_on_with(decision.workers)
            # The reply to the first order was lost, or another chief repeats the decision of a dead
            # chief.
            if self._last == decision and self._step == decision.step + 1:
                return self._step
            # A task with variables and tables has several quorums, each with its own application.
            self._apply_decision(
                self._promised_gradients(decision),
                Counter(self._rules.tasks),
                float(np.int64(decision.norm_bits).view(np.float64)),
            )
            self._last = decision
            return self._step

    def _promised_gradients(self, decision: GradientSelection) -> list[Contribution]:
        if self._step != decision.step:
            raise FailedPreconditionError(
                f"{self._name} is at step {self._step}, not at {decision.step}"
            )
        # The promise of ``gather`` is kept here: each chosen gradient is present.
        chosen = self._gradients.choose(decision.workers)
        if isinstance(chosen, int):
            raise InternalError(
                f"{self._name}: the gradients of worker {chosen} for step {self._step} are gone"
            )
        return chosen

    def validate(self) -> None:
        """Asserts the invariants; for tests."""
        super().validate()
        with self._changed:
            assert self._session or not any(c.promised for c in self._gradients.entries), (
                "promised to no chief"
            )

    def _check_chief(self, session: int, check: Callable[[], None], generation: int) -> None:
        check()
        # A restore drops the gradients that were promised, so the chief has to look again.
        if not self._session or generation != self._generation:
            raise FailedPreconditionError(
                f"{self._name} has no chief, as it was restarted or restored"
            )
        if session != self._session:
            raise FailedPreconditionError(f"{self._name} was claimed again")


class LeadingQuorum(LedQuorum):
    """The quorum of the task that holds the step counter, where a chief leads several tasks."""

    def _present_step(self, stamp: int, target: UpdateTarget) -> int:
        return target.step()

    def _note_counter(self, step_now: Callable[[], int]) -> None:
        self._refresh_step(step_now())
