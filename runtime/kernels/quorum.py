"""The quorum of a task: the gradients of one synchronous step, applied once when enough distinct workers are in.

Each worker pushes its gradients with the step at which it read the variables. Those of the present step wait here; when
enough are in, their mean is applied, the step advances by one, and every waiting push is answered. A gradient of
another step is dropped and counted, and its worker told at once.

Who decides that enough are in? With one task the task itself, as the last gradient arrives. With several, the same
workers must be chosen on all of them, so a chief decides, in two phases: ``gather`` tells it whose gradients are here
and promises to keep them, ``commit`` applies those that it has chosen from what all tasks have.

The task that holds the step counter leads: the counter is the step. The chief commits there last. So whoever reads step
s from the leader reads variables of step s, or of a later one, everywhere; and in the second case the gradient comes
too late at the leader, where s is over. That is why the others need no counter of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from absl import logging

from runtime.errors import (
    AbortedError,
    CancelledError,
    FailedPreconditionError,
    OpError,
    OutOfRangeError,
    PermissionDeniedError,
)
from runtime.kernels.quorum_round import Round
from runtime.kernels.quorum_values import Array, Gathered, GradientCounts, Rules, Selection, Target
from runtime.state.cancellation import Cancellation

LOG_EVERY_SECS = 10.0


class QuorumResource:
    """Gradients of one step, from push to application. Thread safe.

    Args:
        name: for messages.
        rules: how many it needs.
    """

    def __init__(self, name: str, rules: Rules) -> None:
        self._name = name
        self._rules = rules
        # Pushes wait until their fate is known, a chief until there is enough: nobody is woken for nothing.
        lock = threading.RLock()
        self._changed, self._gathered = threading.Condition(lock), threading.Condition(lock)
        self._round = Round(name, rules, self._changed.notify_all)
        self._epoch = 0
        self._owner = 0
        self._wanted = rules.needed
        self._members: set[int] | None = None
        self._seen: set[int] = set()
        self._clients: dict[int, int] = {}  # by worker: the session of its last gradients
        self._retired: set[int] = set()
        self._log_at = 0.0
        self._ended: type[OpError] | None = None

    @property
    def counts(self) -> GradientCounts:
        """What has happened so far."""
        return self._round.counts

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
            gradients = self._round
            gradients.target = target
            before = gradients.now
            gradients.renew(target.generation)
            self._meet(worker)
            step = gradients.refresh(target.step() if self._rules.leads else max(stamp, gradients.now))
            if step < before:
                self._gathered.notify_all()
            if stamp != step:
                gradients.counts.dropped += 1
                return step, False
            if not gradients.contributions:
                self._log_at = time.monotonic() + LOG_EVERY_SECS
            contribution = gradients.add(worker, arrays)
            if len(gradients.contributions) >= self._wanted:
                self._gathered.notify_all()
            try:
                if self._rules.alone and self._enough():
                    gradients.decide(gradients.contributions[: self._needed()])
                if contribution.counted is None and gradients.workers.count(worker) < self._rules.each:
                    contribution.keep()  # its worker owes this step more, and computes on
                    return step, True
                self._wait(lambda: contribution.counted is not None, cancelled)
            except BaseException:
                gradients.withdraw(contribution)
                raise
            if contribution.fenced:
                raise AbortedError("its variables were restored or have lost their values since the session began")
            return gradients.now, bool(contribution.counted)

    def _meet(self, worker: int) -> None:
        self._seen.add(worker)
        if self._members is not None and worker not in self._members:
            self._members.add(worker)
            logging.info("%s: worker %d is back", self._name, worker)
            if len(self._members) >= self._rules.total:
                self._members = None

    def _wait(self, ready: Callable[[], bool], cancelled: Cancellation) -> None:
        """Waits; meanwhile says on whom, and gives up on those who are missing when it is time."""
        what = f"waiting for step {self._round.step} of {self._name}"
        while not cancelled.wait_for(
            self._changed, lambda: self._ended is not None or ready() or self._too_few(), what, self._next_look()
        ):
            now = time.monotonic()
            if now >= self._log_at:
                self._log_at = now + LOG_EVERY_SECS
                logging.info("%s", self._waiting_for(now))
            if self._rules.alone and self._round.contributions and now >= self._time_up():
                self._go_on_without()
        if not ready():
            self._check_open()

    def _next_look(self) -> float:
        return min(self._log_at, self._time_up()) if self._rules.alone else self._log_at

    def _time_up(self) -> float:
        limit = self._rules.timeout_secs
        return float("inf") if limit is None else self._round.since + limit

    def _waiting_for(self, now: float) -> str:
        here = sorted({p.worker for p in self._round.contributions})
        waited = f"{self._name}: step {self._round.step} waits for {now - self._round.since:.0f} s now"
        text = f"{waited}, gradients of workers {here} are in"
        missing = [w for w in range(self._rules.total) if w not in here]
        if not self._rules.alone and self._enough():
            return f"{text}; waiting for the chief to apply them"
        return f"{text}, {self._needed()} gradients are needed; missing: {missing}"

    def _go_on_without(self) -> None:
        here = {p.worker for p in self._round.contributions}
        logging.warning(
            "%s: step %s goes on after %.0f s with %d of %d gradients, of workers %s",
            self._name,
            self._round.step,
            self._rules.timeout_secs,
            len(self._round.contributions),
            self._rules.needed,
            sorted(here),
        )
        self._members = here
        self._round.decide(list(self._round.contributions))

    # -- the decision ------------------------------------------------------------------------------------------

    def _needed(self) -> int:
        needed = self._rules.needed if self._rules.alone else self._wanted
        return needed if self._members is None else min(needed, len(self._members) * self._rules.each)

    def _enough(self) -> bool:
        return len(self._round.contributions) >= self._needed()

    # -- the chief of several tasks ----------------------------------------------------------------------------

    def claim(
        self, owner: int, step_now: Callable[[], int], generation: int, wanted: int, forget: bool = False
    ) -> tuple[int, int, Selection | None]:
        """Makes the caller the chief: what an earlier one orders from now on is refused.

        Args:
            owner: a number that the chief has drawn for itself.
            step_now: reads the step counter, where this task leads.
            generation: of the task's variables.
            wanted: how many gradients make a decision worth while.
            forget: drop what is here: it does not fit what the leader has.

        Returns:
            The epoch of the new chief, the step, and the last decision of this task.
        """
        with self._changed:
            self._epoch += 1
            self._owner = owner
            self._wanted = wanted
            self._round.renew(generation)
            if forget:
                self._round.forget()
            if self._rules.leads:
                self._round.refresh(step_now())
            self._gathered.notify_all()
            return self._epoch, self._round.now, self._round.last

    def gather(
        self,
        chief: tuple[int, int],
        generation: int,
        known: tuple[int, int],
        cancelled: Cancellation,
        limit_secs: float = LOG_EVERY_SECS,
    ) -> Gathered:
        """Waits until there is something to decide, tells whose gradients are here, and promises to keep these.

        That is when as many gradients are here as the chief has asked for, and more of this step than it knows.

        Args:
            chief: the caller's number and epoch.
            generation: of the task's variables.
            known: the step, and how many gradients of it, that the caller knows of.
            cancelled: ends the wait.
            limit_secs: after so long, tells what there is.

        Raises:
            PermissionDeniedError: another chief has taken over.
            FailedPreconditionError: the task has restarted, its variables were restored, or the caller has claimed it
                again: go on from a new claim.
        """

        def ready() -> bool:
            step, count = self._round.now, len(self._round.contributions)
            return (
                self._ended is CancelledError
                or chief != (self._owner, self._epoch)
                or step < known[0]
                or count >= self._wanted
                and (step > known[0] or count > known[1])
            )

        with self._changed:
            until = time.monotonic() + limit_secs
            cancelled.wait_for(self._gathered, ready, f"waiting for gradients in {self._name}", until)
            if self._ended is CancelledError:
                self._check_open()
            self._check_chief(chief, generation)
            for contribution in self._round.contributions:
                contribution.promised = True
            seen, self._seen = tuple(sorted(self._seen)), set()
            waited = time.monotonic() - self._round.since if self._round.contributions else 0.0
            return Gathered(self._round.now, tuple(p.worker for p in self._round.contributions), seen, waited)

    def commit(self, chief: tuple[int, int], generation: int, decision: Selection, wanted: int) -> int:
        """Applies the gradients that a chief has chosen. Applying the last decision again does nothing.

        Args:
            chief: the caller's number and epoch.
            generation: of the task's variables.
            decision: the step, and whose gradients of it to apply.
            wanted: how many gradients make the next decision worth while.

        Returns:
            The step afterwards.

        Raises:
            PermissionDeniedError: another chief has taken over.
            FailedPreconditionError: the task is at another step, has restarted, or was restored: claim it again.
            InternalError: a gradient that was promised is not here.
        """
        with self._changed:
            self._check_chief(chief, generation)
            self._wanted = wanted
            if self._round.last == decision and self._round.step == decision.step + 1:
                return self._round.step
            chosen = self._round.chosen(decision)
            self._round.decide(chosen)
            self._round.last = decision
            return self._round.now

    def _check_chief(self, chief: tuple[int, int], generation: int) -> None:
        if not self._epoch or generation != self._round.generation:
            raise FailedPreconditionError(f"{self._name} has no chief, as it was restarted or restored")
        if chief[0] == self._owner and chief[1] != self._epoch:
            raise FailedPreconditionError(f"{self._name} was claimed again")
        if chief[0] != self._owner:
            raise PermissionDeniedError(f"{self._name}: another chief has taken over")

    # -- life --------------------------------------------------------------------------------------------------

    def status(self) -> str:
        """Whom the present step waits for, in words; empty when nobody waits."""
        with self._changed:
            return self._waiting_for(time.monotonic()) if self._round.contributions else ""

    def clear(self) -> None:
        """Ends everything that waits: the container was cleared."""
        with self._changed:
            self._ended = CancelledError
            self._changed.notify_all()
            self._gathered.notify_all()

    def retire(self, client: int, index: int) -> None:
        """A session trains no more: its worker gives no gradients, unless it does after all.

        Args:
            client: the session.
            index: of its task: the number of its worker if it has given none yet.
        """
        with self._changed:
            known = {worker for worker, of in self._clients.items() if client and of == client}
            if not known and index not in self._clients and 0 <= index < self._rules.total:
                known = {index}
            self._retired |= known
            self._changed.notify_all()

    def _too_few(self) -> bool:
        """Whether an aggregate can never come together, as too many workers are through."""
        rules = self._rules
        given = [
            p.worker for p in self._round.contributions if p.worker in self._retired
        ]  # they may have given some before
        most = (rules.total - len(self._retired)) * rules.each + len(given)
        return bool(self._retired) and rules.timeout_secs is None and most < rules.needed

    def set_finished(self, finished: bool) -> None:
        """Training is over, so that the workers that are missing will not come; or it goes on."""
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
