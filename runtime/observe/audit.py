"""The audit log of a task: orders of clients and their outcome, in a JSON object per line.

The lines go to the logger ``bellwether.audit`` of Python's logging, and to a file if the server has
one. A program may add handlers to the logger. Text from clients stands in JSON strings of ASCII, so
such text can neither move a cursor nor begin a line.
"""

import fcntl
import json
import logging
import os

from runtime import concurrency
from runtime.errors import InvalidArgumentError, one_line

VARIABLE = "BELLWETHER_AUDIT_LOG"
"""Environment variable: the audit file of servers without an ``audit_log`` argument."""
LOGGER = logging.getLogger("bellwether.audit")
# The lines appear on a terminal only if the program adds a handler.
LOGGER.addHandler(logging.NullHandler())
LOGGER.setLevel(logging.INFO)
LOGGER.propagate = False
# A client chooses some of the texts, and must not fill the disk with a single line.
_LONGEST = 500
_MOST_BYTES = 128 << 20


class AuditLog:
    """The audit log of one task. Thread safe.

    Args:
        task: Name of the task, for each line.
        path: File for the lines, which are appended; None for no file. A new file has mode 0600. At
            128 MiB the file is renamed to ``path.1``, in place of the previous ``path.1``, and a
            new file begins.

    Raises:
        InvalidArgumentError: The file cannot be opened.
    """

    def __init__(self, task: str, path: str | os.PathLike[str] | None = None) -> None:
        self._task = task
        self._lock = concurrency.Lock()
        self._path = os.fspath(path) if path else ""
        self._file: int | None = None
        if path:
            try:
                self._file = _opened(self._path)
            except OSError as error:
                raise InvalidArgumentError(
                    f"cannot write the audit log {self._path}: {error.strerror}"
                ) from error

    def write(self, action: str, *, peer: str, outcome: str, who: str = "", what: str = "") -> None:
        """Writes one line.

        Args:
            action: Order of the client, such as "checkpoint.write" or "connect".
            peer: Address of the client.
            outcome: "ok", or the name of the error.
            who: Names in the client's certificate; empty without a certificate.
            what: Object of the order (a directory, a container, the hash of a program), or the
                reason of a refusal.

        Examples:
            >>> AuditLog("/job:ps/task:0").write("connect", peer="10.0.0.7", outcome="refused")
        """
        line = {
            "time": concurrency.wall_time(),
            "task": self._task,
            "action": action,
            # Clients choose these texts, and must not fill the disk.
            "peer": peer[:_LONGEST],
            "who": who[:_LONGEST],
            "what": what[:_LONGEST],
            "outcome": outcome,
        }
        # JSON escapes line breaks, so no client can forge a line.
        text = json.dumps(line)
        LOGGER.info("%s", text)
        with self._lock:
            if self._file is not None:
                try:
                    self._begin_file(self._file)
                    # Several tasks may share the file. Lines of single calls do not mix.
                    os.write(self._file, text.encode() + b"\n")
                # A full disk must not stop the task, so only the log ends.
                except OSError as error:
                    logging.getLogger("absl").warning(
                        "%s: the audit log cannot be written and ends here: %s",
                        self._task,
                        one_line(error),
                    )
                    self._close()

    def _begin_file(self, file: int) -> None:
        """Begins the next file if ``file`` is full.

        Raises:
            OSError: The file cannot be renamed, or the next file cannot be opened.
        """
        assert self._lock.locked(), "another line would go into a closed file"
        if os.fstat(file).st_size < _MOST_BYTES:
            return
        # The tasks with the same file take turns. Only the first finds the full file under the
        # name, and renames it.
        fcntl.flock(file, fcntl.LOCK_EX)
        self._file = None
        try:
            if os.path.exists(self._path) and os.path.samestat(os.stat(self._path), os.fstat(file)):
                os.replace(self._path, f"{self._path}.1")
            self._file = _opened(self._path)
        finally:
            os.close(file)

    def close(self) -> None:
        """Closes the file. Later lines go only to the logger."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _opened(path: str) -> int:
    # The lines name clients and directories, so only the user of the task may read them.
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
