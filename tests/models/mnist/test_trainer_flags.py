"""The trainer's flags: what is refused in one line, what a value means, and runs that are meant to go on for ever."""

import dataclasses
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import pytest
from absl import flags
from absl.testing import flagsaver

import runtime as rt
from harness.exit_codes import DATA
from models.mnist import config as config_flags
from models.mnist import trainer
from models.mnist.config import RunConfig
from runtime.checkpoint.roots import roots_of
from tests.kit import real_mnist

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture
def parsed() -> Iterator[Any]:
    with flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()
        yield flags.FLAGS


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("seed", "-1", "seed"),
        ("epochs", "inf", "1e9"),
        ("epochs", "nan", "1e9"),
        ("epochs", "-1", "epochs"),
        ("learning_rate", "nan", "learning_rate"),
        ("batch_size", "0", "batch_size"),
        ("metrics_port", "65536", "metrics_port"),
    ],
)
def test_senseless_values_are_refused(parsed: Any, name: str, value: str, says: str) -> None:
    """Values that mean nothing are refused."""
    with pytest.raises((flags.IllegalFlagValueError, flags.ValidationError), match=says):
        parsed[name].parse(value)
        parsed.validate_all_flags()


def test_ordinary_values_are_accepted(parsed: Any) -> None:
    """Defaults and ordinary values are accepted."""
    parsed.validate_all_flags()
    for name, value in [("seed", "0"), ("epochs", "1e9")]:
        parsed[name].parse(value)
    parsed.validate_all_flags()


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adagrad", "adam"])
def test_endless_run_can_begin(parsed: Any, optimizer: str) -> None:
    """A run that is meant to be stopped by hand has a learning rate from the first step."""
    parsed.optimizer = optimizer
    rule = trainer.update_rule(RunConfig.from_flags(), round(1e9 * 600))
    weights = {"w": jnp.ones(2)}
    updates, _ = rule.update({"w": jnp.ones(2)}, rule.init(weights), weights)
    expected = {"sgd": -0.5, "momentum": -0.05, "adagrad": -0.0953, "adam": -0.005}[optimizer]
    assert updates["w"].tolist() == pytest.approx([expected, expected], rel=1e-2)


def test_logdir_limits_the_checkpoints(parsed: Any, tmp_path: pathlib.Path) -> None:
    """A task with a logdir keeps checkpoints there only."""
    parsed(["trainer", "--ps_hosts=localhost:0", "--job_name=ps"])
    # only the chief was given one: the ps takes its word for it
    assert RunConfig.from_flags().checkpoint_root is None
    for value, allowed in ((str(tmp_path / "run"), (str(tmp_path / "run"),)), ("", ())):
        parsed(["trainer", "--ps_hosts=localhost:0", "--job_name=ps", f"--logdir={value}"])
        with trainer.make_server(RunConfig.from_flags()) as server:
            roots = server.worker.checkpoint_participant.roots
            assert roots.paths == allowed
            with pytest.raises(rt.PermissionDeniedError):
                roots.check(str(tmp_path / "elsewhere"))
    roots_of((str(tmp_path / "run"),)).check(str(tmp_path / "run" / "model.ckpt" / "5" / "default"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"security": "insecure"}, rt.Security.insecure()),
        ({"security": "/no/such/token"}, rt.Security("/no/such/token")),
        ({"security": "/"}, rt.Security(certificates="/")),
    ],
)
def test_security_flag_chooses_credentials(
    parsed: Any, given: dict[str, Any], expected: rt.Security | None
) -> None:
    """--security chooses the credentials of a task."""
    with flagsaver.flagsaver(**given):
        config = RunConfig.from_flags()
    assert config.given_security == expected and config.problem() is None


@pytest.mark.chaos
def test_unusable_data_is_one_line() -> None:
    """Data that cannot be used give one line and the code for data."""
    run = subprocess.run(
        [sys.executable, "-m", "models.mnist.trainer", "--logdir="],
        cwd=ROOT,
        env={**os.environ, "MNIST_DIR": "/nowhere/at/all"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == DATA.plain and "Traceback" not in run.stderr
    last = run.stderr.splitlines()[-1]
    assert last.startswith("worker 0: MNIST_DIR=/nowhere/at/all has neither train-images")


@pytest.mark.cluster
def test_help_lists_all_flags() -> None:
    """--help lists the flags of all modules."""
    names = {flag.name for flag in flags.FLAGS.get_key_flags_for_module(trainer)}
    assert {
        "logdir",
        "sync",
        "max_staleness",
        "ps_backups",
        "metrics_port",
        "metrics_host",
        "log_json",
        "profile_steps",
    } <= names


def test_config_holds_every_flag(parsed: Any) -> None:
    """The config holds every flag and cannot change."""
    key = {flag.name for flag in parsed.get_key_flags_for_module(config_flags)}
    config = RunConfig.from_flags()
    limits = {f"limit_{row.name}" for row in rt.Limits.rows()}
    assert limits <= key
    task = {"ps_hosts", "worker_hosts", "chief_hosts", "job_name", "task_index"}
    own = key - limits - task
    assert {field.name for field in dataclasses.fields(config)} == own | {
        "checkpoint_root",
        "limits",
        "me",
    }
    assert {name: parsed[name].value or None for name in own} == {
        name: list(value) if isinstance(value, tuple) and value else value or None
        for name, value in dataclasses.asdict(config).items()
        if name in own
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 2  # type: ignore[misc]
    hash(config)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("mnist_*.flags")), ids=lambda path: path.stem
)
def test_flag_file_sets_its_values(parsed: Any, path: pathlib.Path) -> None:
    """A flag file gives the config its values."""
    parsed(["trainer", f"--flagfile={path}"])
    config = RunConfig.from_flags()
    said = dict(
        line[2:].split("=") for line in path.read_text().splitlines() if line.startswith("--")
    )
    assert said and {name: str(getattr(config, name)) for name in said} == {
        name: str(type(getattr(config, name))(value)) for name, value in said.items()
    }
    assert config.problem() is None


def test_only_config_reads_flags() -> None:
    """Only the config reads flags."""
    for path in sorted((ROOT / "models" / "mnist").glob("*.py")):
        if path.name not in ("config.py", "minimal.py"):
            assert "FLAGS" not in path.read_text(), path.name


@pytest.mark.chaos
@real_mnist.needed
def test_log_says_where_run_continues(tmp_path: pathlib.Path) -> None:
    """The log says where a run is kept and from which step the run continues."""

    def trained(*arguments: str) -> str:
        trainer = [sys.executable, "-m", "models.mnist.trainer"]
        told = [f"--data_dir={real_mnist.DIRECTORY}", f"--logdir={tmp_path}", *arguments]
        run = subprocess.run(
            [*trainer, *told], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert run.returncode == 0, run.stderr
        return run.stderr

    first = trained("--train_steps=30")
    assert f"checkpoints and TensorBoard events go to {tmp_path}\n" in first
    assert f"saved {tmp_path}/model.ckpt/30\n" in first
    again = trained("--train_steps=30")
    assert "going on from global step 30: training ends at 30, so nothing is left" in again
    assert again.count("going on with the data at epoch 0.05") == 1
