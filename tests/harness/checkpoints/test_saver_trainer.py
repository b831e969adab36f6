"""The MNIST trainer and its checkpoints: without a shared directory, and with a worker that comes back."""

import contextlib
import pathlib
import re
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import pytest

import harness
from harness.checkpoints.manifest import read_manifest
from tests.kit import real_mnist
from tests.kit.processes import Program
from tests.kit.waits import until
from tests.runtime import kit

pytestmark = pytest.mark.chaos

T = TypeVar("T")
ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def mnist() -> str:
    if real_mnist.NONE_HERE:
        pytest.skip(real_mnist.NONE_HERE)
    return real_mnist.DIRECTORY


class _Trainers:
    """Trainers, each a program with a working directory of its own."""

    def __init__(
        self, stack: contextlib.ExitStack, directory: pathlib.Path, flags: list[str]
    ) -> None:
        self._stack = stack
        self._directory = directory
        self._flags = flags

    def where(self, job: str, index: int) -> pathlib.Path:
        return self._directory / f"{job}{index}"

    def start(self, job: str, index: int) -> Program:
        where = self.where(job, index)
        where.mkdir(exist_ok=True)
        command = [
            "python",
            "-m",
            "models.mnist.trainer",
            *self._flags,
            f"--job_name={job}",
            f"--task_index={index}",
        ]
        return self._stack.enter_context(Program(*command, cwd=where))


@contextlib.contextmanager
def _trainers(
    directory: pathlib.Path, mnist: str, ps: int, workers: int, *flags: str
) -> Iterator[_Trainers]:
    addresses = kit.addresses(ps=ps, worker=workers)
    hosts = [f"--{job}_hosts={','.join(at)}" for job, at in addresses.items()]
    with contextlib.ExitStack() as stack:
        yield _Trainers(
            stack, directory, [*hosts, f"--data_dir={mnist}", "--start_timeout_secs=100", *flags]
        )


@pytest.mark.timeout(200)
def test_trainer_streams_without_shared_directory(tmp_path: pathlib.Path, mnist: str) -> None:
    """The trainer saves by stream where each ps has a directory of its own."""
    flags = (
        "--logdir=run",
        "--checkpoint_transfer=stream",
        "--train_steps=40",
        "--save_summaries_secs=0",
    )
    with _trainers(tmp_path, mnist, 2, 1, *flags) as trainers:
        for index in (0, 1):
            trainers.start("ps", index)
        trainers.start("worker", 0).result(150)
    path = harness.latest_checkpoint(str(trainers.where("worker", 0) / "run"))
    assert path is not None and int(harness.load_variable(path, "global_step")) >= 40
    assert np.abs(harness.load_variable(path, "mlp/w1")).max() > 0
    for index in (0, 1):
        assert not list(trainers.where("ps", index).rglob("bellwether.json"))


@pytest.mark.timeout(240)
def test_restarted_worker_continues_its_data(tmp_path: pathlib.Path, mnist: str) -> None:
    """A restarted worker continues with its own data."""
    logdir = tmp_path / "run"
    flags = (
        f"--logdir={logdir}",
        "--train_steps=1000000",
        "--save_model_secs=1",
        "--save_summaries_secs=0",
    )
    with _trainers(tmp_path, mnist, 1, 2, *flags) as trainers:
        trainers.start("ps", 0)
        trainers.start("worker", 0)
        second = trainers.start("worker", 1)
        seen = until(lambda: _epoch_of(logdir, 1), every=0.1)
        second.kill()
        found = trainers.start("worker", 1).expect(r"going on with the data at epoch ([\d.]+)")
    assert float(found[1]) >= seen - 1e-3  # never back to the beginning


@pytest.mark.timeout(200)
def test_empty_logdir_writes_nothing(tmp_path: pathlib.Path, mnist: str) -> None:
    """A trainer without a logdir trains, says so once and writes no file."""
    # Summaries are on, as they are by default, and a test is due in the middle of the run.
    with _trainers(
        tmp_path, mnist, 1, 1, "--logdir=", "--train_steps=40", "--test_epochs=0.03"
    ) as trainers:
        trainers.start("ps", 0)
        log = trainers.start("worker", 0).result(150)
    assert log.count("--logdir is empty: no summaries and no checkpoints are written") == 1
    assert re.search(r"^Test-Accuracy: 0\.\d+$", log, re.M) and "Traceback" not in log
    for job in ("ps", "worker"):
        assert not list(trainers.where(job, 0).iterdir())


def _epoch_of(logdir: pathlib.Path, worker: int) -> float | None:
    """How far a worker's data had come in the newest checkpoint, in epochs; None when it is not in it."""
    with contextlib.suppress(OSError):  # removed meanwhile
        path = harness.latest_checkpoint(str(logdir))
        manifest = read_manifest(path) if path else None
        state = (
            manifest.states.get(f"/job:worker/task:{worker}", {}).get("data") if manifest else None
        )
        if state and state["position"]:
            return float(state["epoch"]) + float(state["position"]) / (state["num_examples"] / 2)
    return None
