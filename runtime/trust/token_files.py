"""Files with tokens: where this user's lie, how they are drawn, read and swept away.

A token is 256 random bits, in a file as 64 hexadecimal digits. Whoever can read the file belongs to the cluster, so it
lies in a directory that only its user can enter. A file of `TokenFile` is locked for as long as its owner lives; the
kernel ends the lock with the process, also after kill -9, and the next file that is made there removes it.
"""

import contextlib
import errno
import fcntl
import functools
import grp
import hashlib
import io
import os
import pwd
import re
import resource
import secrets
import stat
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from runtime.errors import PermissionDeniedError, UnauthenticatedError
from runtime.wire.endpoint import host_id

KEY_BYTES: Final = 32
_TOKEN: Final = re.compile(rb"\s*([0-9a-fA-F]{64})\s*")
_LONGEST_FILE: Final = 256
_OURS: Final = "@"
"""In the names of the files that come and go with a process; others in the directory are the user's."""
_RUNTIME_DIRECTORY: Final = "XDG_RUNTIME_DIR"
CORE_VARIABLE: Final = "BELLWETHER_CORE_DUMPS"
"""Environment variable: with 1, a process that has read a secret still leaves core dumps, which hold it."""


class Token(NamedTuple):
    """A key, and where it was found, for messages.

    Attributes:
        key: 32 bytes.
        source: path of the file.
    """

    key: bytes
    source: str


class TokenFile:
    """A file with a token that lasts as long as this object, or the process.

    Args:
        name: as ``name_of`` gives it; a file that has it is replaced.
        key: the token; a fresh one by default.

    Raises:
        PermissionDeniedError: there is no place for it; says why and what to do.
    """

    def __init__(self, name: str, key: bytes | None = None) -> None:
        self.key = secrets.token_bytes(KEY_BYTES) if key is None else key
        forbid_core_dumps()
        directory = _make_directory()
        self.path = str(directory / name)
        with _locked(directory):
            _sweep(directory)
            fd, fresh = tempfile.mkstemp(dir=directory, prefix=f"new{_OURS}")
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(fd, f"{self.key.hex()}\n".encode())
                os.replace(fresh, self.path)
            except BaseException:
                os.close(fd)
                os.unlink(fresh)
                raise
        self._end = weakref.finalize(self, _remove, directory, self.path, fd, os.getpid())

    def close(self) -> None:
        """Removes the file. Does nothing the second time."""
        self._end()


def name_of(host: str, port: int) -> str:
    """Name of the file in which a server on the loopback leaves its token for this user's other processes.

    Args:
        host: numeric address.
        port: of its control plane.
    """
    return f"{host}:{port}{_OURS}{_network()}"


def read_left(name: str) -> Token | None:
    """The token that a server of this user has left under a name; None when none that lives has."""
    for directory in _places():
        try:
            _check_private(directory)
            with _open_file(directory / name) as file:
                if not _is_abandoned(file.fileno()):
                    return Token(_read(file, str(directory / name)), str(directory / name))
        except (OSError, PermissionDeniedError, UnauthenticatedError):
            continue
    return None


def read(path: str) -> Token:
    """The token in a file that the user has named.

    Raises:
        UnauthenticatedError: it cannot be read, others can read it, or it holds no token; says what to do.
    """
    try:
        with _open_file(Path(path)) as file:
            about, me = os.fstat(file.fileno()), os.geteuid()
            if about.st_uid not in (me, 0) and me != 0:
                raise UnauthenticatedError(f"{path} belongs to another user: make a copy of the token that is yours")
            if others_read(about):
                raise UnauthenticatedError(f"others can read the token in {path}: chmod 600 it, and draw another one")
            return Token(_read(file, path), path)
    except FileNotFoundError:
        raise UnauthenticatedError(
            f"there is no {path}: give a directory with certificates, or a file with a token (a task that is started "
            "elsewhere needs the whole path)"
        ) from None
    except OSError as error:
        raise UnauthenticatedError(f"the token in {path} cannot be read: {error.strerror or error}") from None


def others_read(about: os.stat_result) -> bool:
    """Whether a secret's file can be read by others than those it is for."""
    # What the system has mounted for this user may be readable by a group: that is how it can read it.
    return bool(about.st_mode & (0o077 if about.st_uid == os.geteuid() else 0o007))


def places() -> str:
    """The directories in which tokens of this user may lie, for messages."""
    return " or ".join(map(str, _places()))


def _places() -> list[Path]:
    # All of them are looked at, as the environment of a service or a job may lack what that of a terminal has.
    user = os.geteuid()
    own = [os.environ.get(_RUNTIME_DIRECTORY, ""), f"/run/user/{user}"]
    found = [Path(parent) / "bellwether" for parent in own if parent.startswith("/") and _is_own(Path(parent))]
    found += [Path(parent) / f"bellwether-{user}" for parent in ("/tmp", tempfile.gettempdir())]
    return list(dict.fromkeys(found))


def _is_own(path: Path) -> bool:
    try:
        about = path.stat()
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()


def _make_directory() -> Path:
    problem = ""
    for directory in _places():
        try:
            make_private_directory(directory)
            if os.access(directory, os.W_OK | os.X_OK):
                return directory
            raise OSError(errno.EACCES, "it cannot be written")
        except OSError as error:
            problem = problem or f"{directory}: {error.strerror or error}"
        except PermissionDeniedError as error:
            problem = problem or error.message
    raise PermissionDeniedError(
        f"no place for a token ({problem}): set {_RUNTIME_DIRECTORY} to a directory of yours that nobody else can "
        "write, such as one that `mkdir -m 700` makes in your home, for all processes of the cluster and their clients"
    )


def make_private_directory(directory: Path) -> None:
    """Makes a directory that only its user can enter, unless it is there.

    Raises:
        PermissionDeniedError: Others can enter the directory, or can put another one in its place.
        OSError: The directory cannot be made.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(directory)


def _check_private(directory: Path) -> None:
    about = directory.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise PermissionDeniedError(f"{directory} is no directory of this user")
    if about.st_mode & 0o077:
        raise PermissionDeniedError(f"others can enter {directory}: chmod 700 it")
    check_only_ours(directory)


def check_only_ours(path: Path) -> None:
    """Checks that only this user and root can change a file or directory, or put another in its place.

    A user's private group, which many systems give each user, counts as the user.

    Raises:
        PermissionDeniedError: Others can write the path or a directory above; says which and what to do.
        OSError: The path is not there.
    """
    whole = Path(os.path.realpath(path))
    for part in (whole, *whole.parents):
        about = part.lstat()
        if about.st_uid not in (0, os.geteuid()):
            raise PermissionDeniedError(f"{part} belongs to another user")
        others = about.st_mode & (0o002 if _is_private(about.st_gid) else 0o022)
        # In a directory with the sticky bit, as /tmp, others cannot replace what is there.
        if others and not (part != whole and about.st_mode & stat.S_ISVTX) and not _is_read_only(part):
            mode = stat.S_IMODE(about.st_mode)
            raise PermissionDeniedError(f"others can write {part} (mode {mode:04o}): chmod go-w it")


def _is_read_only(path: Path) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _is_private(group: int) -> bool:
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def _open_file(path: Path) -> io.FileIO:
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for a writer
        raise UnauthenticatedError(f"{path} is no file with a token")
    # The object has the descriptor before Python runs another instruction, at which Ctrl-C could come between.
    return io.FileIO(path)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keeps other processes from making and removing files meanwhile."""
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def forbid_core_dumps() -> None:
    """Has this process and its children leave no core dumps, as it holds a secret; ``ulimit -c`` can raise it again."""
    if os.environ.get(CORE_VARIABLE) != "1":
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _read(file: io.FileIO, path: str) -> bytes:
    forbid_core_dumps()
    found = _TOKEN.fullmatch(file.read(_LONGEST_FILE))
    if found is None:
        raise UnauthenticatedError(
            f"{path} holds no token: 64 hexadecimal digits, as `openssl rand -hex 32` makes them"
        )
    return bytes.fromhex(found[1].decode())


def _is_abandoned(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep(directory: Path) -> None:
    for path in directory.glob(f"*{_OURS}*"):
        with (
            contextlib.suppress(OSError, UnauthenticatedError),
            _open_file(path) as file,
        ):  # gone with the system's own cleaning
            if _is_abandoned(file.fileno()):
                path.unlink()


def _remove(directory: Path, path: str, fd: int, process: int) -> None:
    if os.getpid() != process:
        return  # a fork: the file is its parent's
    try:
        with _locked(directory), contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(fd)):  # else another server has it by now
                os.unlink(path)
    except FileNotFoundError:
        return  # the whole directory has gone
    finally:
        os.close(fd)


@functools.cache
def _network() -> str:
    # Containers may share a directory, and not what their addresses mean.
    return hashlib.sha256(host_id().encode()).hexdigest()[:8]
