"""Start-up, counted instead of timed: what is imported, and that a second start compiles nothing."""

import contextlib
import grp
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

import harness
from tests.kit.changes import SetVariables

pytestmark = pytest.mark.cluster

ROOMS = {
    "launcher": (
        "import harness.launch.__main__",
        "absl harness",
        "exit_codes launch tracebacks",
        "runtime numpy jax grpc google psutil models",
    ),
    "ps": (
        "import models.mnist.trainer",
        "runtime jax",
        "exit_codes launch monitoring tracebacks training",
        "orbax tensorstore tensorboardX tensorboard matplotlib pooch tqdm sklearn scipy",
    ),
    "worker": (
        "import models.mnist.trainer, harness; harness.Supervisor, harness.Saver, "
        "harness.Optimizer, harness.Progress, harness.checkpointable",
        "runtime jax optax",
        "checkpoints coordinator exit_codes launch monitoring optimizers tensorboard timeouts "
        "tracebacks training",
        "orbax tensorstore tensorboard matplotlib pooch sklearn scipy",
    ),
}
"""What a task imports before it serves or builds a graph: a program, packages that are imported, rooms of the harness,
and packages that are not imported."""
HEAVY = (
    "orbax",
    "tensorstore",
    "tensorboardX",
    "tensorboard",
    "optax",
    "matplotlib",
    "scipy",
    "tqdm",
)
SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_enable_xla_caches",
)
TRAINER = """
import contextlib
import json
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
directory = harness.keep_compilations()
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
def cache(tmp_path: Path, set_variables: SetVariables) -> Path:
    """The directory of this user's programs; nothing is there yet."""
    set_variables(XDG_CACHE_HOME=str(tmp_path / "cache"))
    return tmp_path / "cache" / "bellwether" / "programs"


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
def test_ps_imports_no_heavy_modules(package: str) -> None:
    """The imports of a ps leave out the heavy modules."""
    code = f"import {package}, sys; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    assert _python(code).split() == []


@pytest.mark.parametrize("task", ROOMS)
def test_task_imports_its_rooms_only(task: str) -> None:
    """The launcher, a ps and a worker of the example import the rooms of a table and no other."""
    program, imported, rooms, left_out = ROOMS[task]
    code = f"{program}; import sys; print(*sys.modules)"
    modules = _python(code).split()
    assert {m for m in modules if m.startswith("harness.") and m.count(".") == 1} == {
        f"harness.{room}" for room in rooms.split()
    }
    tops = {module.partition(".")[0] for module in modules}
    assert not tops & set(left_out.split())
    assert tops >= set(imported.split())


@pytest.mark.chaos
def test_second_start_compiles_no_program(cache: Path) -> None:
    """A second start finds every compiled program."""
    first = json.loads(_python(TRAINER))
    assert first["cache_misses"] > 0 and Path(first["directory"]).parent == cache
    second = json.loads(_python(TRAINER))
    assert second["cache_misses"] == 0
    assert second["cache_hits"] == first["cache_misses"]
    assert second["loss"] == first["loss"]


def test_programs_are_kept_beside_downloads(cache: Path) -> None:
    """Compiled programs are kept beside a directory that others may read."""
    (cache.parent / "mnist").mkdir(parents=True)
    cache.parent.chmod(0o755)
    found = _python("import harness; print(harness.keep_compilations())")
    assert Path(found.strip()).parent == cache


def test_given_cache_directory_stays(tmp_path: Path, cache: Path) -> None:
    """A cache directory that JAX was given stays."""
    given = str(tmp_path / "given")
    found = json.loads(_python(TRAINER, JAX_COMPILATION_CACHE_DIR=given))
    assert found["directory"] == given
    assert not cache.exists()


def _train(**environment: str) -> tuple[dict[str, Any], str]:
    told, log = _run(TRAINER, **environment)
    found: dict[str, Any] = json.loads(told)
    return found, log


@pytest.mark.chaos
def test_damaged_program_is_recompiled(cache: Path) -> None:
    """A damaged program is compiled again."""
    first, _ = _train()
    entries = sorted(Path(first["directory"]).glob("*-cache"))
    assert len(entries) == first["cache_misses"] == 2
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:-40])
    again, _ = _train()
    assert (again["cache_hits"], again["loss"]) == (0, first["loss"])


@pytest.fixture
def keep(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., tuple[str | None, str]]]:
    """Has this process keep compilations, where nothing is compiled; returns the directory and the log."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}

    def run(given: str | None = None, logdir: str = "") -> tuple[str | None, str]:
        caplog.clear()
        jax.config.update(SETTINGS[0], given)
        found = harness.keep_compilations(logdir)
        assert getattr(jax.config, SETTINGS[0]) == found
        return found, caplog.text

    yield run
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_lie_in_a_private_directory(
    cache: Path, keep: Callable[..., tuple[str | None, str]]
) -> None:
    """Compiled programs lie in a private directory."""
    found, log = keep()
    assert found is not None and Path(found).parent == cache and not log
    assert cache.stat().st_mode & 0o777 == Path(found).stat().st_mode & 0o777 == 0o700


def test_impossible_program_cache_is_logged(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A program cache that cannot be made is logged and ends no task."""
    directory = harness.keep_compilations()
    assert directory is not None
    os.rmdir(directory)
    Path(directory).touch()  # no directory can be made there, as on a full disk
    assert Path(directory).parent == cache
    jax.config.update("jax_compilation_cache_dir", None)
    assert harness.keep_compilations() is None
    assert f"compiled programs are not kept: [Errno 17] File exists: '{directory}'" in caplog.text


def test_logdir_of_compilations_is_retired(
    tmp_path: Path, cache: Path, keep: Callable[..., tuple[str | None, str]]
) -> None:
    """The argument logdir of keep_compilations is retired and unused."""
    found, log = keep(logdir=str(tmp_path / "run"))
    assert found is not None and Path(found).parent == cache and not (tmp_path / "run").exists()
    assert "keep_compilations(logdir) is gone: since 0.2" in log


@pytest.mark.parametrize("mode", [0o777, 0o755])
def test_open_cache_is_not_used(
    cache: Path, keep: Callable[..., tuple[str | None, str]], mode: int
) -> None:
    """No program is kept where other users can enter."""
    keep()
    cache.chmod(mode)
    found, log = keep()
    assert found is None and f"others can enter {cache}" in log


@pytest.mark.parametrize("given", [False, True])
def test_replaceable_cache_is_not_used(
    cache: Path, keep: Callable[..., tuple[str | None, str]], given: bool
) -> None:
    """No program is kept where other users can replace the directory."""
    first, _ = keep()
    cache.parent.chmod(0o777)
    found, log = keep(first if given else None)
    assert found is None and f"others can write {cache.parent} (mode 0777)" in log
    # others can write there, but cannot replace a directory that is there
    cache.parent.chmod(0o1777)
    found, log = keep(first if given else None)
    assert found == first and not log


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make directories of another user")
@pytest.mark.parametrize("user, group, mode", [(65534, 0, 0o700), (0, 65534, 0o770)])
def test_foreign_cache_is_not_used(
    cache: Path, keep: Callable[..., tuple[str | None, str]], user: int, group: int, mode: int
) -> None:
    """No program is kept in a directory of another user or group."""
    cache.mkdir(parents=True)
    cache.chmod(mode)
    os.chown(cache, user, group)
    found, log = keep()
    assert found is None and str(cache) in log


def test_private_group_is_trusted(cache: Path, keep: Callable[..., tuple[str | None, str]]) -> None:
    """The private group of a user is trusted."""
    cache.parent.mkdir(parents=True)
    cache.parent.chmod(0o775)
    me, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(cache.parent.stat().st_gid)
    private = (group.gr_gid, group.gr_name) == (me.pw_gid, me.pw_name) and not set(group.gr_mem) - {
        me.pw_name
    }
    assert (keep()[0] is not None) is private


def test_missing_home_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    set_variables: SetVariables,
    keep: Callable[..., tuple[str | None, str]],
) -> None:
    """A user without a home is told so, and no directory is made."""
    set_variables(XDG_CACHE_HOME=None, HOME=None)
    monkeypatch.setattr("pwd.getpwuid", dict[int, str]().__getitem__)
    with contextlib.chdir(tmp_path):
        found, log = keep()
    assert (
        found is None
        and "this user has no home: set XDG_CACHE_HOME to a directory of this user's" in log
    )
    assert not (tmp_path / "~").exists()


@pytest.mark.chaos
def test_limited_cache_forgets_old_programs(cache: Path) -> None:
    """A limited cache forgets programs and training continues."""
    first, _ = _train()
    sizes = [path.stat().st_size for path in Path(first["directory"]).iterdir()]
    shutil.rmtree(cache)
    limit = str(sum(sizes) * 2 // 3)
    _train(JAX_COMPILATION_CACHE_MAX_SIZE=limit)
    kept = list(Path(first["directory"]).glob("*-cache"))
    assert 0 < len(kept) < len(sizes)
    again, _ = _train(JAX_COMPILATION_CACHE_MAX_SIZE=limit)
    assert again["loss"] == first["loss"]
