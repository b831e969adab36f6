"""The command that shows what is in a checkpoint."""

import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

import harness
import runtime as rt
from harness.checkpoints import inspection
from tests.kit.commands import Ran, run_main


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """The command, in this process."""
    return lambda *arguments: run_main(inspection.main, capsys, arguments)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Two checkpoints, 1 and 2, that differ in one element of one variable."""
    logdir = tmp_path_factory.mktemp("run")
    with rt.Graph().as_default(), rt.Session() as session:
        w = rt.Variable(np.arange(6, dtype=np.float32).reshape(2, 3), name="net/w")
        rt.Variable(np.int32(7), name="steps")
        session.run(rt.global_variables_initializer())
        saver = harness.Saver()
        saver.save(session, str(logdir / "model.ckpt"), 1)
        session.run(w.assign_add(np.array([[0, 0, 0], [0, 0.5, 0]], np.float32)))
        saver.save(session, str(logdir / "model.ckpt"), 2)
    return logdir


def test_newest_step_is_shown(inspect: Callable[..., Ran], saved: pathlib.Path) -> None:
    """The command shows all steps and the variables of the newest."""
    shown = inspect(saved)
    assert shown.returncode == 0, shown.stderr
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert [line[0] for line in lines if "complete" in line] == ["1", "2"]
    assert ["net/w", "float32", "[2,", "3]", "24", "B", "/job:localhost/task:0"] in lines
    assert "model.ckpt/2: 2 variables, 28 B" in shown.stdout


def test_json_shows_one_variables_values(inspect: Callable[..., Ran], saved: pathlib.Path) -> None:
    """--json with --values and --name prints the values of one variable."""
    found = json.loads(inspect(saved / "model.ckpt-1", "--json", "--values", "--name=net").stdout)
    (variable,) = found["variables"]
    assert (variable["name"], variable["bytes"], variable["value"]) == (
        "net/w",
        24,
        [[0, 1, 2], [3, 4, 5]],
    )


def test_compare_counts_differences(inspect: Callable[..., Ran], saved: pathlib.Path) -> None:
    """--compare counts the elements that differ and exits with 1, or finds no difference."""
    found = inspect(saved / "model.ckpt" / "1", "--compare", saved / "model.ckpt" / "2")
    assert (found.returncode, found.stdout) == (1, "net/w: 1 of 6 elements differ, by up to 0.5\n")
    same = inspect(saved / "model.ckpt" / "2", "--compare", saved)
    assert same.returncode == 0 and "no difference" in same.stdout


def test_damaged_checkpoint_is_named(
    inspect: Callable[..., Ran], saved: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """A damaged checkpoint is named, and the newest whole checkpoint is shown."""

    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    victim = next(
        p for p in sorted((copy / "model.ckpt" / "2").rglob("*")) if p.is_file() and "/d/" in str(p)
    )
    victim.write_bytes(victim.read_bytes()[:-1])
    shown = inspect(copy)
    assert shown.returncode == 1
    assert "DAMAGED" in shown.stdout and victim.name in shown.stdout
    assert "model.ckpt/1: 2 variables" in shown.stdout  # the newest whole one


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "required: DIR"),
        (("/nowhere",), 2, "no such directory"),
        (("--nonsense", "x"), 2, "nonsense"),
    ],
)
def test_command_mistakes_are_one_line(
    inspect: Callable[..., Ran], arguments: tuple[str, ...], code: int, said: str
) -> None:
    """A mistake on the command line gives one line and code 2."""
    found = inspect(*arguments)
    assert (found.returncode, found.stderr.count("\n")) == (code, 1)
    assert said in found.stderr


def test_unknown_variable_is_named(inspect: Callable[..., Ran], saved: pathlib.Path) -> None:
    """A variable that the checkpoint lacks is named."""
    found = inspect(saved, "--name=x")
    assert found.returncode == 1 and "has no 'x'" in found.stderr


@pytest.mark.cluster
@pytest.mark.parametrize("flags", [[], ["--json"], ["--help"]])
def test_closed_reader_ends_inspection_silently(saved: pathlib.Path, flags: list[str]) -> None:
    """The command ends by SIGPIPE's code without a word when nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as unread:
        ended = subprocess.run(
            [sys.executable, "-m", "harness.inspect_checkpoint", str(saved), *flags],
            stdout=unread,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        )
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.cluster
def test_closed_output_changes_no_code(saved: pathlib.Path) -> None:
    """A closed output does not change the exit code."""
    command = shlex.join([sys.executable, "-m", "harness.inspect_checkpoint", str(saved)])
    ended = subprocess.run(["bash", "-c", f"{command} >&-"], stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
