"""The lead of a chief, and the leadership under which a session's orders go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping

from absl import logging

from runtime import concurrency
from runtime.errors import AbortedError
from runtime.proto.run_record_pb2 import RunOrder, RunReply
from runtime.state.leadership import EPOCHS_AT_ONCE, NOBODY, Leadership

CLAIM_TRIES = 10

Ask = Callable[[Leadership], Mapping[str, Leadership]]
"""Claims tasks for a leadership, or only asks them for ``NOBODY``; returns by task the leadership it obeys."""


class Lead:
    """The lead of one chief, over all tasks that the chief gives orders to. Thread safe.

    Attributes:
        owner: the chief's number.
        leadership: The leadership of the chief's orders; ``NOBODY`` before the first claim.
        tasks: Names of the claimed tasks.
    """

    def __init__(self) -> None:
        self.owner = concurrency.random_id(62) + 1
        self.leadership = NOBODY
        self.tasks: frozenset[str] = frozenset()
        self._lock = concurrency.Lock()

    def claim(self, ask: Ask, held: Collection[str] = ()) -> Leadership:
        """Takes the lead over tasks under one epoch: the present epoch, unless a task has seen a later one.

        Args:
            ask: Function that reaches the tasks.
            held: Tasks that are not taken back: if another chief leads one of them, nothing is claimed, and the tasks
                refuse orders under the leadership that is returned.

        Raises:
            AbortedError: another chief keeps claiming the same tasks.
        """
        # Never set: two chiefs that start together step aside for random times.
        wait = concurrency.Event()
        with self._lock:
            for attempt in range(CLAIM_TRIES):
                obeyed = ask(NOBODY)
                if any(obeyed[task] and obeyed[task].owner != self.owner for task in held):
                    return self.leadership
                claimed = Leadership(next_epoch(self.owner, obeyed.values()), self.owner)
                while (lowest := min(leadership.epoch for leadership in obeyed.values())) < claimed.epoch:
                    obeyed = ask(Leadership(min(claimed.epoch, lowest + EPOCHS_AT_ONCE - 1), self.owner))
                if all(leadership == claimed for leadership in obeyed.values()):
                    if claimed != self.leadership:
                        logging.info("this task leads now, as chief number %d of the run", claimed.epoch)
                    self.leadership, self.tasks = claimed, frozenset(obeyed)
                    return claimed
                wait.wait(concurrency.uniform(0.0, 0.05 * 2**attempt))
            raise AbortedError("another chief keeps claiming the same tasks: run one chief only")


def next_epoch(owner: int, obeyed: Collection[Leadership]) -> int:
    """Returns the epoch under which a chief claims tasks: its own if that is the latest, else a later one."""
    latest = max(leadership.epoch for leadership in obeyed)
    owners = {leadership.owner for leadership in obeyed if leadership.epoch == latest}
    return latest if latest and owners == {owner} else latest + 1


class Authority:
    """The leadership under which the orders of one session go. Thread safe.

    Orders of a chief's session go under the chief's lead. Orders of any other session go under the leadership that each
    task obeys, so that they depose no chief; a task without a leader is claimed for the session.

    Args:
        send: gives a task an order to its run record.
    """

    def __init__(self, send: Callable[[str, RunOrder], RunReply]) -> None:
        self._send = send
        self._owner = concurrency.random_id(62) + 1
        self._lock = concurrency.Lock()
        self._lead: Lead | None = None
        self._claimed = NOBODY
        self._tasks: frozenset[str] = frozenset()

    def lead_with(self, lead: Lead) -> None:
        """Has orders go under a chief's leadership from now on, and under no other."""
        with self._lock:
            self._lead, self._claimed = lead, NOBODY

    def over(self, tasks: Collection[str]) -> Mapping[str, Leadership]:
        """Returns, by task, the leadership for orders; a chief claims tasks that it has not ordered before."""
        with self._lock:
            lead = self._lead
            if lead is None:
                obeyed = self._ask(tasks, NOBODY)
                free = [task for task, leadership in obeyed.items() if not leadership]
                return {**obeyed, **self._ask(free, Leadership(1, self._owner))}  # whoever comes first leads
            if self._claimed != lead.leadership or not self._tasks.issuperset(tasks):
                wanted = lead.tasks.union(tasks)
                self._claimed, self._tasks = lead.claim(functools.partial(self._ask, wanted), lead.tasks), wanted
            return dict.fromkeys(tasks, self._claimed)

    def _ask(self, tasks: Collection[str], leadership: Leadership) -> dict[str, Leadership]:
        def ask(task: str) -> Leadership:
            order = RunOrder(claim=RunOrder.Claim()) if leadership else RunOrder(inspect=RunOrder.Inspect())
            order.leadership.CopyFrom(leadership.to_proto())
            return Leadership.from_proto(self._send(task, order).leadership)

        return {task: reply.result() for task, reply in concurrency.call_all(ask, tasks, "run order to").items()}
