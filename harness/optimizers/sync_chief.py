"""The chief of synchronous steps over several ps: chooses each aggregate, and has it applied on all of them."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from absl import logging

import runtime as rt
from harness.coordinator import Coordinator, create_threads, underlying
from harness.optimizers import times
from harness.optimizers.sync_policy import ClaimReply, TaskProgress, choose, rejoined, settle
from harness.training.start.managed_session import is_chief
from runtime import concurrency

_LISTEN_MILLIS = 10_000
_NOTHING = TaskProgress(-2)
_NORM_BITS = 5
"""The place of the squared norm in an order; see ``runtime.lowlevel.Quorum.commit``."""


@dataclass(frozen=True)
class QuorumOrders:
    """The operations by which a chief commands one quorum; see ``runtime.lowlevel.Quorum``.

    Attributes:
        beside: a variable on the quorum's task.
        takeover: placeholder of ``claim``.
        claim: operation that begins a session of the chief.
        request: placeholder of ``gather``.
        gather: operation that waits for news of the quorum.
        order: placeholder of ``norm`` and ``commit``.
        norm: operation that returns the squared norm of this ps's part of the chosen mean.
        commit: operation that applies the chosen gradients; on the leader, after the commits of all
            other tasks.
        follow: operation that applies the chosen gradients on this ps alone.
        status: operation that changes nothing.
    """

    beside: rt.Variable
    takeover: rt.Tensor
    claim: tuple[rt.Tensor, rt.Tensor]
    request: rt.Tensor
    gather: tuple[rt.Tensor, rt.Tensor, rt.Tensor]
    order: rt.Tensor
    norm: rt.Tensor
    commit: rt.Tensor
    follow: rt.Tensor
    status: rt.Tensor


def make_orders(quorums: Sequence[rt.lowlevel.Quorum]) -> list[QuorumOrders]:
    """Makes the operations of several quorums, the leader's first."""
    made: list[QuorumOrders] = []
    with rt.device(None):
        for quorum in reversed(quorums):
            takeover = rt.placeholder(np.int64, [4], name=f"{quorum.name}/takeover")
            request = rt.placeholder(np.int64, [7], name=f"{quorum.name}/request")
            order = rt.placeholder(np.int64, [None], name=f"{quorum.name}/order")
            claim, gather = quorum.claim(takeover), quorum.gather(request)
            follow = commit = quorum.commit(order)
            # The leader commits last: while it is at step s, every other task has the variables of
            # step s or later.
            if quorum is quorums[0]:
                with rt.control_dependencies([o.commit for o in made]):
                    commit = quorum.commit(order)
            made.insert(
                0,
                QuorumOrders(
                    quorum.beside,
                    takeover,
                    claim,
                    request,
                    gather,
                    order,
                    quorum.norm(order),
                    commit,
                    follow,
                    quorum.status(),
                ),
            )
    assert made[0].beside is quorums[0].beside, "the leader stands first"
    return made


class SyncRunner:
    """The chief's threads beside training, one for each ps, which listen and decide as queue runners do.

    With one ps, the ps decides by itself, and there is nothing to run.

    Args:
        tasks: the orders of each ps, the one that holds the global step first; empty when there is
            one ps.
        needed: gradients in an aggregate.
        total: workers.
        timeout_secs: see ``SyncReplicas``.
        name: for messages.
        elastic: True if workers come and go. Then the ps with the global step knows which workers
            are there.
        clips: True if the mean is clipped, so that each decision needs its norm.
        leads: True if this task leads where its session is part of no run. In a run, the chief of
            the run leads.
    """

    def __init__(
        self,
        tasks: Sequence[QuorumOrders],
        *,
        needed: int,
        total: int,
        timeout_secs: float | None,
        name: str,
        elastic: bool = False,
        clips: bool = False,
        leads: bool = True,
    ) -> None:
        self.leads = leads
        self.name = name
        self.tasks = list(tasks)
        self._needed = needed
        self._total = total
        self._elastic = elastic
        self._clips = clips
        self._each = 1 if elastic else -(-needed // total)
        # For each task, the number of changes of its workers that this chief has seen.
        self._changes = [0 for _ in tasks]
        self._timeout_secs = timeout_secs
        # Held during a commit, so that two threads never choose the same gradients.
        self._deciding = concurrency.Lock()
        # Guards the fields below.
        self._changed = concurrency.Condition()
        self._reports = [_NOTHING for _ in tasks]
        # For each task, epoch and owner.
        self._leaderships: list[tuple[int, int]] = []
        self._sessions: list[int] = []
        self._claim_count = 0
        self._lost: BaseException | None = None
        self._members: frozenset[int] | None = None
        self._running = False

    def create_threads(
        self,
        sess: rt.Session,
        coord: Coordinator | None = None,
        daemon: bool = False,
        start: bool = False,
    ) -> list[concurrency.Thread]:
        """Makes the threads.

        Args:
            sess: the session of the threads.
            coord: coordinator that receives errors of the threads and stops the threads.
            daemon: True if the process may end while the threads run.
            start: True to start the threads.

        Returns:
            The threads; none with one ps, on a task that is not the chief, or while threads of an
            earlier call run.
        """
        if not self.tasks or not is_chief(sess, self.leads):
            return []
        coord = coord or Coordinator()
        with self._changed:
            # Supervisor and program may both start the queue runners.
            if self._running:
                return []
            self._running = True
        calls = {f"{self.name}-lead": functools.partial(self._lead_steps, sess, coord)}
        for i in range(len(self.tasks)):
            calls[f"{self.name}-listen-{i}"] = functools.partial(self._listen_all, i, sess, coord)
        calls[f"{self.name}-release"] = functools.partial(self._release_tasks, sess, coord)
        return create_threads(calls, self.name, coord, daemon=daemon, start=start)

    # -- beginning a session -----------------------------------------------------------------------

    def _lead_steps(self, sess: rt.Session, coord: Coordinator) -> None:
        """Claims all ps, again after each loss of a ps, and ends steps that have waited for too long."""
        try:
            while not coord.should_stop():
                try:
                    self._claim_tasks(sess)
                    self._watch_step(sess, coord)
                except (rt.FailedPreconditionError, rt.CancelledError) as error:
                    if not coord.should_stop():
                        logging.info("%s: starts again: %s", self.name, error)
                        coord.wait_for_stop(times.RETRY_SECS)
        except Exception as error:
            if not coord.should_stop():
                coord.request_stop(error)
        finally:
            with self._changed:
                self._running = False
                self._changed.notify_all()

    def _claim_tasks(self, sess: rt.Session) -> None:
        """Begins a session on all ps, and brings them to one step."""
        self._leaderships = self._leadership_of_tasks(sess)
        plan = settle(self._send_claims(sess, ()))
        if plan.behind:
            logging.warning(
                "%s: step %d was applied on some ps only: the others follow", self.name, plan.step
            )
            assert plan.behind[-1] == 0, "the leader follows last"
            for i in plan.behind:
                sess.run(
                    self.tasks[i].follow,
                    {self.tasks[i].order: self._order_feed(i, plan.step, plan.decision)},
                )
        if plan.forget:
            # Another task has refused gradients that wait at the leader: their workers must push
            # again.
            self._send_claims(sess, (0, *plan.forget))
        with self._changed:
            self._reports = [_NOTHING for _ in self.tasks]
            self._lost = None
            self._claim_count += 1
            self._changed.notify_all()

    def _leadership_of_tasks(self, sess: rt.Session) -> list[tuple[int, int]]:
        """Returns epoch and owner of the leadership under which to order each ps."""
        placed = sess.placement([task.beside for task in self.tasks])
        names = [placed[task.beside].task_name for task in self.tasks]
        try:
            under = sess.authority.over(names)
        except (rt.UnavailableError, rt.AbortedError) as error:
            # A session recovers within a step only, so a step that changes nothing is run.
            sess.run([task.status for task in self.tasks])
            raise rt.FailedPreconditionError(error.message, task=error.task) from error
        return [(under[name].epoch, under[name].owner) for name in names]

    def _send_claims(self, sess: rt.Session, forget: Sequence[int]) -> list[ClaimReply]:
        assert len(self._leaderships) == len(self.tasks), "every ps obeys before it is claimed"
        answers = sess.run([task.claim for task in self.tasks], self._takeover_feeds(forget))
        self._sessions = [int(numbers[0]) for numbers, _ in answers]
        return [
            ClaimReply(int(n[1]), int(n[2]), tuple(int(d) for d in decision))
            for n, decision in answers
        ]

    def _takeover_feeds(self, forget: Sequence[int]) -> dict[rt.Tensor, np.ndarray]:
        wanted = self._wanted_gradients()
        return {
            task.takeover: np.array([*self._leaderships[i], wanted, i in forget], np.int64)
            for i, task in enumerate(self.tasks)
        }

    def _wanted_gradients(self) -> int:
        """Returns the number of gradients to request.

        Where workers come and go, the ps counts the workers itself.
        """
        whole = self._elastic or self._members is None
        return self._needed if whole else self._aggregate_size()

    def _aggregate_size(self) -> int:
        """Returns the number of gradients in an aggregate now."""
        return (
            self._needed
            if self._members is None
            else min(self._needed, len(self._members) * self._each)
        )

    def _watch_step(self, sess: rt.Session, coord: Coordinator) -> None:
        wait = self._timeout_secs
        while not coord.should_stop():
            with self._changed:
                claim = self._claim_count
                step = self._reports[0].step
                self._changed.wait_for(lambda: self._lost is not None or coord.should_stop(), wait)
                if self._lost is not None:
                    raise self._lost
                moved = self._reports[0].step != step
            if self._timeout_secs is None or coord.should_stop():
                continue
            # The next look comes when the step has waited for the whole time. The ps measures from
            # its first gradient.
            waited = 0.0 if moved else self._choose_late(sess, claim)
            wait = max(0.05, self._timeout_secs - waited)

    def _choose_late(self, sess: rt.Session, claim: int) -> float:
        """Asks all ps for their gradients, and decides when time is up; returns how long the step has waited."""
        waited = [
            self._gather_report(i, sess, claim, _NOTHING.step, 0, 0) for i in range(len(self.tasks))
        ][0]
        if self._timeout_secs is not None and waited >= self._timeout_secs:
            self._decide_step(sess, claim, time_is_up=True)
            return 0.0
        return waited

    # -- listening and deciding --------------------------------------------------------------------

    def _listen_all(self, index: int, sess: rt.Session, coord: Coordinator) -> None:
        claim = 0
        try:
            while not coord.should_stop():
                with self._changed:
                    if not self._running:
                        return
                    if self._claim_count == claim or self._lost is not None:
                        self._changed.wait(times.RETRY_SECS)
                        continue
                    claim = self._claim_count
                try:
                    self._listen_once(index, sess, claim, coord.should_stop)
                except (rt.FailedPreconditionError, rt.CancelledError) as error:
                    self._note_loss(error, claim)
        except Exception as error:
            if not coord.should_stop():
                coord.request_stop(error)
                self._note_loss(error, claim)

    def _listen_once(
        self, index: int, sess: rt.Session, claim: int, should_stop: Callable[[], bool]
    ) -> None:
        # Below every step, so that the first report comes at once.
        step, count = _NOTHING.step, 0
        while not should_stop() and self._claim_count == claim:
            self._gather_report(index, sess, claim, step, count, _LISTEN_MILLIS)
            self._decide_step(sess, claim)
            with self._changed:
                step, count = self._reports[index].step, len(self._reports[index].workers)

    def _gather_report(
        self, index: int, sess: rt.Session, claim: int, step: int, count: int, limit_millis: int
    ) -> float:
        """Takes the report of a ps; returns for how many seconds the present step of the ps has waited."""
        task = self.tasks[index]
        known = self._sessions[index], step, count, self._changes[index]
        request = np.array([*self._leaderships[index], *known, limit_millis], np.int64)
        (found, millis, changes), workers, seen = sess.run(task.gather, {task.request: request})
        with self._changed:
            if self._claim_count == claim:
                self._changes[index] = int(changes)
                # A step below the requested step: the variables were initialised again. A step
                # below the known step: the report is older than a commit, and is dropped.
                if int(found) < step or int(found) >= self._reports[index].step:
                    self._reports[index] = TaskProgress(int(found), tuple(int(w) for w in workers))
                if not self._elastic:
                    self._members = rejoined(self._members, [int(w) for w in seen], self._total)
                elif index == 0:
                    self._members = frozenset(int(w) for w in seen)
        return float(millis) / 1000

    def _decide_step(self, sess: rt.Session, claim: int, time_is_up: bool = False) -> None:
        """Applies the next aggregate if it can be chosen."""
        with self._deciding:
            with self._changed:
                if self._claim_count != claim:
                    return
                leader, others = self._reports[0], self._reports[1:]
                if leader.workers and any(o.step > leader.step for o in others):
                    raise rt.FailedPreconditionError(f"{self.name}: the global step has gone back")
                workers = choose(leader, others, self._aggregate_size(), time_is_up)
                if not workers:
                    return
                assert len(workers) <= self._aggregate_size()
                wanted = self._wanted_gradients()
                if time_is_up and len(workers) < self._aggregate_size():
                    few = f"only {len(workers)} of {self._aggregate_size()} gradients came in time"
                    logging.warning(
                        "%s: step %d goes on without all workers: %s", self.name, leader.step, few
                    )
                    wanted = 0 if self._elastic else len(workers)
                    self._members = frozenset(workers)
                feeds = {
                    t.order: self._order_feed(i, leader.step, (0, *workers), wanted)
                    for i, t in enumerate(self.tasks)
                }
            if self._clips:
                self._add_norm(sess, feeds)
            sess.run([task.commit for task in self.tasks], feeds)
            with self._changed:
                if self._claim_count == claim:
                    # A task may have reported the next step already.
                    after = TaskProgress(leader.step + 1)
                    self._reports = [r if r.step > leader.step else after for r in self._reports]

    def _add_norm(self, sess: rt.Session, orders: dict[rt.Tensor, np.ndarray]) -> None:
        """Adds the squared norm of the mean to the orders; the promised gradients stay for any chief."""
        parts = sess.run([task.norm for task in self.tasks], orders)
        for order in orders.values():
            order[_NORM_BITS] = np.sum(parts).view(np.int64)

    def _order_feed(
        self, index: int, step: int, decision: Sequence[int], wanted: int | None = None
    ) -> np.ndarray:
        wanted = self._wanted_gradients() if wanted is None else wanted
        return np.array(
            [*self._leaderships[index], self._sessions[index], wanted, step, *decision], np.int64
        )

    def _note_loss(self, error: BaseException, claim: int) -> None:
        with self._changed:
            if self._claim_count == claim and self._lost is None:
                self._lost = error
                self._changed.notify_all()

    def _release_tasks(self, sess: rt.Session, coord: Coordinator) -> None:
        """Ends the waits of the listeners at a stop.

        Their session ends when another one begins.
        """
        coord.wait_for_stop()
        with self._changed:
            self._changed.notify_all()
        if not self._sessions:
            return
        try:
            underlying(sess).run(
                [task.claim for task in self.tasks],
                self._takeover_feeds(()),
                timeout_secs=times.RELEASE_SECS,
            )
        except (rt.OpError, RuntimeError) as error:
            # The session may be closed, or a ps may have stopped, which ends the waits as well.
            logging.info("%s: releasing the ps: %s", self.name, error)
