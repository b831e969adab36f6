"""How a chief takes the lead, and under whose leadership a session's orders go."""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Callable, Collection, Mapping

from absl import logging

from runtime.errors import AbortedError
from runtime.state.leadership import EPOCHS_AT_ONCE, NOBODY, Leadership

CLAIM_TRIES = 10

Ask = Callable[[Leadership], Mapping[str, Leadership]]
"""Claims some tasks for a leadership, which ``NOBODY`` does not; tells by task whom it obeys then."""


class Lead:
    """One who may lead: its number, and the leadership that it has claimed. Thread safe."""

    def __init__(self) -> None:
        self.owner = secrets.randbits(62) + 1
        self.leadership = NOBODY
        self._lock = threading.Lock()

    def claim(self, ask: Ask, held: Collection[str] = ()) -> Leadership:
        """Takes the lead over tasks, all under one epoch: the one that it has, if no task has seen a later one.

        Args:
            ask: reaches the tasks.
            held: those of them that it has claimed before and must not take back from another chief.

        Raises:
            AbortedError: another chief leads a task of ``held``, or keeps claiming the same tasks.
        """
        wait = threading.Event()  # never set: two chiefs that start together step aside for random times
        with self._lock:
            for attempt in range(CLAIM_TRIES):
                found = ask(NOBODY)
                lost = sorted(task for task in held if found[task].owner != self.owner)
                if lost:
                    raise AbortedError("another chief has taken the lead here", task=lost[0])
                claimed = Leadership(next_epoch(self.owner, found.values()), self.owner)
                while (lowest := min(obeyed.epoch for obeyed in found.values())) < claimed.epoch:
                    found = ask(Leadership(min(claimed.epoch, lowest + EPOCHS_AT_ONCE - 1), self.owner))
                if all(obeyed == claimed for obeyed in found.values()):
                    if claimed != self.leadership:
                        logging.info("this task leads now, as chief number %d of the run", claimed.epoch)
                    self.leadership = claimed
                    return claimed
                wait.wait(random.uniform(0.0, 0.05 * 2**attempt))
            raise AbortedError("another chief keeps claiming the same tasks: run one chief only")


def next_epoch(owner: int, obeyed: Collection[Leadership]) -> int:
    """The epoch under which a chief claims tasks that obey these: its own when that is the latest, else a later one."""
    latest = max(leadership.epoch for leadership in obeyed)
    owners = {leadership.owner for leadership in obeyed if leadership.epoch == latest}
    return latest if latest and owners == {owner} else latest + 1
