"""Overruns: programs of other processes that have run for too long, as the tasks of this user on this host remember.

A file outlives the process that such a program has ended, so that the next one does not take the program again.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Final, NamedTuple

from runtime.errors import PermissionDeniedError

STATE_VARIABLE: Final = "XDG_STATE_HOME"
_NAME: Final = "bellwether/overruns"
_READ_BYTES: Final = 1 << 20
"""Of the file's end: thousands of lines, each of which has cost its sender an outage's time."""


class Overrun(NamedTuple):
    """A program that has ended a task.

    Attributes:
        sha256: of the program, in hexadecimal digits.
        secs: for how long it had run.
        task: which it has ended.
        when: seconds since the epoch.
    """

    sha256: str
    secs: float
    task: str
    when: float


def state_directory() -> str:
    """The directory for what a user's programs keep from one run to the next: ``XDG_STATE_HOME``, or its default.

    Raises:
        PermissionDeniedError: this user has no home; says what to do.
    """
    given = os.environ.get(STATE_VARIABLE, "")
    found = given if given.startswith("/") else os.path.expanduser("~/.local/state")
    if not found.startswith("/"):  # as in a container whose user has no account
        raise PermissionDeniedError(f"this user has no home: set {STATE_VARIABLE} to a directory of this user's")
    return found


def remember(sha256: str, secs: float, task: str) -> None:
    """Adds an overrun of now.

    Raises:
        PermissionDeniedError: it cannot be written down; says why and what to do.
    """
    path = Path(state_directory(), _NAME)
    line = json.dumps(Overrun(sha256, secs, task, time.time())) + "\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(file, line.encode())  # one call: lines of several processes do not mix
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        what = f"{path} cannot be written ({error.strerror}): set {STATE_VARIABLE} to a directory of this user's"
        raise PermissionDeniedError(what) from error


def remembered() -> list[Overrun]:
    """The overruns, the oldest first; none where they cannot be read, or where a line is none of ours."""
    try:
        path = os.path.join(state_directory(), _NAME)
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (PermissionDeniedError, OSError):  # nothing was ever written down
        return []
    with open(file, "rb") as lines:
        lines.seek(max(0, os.fstat(file).st_size - _READ_BYTES))
        found = [_read(line) for line in lines.read(_READ_BYTES).splitlines()]
    return [overrun for overrun in found if overrun is not None]


def _read(line: bytes) -> Overrun | None:
    try:
        sha256, secs, task, when = json.loads(line)
        return Overrun(str(sha256), float(secs), str(task), float(when))
    except (ValueError, TypeError):  # cut off, or somebody else's
        return None
