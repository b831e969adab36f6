"""One job writes into a log directory at a time: its chief holds a lock there.

Two jobs in one directory restore and delete each other's checkpoints. Within one job the ps tasks see to it that one
chief leads, so a chief that has been replaced and lives on is no other job, although it still has the lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass

from absl import logging

import runtime as rt

NAME = "chief.lock"
"""The file in the log directory. The lock is the kernel's, and ends with the process; the file stays."""
PATIENCE_SECS = 40.0
"""How long the chief of another job may take to end, such as one that is just being stopped."""
_LOOK_SECS = 0.2
_lock = threading.Lock()
_held: dict[str, int] = {}
"""The open files of this process, by directory."""


@dataclass(frozen=True)
class _Holder:
    """Who holds the lock of a directory, as its file says.

    Attributes:
        tasks: addresses of the ps tasks, or of whoever else has the variables; none for a process that is alone.
        pid: of the chief's process.
        host: where it runs.
    """

    tasks: tuple[str, ...]
    pid: int
    host: str


def hold(directory: str, tasks: Collection[str], patience_secs: float | None = None) -> bool:
    """Takes the lock of a log directory, until `release` or the end of the process.

    A file system without locks, or a URL, has none. Where one of the two is no cluster, such as a program that only
    restores, there is a warning instead of an error.

    Args:
        directory: of checkpoints and events; it is made where it is missing.
        tasks: addresses of the ps tasks of this job.
        patience_secs: how long the chief of another job is waited for; PATIENCE_SECS by default.

    Returns:
        Whether it had to wait: the directory may hold another checkpoint now.

    Raises:
        InvalidArgumentError: the chief of another job writes there.
    """
    if not directory or "://" in directory:
        return False
    directory = os.path.realpath(directory)
    own = _Holder(tuple(sorted(tasks)), os.getpid(), socket.gethostname())
    with _lock:
        if directory in _held:
            _write(_held[directory], own)  # after a recovery, or another cluster of this process
            return False
        try:
            os.makedirs(directory, exist_ok=True)
            fd = os.open(os.path.join(directory, NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:  # whoever writes there next says what is wrong
            logging.info("%s is not locked: %s", directory, error)
            return False
        began = time.monotonic()
        try:
            other = _take(fd, own, PATIENCE_SECS if patience_secs is None else patience_secs)
        except BaseException:
            os.close(fd)
            raise
        if other is None:
            _held[directory] = fd
            return time.monotonic() - began >= _LOOK_SECS
        os.close(fd)
    if other.tasks and own.tasks and not set(other.tasks) & set(own.tasks):
        raise rt.InvalidArgumentError(
            f"another job writes into {directory}: the chief of the job at {', '.join(other.tasks)}, process "
            f"{other.pid} on {other.host}. Each would restore and delete the other's checkpoints: give this job a log "
            "directory of its own, or stop that one"
        )
    if not (other.tasks and own.tasks):
        logging.warning("process %d on %s uses %s as a chief, too: do not save there", other.pid, other.host, directory)
    return False


def release(directory: str | None) -> None:
    """Gives back the lock of a log directory; nothing where this process has none."""
    with _lock:
        fd = _held.pop(os.path.realpath(directory), None) if directory else None
        if fd is not None:
            os.close(fd)


def _take(fd: int, own: _Holder, patience_secs: float) -> _Holder | None:
    """Takes the lock, and says so in the file; gives who has it, where that is not to be had."""
    deadline = time.monotonic() + patience_secs
    told = False
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            other = _read(fd)
        except OSError as error:  # a file system without locks
            logging.info("the log directory is not locked: %s", error)
            return None
        else:
            _write(fd, own)
            return None
        if other is not None and (not other.tasks or not own.tasks or set(other.tasks) & set(own.tasks)):
            return other
        if time.monotonic() >= deadline:
            return other or _Holder((), 0, "an unknown host")
        if other is not None and not told:
            logging.warning(
                "process %d on %s writes into the log directory, as the chief of another job: waiting for its end",
                *(other.pid, other.host),
            )
            told = True
        threading.Event().wait(_LOOK_SECS)


def _write(fd: int, own: _Holder) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(asdict(own)).encode(), 0)


def _read(fd: int) -> _Holder | None:
    """Who has the lock; None while that is just being written."""
    try:
        told = json.loads(os.pread(fd, 1 << 20, 0))
        return _Holder(tuple(map(str, told["tasks"])), int(told["pid"]), str(told["host"]))
    except (ValueError, KeyError, TypeError):
        return None
