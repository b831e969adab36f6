"""The watch over programs of other processes: one that runs for too long ends the task.

XLA cannot be interrupted, and whoever needs the program's variables waits for it. So the process ends as by
``kill -9``: who has started the task starts it again, and it goes on from its backup or the newest checkpoint.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Final

import jax
from absl import logging

from runtime import concurrency
from runtime.limits import Limits
from runtime.observe.audit import AuditLog

_LOOK_SECS: Final = 1.0
_LOOKS: Final = 10
"""At least so many times a limit the watch looks."""
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


Running = tuple[WatchedProgram, jax.Array | None]
"""A program that runs, and the result that tells when it is done, once there is one."""


class ProgramWatch:
    """Which programs of others run on a task, and whether one has for too long.

    Only the oldest counts: what came later may be waiting for it. Time is counted by the looks of a thread, so that a
    process that was frozen does not take that for a program's time.

    Attributes:
        running: the programs that run, the oldest first, each under a key of its own. Whoever runs one adds it, and
            takes it away when it has waited for its end.
        audit: where an overrun is written down.
    """

    def __init__(self, task: str, limits: Limits) -> None:
        self.running: dict[int, Running] = {}
        self.audit: AuditLog | None = None
        self._task = task
        self._limits = limits
        self._closed = concurrency.Event()
        self._lock = concurrency.Lock()
        self._thread: concurrency.Thread | None = None

    def begin(self) -> None:
        """Begins to look, before the first program is run."""
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = concurrency.Thread(target=self._look, name="program watch", daemon=True)
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
            if oldest is not None and looks * period >= limit:
                self._end(oldest[0])

    def _oldest(self) -> Running | None:
        for key, found in self.running.copy().items():
            done = found[1]
            if done is None or not done.is_ready():  # type: ignore[attr-defined]  # its stubs do not know it
                return found
            self.running.pop(key, None)  # nobody has waited for it
        return None

    def _end(self, program: WatchedProgram) -> None:
        if self.audit is not None:
            self.audit.write(
                "program.overrun", peer=program.peer, who=program.who, what=program.sha256, outcome="ended the task"
            )
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
