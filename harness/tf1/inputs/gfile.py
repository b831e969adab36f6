"""``tf.gfile``: files and directories of this machine."""

from __future__ import annotations

import builtins
import glob
import os
import shutil
from collections.abc import Iterator
from typing import Any

import runtime as rt
from harness.tf1.names.missing import namespace as _namespace

_builtin_open = builtins.open


def _missing(path: str) -> rt.NotFoundError:
    return rt.NotFoundError(f"{path}: no such file or directory")


def Exists(filename: str) -> bool:  # noqa: N802 - TensorFlow's names
    """Returns True if there is such a file or directory."""
    return os.path.exists(filename)


def IsDirectory(dirname: str) -> bool:  # noqa: N802
    """Returns True if the path is a directory."""
    return os.path.isdir(dirname)


def MakeDirs(dirname: str) -> None:  # noqa: N802
    """Makes a directory with the missing ones above; an existing directory is no error."""
    os.makedirs(dirname, exist_ok=True)


def MkDir(dirname: str) -> None:  # noqa: N802
    """Makes one directory.

    Raises:
        AlreadyExistsError: the directory exists.
        NotFoundError: the directory above does not exist.
    """
    try:
        os.mkdir(dirname)
    except FileExistsError:
        raise rt.AlreadyExistsError(f"{dirname}: is there already") from None
    except FileNotFoundError:
        raise _missing(os.path.dirname(dirname)) from None


def ListDirectory(dirname: str) -> list[str]:  # noqa: N802
    """Lists the names in a directory, sorted.

    Raises NotFoundError when there is no such directory.
    """
    try:
        return sorted(os.listdir(dirname))
    except FileNotFoundError:
        raise _missing(dirname) from None


def Glob(filename: str) -> list[str]:  # noqa: N802
    """Lists the files that match a pattern, sorted."""
    return sorted(glob.glob(filename))


def Walk(top: str, in_order: bool = True) -> Iterator[tuple[str, list[str], list[str]]]:  # noqa: N802
    """Calls ``os.walk``."""
    return os.walk(top, topdown=in_order)


def Remove(filename: str) -> None:  # noqa: N802
    """Removes a file. Raises NotFoundError when there is none."""
    try:
        os.remove(filename)
    except FileNotFoundError:
        raise _missing(filename) from None


def DeleteRecursively(dirname: str) -> None:  # noqa: N802
    """Removes a directory with all in it. Raises NotFoundError when there is none."""
    try:
        shutil.rmtree(dirname)
    except FileNotFoundError:
        raise _missing(dirname) from None


def Copy(oldpath: str, newpath: str, overwrite: bool = False) -> None:  # noqa: N802
    """Copies a file.

    Raises:
        NotFoundError: there is none.
        AlreadyExistsError: the new one is there, and ``overwrite`` is not set.
    """
    _may_write(newpath, overwrite)
    try:
        shutil.copyfile(oldpath, newpath)
    except FileNotFoundError:
        raise _missing(oldpath) from None


def Rename(oldname: str, newname: str, overwrite: bool = False) -> None:  # noqa: N802
    """Renames a file, with the errors of ``Copy``."""
    _may_write(newname, overwrite)
    try:
        os.replace(oldname, newname)
    except FileNotFoundError:
        raise _missing(oldname) from None


def Stat(filename: str) -> os.stat_result:  # noqa: N802
    """Calls ``os.stat``. Raises NotFoundError when there is no such file."""
    try:
        return os.stat(filename)
    except FileNotFoundError:
        raise _missing(filename) from None


def _may_write(path: str, overwrite: bool) -> None:
    if not overwrite and os.path.exists(path):
        raise rt.AlreadyExistsError(f"{path}: is there already; give overwrite=True")


def GFile(name: str, mode: str = "r") -> Any:  # noqa: N802
    """Opens a file, as ``open`` does. Raises NotFoundError when a file to read is not there."""
    try:
        return _builtin_open(name, mode)
    except FileNotFoundError:
        raise _missing(name) from None


FastGFile = GFile
Open = GFile

__getattr__, _ = _namespace("tf.gfile")
