"""The lead of a chief, and the leadership under which a session's orders go."""

import functools
from collections.abc import Callable, Collection, Mapping

from absl import logging

from runtime import concurrency
from runtime.errors import AbortedError
from runtime.proto.run_record_pb2 import RunOrder, RunReply
from runtime.state.leadership import EPOCHS_AT_ONCE, NOBODY, Leadership

CLAIM_TRIES = 10

Ask = Callable[[Leadership], Mapping[str, Leadership]]
"""A function that claims tasks for a leadership, and returns by task the obeyed leadership.

``NOBODY`` claims none.
"""


class Lead:
    """The lead of one chief over all tasks under its orders. Thread safe.

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
            held: Tasks that are not taken back. If another chief leads a held task, nothing is
                claimed, and the tasks refuse orders under the returned leadership.

        Raises:
            AbortedError: another chief keeps claiming the same tasks.
        """
        # The event is never set. Two chiefs that start together step aside for random times.
        wait = concurrency.Event()
        with self._lock:
            for attempt in range(CLAIM_TRIES):
                obeyed = ask(NOBODY)
                if any(obeyed[task] and obeyed[task].owner != self.owner for task in held):
                    return self.leadership
                claimed = Leadership(next_epoch(self.owner, obeyed.values()), self.owner)
                # A task accepts only a limited jump of the epoch, so that no claim can exhaust the
                # epochs.
                while (
                    lowest := min(leadership.epoch for leadership in obeyed.values())
                ) < claimed.epoch:
                    obeyed = ask(
                        Leadership(min(claimed.epoch, lowest + EPOCHS_AT_ONCE - 1), self.owner)
                    )
                if all(leadership == claimed for leadership in obeyed.values()):
                    if claimed != self.leadership:
                        logging.info(
                            "this task leads now, as chief number %d of the run", claimed.epoch
                        )
                    self.leadership, self.tasks = claimed, frozenset(obeyed)
                    return claimed
                wait.wait(concurrency.uniform(0.0, 0.05 * 2**attempt))
            raise AbortedError("another chief keeps claiming the same tasks: run one chief only")


def next_epoch(owner: int, obeyed: Collection[Leadership]) -> int:
    """Returns the epoch for a claim: the latest epoch if the chief owns it, else the epoch after."""
    latest = max(leadership.epoch for leadership in obeyed)
    owners = {leadership.owner for leadership in obeyed if leadership.epoch == latest}
    assert owner, "the number 0 is that of no chief"
    return latest if latest and owners == {owner} else latest + 1


class Authority:
    """The leadership for the orders of one session. Thread safe.

    Orders of a chief's session go under the chief's lead. Orders of any other session go under the
    leadership that each task obeys, so that no chief is deposed. A task without a leader is claimed
    for the session.

    Args:
        send: the function that sends an order to the run record of a task.
    """

    def __init__(self, send: Callable[[str, RunOrder], RunReply]) -> None:
        self._send = send
        self._owner = concurrency.random_id(62) + 1
        self._lock = concurrency.Lock()
        self._lead: Lead | None = None
        self._claimed = NOBODY
        self._tasks: frozenset[str] = frozenset()

    def lead_with(self, lead: Lead) -> None:
        """Puts all later orders under a chief's leadership."""
        with self._lock:
            self._lead, self._claimed = lead, NOBODY

    def over(self, tasks: Collection[str]) -> Mapping[str, Leadership]:
        """Returns, by task, the leadership for orders.

        A chief claims tasks without an earlier order.
        """
        with self._lock:
            lead = self._lead
            if lead is None:
                obeyed = self._ask_tasks(tasks, NOBODY)
                free = [task for task, leadership in obeyed.items() if not leadership]
                # The first session that claims a free task leads the task.
                return {**obeyed, **self._ask_tasks(free, Leadership(1, self._owner))}
            # The chief may have claimed a later epoch since the last order of this session.
            if self._claimed != lead.leadership or not self._tasks.issuperset(tasks):
                # Another session of the chief may claim tasks meanwhile, which are not asked here.
                held = lead.tasks
                wanted = held.union(tasks)
                self._claimed = lead.claim(functools.partial(self._ask_tasks, wanted), held)
                self._tasks = wanted
            assert self._tasks.issuperset(tasks), "a task is ordered without a claim"
            return dict.fromkeys(tasks, self._claimed)

    def _ask_tasks(self, tasks: Collection[str], leadership: Leadership) -> dict[str, Leadership]:
        def ask(task: str) -> Leadership:
            order = (
                RunOrder(claim=RunOrder.Claim())
                if leadership
                else RunOrder(inspect=RunOrder.Inspect())
            )
            order.leadership.CopyFrom(leadership.to_proto())
            return Leadership.from_proto(self._send(task, order).leadership)

        # All tasks are asked at once, so that the slowest task sets the time.
        return {
            task: reply.result()
            for task, reply in concurrency.call_all(ask, tasks, "run order to").items()
        }
