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
from tests.kit.changes import SetVariables
from tests.kit.processes import Task

TOKEN = "0f" * 32


@pytest.fixture
def place(tmp_path: pathlib.Path, set_variables: SetVariables) -> Iterator[pathlib.Path]:
    """The directory for tokens of this test."""
    tmp_path.chmod(0o700)
    set_variables(XDG_RUNTIME_DIR=str(tmp_path))
    yield tmp_path / "bellwether"


def mode(path: str | pathlib.Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_nobody_else_reads_a_token(place: pathlib.Path) -> None:
    """A token file and its directory can be read by their user alone, and the file goes with its
    owner.
    """
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


def test_every_token_is_different() -> None:
    """Every token file has another token."""
    files = [TokenFile(f"test-{os.getpid()}-{i}@") for i in range(3)]
    assert len({file.key for file in files}) == 3
    for file in files:
        file.close()


def test_new_token_replaces_the_old(
    place: pathlib.Path,
) -> None:
    """A new token file replaces an old one, whose close leaves the new file alone."""
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
def test_leftovers_count_for_nothing(place: pathlib.Path, signum: int | None) -> None:
    """The token of a dead process counts for nothing and is swept by the next process."""
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


def test_enterable_directory_is_not_used(place: pathlib.Path) -> None:
    """A directory that other users can enter is not used for tokens."""
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
def test_unprivate_directory_is_refused(
    place: pathlib.Path, tmp_path: pathlib.Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that is no private directory is refused in one line."""
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
def test_named_token_file_is_checked(
    tmp_path: pathlib.Path, content: str | None, rights: int, message: str
) -> None:
    """A token file that the user names must be private and hold a token."""
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


def test_directory_or_pipe_is_no_token(tmp_path: pathlib.Path) -> None:
    """A directory or a pipe is refused as a token file."""
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
def test_squatted_directory_has_way_out(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, set_variables: SetVariables
) -> None:
    """A directory that another user made first is refused with a way out that works."""
    squatted = tmp_path / f"bellwether-{os.geteuid()}"
    squatted.mkdir(mode=0o700)
    os.chown(squatted, 65534, 65534)
    set_variables(XDG_RUNTIME_DIR=None)
    monkeypatch.setattr(token_files, "_places", lambda: [squatted])
    with pytest.raises(
        PermissionDeniedError, match="no directory of this user.*set XDG_RUNTIME_DIR.*mkdir -m 700"
    ):
        TokenFile("one@")
    monkeypatch.undo()
    own = tmp_path / "run"
    own.mkdir(mode=0o700)
    set_variables(XDG_RUNTIME_DIR=str(own))
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
def test_secret_process_leaves_no_core(tmp_path: pathlib.Path, allowed: str, limits: str) -> None:
    """A process with a secret leaves no core unless the user allows cores."""
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    command = [sys.executable, "-c", CORE, str(path)]
    environment = {**os.environ, "BELLWETHER_CORE_DUMPS": allowed}
    assert (
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        == limits
    )
