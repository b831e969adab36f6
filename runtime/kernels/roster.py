"""The workers of a synchronous step: a fixed number, or workers that come and go.

A quorum owns the roster and guards the roster by its lock.
"""

import sys
from collections.abc import Callable, Collection

from absl import logging


class Roster:
    """A fixed number of workers.

    Args:
        name: for messages.
        needed: gradients in an aggregate.
        total: workers.

    Attributes:
        each: most gradients of one worker in an aggregate.
        changes: number of changes of the awaited workers.
        look_secs: seconds between two looks for workers that have died.

    Examples:
        >>> roster = Roster("train", needed=3, total=3)
        >>> roster.meet(0, client=10)
        >>> roster.missing({0})
        [1, 2]
    """

    look_secs = float("inf")

    def __init__(self, name: str, needed: int, total: int) -> None:
        # Rounded up: with fewer workers than gradients, all workers together must reach the number.
        self.each = -(-needed // total)
        self.changes = 0
        self._name = name
        self._needed = needed
        self._total = total
        # The workers that a step waits for; None for all workers.
        self._there: set[int] | None = None
        self._heard: set[int] = set()
        # By worker, the session of the last gradients.
        self._clients: dict[int, int] = {}
        self._retired: set[int] = set()

    def meet(self, worker: int, client: int) -> None:
        """Notes that a worker gives gradients, in a session."""
        self._clients[worker] = client
        self._retired.discard(worker)
        self._heard.add(worker)
        if self._there is not None and worker not in self._there:
            self._there.add(worker)
            self.changes += 1
            logging.info("%s: worker %d takes part", self._name, worker)
            # All are back, so no worker needs to be listed any more.
            if len(self._there) >= self._total:
                self._there = None

    def within_reach(self, wanted: int) -> int:
        """Returns how many gradients a step waits for if ``wanted`` are the most."""
        return wanted if self._there is None else min(wanted, len(self._there) * self.each)

    def take_heard(self) -> tuple[int, ...]:
        """Returns the workers that have given gradients since the last call."""
        heard, self._heard = self._heard, set()
        return tuple(sorted(heard))

    def missing(self, given: Collection[int]) -> list[int]:
        """Returns the awaited workers without gradients for the step."""
        return [worker for worker in range(self._total) if worker not in given]

    def keep_only(self, workers: Collection[int]) -> None:
        """Waits for these workers only, and for each further worker after its next gradient."""
        # A worker that was dropped before stays dropped until its next gradient.
        self._there = set(workers) if self._there is None else self._there & set(workers)
        self.changes += 1

    def go_on_with(self, workers: Collection[int]) -> None:
        """Follows a chief that goes on with these workers; a fixed number of workers stays as large."""

    def look(self, given: Collection[int]) -> bool:
        """Drops the workers that give no sign of life; returns True if there were any."""
        return False

    def end_client(self, client: int, given: Collection[int]) -> bool:
        """Notes the end of a session; returns True if the wait for a worker ends."""
        return False

    def retire(self, client: int, index: int, given: Collection[int]) -> bool:
        """Notes that a session trains no more; returns True if the wait for a worker ends."""
        # A worker that stops before its first gradient has no session here. Its number is the index
        # of its task.
        known = self._of_client(client)
        if not known and index not in self._clients and 0 <= index < self._total:
            known = {index}
        self._retired |= known
        return bool(known)

    @property
    def known(self) -> set[int]:
        """Workers that have given gradients."""
        return set(self._clients)

    def validate(self) -> None:
        """Asserts the invariants; for tests."""
        assert self._heard | (self._there or set()) <= self.known, (
            "a worker without a session is waited for"
        )
        assert len(self._there or ()) <= self._total

    def _of_client(self, client: int) -> set[int]:
        return {worker for worker, of in self._clients.items() if client and of == client}

    def too_few(self, given: Collection[int]) -> list[int]:
        """Returns the workers that have stopped training if too few are left for an aggregate; else an empty list.

        Args:
            given: worker of each gradient here, perhaps given before the worker stopped.
        """
        # The workers in training may still give their whole share, and the retired workers only
        # gradients that are here.
        most = (self._total - len(self._retired)) * self.each + sum(
            w in self._retired for w in given
        )
        return sorted(self._retired) if most < self._needed else []


class ElasticRoster(Roster):
    """Workers that come and go.

    A step waits for a worker from the first gradient until the worker leaves or dies.

    Args:
        name: for messages.
        lives: tells whether a session gives signs of life.

    Examples:
        >>> roster = ElasticRoster("train", lives=lambda session: True)
        >>> for worker in (0, 4):
        ...     roster.meet(worker, client=10 + worker)
        >>> roster.missing({0})
        [4]
    """

    look_secs = 0.2

    def __init__(self, name: str, lives: Callable[[int], bool]) -> None:
        # No number of workers is ever complete, so that every worker is listed by name.
        super().__init__(name, 1, sys.maxsize)
        self._there = set()
        self._lives = lives

    def take_heard(self) -> tuple[int, ...]:
        """Returns the workers that are there."""
        heard = super().take_heard()
        return tuple(sorted(self._there or ())) or heard

    def missing(self, given: Collection[int]) -> list[int]:
        """Returns the workers that are there and have given no gradients."""
        return sorted((self._there or set()) - set(given))

    def go_on_with(self, workers: Collection[int]) -> None:
        """Waits for these workers only, and for each further worker after its next gradient."""
        self.keep_only(workers)

    def look(self, given: Collection[int]) -> bool:
        """Drops the workers whose sessions give no sign of life; returns True if there were any."""
        return self._miss_workers(
            {w for w in self.missing(given) if not self._lives(self._clients.get(w, 0))}, given
        )

    def end_client(self, client: int, given: Collection[int]) -> bool:
        """Drops the worker of a session that has ended; returns True if the worker was present."""
        return self._miss_workers(self._of_client(client), given)

    def retire(self, client: int, index: int, given: Collection[int]) -> bool:
        """Drops the worker of a session that trains no more; returns True if the worker was present."""
        return self._miss_workers(self._of_client(client), given)

    def _miss_workers(self, workers: set[int], given: Collection[int]) -> bool:
        # A worker that has given gradients to this step stays until its call ends.
        gone = workers & set(self.missing(given))
        if gone:
            logging.info("%s: workers %s have gone", self._name, sorted(gone))
            self._there = (self._there or set()) - gone
            self.changes += 1
        return bool(gone)

    def too_few(self, given: Collection[int]) -> list[int]:
        """Returns an empty list, as further workers may come."""
        return []
