"""Files that only this user can have written: each is sealed with a key of the user's, and one that is not is none.

JAX keeps compiled programs as files of a directory, and runs what it finds there: its documentation says that the
directory is trusted. It has no public way to put another cache in the place of its own, but it opens the directory with
`etils.epath`, which lets a program say what paths of a scheme are. So the cache stays JAX's, and its files are sealed
below it; nothing private of JAX is used.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import grp
import hashlib
import hmac
import os
import pwd
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from absl import logging
from etils import epath

import runtime as rt
from runtime.lowlevel import STATE_VARIABLE, state_directory

SCHEME = "bellwether-sealed://"
MOST_BYTES = 1 << 30
"""Of one file; programs of the largest models take a tenth of that."""
_SEAL_BYTES = hashlib.sha256().digest_size
_KEY_NAME = "bellwether/compilations.key"
_KEY = re.compile(rb"([0-9a-f]{64})\n")


class _Size(NamedTuple):
    length: int


@epath.register_path_cls(SCHEME)
class SealedPath:
    """A directory of sealed files, or one of them: as much of a path as JAX's cache uses.

    Args:
        path: an absolute path after ``bellwether-sealed://``.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path.removeprefix(SCHEME))
        self._content: bytes | None = None

    def __fspath__(self) -> str:
        """The path of the file system."""
        return os.fspath(self._path)

    def __str__(self) -> str:
        """The same, for messages."""
        return os.fspath(self._path)

    def joinpath(self, *parts: str) -> SealedPath:
        """A path below this one."""
        return SealedPath(f"{SCHEME}{self._path.joinpath(*parts)}")

    def __truediv__(self, part: str) -> SealedPath:
        """A path below this one."""
        return self.joinpath(part)

    @property
    def name(self) -> str:
        """The last part."""
        return self._path.name

    def mkdir(self, mode: int = 0o700, parents: bool = False, exist_ok: bool = False) -> None:
        """Makes the directory."""
        self._path.mkdir(mode, parents, exist_ok)

    def glob(self, pattern: str) -> Iterator[SealedPath]:
        """The paths in the directory that match."""
        return (self.joinpath(found.name) for found in self._path.glob(pattern))

    def stat(self) -> _Size:
        """The size of the file, as `epath` tells it."""
        return _Size(self._path.stat().st_size)

    def unlink(self) -> None:
        """Removes the file."""
        self._path.unlink()

    def exists(self) -> bool:
        """Whether there is such a file with a seal of this user's; one without is told of and removed."""
        try:
            self._content = self._unsealed()
        except FileNotFoundError:
            return False
        except OSError as error:
            logging.warning("%s is not used: %s", self._path, error.strerror)
            with contextlib.suppress(OSError):  # who writes it anew tells what is wrong with its place
                self._path.unlink()
            return False
        return True

    def read_bytes(self) -> bytes:
        """What was written.

        Raises:
            OSError: there is no such file, or it has no seal of this user's.
        """
        found, self._content = self._content, None  # what `exists` has seen: the file may be another by now
        return self._unsealed() if found is None else found

    def write_bytes(self, content: bytes) -> None:
        """Writes the file, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        fd, fresh = tempfile.mkstemp(dir=self._path.parent, prefix="new-")
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(self._seal(content))
                file.write(content)
            os.replace(fresh, self._path)
        except BaseException:
            os.unlink(fresh)
            raise

    def _unsealed(self) -> bytes:
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_BYTES:
                raise OSError(errno.EINVAL, "it is no file of a compiled program")
            seal, content = file.read(_SEAL_BYTES), file.read(about.st_size)
        if not hmac.compare_digest(seal, self._seal(content)):
            raise OSError(errno.EBADMSG, "it was damaged, or not written by this user's tasks; it is compiled again")
        return content

    def _seal(self, content: bytes) -> bytes:
        # The name is in it: else one file could be put in the place of another.
        made = hmac.new(user_key(state_directory()), self.name.encode() + b"\0", hashlib.sha256)
        made.update(content)
        return made.digest()


def key_name() -> str:
    """A name for the key of this user, by which files under another key are told apart.

    Raises:
        PermissionDeniedError: there is no place for a key; says why and what to do.
    """
    return hmac.new(user_key(state_directory()), b"name", hashlib.sha256).hexdigest()[:8]


@functools.lru_cache
def user_key(state_directory: str) -> bytes:
    """The key in a directory, 32 bytes; drawn when there is none.

    Raises:
        PermissionDeniedError: it cannot be kept there, or is not this user's alone; says why and what to do.
    """
    path = Path(state_directory, _KEY_NAME)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (problem := others_can_write(str(path.parent))) is not None:
            raise rt.PermissionDeniedError(problem)
        if not path.exists():
            _draw(path)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
                raise rt.PermissionDeniedError(f"{path} is not a file that this user alone can read: remove it")
            found = _KEY.fullmatch(file.read(100))
    except OSError as error:
        raise rt.PermissionDeniedError(
            f"{path} cannot be kept ({error.strerror or error}): set {STATE_VARIABLE} to a directory of this user's"
        ) from None
    if found is None:
        raise rt.PermissionDeniedError(f"{path} holds no key: remove it")
    return bytes.fromhex(found[1].decode())


def _draw(path: Path) -> None:
    fd, fresh = tempfile.mkstemp(dir=path.parent, prefix="new-")  # only this user can read it
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(f"{secrets.token_hex(32)}\n".encode())
            file.flush()
            os.fsync(fd)
        os.link(fresh, path)
    except FileExistsError:
        return  # another process was first: its key counts
    finally:
        os.unlink(fresh)


def others_can_write(directory: str) -> str | None:
    """Who else can put files into a directory, or another directory in its place: one line, or None.

    The system's own user can anyway. A user's private group, as many systems give each user one, is nobody else.

    Args:
        directory: an existing one without links in its path.
    """
    parts = [Path(directory), *Path(directory).parents]
    for part in parts:
        about = part.lstat()
        if about.st_uid not in (0, os.geteuid()):
            return f"{part} belongs to another user"
        others = about.st_mode & (0o002 if _is_private(about.st_gid) else 0o022)
        if others and not (part != parts[0] and about.st_mode & stat.S_ISVTX):
            return f"others can write {part} (mode {stat.S_IMODE(about.st_mode):04o}): chmod go-w it"
    return None


def _is_private(group: int) -> bool:
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}
