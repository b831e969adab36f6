"""Start-up, counted instead of timed: what is imported, and that a second start compiles nothing."""

import grp
import hashlib
import json
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from etils import epath

import harness
from harness.training.sealed_files import SCHEME

pytestmark = pytest.mark.cluster

HEAVY = ("orbax", "tensorstore", "tensorboardX", "tensorboard", "optax", "matplotlib", "scipy", "tqdm")
SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_enable_xla_caches",
)
TRAINER = """
import json, sys
import jax, jax.numpy as jnp
import numpy as np
import harness
import runtime as rt

counts = {"cache_hits": 0, "cache_misses": 0}

def note(event, **_):
    name = event.rpartition("/")[2]
    if event.startswith("/jax/compilation_cache/") and name in counts:
        counts[name] += 1

jax.monitoring.register_event_listener(note)
directory = harness.keep_compilations(sys.argv[1])
kept = jax.config.jax_compilation_cache_dir
server = rt.Server.create_local_server()
w = rt.Variable(np.ones((3, 4), np.float32), name="w")
x = rt.placeholder(jnp.float32, [None, 3])
loss = rt.call(lambda w, x: jnp.sum((x @ w) ** 2), w, x)
step = rt.assign_sub(w, 0.1 * rt.gradients(loss, [w])[0])
with rt.Session(server.target) as session:
    session.run(rt.global_variables_initializer())
    for _ in range(3):
        value = session.run([step, loss], {x: np.ones((2, 3), np.float32)})[1]
server.stop()
print(json.dumps({**counts, "directory": directory, "kept": kept, "loss": float(value)}))
"""


@pytest.fixture(autouse=True)
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of this user's key; there is none yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "bellwether" / "compilations.key"


def _python(code: str, *arguments: str, **environment: str) -> str:
    return _run(code, *arguments, **environment)[0]


def _run(code: str, *arguments: str, **environment: str) -> tuple[str, str]:
    """What a program writes to its output, and to its log."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**known, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.chaos
@pytest.mark.parametrize("package", ["runtime", "harness.monitoring"])
def test_a_ps_imports_nothing_that_it_does_not_need(package: str) -> None:
    code = f"import {package}, sys; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    assert _python(code).split() == []


def test_the_launcher_starts_without_jax() -> None:
    assert _python("import harness.launch, sys; print('jax' in sys.modules, 'numpy' in sys.modules)") == "False False\n"


@pytest.mark.chaos
def test_a_second_start_compiles_nothing_wherever_the_directory_lies(tmp_path: Path) -> None:
    first = json.loads(_python(TRAINER, str(tmp_path / "first")))
    assert first["cache_misses"] > 0
    assert Path(first["directory"]).is_relative_to(tmp_path / "first")
    shutil.move(tmp_path / "first", tmp_path / "second")
    second = json.loads(_python(TRAINER, str(tmp_path / "second")))
    assert second["cache_misses"] == 0
    assert second["cache_hits"] == first["cache_misses"]
    assert second["loss"] == first["loss"]


def test_a_cache_that_jax_was_given_stays(tmp_path: Path) -> None:
    given = str(tmp_path / "given")
    found = json.loads(_python(TRAINER, str(tmp_path / "logdir"), JAX_COMPILATION_CACHE_DIR=given))
    assert found["directory"] == given
    assert not (tmp_path / "logdir").exists()


def _train(logdir: Path, **environment: str) -> tuple[dict[str, Any], str]:
    told, log = _run(TRAINER, str(logdir), **environment)
    found: dict[str, Any] = json.loads(told)
    return found, log


def _cut(entry: Path, others: list[Path]) -> None:
    entry.write_bytes(entry.read_bytes()[:-40])


def _forge(entry: Path, others: list[Path]) -> None:
    """Puts what is there under a seal of nobody's: as who has no key can."""
    data = entry.read_bytes()
    entry.write_bytes(hashlib.sha256(data[32:]).digest() + data[32:])


def _unseal(entry: Path, others: list[Path]) -> None:
    entry.write_bytes(entry.read_bytes()[32:])


def _swap(entry: Path, others: list[Path]) -> None:
    """Puts another program's in its place, with the seal that this has."""
    entry.write_bytes(next(o for o in others if o != entry).read_bytes())


def _pipe(entry: Path, others: list[Path]) -> None:
    entry.unlink()
    os.mkfifo(entry)


def _link(entry: Path, others: list[Path]) -> None:
    elsewhere = entry.parent.parent / entry.name
    entry.rename(elsewhere)
    entry.symlink_to(elsewhere)


def _huge(entry: Path, others: list[Path]) -> None:
    with entry.open("r+b") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("harm", [_cut, _forge, _unseal, _swap, _pipe, _link, _huge], ids=lambda f: f.__name__[1:])
def test_a_file_that_is_not_as_this_user_has_written_it_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path, list[Path]], None]
) -> None:
    directory = epath.Path(f"{SCHEME}{tmp_path}")
    ours, other = directory / "one-cache", directory / "other-cache"
    for path in (ours, other):
        path.write_bytes(f"what is in {path.name}".encode() * 10)
        assert path.exists() and path.read_bytes().startswith(f"what is in {path.name}".encode())
    harm(tmp_path / "one-cache", [tmp_path / "other-cache"])
    with pytest.raises(OSError):
        ours.read_bytes()
    assert not ours.exists() and not caplog.text.count("other-cache")
    assert caplog.text.count(f"{ours} is not used: ") == 1
    ours.write_bytes(b"anew")
    assert ours.exists() and ours.read_bytes() == b"anew" and other.exists()


@pytest.mark.chaos
def test_a_forged_program_is_told_of_and_compiled_again(tmp_path: Path) -> None:
    first, _ = _train(tmp_path)
    entries = sorted(Path(first["directory"]).iterdir())
    assert len(entries) == first["cache_misses"] == 2
    _forge(entries[0], entries)
    _swap(entries[1], entries)
    again, log = _train(tmp_path)
    assert (again["cache_hits"], again["cache_misses"], again["loss"]) == (0, 2, first["loss"])
    assert [log.count(f"{entry} is not used: ") for entry in entries] == [1, 1]
    after, log = _train(tmp_path)  # what was compiled again is in its place
    assert (after["cache_hits"], after["cache_misses"]) == (2, 0) and "is not used" not in log


@pytest.fixture
def keep(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., tuple[str | None, str]]]:
    """Has this process keep compilations below ``run``, where nothing is compiled; gives the directory and the log."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}

    def run(given: str | None = None) -> tuple[str | None, str]:
        caplog.clear()
        jax.config.update(SETTINGS[0], given)
        found = harness.keep_compilations(str(tmp_path / "run"))
        used = getattr(jax.config, SETTINGS[0])
        assert (used is None) == (found is None) and (found is None or used.endswith(found))
        return found, caplog.text

    yield run
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize("part", ["", "compilations", "compilations/*"])
@pytest.mark.parametrize("given", [False, True])
def test_nothing_is_kept_where_others_can_write(
    tmp_path: Path, keep: Callable[..., tuple[str | None, str]], part: str, given: bool
) -> None:
    first, _ = keep()
    (shared,) = (tmp_path / "run").glob(part) if part else [tmp_path / "run"]
    shared.chmod(0o777)
    found, log = keep(first if given else None)
    assert found is None and f"others can write {shared} (mode 0777)" in log
    shared.chmod(0o1777)  # others can write there, but not put another directory in the place of one that is there
    found, log = keep(first if given else None)
    if part.endswith("*"):
        assert found is None and f"others can write {shared} (mode 1777)" in log
    else:
        assert found == first and not log


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make directories of another user")
@pytest.mark.parametrize("user, group, mode", [(65534, 0, 0o755), (0, 65534, 0o775)])
def test_nothing_is_kept_in_what_is_another_users_or_groups(
    tmp_path: Path, keep: Callable[..., tuple[str | None, str]], user: int, group: int, mode: int
) -> None:
    directory = tmp_path / "run" / "compilations"
    directory.mkdir(parents=True)
    directory.chmod(mode)
    os.chown(directory, user, group)
    found, log = keep()
    assert found is None and str(directory) in log
    assert ("belongs to another user" if user else "others can write") in log


def test_a_users_private_group_is_nobody_else(tmp_path: Path, keep: Callable[..., tuple[str | None, str]]) -> None:
    logdir = tmp_path / "run"
    logdir.mkdir()
    logdir.chmod(0o775)
    me, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(logdir.stat().st_gid)
    private = (group.gr_gid, group.gr_name) == (me.pw_gid, me.pw_name) and not set(group.gr_mem) - {me.pw_name}
    assert (keep()[0] is not None) is private


def test_the_key_is_this_users_alone(tmp_path: Path, key: Path, keep: Callable[..., tuple[str | None, str]]) -> None:
    first, _ = _train(tmp_path / "run")
    assert key.stat().st_mode & 0o777 == 0o600 and key.parent.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in Path(first["directory"]).iterdir()} == {0o600}
    assert os.stat(first["directory"]).st_mode & 0o777 == 0o700
    key.chmod(0o640)
    found, log = keep()
    assert found is None and f"{key} is not a file that this user alone can read" in log
    key.chmod(0o600)
    key.write_text("12\n")
    found, log = keep()
    assert found is None and f"{key} holds no key" in log


def test_without_a_place_for_the_key_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: Callable[..., tuple[str | None, str]]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    found, log = keep()
    assert found is None and "set XDG_STATE_HOME" in log


def test_a_user_without_a_home_is_told_so_and_no_directory_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: Callable[..., tuple[str | None, str]]
) -> None:
    """As in a container whose user has no account: "~" stays as it is."""
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", dict[int, str]().__getitem__)
    monkeypatch.chdir(tmp_path)
    found, log = keep()
    assert found is None and "this user has no home: set XDG_STATE_HOME to a directory of this user's" in log
    assert not (tmp_path / "~").exists()


def test_programs_of_another_key_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: Callable[..., tuple[str | None, str]]
) -> None:
    first, _ = keep()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
    assert keep()[0] not in (first, None)


@pytest.mark.chaos
def test_processes_that_start_at_once_draw_one_key(tmp_path: Path, key: Path) -> None:
    code = "from harness.training.sealed_files import key_name; print(key_name())"
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert len({process.communicate(timeout=120)[0] for process in started}) == 1
    assert [path.name for path in key.parent.iterdir()] == [key.name]


@pytest.mark.chaos
def test_a_cache_that_is_limited_forgets_what_was_used_longest_ago(tmp_path: Path) -> None:
    first, _ = _train(tmp_path / "run")
    sizes = [path.stat().st_size for path in Path(first["directory"]).iterdir()]
    shutil.rmtree(tmp_path / "run")
    limit = str(sum(sizes) * 2 // 3)
    _train(tmp_path / "run", JAX_COMPILATION_CACHE_MAX_SIZE=limit)
    kept = list(Path(first["directory"]).glob("*-cache"))
    assert 0 < len(kept) < len(sizes)
    again, _ = _train(tmp_path / "run", JAX_COMPILATION_CACHE_MAX_SIZE=limit)
    assert again["loss"] == first["loss"]
