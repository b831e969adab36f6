"""The quorum of a task: the gradients of one synchronous step, applied once when enough distinct workers are in.

Each worker pushes its gradients with the step at which it read the variables. Those of the present step wait here; when
enough are in, their mean is applied, the step advances by one, and every waiting push is answered. A gradient of
another step is dropped and counted, and its worker told at once.

One task decides by itself that it has enough, as the last gradient arrives. Several tasks must apply the gradients of
the same workers, so a chief decides, in two phases: ``gather`` tells it whose gradients are here and promises to keep
them; ``commit`` applies those that it has chosen from what all tasks have.

The task that holds the step counter leads: the counter is the step. The chief commits there last. So whoever reads step
s from the leader reads variables of step s, or of a later one, everywhere; and in the second case the gradient comes
too late at the leader, where s is over. That is why the others need no counter of their own.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from absl import logging

from runtime import timeouts
from runtime.errors import (
    AbortedError,
    CancelledError,
    FailedPreconditionError,
    InternalError,
    OpError,
    OutOfRangeError,
)
from runtime.kernels.accumulator import MEAN, reduce_in_order
from runtime.state.cancellation import Cancellation
from runtime.state.store import Resource
from runtime.tensor_spec import Array, aligned

UNKNOWN = -1
"""The step of a task that does not lead and has not heard of one yet."""


@dataclass(frozen=True)
class Rules:
    """What a quorum needs.

    Attributes:
        needed: gradients in an aggregate.
        total: workers there are. Below ``needed``, each may give several gradients to one aggregate.
        alone: this task decides by itself; else a chief does.
        leads: this task holds the step counter.
        timeout_secs: how long the first gradient of a step waits before the step goes on without the workers that are
            missing; None for ever.
        tasks: all tasks that hold a part of the step.
        group: what the quorums of these tasks have in common.
        elastic: workers come and go, and ``total`` means nothing. Who gives a gradient is waited for from then on,
            until it stops training or gives no sign of life; ``needed`` is ``ALL_WORKERS``, or the most that an
            aggregate has.
    """

    needed: int
    total: int
    alone: bool = True
    leads: bool = True
    timeout_secs: float | None = None
    tasks: tuple[str, ...] = ()
    group: str = ""
    elastic: bool = False

    @property
    def each(self) -> int:
        """Most gradients of one worker in an aggregate."""
        return 1 if self.elastic else -(-self.needed // self.total)


_LOOK_SECS = 0.2
"""How often a step that waits looks whether those who are missing still live, where workers come and go."""


class Target(Protocol):
    """The variables that a quorum updates."""

    @property
    def generation(self) -> int:
        """Of the variables: another one after each restore."""

    def step(self) -> int:
        """The step counter, where this task leads."""

    def apply(self, inputs: Sequence[Array], key: tuple[int, int], expected: Mapping[str, int] | None) -> None:
        """Applies aggregated gradients, which must move the step on by one, and waits until it is done.

        Args:
            inputs: the aggregated gradients.
            key: names this application in the gate of the task.
            expected: by task, how many applications have this key; None when there is one.
        """


@dataclass
class GradientCounts:
    """What has happened to the gradients that were pushed.

    Attributes:
        applied: aggregates applied.
        accepted: gradients in them.
        dropped: gradients that were stale: of another step, or of this one but too late.
        repeated: gradients of a worker that had given all it may.
    """

    applied: int = 0
    accepted: int = 0
    dropped: int = 0
    repeated: int = 0


@dataclass(frozen=True)
class Selection:
    """Whose gradients were applied at which step, one entry for each gradient."""

    step: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Gathered:
    """What a chief is told.

    Attributes:
        step: the step that the task is at.
        workers: whose gradients of it are here, one entry for each, in the order in which they came.
        seen: the workers that were heard of since it was told last; where they come and go, those who are there.
        waited_secs: how long the first of these gradients has waited.
        changes: how often it has changed who is there.
    """

    step: int
    workers: tuple[int, ...]
    seen: tuple[int, ...]
    waited_secs: float
    changes: int = 0


@dataclass(eq=False)
class Contribution:
    """One worker's gradients.

    Attributes:
        worker: whose.
        arrays: views of the caller's memory, valid as long as the caller waits; or copies once ``kept``.
        promised: a chief was told that it is here.
        kept: whether the arrays are copies.
        counted: whether it was applied; None while that is open.
        fenced: dropped, as the variables were restored or have lost their values.
    """

    worker: int
    arrays: Sequence[Array]
    promised: bool = False
    kept: bool = False
    counted: bool | None = None
    fenced: bool = False

    def keep(self) -> None:
        """Copies the arrays, so that they outlive the call."""
        if not self.kept:
            self.arrays = [np.array(a) for a in self.arrays]
            self.kept = True


class QuorumResource(Resource):
    """Gradients of one step, from push to application. Thread safe.

    Args:
        name: for messages.
        rules: how many it needs.
        lives: tells whether a session gives signs of life; asked where workers come and go.
    """

    def __init__(self, name: str, rules: Rules, lives: Callable[[int], bool] = lambda session: True) -> None:
        self._name = name
        self._rules = rules
        self._lives = lives
        # Pushes wait until their fate is known, a chief until there is enough: nobody is woken for nothing.
        lock = threading.RLock()
        self._changed, self._gathered = threading.Condition(lock), threading.Condition(lock)
        self.counts = GradientCounts()
        """What has happened so far."""
        self._step: int | None = None
        self._contributions: list[Contribution] = []
        self._since = 0.0  # when the first of them came
        self._target: Target | None = None
        self._last: Selection | None = None
        self._generation = 0
        self._id = zlib.crc32(rules.group.encode())
        self._buffers: list[Array] = []
        self._session = 0
        self._wanted = rules.needed
        self._members: set[int] | None = set() if rules.elastic else None
        self._changes = 0
        self._look_at = 0.0
        self._seen: set[int] = set()
        self._clients: dict[int, int] = {}  # by worker: the session of its last gradients
        self._retired: set[int] = set()
        self._log_at = 0.0
        self._ended: type[OpError] | None = None

    @property
    def dropped_gradients(self) -> int:
        """How many gradients it has dropped as stale or repeated."""
        return self.counts.dropped + self.counts.repeated

    @property
    def _now(self) -> int:
        return UNKNOWN if self._step is None else self._step

    # -- workers -----------------------------------------------------------------------------------------------

    def push(
        self,
        worker: int,
        stamp: int,
        arrays: Sequence[Array],
        target: Target,
        cancelled: Cancellation,
        client: int = 0,
    ) -> tuple[int, bool]:
        """Gives gradients and waits until the step that they belong to is over.

        A worker that may give several to one aggregate is answered at once as long as it owes more.

        Args:
            worker: who computed them; the same number for a worker that was started again.
            stamp: the step at which the variables were read.
            arrays: the gradients. They must not change while the call lasts.
            target: what they are applied to.
            cancelled: ends the wait; the gradients are withdrawn then, unless a chief was promised them.
            client: the session that they come from.

        Returns:
            The step that the variables are at now, and whether the gradients were applied or will be.

        Raises:
            CancelledError, DeadlineExceededError: the wait was ended.
            AbortedError: the variables were restored meanwhile, or have lost their values.
            OutOfRangeError: training is over, or so many workers are through that no aggregate comes together.
        """
        with self._changed:
            self._clients[worker] = client
            self._retired.discard(worker)
            self._check_open()
            self._target = target
            before = self._now
            self._renew(target.generation)
            self._meet(worker)
            step = self._refresh(target.step() if self._rules.leads else max(stamp, self._now))
            if step < before:
                self._gathered.notify_all()
            if stamp != step:
                self.counts.dropped += 1
                return step, False
            if not self._contributions:
                self._log_at = time.monotonic() + timeouts.LOG_EVERY_SECS
            contribution = self._add(worker, arrays)
            if self._enough():
                self._gathered.notify_all()
            try:
                if self._can_decide():
                    self._decide(self._contributions[: self._needed()])
                if (
                    contribution.counted is None
                    and sum(c.worker == worker for c in self._contributions) < self._rules.each
                ):
                    contribution.keep()  # its worker owes this step more, and computes on
                    return step, True
                while contribution.counted is None:
                    self._wait(lambda: contribution.counted is not None or self._can_decide(), cancelled)
                    if contribution.counted is None:  # somebody has left who was waited for
                        self._decide(self._contributions[: self._needed()])
            except BaseException:
                self._withdraw(contribution)
                raise
            if contribution.fenced:
                raise AbortedError("its variables were restored or have lost their values since the session began")
            return self._now, bool(contribution.counted)

    def _meet(self, worker: int) -> None:
        self._seen.add(worker)
        if self._members is not None and worker not in self._members:
            self._members.add(worker)
            self._changes += 1
            logging.info("%s: worker %d is %s", self._name, worker, "there" if self._rules.elastic else "back")
            if not self._rules.elastic and len(self._members) >= self._rules.total:
                self._members = None

    def _wait(self, ready: Callable[[], bool], cancelled: Cancellation) -> None:
        """Waits until ``ready``; logs the missing workers, and goes on without them after ``timeout_secs``."""
        what = f"waiting for step {self._step} of {self._name}"
        while not cancelled.wait_for(
            self._changed, lambda: self._ended is not None or ready() or self._too_few(), what, self._next_look()
        ):
            now = time.monotonic()
            if now >= self._log_at:
                self._log_at = now + timeouts.LOG_EVERY_SECS
                logging.warning("%s", self._waiting_for(now))
            if self._rules.elastic and now >= self._look_at:
                self._look_at = now + _LOOK_SECS
                self._look()
            if self._rules.alone and self._contributions and now >= self._time_up():
                self._go_on_without()
        if not ready():
            self._check_open()

    def _next_look(self) -> float:
        next_look = min(self._log_at, max(self._look_at, time.monotonic())) if self._rules.elastic else self._log_at
        return min(next_look, self._time_up()) if self._rules.alone else next_look

    def _look(self) -> None:
        """Looks whether those who are missing still live."""
        here = {p.worker for p in self._contributions}
        missing = [w for w in self._members or () if w not in here]
        self._miss({w for w in missing if not self._lives(self._clients.get(w, 0))})

    def _miss(self, workers: set[int]) -> None:
        """These are gone: where workers come and go, nobody waits for them, unless they give gradients again.

        Who has given some to this step stays: ``_withdraw`` takes them out when the call ends.
        """
        if not self._rules.elastic or self._members is None:
            return
        gone = self._members & workers - {p.worker for p in self._contributions}
        if gone:
            logging.info("%s: workers %s have gone", self._name, sorted(gone))
            self._members -= gone
            self._changes += 1
            self._changed.notify_all()
            self._gathered.notify_all()

    def _time_up(self) -> float:
        limit = self._rules.timeout_secs
        return float("inf") if limit is None else self._since + limit

    def _waiting_for(self, now: float) -> str:
        here = sorted({p.worker for p in self._contributions})
        waited = f"{self._name}: step {self._step} waits for {now - self._since:.0f} s now"
        text = f"{waited}, gradients of workers {here} are in"
        there = self._members or () if self._rules.elastic else range(self._rules.total)
        missing = sorted(w for w in there if w not in here)
        if not self._rules.alone and self._enough():
            return f"{text}; waiting for the chief to apply them"
        return f"{text}, {self._needed()} gradients are needed; missing: {missing}"

    def _go_on_without(self) -> None:
        here = {p.worker for p in self._contributions}
        logging.warning(
            "%s: step %s goes on after %.0f s with %d of %d gradients, of workers %s",
            self._name,
            self._step,
            self._rules.timeout_secs,
            len(self._contributions),
            self._needed(),
            sorted(here),
        )
        self._members = here
        self._changes += 1
        self._decide(list(self._contributions))

    # -- coming and going --------------------------------------------------------------------------------------

    def _add(self, worker: int, arrays: Sequence[Array]) -> Contribution:
        """Adds a contribution. A worker that has given all it may was started again, or its connection was cut.

        Its new gradients take the place of the old ones, except those that a chief was promised.
        """
        contribution = Contribution(worker, arrays)
        of_worker = [p for p in self._contributions if p.worker == worker]
        if len(of_worker) >= self._rules.each:
            self.counts.repeated += 1
            old = next((p for p in of_worker if not p.promised), None)
            if old is None:
                return of_worker[-1]
            old.counted = False
            self._contributions = [contribution if p is old else p for p in self._contributions]
            self._changed.notify_all()
        else:
            if not self._contributions:
                self._since = time.monotonic()
            self._contributions.append(contribution)
        return contribution

    def _withdraw(self, contribution: Contribution) -> None:
        """Takes out a contribution whose caller has stopped waiting; keeps one that a chief was promised."""
        if not any(p is contribution for p in self._contributions):
            return
        if contribution.promised:
            contribution.keep()
        else:
            self._contributions = [p for p in self._contributions if p is not contribution]

    def _renew(self, generation: int) -> None:
        """Takes note of the variables' generation; in a new one, nothing that is here has a meaning."""
        if generation != self._generation:
            self._generation = generation
            self._drop(fenced=True)
            self._step = self._last = None

    def _refresh(self, step: int) -> int:
        """Takes note of the variables' step; contributions to another step are dropped."""
        if step != self._step:
            self._drop()
            self._step = step
        return step

    def _forget(self) -> None:
        """Drops everything, the step too."""
        self._drop()
        self._step = self._last = None

    def _drop(self, fenced: bool = False) -> None:
        """Drops the contributions, and counts them."""
        for contribution in self._contributions:
            contribution.counted, contribution.fenced = False, fenced
        self.counts.dropped += len(self._contributions)
        self._contributions.clear()
        self._changed.notify_all()

    # -- the decision ------------------------------------------------------------------------------------------

    def _needed(self) -> int:
        needed = self._rules.needed if self._rules.alone else self._wanted
        return needed if self._members is None else min(needed, len(self._members) * self._rules.each)

    def _enough(self) -> bool:
        return len(self._contributions) >= max(1, self._needed())

    def _can_decide(self) -> bool:
        """Whether this task decides by itself, and has what it needs."""
        return self._rules.alone and self._enough()

    def _chosen(self, decision: Selection) -> list[Contribution]:
        """The contributions that a decision names.

        Raises:
            FailedPreconditionError: this is another step.
            InternalError: one is not here.
        """
        if self._step != decision.step:
            raise FailedPreconditionError(f"{self._name} is at step {self._step}, not at {decision.step}")
        chosen: list[Contribution] = []
        for worker, count in Counter(decision.workers).items():
            of_worker = [p for p in self._contributions if p.worker == worker][:count]
            if len(of_worker) < count:
                raise InternalError(f"{self._name}: the gradients of worker {worker} for step {self._step} are gone")
            chosen += of_worker
        return chosen

    def _decide(self, chosen: Sequence[Contribution]) -> None:
        """Applies the mean of the chosen gradients, added in the order of the workers: always to the same bits."""
        assert self._target is not None and self._step is not None
        several = None if self._rules.alone else dict.fromkeys(self._rules.tasks, 1)
        try:
            self._target.apply(self._means(sorted(chosen, key=lambda p: p.worker)), (self._id, self._step), several)
        except AbortedError:  # the gradients are not for these variables any more: whoever waits must know
            self._drop(fenced=True)
            raise
        taken = {id(p) for p in chosen}
        for contribution in self._contributions:
            contribution.counted = id(contribution) in taken
        self.counts.applied += 1
        self.counts.accepted += len(chosen)
        self.counts.dropped += len(self._contributions) - len(chosen)
        self._contributions.clear()
        self._last = Selection(self._step, tuple(p.worker for p in chosen))
        self._step += 1
        self._changed.notify_all()

    def _means(self, ordered: Sequence[Contribution]) -> list[Array]:
        columns = list(zip(*(p.arrays for p in ordered), strict=True))
        if len(self._buffers) != len(columns):
            self._buffers = [aligned(c[0].shape, c[0].dtype) for c in columns]
        for i, column in enumerate(columns):
            if self._buffers[i].shape != column[0].shape or self._buffers[i].dtype != column[0].dtype:
                self._buffers[i] = aligned(column[0].shape, column[0].dtype)
        return [_joined(c, b) for c, b in zip(columns, self._buffers, strict=True)]

    # -- the chief of several tasks ----------------------------------------------------------------------------

    def claim(
        self,
        check: Callable[[], None],
        step_now: Callable[[], int],
        generation: int,
        wanted: int,
        forget: bool = False,
    ) -> tuple[int, int, Selection | None]:
        """Begins a session of the chief: what it has ordered in an earlier one is refused from now on.

        Args:
            check: raises unless the caller leads; called here and by all other orders, when they have waited.
            step_now: reads the step counter, where this task leads.
            generation: of the task's variables.
            wanted: how many gradients make a decision worth while.
            forget: drop what is here: it does not fit what the leader has.

        Returns:
            The number of the session, the step, and the last decision of this task.

        Raises:
            PermissionDeniedError: another chief leads.
            FailedPreconditionError: the caller must claim the task again.
        """
        with self._changed:
            check()
            self._session += 1
            self._wanted = wanted
            self._renew(generation)
            if forget:
                self._forget()
            if self._rules.leads:
                self._refresh(step_now())
            self._gathered.notify_all()
            return self._session, self._now, self._last

    def gather(
        self,
        session: int,
        check: Callable[[], None],
        generation: int,
        known: tuple[int, int],
        cancelled: Cancellation,
        limit_secs: float = timeouts.LOG_EVERY_SECS,
        changes: int = 0,
    ) -> Gathered:
        """Waits until there is something to decide, tells whose gradients are here, and promises to keep these.

        That is when as many gradients are here as the chief has asked for, and more of this step than it knows.

        Args:
            session: of the caller.
            check: as in ``claim``.
            generation: of the task's variables.
            known: the step, and how many gradients of it, that the caller knows of.
            cancelled: ends the wait.
            limit_secs: after so long, tells what there is.
            changes: how many changes of who is there the caller knows of.

        Raises:
            PermissionDeniedError: another chief leads.
            FailedPreconditionError: the task has restarted, its variables were restored, or the caller has claimed it
                again: go on from a new claim.
        """

        def ready() -> bool:
            step, count = self._now, len(self._contributions)
            return (
                self._ended is CancelledError
                or session != self._session
                or step < known[0]
                or self._enough()
                and (step > known[0] or count > known[1] or self._changes != changes)
            )

        with self._changed:
            until = time.monotonic() + limit_secs
            cancelled.wait_for(self._gathered, ready, f"waiting for gradients in {self._name}", until)
            if self._ended is CancelledError:
                self._check_open()
            self._check_chief(session, check, generation)
            for contribution in self._contributions:
                contribution.promised = True
            seen, self._seen = tuple(sorted(self._members or self._seen)), set()
            waited = time.monotonic() - self._since if self._contributions else 0.0
            return Gathered(self._now, tuple(p.worker for p in self._contributions), seen, waited, self._changes)

    def commit(self, session: int, check: Callable[[], None], generation: int, decision: Selection, wanted: int) -> int:
        """Applies the gradients that a chief has chosen. Applying the last decision again does nothing.

        Args:
            session: of the caller.
            check: as in ``claim``.
            generation: of the task's variables.
            decision: the step, and whose gradients of it to apply.
            wanted: how many gradients make the next decision worth while. Where workers come and go, 0 means not to
                wait any more for those that are not chosen.

        Returns:
            The step afterwards.

        Raises:
            PermissionDeniedError: another chief leads.
            FailedPreconditionError: the task is at another step, has restarted, or was restored: claim it again.
            InternalError: a gradient that was promised is not here.
        """
        with self._changed:
            self._check_chief(session, check, generation)
            self._wanted = wanted or self._wanted
            if not wanted and self._members is not None:
                self._members &= set(decision.workers)
                self._changes += 1
            if self._last == decision and self._step == decision.step + 1:
                return self._step
            chosen = self._chosen(decision)
            self._decide(chosen)
            self._last = decision
            return self._now

    def _check_chief(self, session: int, check: Callable[[], None], generation: int) -> None:
        check()
        if not self._session or generation != self._generation:
            raise FailedPreconditionError(f"{self._name} has no chief, as it was restarted or restored")
        if session != self._session:
            raise FailedPreconditionError(f"{self._name} was claimed again")

    # -- life --------------------------------------------------------------------------------------------------

    def status(self) -> str:
        """The workers that the present step waits for, in words; empty when nothing waits."""
        with self._changed:
            return self._waiting_for(time.monotonic()) if self._contributions else ""

    def clear(self) -> None:
        """Ends everything that waits: the container was cleared."""
        with self._changed:
            self._ended = CancelledError
            self._changed.notify_all()
            self._gathered.notify_all()

    def end_client(self, client: int) -> None:
        """A session has ended: where workers come and go, its worker has."""
        with self._changed:
            self._miss({worker for worker, of in self._clients.items() if of == client})

    def retire(self, client: int, index: int) -> None:
        """A session has stopped training: its worker is not waited for, unless it gives gradients again.

        Args:
            client: the session.
            index: of its task: the number of its worker if it has given none yet.
        """
        with self._changed:
            known = {worker for worker, of in self._clients.items() if client and of == client}
            if self._rules.elastic:
                self._miss(known)
                return
            if not known and index not in self._clients and 0 <= index < self._rules.total:
                known = {index}
            self._retired |= known
            self._changed.notify_all()

    def _too_few(self) -> bool:
        """Whether an aggregate can never come together, as too many workers are through."""
        rules = self._rules
        given = [p.worker for p in self._contributions if p.worker in self._retired]  # they may have given some before
        most = (rules.total - len(self._retired)) * rules.each + len(given)
        return bool(self._retired) and rules.timeout_secs is None and most < rules.needed

    def set_finished(self, finished: bool) -> None:
        """Training has finished, so that missing workers will not come; or it has begun again."""
        with self._changed:
            if self._ended is not CancelledError:
                self._ended = OutOfRangeError if finished else None
                self._changed.notify_all()

    def _check_open(self) -> None:
        if self._ended is not None:
            over = "was cleared away" if self._ended is CancelledError else "waits no more: training is over"
            raise self._ended(f"{self._name} {over}")
        if self._too_few():
            through = sorted(self._retired)
            raise OutOfRangeError(
                f"{self._name} waits no more: {self._rules.needed} gradients are needed, and of {self._rules.total} "
                f"workers {through} are through with training"
            )


def _joined(arrays: Sequence[Array], out: Array) -> Array:
    """The mean of several workers' gradients; of integers, which are no gradients, all bits that any of them has."""
    if out.dtype.kind not in "iub":
        return reduce_in_order(list(arrays), MEAN, out=out)
    np.copyto(out, arrays[0])
    for array in arrays[1:]:
        np.bitwise_or(out, array, out=out)
    return out
