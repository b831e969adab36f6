"""Socket directories of dead processes go; those of live processes, of others and of other containers stay."""

import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from runtime.wire import socket_dirs

pytestmark = pytest.mark.cluster


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def _directory(
    parent: pathlib.Path, pid: int, name: str, *, socket_file: bool = True
) -> pathlib.Path:
    path = parent / f"bellwether-{pid}-{name}"
    path.mkdir()
    if socket_file:
        with socket.socket(socket.AF_UNIX) as listener:
            # closed at once: the file stays, nobody listens
            listener.bind(str(path / socket_dirs.SOCKET_NAME))
    return path


def test_leavings_of_dead_process_are_removed(tmp_path: pathlib.Path, dead_pid: int) -> None:
    """The sweep removes the socket directory of a dead process."""
    path = _directory(tmp_path, dead_pid, "a")
    assert socket_dirs.sweep(tmp_path) == 1
    assert not path.exists()
    assert socket_dirs.sweep(tmp_path) == 0


def test_directory_of_live_process_stays(tmp_path: pathlib.Path) -> None:
    """The sweep leaves the socket directory of a live process."""
    path = _directory(tmp_path, os.getpid(), "a")
    assert socket_dirs.sweep(tmp_path) == 0
    assert path.exists()


def test_answering_socket_stays(tmp_path: pathlib.Path, dead_pid: int) -> None:
    """The sweep leaves a socket that answers, whatever its process id says."""
    path = _directory(tmp_path, dead_pid, "a", socket_file=False)
    # of another container, as far as the sweep can know
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / socket_dirs.SOCKET_NAME))
        listener.listen()
        assert socket_dirs.sweep(tmp_path) == 0
    assert socket_dirs.sweep(tmp_path) == 1


def test_old_directory_without_socket_goes(tmp_path: pathlib.Path, dead_pid: int) -> None:
    """The sweep removes a directory without a socket only when the directory is old."""
    path = _directory(tmp_path, dead_pid, "a", socket_file=False)
    assert socket_dirs.sweep(tmp_path) == 0
    old = time.time() - 3600
    os.utime(path, (old, old))
    assert socket_dirs.sweep(tmp_path) == 1


def test_foreign_names_stay(tmp_path: pathlib.Path, dead_pid: int) -> None:
    """The sweep leaves names that are not of its pattern, files and links."""
    for name in (
        "bellwether-abc-d",
        "bellwether-",
        f"other-{dead_pid}-a",
        "bellwether-99999999999999999999999-x",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / f"bellwether-{dead_pid}-file").write_text("")
    os.symlink(tmp_path / "bellwether-abc-d", tmp_path / f"bellwether-{dead_pid}-link")
    before = sorted(os.listdir(tmp_path))
    assert socket_dirs.sweep(tmp_path) == 0
    assert sorted(os.listdir(tmp_path)) == before


def test_new_directory_is_private() -> None:
    """A new socket directory is open to its user alone and named after its process."""
    path = pathlib.Path(socket_dirs.make_directory())
    try:
        assert path.stat().st_mode & 0o777 == 0o700
        assert path.name.startswith(f"bellwether-{os.getpid()}-")
    finally:
        path.rmdir()
