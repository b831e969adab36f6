"""Files with tokens: their places, and the drawing, reading and removal of tokens.

A token is 256 random bits, in a file as 64 hexadecimal digits. Every process with read access to
the file belongs to the cluster, so only the user can enter the directory of the file. The owner of
a `TokenFile` holds a lock on the file. The kernel ends the lock with the process, even after kill
-9. The next task to leave a token there removes all files without a lock.
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
import stat
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from runtime import concurrency
from runtime.cluster.endpoint import host_id
from runtime.errors import PermissionDeniedError, UnauthenticatedError

KEY_BYTES = 32
_TOKEN = re.compile(rb"\s*([0-9a-fA-F]{64})\s*")
# A token with spaces and newlines around it is far shorter. The limit keeps a huge file out of the
# memory.
_LONGEST_FILE = 256
_OURS = "@"
"""Mark in the names of files owned by a process.

Files without the mark belong to the user and are never removed.
"""
_RUNTIME_DIRECTORY = "XDG_RUNTIME_DIR"
CORE_VARIABLE = "BELLWETHER_CORE_DUMPS"
"""Environment variable: with 1, a process with a secret in memory still leaves core dumps.

They contain the secret.
"""


class Token(NamedTuple):
    """A token and its source.

    Attributes:
        key: The token, 32 bytes.
        source: Path of the file, for messages.
    """

    key: bytes
    source: str


class TokenFile:
    """A file with a token. Lasts as long as the object and the process.

    Args:
        name: Name of the file, from ``name_of``. An existing file is replaced.
        key: The token, 32 bytes; 32 random bytes by default.

    Attributes:
        key: The token.
        path: Path of the file.

    Raises:
        PermissionDeniedError: No directory is private to this user. The message names a remedy.
    """

    def __init__(self, name: str, key: bytes | None = None) -> None:
        self.key = concurrency.random_bytes(KEY_BYTES) if key is None else key
        assert len(self.key) == KEY_BYTES
        assert os.sep not in name, "the file lies in another directory"
        forbid_core_dumps()
        directory = _make_directory()
        self.path = str(directory / name)
        with _locked(directory):
            _sweep(directory)
            # The file gets its name when token and lock are in place: no reader finds half a token
            # or an unlocked one.
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
    """Returns the file name for the token of a loopback server.

    Args:
        host: Numeric address of the server.
        port: Port of the server's control plane.

    Examples:
        >>> name_of("127.0.0.1", 2222)
        '127.0.0.1:2222@...'
    """
    return f"{host}:{port}{_OURS}{_network()}"


def read_left(name: str) -> Token | None:
    """Reads the token of a live server of this user, or returns None.

    Args:
        name: Name of the file, from ``name_of``.
    """
    for directory in _places():
        try:
            _check_private(directory)
            with _open_file(directory / name) as file:
                if not _is_abandoned(file.fileno()):
                    return Token(_read(file, str(directory / name)), str(directory / name))
        # A place that cannot be trusted counts as empty: another place may hold the token.
        except (OSError, PermissionDeniedError, UnauthenticatedError):
            continue
    return None


def read(path: str) -> Token:
    """Reads the token in a file named by the user.

    Args:
        path: Path of the file.

    Raises:
        UnauthenticatedError: The file cannot be read, belongs to another user, is readable by other
            users, or holds no token. The message names the remedy.
    """
    try:
        with _open_file(Path(path)) as file:
            about, me = os.fstat(file.fileno()), os.geteuid()
            # A stranger's file would put this process into the cluster of the stranger. Root reads
            # files of all users.
            if about.st_uid not in (me, 0) and me != 0:
                raise UnauthenticatedError(
                    f"{path} belongs to another user: make a copy of the token that is yours"
                )
            if others_read(about):
                raise UnauthenticatedError(
                    f"others can read the token in {path}: chmod 600 it, and draw another one"
                )
            return Token(_read(file, path), path)
    except FileNotFoundError:
        raise UnauthenticatedError(
            f"there is no {path}: give a directory with certificates, or a file with a token (a "
            "task that is started "
            "elsewhere needs the whole path)"
        ) from None
    except OSError as error:
        raise UnauthenticatedError(
            f"the token in {path} cannot be read: {error.strerror or error}"
        ) from None


def others_read(about: os.stat_result) -> bool:
    """Returns True if the file of a secret is readable by other users.

    Args:
        about: Status of the file.
    """
    # A secret mounted by the system belongs to root, and this user reads the file by its group. So
    # a group is fine.
    return bool(about.st_mode & (0o077 if about.st_uid == os.geteuid() else 0o007))


def places() -> str:
    """Returns the possible directories for tokens of this user, for messages."""
    return " or ".join(map(str, _places()))


def _places() -> list[Path]:
    # A task in a service or batch job may lack the variables of a terminal, so a client looks into
    # all directories.
    user = os.geteuid()
    own = [os.environ.get(_RUNTIME_DIRECTORY, ""), f"/run/user/{user}"]
    found = [
        Path(parent) / "bellwether"
        for parent in own
        if parent.startswith("/") and _is_own(Path(parent))
    ]
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
        f"no place for a token ({problem}): set {_RUNTIME_DIRECTORY} to a directory of yours that "
        "nobody else can "
        "write, such as one that `mkdir -m 700` makes in your home, for all processes of the "
        "cluster and their clients"
    )


def make_private_directory(directory: Path) -> None:
    """Makes a directory for this user alone. An existing directory is checked.

    Raises:
        PermissionDeniedError: Other users can enter or replace the directory.
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
    """Checks that only this user and root can change or replace a path.

    Many systems give each user a private group. A private group counts as the user.

    Raises:
        PermissionDeniedError: Other users can write the path or a directory above. The message
            names the remedy.
        OSError: The path does not exist.
    """
    whole = Path(os.path.realpath(path))
    for part in (whole, *whole.parents):
        about = part.lstat()
        if about.st_uid not in (0, os.geteuid()):
            raise PermissionDeniedError(f"{part} belongs to another user")
        others = about.st_mode & (0o002 if _is_private(about.st_gid) else 0o022)
        # In a directory with the sticky bit, as /tmp, others cannot replace what is there.
        if (
            others
            and not (part != whole and about.st_mode & stat.S_ISVTX)
            and not _is_read_only(part)
        ):
            mode = stat.S_IMODE(about.st_mode)
            raise PermissionDeniedError(f"others can write {part} (mode {mode:04o}): chmod go-w it")


def _is_read_only(path: Path) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _is_private(group: int) -> bool:
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return (
        group == user.pw_gid
        and found.gr_name == user.pw_name
        and set(found.gr_mem) <= {user.pw_name}
    )


def _open_file(path: Path) -> io.FileIO:
    # To open a pipe would wait for a writer.
    if not stat.S_ISREG(path.stat().st_mode):
        raise UnauthenticatedError(f"{path} is no file with a token")
    # FileIO owns its descriptor at once. Between os.open and a wrapper, Ctrl-C could leak the
    # descriptor.
    return io.FileIO(path)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keeps other processes from making and removing token files during the block."""
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def forbid_core_dumps() -> None:
    """Turns core dumps of this process and its children off.

    A core dump would contain the secret of the process. ``BELLWETHER_CORE_DUMPS=1`` keeps core
    dumps on. Only the soft limit is lowered, so a child may raise the limit again with ``ulimit
    -c``.
    """
    if os.environ.get(CORE_VARIABLE) != "1":
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _read(file: io.FileIO, path: str) -> bytes:
    # Before the token is in the memory: a crash right after the read would leave it on the disk.
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
        # The system's own cleaning may remove the file at the same time.
        with contextlib.suppress(OSError, UnauthenticatedError), _open_file(path) as file:
            if _is_abandoned(file.fileno()):
                path.unlink()


def _remove(directory: Path, path: str, fd: int, process: int) -> None:
    if os.getpid() != process:
        # The object was copied by a fork: the file belongs to the parent.
        return
    try:
        with _locked(directory), contextlib.suppress(FileNotFoundError):
            # A later server at the same address may have replaced the file.
            if os.path.samestat(os.stat(path), os.fstat(fd)):
                os.unlink(path)
    except FileNotFoundError:
        # The whole directory was removed, and the file with the directory.
        return
    finally:
        os.close(fd)


@functools.cache
def _network() -> str:
    # Containers may share a directory while 127.0.0.1 is a different loopback in each.
    return hashlib.sha256(host_id().encode()).hexdigest()[:8]
