"""The example with a chief and an evaluator of their own, by flags and by what an engine tells."""

import json
import os
import pathlib
from collections.abc import Callable

import pytest
from absl.testing import flagsaver

from harness import exit_codes
from models.mnist.config import RunConfig
from runtime.cluster.spec import TaskId
from tests.kit.changes import SetVariables
from tests.kit.processes import Program

pytestmark = pytest.mark.cluster


HOSTS = ("--ps_hosts=p:1", "--worker_hosts=a:1,b:1", "--chief_hosts=c:1")


def test_chief_job_leads_and_counts(parsed: Callable[..., RunConfig]) -> None:
    """A chief of its own leads and counts as a worker."""
    for job, index, leads, number in [
        ("chief", 0, True, 0),
        ("worker", 0, False, 1),
        ("worker", 1, False, 2),
    ]:
        with flagsaver.flagsaver():
            config = parsed(*HOSTS, f"--job_name={job}", f"--task_index={index}", "--sync")
        assert (config.me.is_chief, config.me.number, config.workers) == (leads, number, 3)
        assert config.batches_per_step == 3 and config.problem() is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--job_name=chief", "--ps_hosts=p:1", "--chief_hosts=a:1,b:1"], "a run has one chief"),
        (["--job_name=evaluator", "--logdir="], "--logdir is empty"),
        (["--job_name=evaluator", "--patience=3"], "--patience asks a ps"),
    ],
)
def test_conflicting_roles_are_one_line(
    parsed: Callable[..., RunConfig], arguments: list[str], said: str
) -> None:
    """Roles that do not fit give one line."""
    assert said in str(parsed(*arguments).problem())


def test_tfjob_gives_every_role(
    parsed: Callable[..., RunConfig], set_variables: SetVariables
) -> None:
    """TF_CONFIG of a TFJob gives every task its role."""
    jobs = {"ps": ["p:1"], "chief": ["c:1"], "worker": ["a:1", "b:1"]}
    for job, index, leads in [
        ("chief", 0, True),
        ("worker", 1, False),
        ("evaluator", 0, False),
        ("ps", 0, False),
    ]:
        told = {"cluster": jobs, "task": {"type": job, "index": index}}
        set_variables(TF_CONFIG=json.dumps(told))
        with flagsaver.flagsaver():
            config = parsed()
        assert (config.me.job, config.me.index, config.me.is_chief) == (job, index, leads)
        assert (
            config.me.cluster.job_tasks("ps") == ["p:1"]
            and config.workers == 3
            and config.problem() is None
        )


def test_dynamic_tfjob_worker_finds_place(
    parsed: Callable[..., RunConfig], set_variables: SetVariables
) -> None:
    """A dynamic worker and a ps of a TFJob find their places."""
    sparse = {"worker": {"4": "e:1"}, "ps": ["p:1", "q:1"]}
    told = {"sparseCluster": sparse, "task": {"type": "worker", "index": 4}}
    set_variables(TF_CONFIG=json.dumps(told))
    config = parsed()
    assert (
        config.me.cluster.task_address("worker", 4) == "e:1"
        and config.me.number == 4
        and config.workers == 5
    )
    assert not config.me.is_chief and config.problem() is None
    told = {"sparseCluster": {"worker": {}, "ps": ["q:1"]}, "task": {"type": "ps", "index": 1}}
    set_variables(TF_CONFIG=json.dumps(told))
    config = parsed()
    assert config.me.cluster.tasks() == {TaskId("ps", 1): "q:1"} and config.problem() is None


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"TF_CONFIG": "{"}, "TF_CONFIG is not JSON: "),
        (
            {"JOBSET_NAME": "mnist", "BELLWETHER_JOBS": None},
            "BELLWETHER_JOBS is not set, which a pod",
        ),
    ],
)
def test_incomplete_engine_is_one_line(environment: dict[str, str | None], said: str) -> None:
    """An engine that leaves out a variable gives one line."""
    command = ("python", "-m", "models.mnist.trainer")
    with Program(*command, env=environment) as program:
        assert program.wait() == exit_codes.CONFIGURATION.plain
        (line,) = program.output().strip().splitlines()
    assert line.startswith(said)


@pytest.mark.chaos
def test_evaluator_ends_the_training(tmp_path: pathlib.Path) -> None:
    """An evaluator without progress ends the training of chief and worker at a checkpoint."""
    logdir = tmp_path / "run"
    with Program(
        *(
            "python",
            "-m",
            "harness.launch",
            "--ps=1",
            "--chief",
            "--workers=1",
            "--evaluators=1",
            "--",
        ),
        *(
            "python",
            "-m",
            "models.mnist.trainer",
            f"--logdir={logdir}",
            "--epochs=1e9",
            "--save_model_secs=0.5",
        ),
        *("--optimizer=sgd", "--learning_rate=0", "--patience=2", "--test_epochs=0", "--sync"),
    ) as program:
        assert program.wait() == 0, program.story()
    said = program.output()
    told = [
        line
        for line in said.splitlines()
        if "training is to end: accuracy was best at step" in line
    ]
    # the first to know
    assert told and all(line.startswith(("chief/0", "worker/0")) for line in told), program.story()
    assert "did not stop in time" not in said
    evaluated = json.loads((logdir / "eval" / "evaluations.json").read_text())["evaluations"]
    newest = max(int(name) for name in os.listdir(logdir / "model.ckpt") if name.isdigit())
    assert (
        max(row["step"] for row in evaluated)
        == newest
        == json.loads((logdir / "finished.json").read_text())["step"]
    )
