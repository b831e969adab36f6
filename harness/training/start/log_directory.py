"""The lock of a log directory: one job writes there at a time.

The chief's session manager takes the lock.

Two jobs in one directory restore and delete each other's checkpoints. Within a job the ps tasks
decide which chief leads, so a replaced chief of the same job counts as no other job, although the
lock is still with that process.

The lock belongs to an open file, not to a process. A process loses POSIX's record locks as soon as
the process closes any other file of that name, as a copy of the directory does.
"""

import contextlib
import fcntl
import json
import os
import socket
import struct
from collections.abc import Collection

from absl import logging
from etils import epath

from harness.checkpoints.layout import RUN_FILE, read_record, recorded_series
from runtime.lowlevel import storage

_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
"""The kernel's ``struct flock``: an exclusive lock of all bytes."""


class DirectoryLock:
    """The lock of a log directory, for one session of a chief.

    The kernel releases the lock with the process.

        lock = DirectoryLock()
        while reason := lock.take("/tmp/run", ["ps0:2222"], "model.ckpt"):
            wait(reason)

    ``take`` never waits: the caller does, for as long as the start may take. Sessions of one
    process share the lock of a directory. Each session has a descriptor of the same open file, and
    the lock ends with the last descriptor.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self._tasks: set[str] = set()

    def take(self, directory: str, tasks: Collection[str], series: str = "") -> str:
        """Takes the lock and writes the record of the run, unless the chief of another job has the lock.

        A file system without locks, or a URL, has the record only, and a full disk the lock only.
        There is only a warning where one of the two jobs has no cluster, such as a program that
        restores, or both jobs are of this process.

        Args:
            directory: Directory of checkpoints and events, made where it is missing.
            tasks: Addresses of the ps tasks of this job, or of the tasks with the variables.
            series: Name of the job's series of checkpoints, added to the series of the record.

        Returns:
            The reason to wait, with the name of the other job; empty where this job may write.
        """
        if not directory:
            return ""
        self._tasks = set(tasks)
        if not storage.is_local(directory):
            self._write_record(epath.Path(directory) / RUN_FILE, series)
            return ""
        path = os.path.join(os.path.realpath(directory), RUN_FILE)
        # The directory may have been removed and made again, or be another one than in the last
        # call.
        if not self.has(path):
            self.release()
        if self._fd is None:
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                # The first checkpoint or event that is written there raises the error.
                logging.info("%s is not locked: %s", directory, error)
                return ""
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WHOLE_FILE)
            except (BlockingIOError, PermissionError):
                os.close(fd)
                shared = _share_lock(path)
                reason = _reason_to_wait(directory, self._tasks, here=shared is not None)
                if shared is None:
                    return reason
                fd = shared
            except OSError as error:
                logging.info("%s is on a file system without locks: %s", directory, error)
            # From here on the descriptor is the lock: the kernel takes it back with the process.
            self._fd = fd
            _held.add(self)
        self._write_record(epath.Path(path), series)
        return ""

    def _write_record(self, file: epath.Path, series: str) -> None:
        """Writes the record of the run, with the tasks of all sessions of this process in the directory."""
        record = {
            "tasks": sorted(
                self._tasks.union(*(lock._tasks for lock in list(_held) if lock.has(str(file))))
            ),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "series": sorted({*recorded_series(str(file.parent)), series} - {""}),
        }
        text = json.dumps(record)
        try:
            if self._fd is None:
                file.write_text(text)
            else:
                # In this order a reader never finds an empty file.
                os.pwrite(self._fd, text.encode(), 0)
                os.ftruncate(self._fd, len(text))
        except Exception as error:  # of whichever library serves a URL
            logging.warning("the record of the run cannot be written into %s: %s", file, error)

    def has(self, path: str) -> bool:
        """Returns True if this object has the lock of the file at a path."""
        try:
            return self._fd is not None and os.path.samestat(os.fstat(self._fd), os.stat(path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Releases the lock; does nothing without the lock."""
        fd, self._fd = self._fd, None
        if fd is not None:
            _held.discard(self)
            os.close(fd)


_held: set[DirectoryLock] = set()
"""The locks that this process has: until each is released, or the process ends."""


def _share_lock(path: str) -> int | None:
    """Returns another descriptor of the file, where the process has the lock; None otherwise."""
    for lock in list(_held):
        if (fd := lock._fd) is not None and lock.has(path):
            with contextlib.suppress(OSError):  # released just now
                return os.dup(fd)
    return None


def _release_in_child() -> None:
    """Closes the files in a forked child, which would prolong the locks of the parent."""
    # The child has copies of the descriptors, and a lock lives until the last copy is closed.
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)


def _reason_to_wait(directory: str, own: set[str], *, here: bool) -> str:
    """Returns the reason why a locked directory cannot be used now; empty where it can."""
    other = read_record(directory)
    if not other:
        path = f"{directory}/{RUN_FILE}"
        return f"another process has the lock of {path}, and the record in that file is empty or unreadable"
    theirs = other.get("tasks") or []
    where = f"process {other.get('pid')} on {other.get('host')}"
    # A chief of the same job has been replaced, or recovers. The ps tasks decide which one leads.
    if own.intersection(theirs):
        return ""
    if here or not theirs or not own:
        who = f"another session of this process, {where}," if here else where
        logging.warning("%s uses %s as a chief, too: do not save there", who, directory)
        return ""
    return (
        f"another job writes into {directory}: the chief of the job at {', '.join(theirs)}, "
        f"{where}. Each would restore and delete the other's checkpoints. This one waits for the "
        "end of that one: stop it, or give this job a log directory of its own"
    )
