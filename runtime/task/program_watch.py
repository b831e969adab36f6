"""The watch over programs of other processes, which a task cannot interrupt.

A program that runs for too long ends the process as ``kill -9`` would, because every client that
needs the program's variables waits for it. Whoever has started the task starts it again, and the
task continues from its backup or the newest checkpoint. A client whose programs keep updates of
others waiting for most of a minute is refused (`runtime.task.program_share`).
"""

import os
import signal

import jax
from absl import logging

from runtime import concurrency
from runtime.errors import ResourceExhaustedError
from runtime.limits import Limits
from runtime.observe.audit import AuditLog
from runtime.task import times
from runtime.task.program_share import ClientShares, ProgramTurn, WatchedProgram

# The watch looks at least so many times in the seconds that a program may run.
_LOOKS = 10
_SHOWN = 5


class ProgramWatch:
    """The programs of other processes that run on a task. Thread safe.

    Only the oldest program that runs is limited in its time: a later program may be waiting for it.
    That time is counted by periodic looks. So a process that was frozen does not take its sleep for
    a program's time.

    Args:
        task: Name of the task, for errors.
        limits: The limits ``program_secs`` and ``program_share``.
        audit: Log of the programs that ran too long, and of the clients above their share.
    """

    def __init__(self, task: str, limits: Limits, audit: AuditLog | None = None) -> None:
        self._audit = audit
        self._task = task
        self._limits = limits
        self._lock = concurrency.Lock()
        self._shares = ClientShares(limits.program_share)
        # Turns whose results are still computed when the call returns, by the id of their last
        # result.
        self._computing: dict[int, ProgramTurn] = {}
        self._period = min(times.LOOK_SECS, limits.program_secs / _LOOKS)
        self._looked_at = 0.0
        # The oldest turn at the last look, and the number of looks since the turn was first seen.
        self._seen: ProgramTurn | None = None
        self._looks = 0
        self._looking: concurrency.PeriodicCall | None = None
        self._closed = False

    def start(self) -> None:
        """Starts the looks, before the first program is run."""
        with self._lock:
            if self._looking is None and not self._closed:
                self._looked_at = concurrency.monotonic()
                # The audit log may lie on a disk that hangs.
                self._looking = concurrency.every(self._period, self._look, blocks=True)

    def close(self) -> None:
        """Stops the looks."""
        with self._lock:
            self._closed = True
            if self._looking is not None:
                self._looking.stop()

    def enter(self, program: WatchedProgram, client: int, updates: bool) -> ProgramTurn:
        """Begins the turn of a program, before it waits for its variables.

        Args:
            program: The program.
            client: Session of the run; NOBODY for an update that several sessions have made.
            updates: True if the program changes variables.

        Returns:
            The turn, for ``leave``.

        Raises:
            ResourceExhaustedError: Programs of the client have kept others waiting for too long.
        """
        shares, now = self._shares, concurrency.monotonic()
        turn = ProgramTurn(program, client, updates, now)
        with self._lock:
            refusal = shares.refusal(client, now) if shares.refused else None
            if refusal is None:
                shares.turns[turn] = None
                return turn
        raise self._refused(client, *refusal)

    def leave(self, turn: ProgramTurn, done: jax.Array | None) -> None:
        """Ends a turn, at once or by ``finish``.

        Args:
            turn: The turn.
            done: Result that may still be computed; None if the run has failed.
        """
        if done is None or done.is_ready():  # type: ignore[attr-defined]  # its stubs do not know it
            self._end(turn)
        else:
            assert turn.done is None, "a turn ends once"
            turn.done = done
            self._computing[id(done)] = turn

    def finish(self, done: jax.Array) -> None:
        """Ends the turn of a result that is computed now."""
        if self._computing and (turn := self._computing.pop(id(done), None)) is not None:
            self._end(turn)

    def _end(self, turn: ProgramTurn) -> None:
        turns = self._shares.turns
        with self._lock:
            if len(turns) == 1:
                # Nobody waits, as nearly always: no clock is read.
                turns.pop(turn, None)
                return
            now = concurrency.monotonic()
            self._note_sleep(now)
            self._end_turn(turn, now)

    def _note_sleep(self, now: float) -> None:
        # The sleep of a process that was frozen counts for nobody.
        if now - self._looked_at > times.ASLEEP_SECS:
            self._shares.forget(now)

    def _end_turn(self, turn: ProgramTurn, now: float) -> None:
        if self._shares.end(turn, now):
            _, secs = self._shares.refused[turn.client]
            logging.warning("%s", self._refused(turn.client, secs, secs))
            self._write(
                turn.program, "program.share", f"refused session {turn.client:x} for {secs:.0f} s"
            )

    def _refused(self, client: int, left: float, secs: float) -> ResourceExhaustedError:
        what = (
            f"programs of session {client:x} have kept updates of others waiting for {secs:.1f} of "
            f"{times.WINDOW_SECS:g} s, "
            f"and are refused for {left:.0f} s; make them shorter"
        )
        return self._limits.exceeded("program_share", what, self._task)

    def _look(self) -> None:
        with self._lock:
            now = concurrency.monotonic()
            self._note_sleep(now)
            self._looked_at = now
            oldest = self._oldest(now)
        # A sleep of this process makes no looks, so the sleep does not count.
        self._looks = self._looks + 1 if oldest is not None and oldest is self._seen else 0
        self._seen = oldest
        if oldest is not None and self._looks * self._period >= self._limits.program_secs:
            self._kill(oldest.program)

    def _oldest(self, now: float) -> ProgramTurn | None:
        for turn in [*self._shares.turns]:
            if turn.done is not None and turn.done.is_ready():  # type: ignore[attr-defined]  # as above
                # The call has failed between the run and the wait for its end.
                self._computing.pop(id(turn.done), None)
                self._end_turn(turn, now)
            elif turn.running:
                return turn
        return None

    def _kill(self, program: WatchedProgram) -> None:
        """Ends the process, as ``kill -9`` would."""
        self._write(program, "program.overrun", "ended the task")
        logging.error(
            "%s ends itself: the program %s of [%s], registered by %s, runs for more than %g s "
            "(program_secs), which "
            "cannot be interrupted. Start the task again: it continues from its backup or the "
            "newest checkpoint",
            self._task,
            program.sha256,
            ", ".join(program.operations[:_SHOWN]),
            " ".join(filter(None, (program.who, program.peer))) or "a client of an earlier process",
            self._limits.program_secs,
        )
        logging.flush()
        # An exit in order would wait for the program.
        os.kill(os.getpid(), signal.SIGKILL)

    def _write(self, program: WatchedProgram, action: str, outcome: str) -> None:
        if self._audit is not None:
            self._audit.write(
                action, peer=program.peer, who=program.who, what=program.sha256, outcome=outcome
            )
