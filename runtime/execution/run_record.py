"""The run record: what a task knows of the training run that its variables belong to.

Between-graph training has no scheduler that everybody asks. What the workers must agree on lies beside the variables
instead, on every task that holds some: who leads, whether the variables may be used, who takes part and who is done.

The phases:

    new       nobody has led here yet; variables may be used as soon as they have values
    loading   a chief initialises or restores: half of the variables may be old, half new
    ready     training goes on
    finished  the chief has said that training is over

The fence. A chief that replaces the values of variables begins with ``load``. If there were values, that starts a new
generation of the task: stage calls that were registered in the generation before are refused with AbortedError. So a
gradient of the old values, on its way while the restore runs, can never be added to the restored ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from runtime.errors import AbortedError, InvalidArgumentError, PermissionDeniedError
from runtime.execution.cancel import Cancellation

NEW, LOADING, READY, FINISHED = "new", "loading", "ready", "finished"


class RunRecord:
    """The record of one task.

    Args:
        changed: the store's condition; its lock guards the record too, so that a fence and a stage cannot overlap.
        has_values: tells, under the lock, whether any variable of the store has a value.

    Attributes:
        generation: how often the values were replaced under sessions that were using them.
        expected: the tasks that must be done before ``when_all_done`` is called; a server sets it from its cluster.
        address: where this task is reached; a server sets it. For those who say on whom they wait.
        when_all_done: called once, without the lock, when every expected task is done and one of them asked the
            task to leave then.
        when_loading: called, under the lock, before the leader gives the variables new values.
        origin: why this task began without values, if it should have had some; for the log of a chief.
        finished_at: ``time.monotonic()`` when the run finished with the request to leave, else None.
    """

    def __init__(self, changed: threading.Condition, has_values: Callable[[], bool]) -> None:
        self.generation = 0
        self.expected: frozenset[str] = frozenset()
        self.address = ""
        self.when_all_done: Callable[[], None] | None = None
        self.when_loading: Callable[[], None] | None = None
        self.origin = ""
        self.finished_at: float | None = None
        self._changed = changed
        self._has_values = has_values
        self._leader = 0
        self._leader_name = ""
        self._leader_address = ""
        self._logdir = ""
        self._phase = NEW
        self._joined: dict[str, str] = {}  # with the address
        self._done: dict[str, None] = {}
        self._leave = False

    def request(self, message: Mapping[str, Any], task: str, cancelled: Cancellation) -> dict[str, Any]:
        """Carries out one request and gives the record as it is then.

        Args:
            message: ``action`` and its arguments; see the methods ``_on_...``.
            task: this task's name, for errors.
            cancelled: set when the asking session ends; a request that waits ends then.

        Returns:
            ``address`` (of this task), ``phase``, ``leader`` (0: nobody), ``leader_name``, ``leader_address``,
            ``generation``, ``joined`` and ``done`` (task names), ``addresses`` (of those who joined), ``origin``,
            ``logdir`` (of the run that the values belong to, empty when nobody has told).

        Raises:
            InvalidArgumentError: no such action.
            PermissionDeniedError: an order of somebody who does not lead any more.
            AbortedError: an order of somebody who took the lead before this task was started again.
            CancelledError: the session ended during a wait, or the caller hung up.
        """
        handler = getattr(self, f"_on_{message.get('action')}", None)
        if handler is None:
            raise InvalidArgumentError(f"the run record knows no action {message.get('action')!r}", task=task)
        with self._changed:
            handler(message, task, cancelled)
            self._changed.notify_all()
            left = self._everybody_done()
            answer = {
                "address": self.address,
                "phase": self._phase,
                "leader": self._leader,
                "leader_name": self._leader_name,
                "leader_address": self._leader_address,
                "generation": self.generation,
                "joined": list(self._joined),
                "addresses": {name: address for name, address in self._joined.items() if address},
                "done": list(self._done),
                "origin": self.origin,
                "logdir": self._logdir,
            }
        if left and self.when_all_done is not None:
            self.when_all_done()
        return answer

    @property
    def phase(self) -> str:
        """The phase."""
        return self._phase

    def state(self) -> dict[str, Any]:
        """All that another life of the task needs to go on from, as JSON can say it; call it under the lock."""
        return {
            "generation": self.generation,
            "leader": self._leader,
            "leader_name": self._leader_name,
            "leader_address": self._leader_address,
            "phase": self._phase,
            "logdir": self._logdir,
            "joined": dict(self._joined),
            "done": list(self._done),
            "leave": self._leave,
        }

    def take_up(self, state: Mapping[str, Any]) -> None:
        """Goes on from what ``state`` gave in an earlier life of the task."""
        with self._changed:
            self.generation = int(state["generation"])
            self._leader, self._leader_name = int(state["leader"]), str(state["leader_name"])
            self._leader_address = str(state["leader_address"])
            self._logdir = str(state.get("logdir", ""))
            self._phase, self._leave = str(state["phase"]), bool(state["leave"])
            self._joined, self._done = dict(state["joined"]), dict.fromkeys(state["done"])

    def _everybody_done(self) -> bool:
        everybody = self.expected | self._joined.keys()  # a worker that was added later is not in this task's cluster
        return self._leave and bool(self.expected) and everybody <= self._done.keys()

    def _check_leader(self, message: Mapping[str, Any], task: str) -> None:
        if not self._leader:  # a chief that takes the lead again finds out what is lost
            raise AbortedError("restarted since a chief took the lead here, its state is gone", task=task)
        if message["leader"] != self._leader:
            raise PermissionDeniedError(
                f"refused to {message['action']} for {message.get('name', 'a chief')}: {self._leader_name} has taken "
                "the lead",
                task=task,
            )

    def _wait(self, done: Callable[[], bool], message: Mapping[str, Any], cancelled: Cancellation) -> None:
        until = time.monotonic() + float(message["timeout_secs"])
        cancelled.wait_for(self._changed, done, "waiting for the run", until)

    # -- the actions -------------------------------------------------------------------------------------------

    def _on_look(self, message: Mapping[str, Any], task: str, cancelled: Cancellation) -> None:
        """Changes nothing."""

    def _on_claim(self, message: Mapping[str, Any], task: str, cancelled: Cancellation) -> None:
        """``leader`` (a random number) leads from now on; the orders of the one before are refused."""
        self._leader = int(message["leader"])
        self._leader_name = str(message.get("name", ""))
        self._leader_address = str(message.get("address", ""))

    def _on_load(self, message: Mapping[str, Any], task: str, cancelled: Cancellation) -> None:
        """The leader is about to give the variables values."""
        self._check_leader(message, task)
        if self.when_loading is not None:
            self.when_loading()
        self._phase = LOADING
        self._logdir = ""
        if self._has_values():
            self.generation += 1

    def _on_open(self, message: Mapping[str, Any], task: str, cancelled: Cancellation) -> None:
        """The variables may be used; they belong to the run in ``logdir``, where the leader has one."""
        self._check_leader(message, task)
        self._logdir = str(message.get("logdir", "")) or self._logdir
        if self._phase == FINISHED:
            self._done.clear()
            self._leave = False
            self.finished_at = None
        self.origin = ""
        self._phase = READY

    def _on_finish(self, message: Mapping[str, Any], task: str, cancelled: Cancellation) -> None:
        """Training is over. ``gone``: tasks that the leader does not expect to hear of again."""
        self._check_leader(message, task)
        self._phase = FINISHED
        self._done.update(dict.fromkeys(message.get("gone", ())))

    def _on_join(self, message: Mapping[str, Any], task: str, cancelled: Cancellation) -> None:
        """``task`` takes part; its ``address`` is for those who wait for it."""
        self._joined[str(message["task"])] = str(message.get("address", ""))
        self._done.pop(str(message["task"]), None)

    def _on_done(self, message: Mapping[str, Any], task: str, cancelled: Cancellation) -> None:
        """``task`` needs this one no more. ``leave``: this one may go when nobody does."""
        self._done[str(message["task"])] = None
        if message.get("leave"):
            self._leave = True
            if self._phase == FINISHED and self.finished_at is None:
                self.finished_at = time.monotonic()

    def _on_wait_loaded(self, message: Mapping[str, Any], task: str, cancelled: Cancellation) -> None:
        """Waits for ``timeout_secs`` at most until the phase is not loading."""
        self._wait(lambda: self._phase != LOADING, message, cancelled)

    def _on_wait_done(self, message: Mapping[str, Any], task: str, cancelled: Cancellation) -> None:
        """Waits for ``timeout_secs`` at most until all who joined, but ``task``, are done."""
        others = self._joined.keys() - {str(message["task"])}
        self._wait(lambda: others <= self._done.keys(), message, cancelled)
