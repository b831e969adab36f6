"""Directories of Unix sockets, with the process id in the name.

A server removes its directory at its end. A server that starts removes those of processes that died
before.
"""

import contextlib
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from runtime import concurrency
from runtime.wire import times

SOCKET_NAME = "tensors"
_PREFIX = "bellwether-"


def make_directory() -> str:
    """Makes a directory for a socket, which only this user can enter."""
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")


def sweep(parent: Path | None = None) -> int:
    """Removes this user's socket directories of processes that are gone.

    A process id alone is no proof. Containers that share a directory for temporary files have
    process ids of their own. So the socket is tried too.

    Args:
        parent: Directory to look in; the directory for temporary files by default.

    Returns:
        The number of removed directories.
    """
    removed = 0
    for path in Path(parent or tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if not pid.isdecimal() or os.path.exists(f"/proc/{pid}") or not _is_abandoned(path):
            continue
        shutil.rmtree(path, ignore_errors=True)
        removed += not path.exists()
    return removed


def _is_abandoned(path: Path) -> bool:
    try:
        about = path.lstat()
    except OSError:
        # Another server has just removed it.
        return False
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        return False
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path / SOCKET_NAME))
        except ConnectionRefusedError:
            return True
        except FileNotFoundError:
            return about.st_mtime < concurrency.wall_time() - times.YOUNG_DIRECTORY_SECS
        except OSError:
            # A server listens but has no room just now, or the name is too long to try.
            return False
    return False
