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


def test_what_a_dead_process_left_is_removed(tmp_path: pathlib.Path, dead_pid: int) -> None:
    path = _directory(tmp_path, dead_pid, "a")
    assert socket_dirs.sweep(tmp_path) == 1
    assert not path.exists()
    assert socket_dirs.sweep(tmp_path) == 0


def test_what_a_live_process_may_need_stays(tmp_path: pathlib.Path) -> None:
    path = _directory(tmp_path, os.getpid(), "a")
    assert socket_dirs.sweep(tmp_path) == 0
    assert path.exists()


def test_a_socket_that_answers_stays_whatever_its_process_id_says(
    tmp_path: pathlib.Path, dead_pid: int
) -> None:
    path = _directory(tmp_path, dead_pid, "a", socket_file=False)
    # of another container, as far as the sweep can know
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / socket_dirs.SOCKET_NAME))
        listener.listen()
        assert socket_dirs.sweep(tmp_path) == 0
    assert socket_dirs.sweep(tmp_path) == 1


def test_a_directory_without_a_socket_goes_when_it_is_old(
    tmp_path: pathlib.Path, dead_pid: int
) -> None:
    path = _directory(tmp_path, dead_pid, "a", socket_file=False)
    assert socket_dirs.sweep(tmp_path) == 0
    old = time.time() - 3600
    os.utime(path, (old, old))
    assert socket_dirs.sweep(tmp_path) == 1


def test_names_that_are_not_ours_stay(tmp_path: pathlib.Path, dead_pid: int) -> None:
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


def test_a_new_directory_is_private_and_names_its_process() -> None:
    path = pathlib.Path(socket_dirs.make_directory())
    try:
        assert path.stat().st_mode & 0o777 == 0o700
        assert path.name.startswith(f"bellwether-{os.getpid()}-")
    finally:
        path.rmdir()
