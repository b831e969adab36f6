"""The audit log of a task: whom it let do what, and whom it refused. One JSON object a line.

The lines go to the logger ``bellwether.audit`` of Python's logging, to which a program may add handlers, and to a file
if the server is given one. Text of others stands in JSON strings of ASCII: it can move no cursor and begin no line.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from typing import Final

from runtime.errors import InvalidArgumentError, one_line

VARIABLE: Final = "BELLWETHER_AUDIT_LOG"
"""Environment variable: the file that the audit log is appended to, of servers that are given none."""
LOGGER: Final = logging.getLogger("bellwether.audit")
LOGGER.addHandler(logging.NullHandler())  # without a handler of the program's, lines go to no terminal
LOGGER.setLevel(logging.INFO)
LOGGER.propagate = False
_LONGEST: Final = 500
_MOST_BYTES: Final = 128 << 20


class AuditLog:
    """Where a task writes down what others have it do.

    Args:
        task: whose log it is.
        path: file that lines are appended to; None for none. It is made with mode 0600. A file of 128 MiB is renamed
            to ``path.1``, in the place of the one before.

    Raises:
        InvalidArgumentError: the file cannot be opened.
    """

    def __init__(self, task: str, path: str | os.PathLike[str] | None = None) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._path = os.fspath(path) if path else ""
        self._file: int | None = None
        if path:
            try:
                self._file = _opened(self._path)
            except OSError as error:
                raise InvalidArgumentError(f"cannot write the audit log {self._path}: {error.strerror}") from error

    def write(self, action: str, *, peer: str, outcome: str, who: str = "", what: str = "") -> None:
        """Writes one line.

        Args:
            action: what was asked for, such as "checkpoint.write" or "connect".
            peer: address of who asked.
            outcome: "ok", or the name of the error.
            who: what the peer has shown itself to be: the name in its certificate; empty without one.
            what: the object: a directory, a container, the hash of a program; or why it was refused.
        """
        line = {
            "time": time.time(),
            "task": self._task,
            "action": action,
            "peer": peer[:_LONGEST],
            "who": who[:_LONGEST],
            "what": what[:_LONGEST],
            "outcome": outcome,
        }
        text = json.dumps(line)
        LOGGER.info("%s", text)
        with self._lock:
            if self._file is not None:
                try:
                    self._begin_file(self._file)
                    os.write(self._file, text.encode() + b"\n")  # one call: lines of several processes do not mix
                except OSError as error:
                    logging.getLogger("absl").warning(
                        "%s: the audit log cannot be written and ends here: %s", self._task, one_line(error)
                    )
                    self._close()

    def _begin_file(self, file: int) -> None:
        """Begins the next file where this one is full; the tasks that share the file agree by its lock."""
        if os.fstat(file).st_size < _MOST_BYTES:
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        self._file = None
        try:
            if os.path.exists(self._path) and os.path.samestat(os.stat(self._path), os.fstat(file)):
                os.replace(self._path, f"{self._path}.1")
            self._file = _opened(self._path)
        finally:
            os.close(file)

    def close(self) -> None:
        """Closes the file; later lines go to the logger only."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _opened(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
