"""The roots of a task: directories below which orders may have the task write and read checkpoints.

Any client that can connect may send such orders. The owner of the task sets the roots.
"""

import itertools
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass

from runtime.checkpoint.durability import is_inside
from runtime.errors import DataLossError, InvalidArgumentError, PermissionDeniedError

ROOT_VARIABLE = "BELLWETHER_CHECKPOINT_ROOT"
"""Environment variable with the roots, separated by commas, of servers without an argument for them."""
SCHEMES = ("gs", "s3")
"""Schemes of object stores for checkpoints.

Tensorstore knows more, and would fetch any http address.
"""
MOST_ENTRIES = 1 << 20
MOST_LEVELS = 64
_NOT_IN_URLS = re.compile(r"[|?#%\\]")
"""Characters to which tensorstore gives a meaning: another driver, a query, an escape."""


@dataclass(frozen=True)
class Roots:
    """The directories below which orders about checkpoints must stay.

    Attributes:
        paths: absolute directories, and URLs of object stores; None when any directory will do.
    """

    paths: tuple[str, ...] | None = None

    def check(self, path: str) -> None:
        """Checks that an order may use a directory; links are followed.

        Raises:
            InvalidArgumentError: The path is empty, goes up by ``..``, or has another scheme.
            PermissionDeniedError: The directory is not below a root.
        """
        if not path or "\0" in path or ".." in path.split("/"):
            raise InvalidArgumentError(
                f"{path!r} is no path of a checkpoint: it is empty, or goes up by '..'"
            )
        scheme, colon, _ = path.partition("://")
        if colon and (scheme not in SCHEMES or _NOT_IN_URLS.search(path)):
            kinds = " or ".join(f"{name}://bucket/path" for name in SCHEMES)
            raise InvalidArgumentError(
                f"{path!r} is no place for checkpoints: that is a directory, or {kinds}"
            )
        self.check_inside(path)

    def check_inside(self, path: str) -> None:
        """Raises PermissionDeniedError unless a path, with links followed, lies below a root."""
        if self.paths is None or any(_is_below(path, root) for root in self.paths):
            return
        where = f"below {' or '.join(self.paths)}" if self.paths else "nowhere"
        raise PermissionDeniedError(
            f"{path} may not be used: this task keeps checkpoints {where}; give its Server the "
            f"checkpoint_root (or the {ROOT_VARIABLE}, or the --logdir) of the chief, as an "
            "absolute path where tasks start in different directories"
        )

    def check_tree(self, directory: str) -> None:
        """Checks that a local directory tree holds only files and directories, with links followed.

        Entries that cannot be read are skipped, because their reader reports the error.

        Raises:
            DataLossError: An entry is a device, a pipe or a socket, or there are more entries than
                in a checkpoint.
            PermissionDeniedError: A link leads out of the roots.
        """
        # A link may lead back up, and the walk must end.
        seen = {os.path.realpath(directory)}
        self.check_inside(directory)
        left = [(directory, 0)]
        count = 0
        while left:
            where, depth = left.pop()
            try:
                entries = list(itertools.islice(os.scandir(where), MOST_ENTRIES + 1))
            except OSError:
                continue
            count += len(entries)
            if count > MOST_ENTRIES or depth > MOST_LEVELS:
                raise DataLossError(
                    f"{directory} holds more files, or deeper directories, than a checkpoint does"
                )
            for entry in entries:
                # A directory below the root may hold a link to anywhere.
                if entry.is_symlink():
                    self.check_inside(entry.path)
                try:
                    mode = entry.stat().st_mode
                except OSError:
                    continue
                if stat.S_ISDIR(mode):
                    real = os.path.realpath(entry.path)
                    if real not in seen:
                        seen.add(real)
                        left.append((entry.path, depth + 1))
                elif not stat.S_ISREG(mode):
                    raise DataLossError(f"{entry.path} is not a regular file")


def roots_of(given: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None) -> Roots:
    """Returns the roots for the ``checkpoint_root`` of a server.

    Args:
        given: a directory or a URL, or several. An empty list allows no directory, None allows any.

    Raises:
        InvalidArgumentError: A root is neither the path of a directory nor a URL of an object
            store.

    Examples:
        >>> roots_of(["gs://bucket/run"]).paths
        ('gs://bucket/run',)
    """
    if given is None:
        return Roots()
    if isinstance(given, str | os.PathLike):
        given = [given]
    anywhere = Roots()
    paths = []
    for each in given:
        root = os.fspath(each)
        # The working directory may change later.
        path = root if "://" in root or not root else os.path.abspath(root)
        try:
            anywhere.check(path)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"checkpoint_root: {error.message} (Server(checkpoint_root=), {ROOT_VARIABLE})"
            ) from None
        paths.append(path)
    return Roots(tuple(paths))


def file_below(directory: str, name: str) -> str:
    """Returns the path of a file of a checkpoint.

    Args:
        directory: directory of the checkpoint.
        name: path relative to the directory.

    Raises:
        InvalidArgumentError: The name leads out of the directory.

    Examples:
        >>> file_below("/data/run", "default/d/1")
        '/data/run/default/d/1'
        >>> file_below("/data/run", "../secret")
        Traceback (most recent call last):
        ...
        runtime.errors.InvalidArgumentError: ...
    """
    if not is_inside(name):
        raise InvalidArgumentError(
            f"{name!r} is no file of the checkpoint {directory}: it does not lie in there"
        )
    return os.path.join(directory, name)


def _is_below(path: str, root: str) -> bool:
    if "://" not in path and "://" not in root:
        # A root may be a link itself, so both sides are resolved.
        path, root = os.path.realpath(path), os.path.realpath(root)
    root = root.rstrip("/")
    return path.rstrip("/") == root or path.startswith(f"{root}/")
