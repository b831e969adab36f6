"""The chief of synchronous steps over several ps: chooses each aggregate, and has it applied on all of them."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from absl import logging

import runtime as rt
from harness.coordinator import Coordinator
from harness.sync_decision import Claimed, Report, choose, rejoined, settle

_RETRY_SECS = 0.5
_RELEASE_SECS = 2.0


@dataclass(frozen=True)
class Orders:
    """The operations by which a chief commands one quorum.

    Attributes:
        takeover: placeholder, int64[2]: the chief's number, and whether to forget.
        claim: gives (epoch, step, step of the last decision) and the workers of that decision.
        request: placeholder, int64[4].
        gather: gives the step, the workers whose gradients are there, and the workers heard of.
        order: placeholder, int64.
        commit: gives the step afterwards.
    """

    takeover: rt.Tensor
    claim: tuple[rt.Tensor, rt.Tensor]
    request: rt.Tensor
    gather: tuple[rt.Tensor, rt.Tensor, rt.Tensor]
    order: rt.Tensor
    commit: rt.Tensor


def orders(quorum: rt.Quorum) -> Orders:
    """Makes the operations of one quorum."""
    with rt.device(None), rt.control_dependencies(None):
        takeover = rt.placeholder(np.int64, [2], name=f"{quorum.name}/takeover")
        request = rt.placeholder(np.int64, [4], name=f"{quorum.name}/request")
        order = rt.placeholder(np.int64, [None], name=f"{quorum.name}/order")
        return Orders(takeover, quorum.claim(takeover), request, quorum.gather(request), order, quorum.commit(order))


class SyncRunner:
    """Runs beside training on the chief, as a queue runner does: one thread listens to each ps, one decides.

    With one ps that ps decides by itself, and there is nothing to run.

    Args:
        tasks: the orders of each ps, the one that holds the global step first; empty when there is one ps.
        needed: gradients in an aggregate.
        total: workers.
        timeout_secs: see ``SyncReplicas``.
        name: for messages.
    """

    def __init__(
        self, tasks: Sequence[Orders], *, needed: int, total: int, timeout_secs: float | None, name: str
    ) -> None:
        self.name = name
        self._tasks = list(tasks)
        self._needed = needed
        self._total = total
        self._each = -(-needed // total)
        self._timeout_secs = timeout_secs
        self._owner = secrets.randbits(62) + 1
        self._changed = threading.Condition()
        self._reports = [Report() for _ in tasks]
        self._epochs: list[int] = []
        self._lost: BaseException | None = None
        self._claim_count = 0
        self._members: frozenset[int] | None = None
        self._running: rt.Session | None = None

    def create_threads(
        self, sess: rt.Session, coord: Coordinator | None = None, daemon: bool = False, start: bool = False
    ) -> list[threading.Thread]:
        """Makes the threads.

        Args:
            sess: the session that they run in.
            coord: gets their errors, and stops them.
            daemon: whether they may be left behind when the process ends.
            start: whether to start them.

        Returns:
            The threads; none with one ps, or when those of an earlier call still run.
        """
        if not self._tasks:
            return []
        coord = coord or Coordinator()
        with self._changed:
            if self._running is not None:
                return []
            self._running = sess
            self._epochs = []
        threads = [threading.Thread(target=self._decide_all, args=(sess, coord), name=f"{self.name}-decide")]
        threads += [
            threading.Thread(target=self._listen_all, args=(i, sess, coord), name=f"{self.name}-listen-{i}")
            for i in range(len(self._tasks))
        ]
        threads.append(threading.Thread(target=self._release, args=(sess, coord), name=f"{self.name}-release"))
        for thread in threads:
            thread.daemon = daemon
            coord.register_thread(thread)
            if start:
                thread.start()
        return threads

    # -- deciding ----------------------------------------------------------------------------------------------

    def _decide_all(self, sess: rt.Session, coord: Coordinator) -> None:
        try:
            while not coord.should_stop():
                try:
                    self._claim(sess)
                    self._decide(sess, coord)
                except (rt.FailedPreconditionError, rt.CancelledError) as error:
                    if coord.should_stop():
                        return
                    logging.info("%s: starts again: %s", self.name, error)
                    coord.wait_for_stop(_RETRY_SECS)
        except Exception as error:
            if not coord.should_stop():
                coord.request_stop(error)
        finally:
            with self._changed:
                self._running = None
                self._changed.notify_all()

    def _claim(self, sess: rt.Session) -> None:
        """Takes the lead on all ps, and brings them to one step."""
        with self._changed:
            self._epochs = []
        claims = self._claims(sess, [False] * len(self._tasks))
        plan = settle(claims)
        if plan.behind:
            logging.warning("%s: step %d was applied on some ps only; applying it on the others", self.name, plan.step)
            for i in plan.behind:
                self._commit(sess, [i], plan.step, plan.workers)
        if plan.forget:
            claims = self._claims(sess, [i in plan.forget for i in range(len(self._tasks))])
        with self._changed:
            self._reports = [Report(-2) for _ in self._tasks]
            self._claim_count += 1
            self._lost = None
            self._changed.notify_all()

    def _claims(self, sess: rt.Session, forget: Sequence[bool]) -> list[Claimed]:
        feeds = {
            task.takeover: np.array([self._owner, flag], np.int64)
            for task, flag in zip(self._tasks, forget, strict=True)
        }
        answers = sess.run([task.claim for task in self._tasks], feeds)
        found = []
        epochs = []
        for numbers, workers in answers:
            epoch, step, decided = (int(n) for n in numbers)
            epochs.append(epoch)
            found.append(Claimed(step, decided, tuple(int(w) for w in workers)))
        self._epochs = epochs
        return found

    def _decide(self, sess: rt.Session, coord: Coordinator) -> None:
        waiting_since: float | None = None
        while not coord.should_stop():
            with self._changed:
                if self._lost is not None:
                    raise self._lost
                reports = list(self._reports)
                until = (
                    None if waiting_since is None or self._timeout_secs is None else waiting_since + self._timeout_secs
                )
                up = until is not None and time.monotonic() >= until
                choice = choose(reports[0], reports[1:], self._needed, self._members, self._each, up)
                if not choice.workers:
                    if waiting_since is None and reports[0].workers:
                        waiting_since = time.monotonic()
                    elif until is None or not up:
                        self._changed.wait(None if until is None else until - time.monotonic())
                    else:
                        self._changed.wait()  # time is up, and there is nothing to go on with
                    continue
                if up and len(choice.workers) < self._needed:
                    self._members = frozenset(choice.workers)
            if up:
                logging.warning(
                    "%s: step %d goes on without all workers: %s", self.name, reports[0].step, choice.reason
                )
            # The leader last: see the quorum.
            self._commit(sess, range(1, len(self._tasks)), reports[0].step, choice.workers)
            self._commit(sess, [0], reports[0].step, choice.workers)
            waiting_since = None

    def _commit(self, sess: rt.Session, which: Any, step: int, workers: Sequence[int]) -> None:
        feeds = {
            self._tasks[i].order: np.array([self._owner, self._epochs[i], step, *workers], np.int64) for i in which
        }
        sess.run([self._tasks[i].commit for i in which], feeds)
        with self._changed:
            for i in which:
                if self._reports[i].step == step:
                    self._reports[i] = Report(step + 1)

    # -- listening ---------------------------------------------------------------------------------------------

    def _listen_all(self, index: int, sess: rt.Session, coord: Coordinator) -> None:
        heard_of = 0
        try:
            while not coord.should_stop():
                with self._changed:
                    if self._running is None:
                        return
                    if self._claim_count == heard_of:
                        self._changed.wait(_RETRY_SECS)
                        continue
                    heard_of, epoch = self._claim_count, self._epochs[index]
                try:
                    self._listen(index, epoch, heard_of, sess, coord)
                except (rt.FailedPreconditionError, rt.CancelledError) as error:
                    self._lose(error, heard_of)
        except Exception as error:
            if not coord.should_stop():
                coord.request_stop(error)
                self._lose(error, heard_of)

    def _listen(self, index: int, epoch: int, claim: int, sess: rt.Session, coord: Coordinator) -> None:
        task = self._tasks[index]
        step, count = -2, 0
        while not coord.should_stop():
            known = np.array([self._owner, epoch, step, count], np.int64)
            found, workers, seen = sess.run(task.gather, {task.request: known})
            step, count = int(found[0]), len(workers)
            with self._changed:
                if self._claim_count != claim:
                    return
                if step >= self._reports[index].step:
                    self._reports[index] = Report(step, tuple(int(w) for w in workers))
                self._members = rejoined(self._members, [int(w) for w in seen], self._total)
                self._changed.notify_all()

    def _lose(self, error: BaseException, claim: int) -> None:
        with self._changed:
            if self._claim_count == claim:
                self._lost = error
                self._changed.notify_all()

    def _release(self, sess: rt.Session, coord: Coordinator) -> None:
        """At a stop, ends the waits of the listeners: a claim takes the lead away from this runner."""
        coord.wait_for_stop()
        with self._changed:
            self._changed.notify_all()
        raw = getattr(sess, "raw", sess)
        try:
            feeds = {task.takeover: np.array([self._owner, False], np.int64) for task in self._tasks}
            raw.run([task.claim for task in self._tasks], feeds, timeout_secs=_RELEASE_SECS)
        except (rt.OpError, RuntimeError) as error:  # the session or a ps may be gone
            logging.info("%s: releasing the ps: %s", self.name, error)
