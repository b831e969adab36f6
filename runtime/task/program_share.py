"""The share of a task's time in which the programs of one client keep updates of others waiting.

XLA cannot be interrupted, and a program keeps its variables until it has ended. So programs that
each end soon can stop training when a client sends them again and again. A client that has kept
others waiting for most of a minute is refused for as long as it has kept them waiting.

Each moment belongs to the program that has waited or run longest: XLA runs programs that share
variables in that order. Time counts against the client of that program only while an update of
another client waits behind it. So a client alone is never refused. Of several clients that always
wait for each other, each has its part of the time and none has most.
"""

from dataclasses import dataclass

import jax

from runtime.state.ledger import NOBODY
from runtime.task import times


@dataclass(frozen=True)
class WatchedProgram:
    """A program of another process, as logs describe the program.

    Attributes:
        sha256: SHA-256 of the program, in hexadecimal digits.
        operations: Operations of the program's stage.
        peer: Connection that registered the program; empty if an earlier process of the task had
            that connection.
        who: Names in the certificate of the client that registered the program.
    """

    sha256: str
    operations: tuple[str, ...]
    peer: str
    who: str


@dataclass(eq=False, slots=True)
class ProgramTurn:
    """One run of a program, with the wait for its variables.

    Attributes:
        program: The program.
        client: Session of the run; NOBODY for an update that several sessions have made, which
            counts for none.
        updates: True if the program changes variables.
        began: `monotonic()` when the wait began.
        running: True once the program has its variables.
        done: Result that tells the end of the run; None before there is one.
    """

    program: WatchedProgram
    client: int
    updates: bool
    began: float
    running: bool = False
    done: jax.Array | None = None


class ClientShares:
    """The time that each client has kept others waiting.

    Times are of `monotonic()`, and never decrease.

    Args:
        most: Share of a window above which a client is refused.

    Attributes:
        turns: The turns that have not ended, the oldest first.
        refused: By client, the time at which its refusal ends, and the seconds for which it kept
            others waiting.
    """

    def __init__(self, most: float) -> None:
        self.turns: dict[ProgramTurn, None] = {}
        self.refused: dict[int, tuple[float, float]] = {}
        self._most_secs = most * times.WINDOW_SECS
        self._held: dict[int, float] = {}
        self._window_began = 0.0
        # From this time on the oldest turn is the oldest.
        self._front_since = 0.0

    def forget(self, now: float) -> None:
        """Counts no time before ``now`` for the turns that have not ended."""
        assert now >= self._front_since, "the clock went back"
        self._front_since = now

    def end(self, turn: ProgramTurn, now: float) -> bool:
        """Ends a turn, which may have ended before; returns True if its client is refused from now on."""
        is_front = next(iter(self.turns), None) is turn
        self.turns.pop(turn, None)
        # Only the oldest turn has time of its own; the time of a later one belongs to the turns before.
        if not is_front:
            return False
        since, self._front_since = self._front_since, now
        behind = next(
            (other for other in self.turns if other.updates and other.client != turn.client), None
        )
        if behind is None or turn.client == NOBODY:
            return False
        # The time before the update came kept nobody waiting.
        secs = now - max(since, behind.began)
        assert secs >= 0.0, "the clock went back"
        if turn.client in self.refused:
            # Its programs that waited already when it was refused are not taken back.
            until, held = self.refused[turn.client]
            self.refused[turn.client] = until + secs, held + secs
            return False
        if now - self._window_began > times.WINDOW_SECS:
            self._held.clear()
            self._window_began = now
        held = self._held[turn.client] = self._held.get(turn.client, 0.0) + secs
        if held <= self._most_secs:
            return False
        self.refused[turn.client] = now + held, held
        return True

    def refusal(self, client: int, now: float) -> tuple[float, float] | None:
        """Returns the seconds for which a client stays refused, and kept others waiting; None if it may run."""
        found = self.refused.get(client)
        if found is None:
            return None
        until, secs = found
        if now < until:
            return until - now, secs
        del self.refused[client]
        self._held.pop(client, None)
        return None
