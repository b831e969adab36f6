"""The watch over programs of other processes, which a task cannot interrupt.

A program that runs for too long ends the process as ``kill -9`` would, because every client that needs its variables
waits for it. Whoever has started the task starts it again, and the task continues from its backup or the newest
checkpoint. A client whose programs keep the others waiting for most of the time is refused until they had their turn.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

import jax
from absl import logging

from runtime.errors import ResourceExhaustedError
from runtime.limits import Limits
from runtime.observe.audit import AuditLog

_LOOK_SECS: Final = 1.0
_LOOKS: Final = 10
"""At least so many times a limit the watch looks."""
_WINDOW_LOOKS: Final = 60
"""The looks of which a client's share is counted: a minute, unless ``program_secs`` is below ten seconds."""
_SHOWN: Final = 5


@dataclass(frozen=True, eq=False)
class WatchedProgram:
    """A program of another process, as the watch tells of it.

    Attributes:
        sha256: of the program, in hexadecimal digits.
        operations: of its stage.
        peer: the connection by which it was registered; empty where that was with an earlier process of the task.
        who: the names in the certificate of who registered it.
    """

    sha256: str
    operations: tuple[str, ...]
    peer: str
    who: str


Running = tuple[WatchedProgram, jax.Array | None, int]
"""A program that runs or waits to, the result that tells when it is done, once there is one, and the session."""


class ProgramWatch:
    """The programs of other processes that run on a task, and the time that each client's take.

    Only the oldest counts: a later program may be waiting for it. Time is counted by the looks of a thread, so that a
    step reads no clock, and a process that was frozen does not take that for a program's time.

    A look counts for a client's share only if a program of another client waits behind the client's own. So a client
    that has a task for itself is never refused.

    Attributes:
        running: the programs that run, the oldest first, each under a key of its own. Whoever runs one adds it, and
            takes it away when it has waited for its end.
        audit: where an overrun and a refusal are written down.
        over_share: the sessions that are refused now, because they were above ``program_share``.
    """

    def __init__(self, task: str, limits: Limits) -> None:
        self.running: dict[int, Running] = {}
        self.audit: AuditLog | None = None
        self.over_share: frozenset[int] = frozenset()
        self._charged: deque[int] = deque([0] * _WINDOW_LOOKS, _WINDOW_LOOKS)  # by look, the session; 0 for none
        self._task = task
        self._limits = limits
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begins to look, before the first program is run."""
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._look, name="program watch", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Looks no more."""
        self._closed.set()

    def _look(self) -> None:
        limit = self._limits.program_secs
        period = min(_LOOK_SECS, limit / _LOOKS)
        before: Running | None = None
        looks = 0
        while not self._closed.wait(period):
            oldest = self._oldest()
            looks = looks + 1 if oldest is not None and oldest is before else 0
            before = oldest
            self._charge(oldest)
            if oldest is not None and looks * period >= limit:
                self._end(oldest[0])

    def refusal(self, session: int) -> ResourceExhaustedError:
        """Returns the error of a client that is above its share."""
        return self._limits.exceeded(
            "program_share",
            f"the programs of session {session:x} ran for {self._share(session):.0%} of the last looks while other "
            "clients waited for them; make the programs shorter, or run the step again later",
            self._task,
        )

    def _share(self, session: int) -> float:
        return self._charged.count(session) / _WINDOW_LOOKS

    def _charge(self, oldest: Running | None) -> None:
        """Counts a look for the client whose program keeps others waiting, and finds who is above the limit."""
        keeps_waiting = oldest is not None and any(running[2] != oldest[2] for running in self.running.copy().values())
        self._charged.append(oldest[2] if oldest is not None and keeps_waiting else 0)
        most = self._limits.program_share * _WINDOW_LOOKS
        over = frozenset(session for session, looks in Counter(self._charged).items() if session and looks > most)
        if oldest is not None and oldest[2] in over - self.over_share:
            self._write(oldest[0], "program.share", f"refused session {oldest[2]:x}")
            logging.warning("%s", self.refusal(oldest[2]).message)
        self.over_share = over

    def _oldest(self) -> Running | None:
        for key, found in self.running.copy().items():
            done = found[1]
            if done is None or not done.is_ready():  # type: ignore[attr-defined]  # its stubs do not know it
                return found
            self.running.pop(key, None)  # nobody has waited for it
        return None

    def _end(self, program: WatchedProgram) -> None:
        self._write(program, "program.overrun", "ended the task")
        logging.error(
            "%s ends itself: the program %s of [%s], registered by %s, runs for more than %g s (program_secs), which "
            "cannot be interrupted. Start the task again: it continues from its backup or the newest checkpoint",
            self._task,
            program.sha256,
            ", ".join(program.operations[:_SHOWN]),
            " ".join(filter(None, (program.who, program.peer))) or "a client of an earlier process",
            self._limits.program_secs,
        )
        logging.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def _write(self, program: WatchedProgram, action: str, outcome: str) -> None:
        if self.audit is not None:
            self.audit.write(action, peer=program.peer, who=program.who, what=program.sha256, outcome=outcome)
