import fcntl
import os
import pathlib
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from runtime.errors import PermissionDeniedError, UnauthenticatedError
from runtime.trust import token_files
from runtime.trust.token_files import TokenFile, read, read_left
from tests.kit.processes import Task

TOKEN = "0f" * 32


@pytest.fixture
def place(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """The directory for tokens of this test."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield tmp_path / "bellwether"


def mode(path: str | pathlib.Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_nobody_else_reads_a_token(place: pathlib.Path) -> None:
    before = os.umask(0)  # as careless as can be
    try:
        file = TokenFile("one@")
    finally:
        os.umask(before)
    assert pathlib.Path(file.path) == place / "one@"
    assert (mode(place), mode(file.path)) == (0o700, 0o600)
    assert len(file.key) == 32 and pathlib.Path(file.path).read_text() == f"{file.key.hex()}\n"
    assert read_left("one@") == (file.key, file.path)
    file.close()
    assert list(place.iterdir()) == [] and read_left("one@") is None
    file.close()


def test_every_token_is_another() -> None:
    files = [TokenFile(f"test-{os.getpid()}-{i}@") for i in range(3)]
    assert len({file.key for file in files}) == 3
    for file in files:
        file.close()


def test_a_new_file_takes_the_place_of_an_old_one_which_then_leaves_it_alone(
    place: pathlib.Path,
) -> None:
    old = TokenFile("one@")
    new = TokenFile("one@")
    old.close()
    found = read_left("one@")
    assert found is not None and found.key == new.key != old.key
    new.close()
    assert read_left("one@") is None


def _hold(name: str, pipe: Any) -> None:
    file = TokenFile(name)
    pipe.send(("KEY", file.key))
    pipe.recv()


@pytest.mark.cluster
@pytest.mark.parametrize("signum", [signal.SIGKILL, None])
def test_what_a_process_leaves_behind_counts_for_nothing_and_is_swept(
    place: pathlib.Path, signum: int | None
) -> None:
    with Task(_hold, "theirs@") as other:
        key = other.hear("KEY")[1]
        found = read_left("theirs@")
        assert found is not None and found.key == key
        (place / "notes").write_text("of the user")
        TokenFile("ours@").close()
        assert (place / "theirs@").exists()  # it lives
        if signum is None:
            other.tell("end")
        else:
            other.signal(signum)
        other.wait()
    assert (place / "theirs@").exists() == (signum is not None)
    assert read_left("theirs@") is None
    mine = TokenFile("ours@")
    assert {path.name for path in place.iterdir()} == {"ours@", "notes"}
    mine.close()


def test_a_directory_that_others_can_enter_is_not_used(place: pathlib.Path) -> None:
    TokenFile("one@").close()
    (place / "one@").write_text(TOKEN)
    fd = os.open(place / "one@", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert read_left("one@") is not None
    place.chmod(0o755)
    assert read_left("one@") is None
    elsewhere = TokenFile(f"test-{os.getpid()}@")
    assert not elsewhere.path.startswith(str(place))
    elsewhere.close()
    os.close(fd)


@pytest.mark.parametrize("kind", ["a link", "a file", "open parent"])
def test_what_is_no_private_directory_is_refused(
    place: pathlib.Path, tmp_path: pathlib.Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    elif kind == "a file":
        place.write_text("")
    else:
        tmp_path.chmod(0o777)
    monkeypatch.setattr(token_files, "_places", lambda: [place])
    with pytest.raises(
        PermissionDeniedError, match="no place for a token .*XDG_RUNTIME_DIR"
    ) as caught:
        TokenFile("one@")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "rights", "message"),
    [
        (TOKEN, 0o600, ""),
        (f"{TOKEN}\n", 0o400, ""),
        (TOKEN, 0o640, "others can read the token in .*chmod 600"),
        (TOKEN, 0o604, "others can read"),
        (TOKEN[:-1], 0o600, "holds no token.*openssl rand"),
        (TOKEN + "00", 0o600, "holds no token"),
        ("g" * 64, 0o600, "holds no token"),
        ("x" * 10_000, 0o600, "holds no token"),
        (None, 0o600, "there is no .*: give a directory"),
    ],
)
def test_a_file_that_the_user_names(
    tmp_path: pathlib.Path, content: str | None, rights: int, message: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
        path.chmod(rights)
    if not message:
        assert read(str(path)) == (bytes.fromhex(TOKEN), str(path))
        return
    with pytest.raises(UnauthenticatedError, match=message) as caught:
        read(str(path))
    assert (
        str(path) in str(caught.value)
        and "\n" not in str(caught.value)
        and TOKEN not in str(caught.value)
    )


def test_a_directory_or_a_pipe_holds_no_token(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UnauthenticatedError, match="is no file with a token"):
            read(str(path))


def _interrupted_at(instruction: int) -> bool:
    """Looks for a token, with Ctrl-C at one instruction; returns False when there is no such instruction."""
    left = [instruction]

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != token_files.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    sys._getframe().f_trace_opcodes = True  # Python 3.12 asks for it before tracing begins
    sys.settrace(trace)
    try:
        read_left("one@")
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


# Python closes a file that nobody has any more, and warns.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_leaks_no_descriptor(place: pathlib.Path) -> None:
    """Each of 9,594 steps that Ctrl-C had interrupted looked for the token again, and 72 left its file open."""
    token = TokenFile("one@")
    before = len(os.listdir("/proc/self/fd"))
    instruction = 1
    while _interrupted_at(instruction):
        assert len(os.listdir("/proc/self/fd")) == before, instruction
        instruction += 1
    assert instruction > 100
    token.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make directories of another user")
def test_a_squatted_directory_has_a_way_out(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user who makes the directory first keeps nobody from starting who does what the message says."""
    squatted = tmp_path / f"bellwether-{os.geteuid()}"
    squatted.mkdir(mode=0o700)
    os.chown(squatted, 65534, 65534)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(token_files, "_places", lambda: [squatted])
    with pytest.raises(
        PermissionDeniedError, match="no directory of this user.*set XDG_RUNTIME_DIR.*mkdir -m 700"
    ):
        TokenFile("one@")
    monkeypatch.undo()
    own = tmp_path / "run"
    own.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    token = TokenFile("one@")
    assert token.path.startswith(str(own))
    token.close()


CORE = """
import resource, sys
from runtime.trust.token_files import read
resource.setrlimit(resource.RLIMIT_CORE, (1024, 1024))
read(sys.argv[1])
print(*resource.getrlimit(resource.RLIMIT_CORE))
"""


@pytest.mark.cluster
@pytest.mark.parametrize(("allowed", "limits"), [("", "0 1024\n"), ("1", "1024 1024\n")])
def test_a_process_with_a_secret_leaves_no_core(
    tmp_path: pathlib.Path, allowed: str, limits: str
) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    command = [sys.executable, "-c", CORE, str(path)]
    environment = {**os.environ, "BELLWETHER_CORE_DUMPS": allowed}
    assert (
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        == limits
    )
