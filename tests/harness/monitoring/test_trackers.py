"""Experiment trackers get every scalar that the chief writes, cost training nothing, and go on after the chief's death.

Those of W&B and MLflow run where these are installed: make test-trackers.
"""

import importlib.util
import json
import logging
import math
import pathlib
import signal
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

import harness
import runtime as rt
from harness.monitoring import trackers
from harness.monitoring.trackers import Outcome
from tests.kit.processes import Program
from tests.kit.waits import until

needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="no wandb: make test-trackers")
needs_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="no mlflow: make test-trackers")


class Notebook:
    """A tracker of the user's own."""

    name = "notebook"

    def __init__(self) -> None:
        self.began: list[tuple[str, str | None]] = []
        self.scalars: list[tuple[int | None, dict[str, float]]] = []
        self.outcomes: list[Outcome] = []
        self.threads: set[str] = set()
        self.failures = 0

    def begin(self, logdir: str, run_id: str | None) -> str:
        self.began.append((logdir, run_id))
        return run_id or "run-1"

    def log(self, scalars: Mapping[str, float], step: int | None) -> None:
        self.threads.add(threading.current_thread().name)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("nobody there")
        self.scalars.append((step, dict(scalars)))

    def finish(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def series(self, tag: str) -> list[tuple[int | None, float]]:
        return [(step, scalars[tag]) for step, scalars in self.scalars if tag in scalars]


@pytest.fixture(autouse=True)
def graph() -> Iterator[rt.Graph]:
    with rt.Graph().as_default() as made:
        yield made
    harness.FileWriterCache.clear()


def test_a_supervisor_gives_its_tracker_every_scalar(tmp_path: pathlib.Path) -> None:
    notebook = Notebook()
    step = harness.get_or_create_global_step()
    loss = harness.summary.scalar("loss", step / 2)
    more = step.assign_add(1)
    supervisor = harness.Supervisor(logdir=tmp_path, summary_op=None, tracker=notebook)
    with supervisor.managed_session() as session:
        for _ in range(3):
            session.run(more)
            supervisor.summary_computed(session, session.run(loss))
        supervisor.summary_writer.add_scalars({"lr": 0.25, "norm": math.inf}, 7)
    assert notebook.began == [(str(tmp_path), None)]
    assert notebook.series("loss") == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert (7, {"lr": 0.25, "norm": math.inf}) in notebook.scalars
    assert notebook.outcomes == ["finished"]
    assert notebook.threads == {"track-notebook"}
    assert (tmp_path / "notebook.run_id").read_text() == "run-1"


def test_a_monitored_session_gives_its_tracker_every_scalar(tmp_path: pathlib.Path) -> None:
    notebook = Notebook()
    step = harness.get_or_create_global_step()
    harness.summary.scalar("twice", step * 2.0)
    more = step.assign_add(1)
    stop = harness.StopAtStepHook(last_step=4)
    with harness.MonitoredTrainingSession(
        checkpoint_dir=str(tmp_path), save_summaries_steps=1, log_step_count_steps=1, tracker=notebook, hooks=[stop]
    ) as session:
        while not session.should_stop():
            session.run(more)
    assert [at for at, _ in notebook.series("twice")] == [1, 2, 3, 4]
    assert [at for at, _ in notebook.series("global_step/sec")] == [2, 3, 4]
    assert notebook.outcomes == ["finished"]


@pytest.mark.parametrize("monitored", [False, True])
@pytest.mark.parametrize(("error", "outcome"), [(ValueError("mine"), "failed"), (KeyboardInterrupt(), "interrupted")])
def test_a_tracker_hears_how_training_ended(
    tmp_path: pathlib.Path, monitored: bool, error: BaseException, outcome: Outcome
) -> None:
    notebook = Notebook()
    more = harness.get_or_create_global_step().assign_add(1)
    with pytest.raises(type(error)):
        if monitored:
            with harness.MonitoredTrainingSession(checkpoint_dir=str(tmp_path), tracker=notebook) as session:
                session.run(more)
                raise error
        with harness.Supervisor(logdir=tmp_path, summary_op=None, tracker=notebook).managed_session() as session:
            session.run(more)
            raise error
    assert notebook.outcomes == [outcome]


def test_the_next_chief_goes_on_with_the_run(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = []
    for damage in ("", "", "a/b"):
        notebook = Notebook()
        if damage:
            (tmp_path / "notebook.run_id").write_text(damage)
        run = trackers.TrackedRun(notebook, str(tmp_path))
        run.finish("interrupted")
        ids.append(notebook.began[0][1])
    assert ids == [None, "run-1", None]
    assert "notebook.run_id holds no id of a run: notebook begins a new one" in caplog.text


def test_a_tracker_that_fails_is_told_of_once_and_costs_what_it_refused(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    notebook = Notebook()
    notebook.failures = 3
    with caplog.at_level(logging.INFO, logger="absl"):
        run = trackers.TrackedRun(notebook, str(tmp_path))
        for step in range(5):
            run.put({"loss": 1.0}, step)
        run.finish("finished")
    assert notebook.series("loss") == [(3, 1.0), (4, 1.0)]
    text = "notebook does not take what this run writes (training goes on without it): ConnectionError: nobody there"
    assert caplog.text.count(text) == 1
    assert "notebook takes what this run writes again" in caplog.text
    assert "notebook lacks 3 of the writes of this run" in caplog.text
    assert notebook.outcomes == ["finished"]


def test_a_tracker_that_hangs_holds_up_neither_a_step_nor_the_end(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "MOST_WAITING", 10)
    monkeypatch.setattr(trackers, "FINISH_SECS", 0.1)
    hung, released = threading.Event(), threading.Event()

    class Hangs(Notebook):
        def log(self, scalars: Mapping[str, float], step: int | None) -> None:
            hung.set()
            released.wait()

    step = harness.get_or_create_global_step()
    more = step.assign_add(1)
    supervisor = harness.Supervisor(logdir=tmp_path, summary_op=None, tracker=Hangs())
    with supervisor.managed_session() as session:
        for number in range(100):
            session.run(more)
            supervisor.summary_writer.add_scalars({"loss": 1.0}, number)
        assert hung.wait(60)
    released.set()
    assert "notebook is still busy after 0.1 s" in caplog.text
    assert "notebook lacks" in caplog.text


def test_a_tracker_that_cannot_begin_is_tried_again(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "RETRY_SECS", 0.001)
    logged = threading.Event()

    class Late(Notebook):
        tries = 0

        def begin(self, logdir: str, run_id: str | None) -> str:
            self.tries += 1
            if self.tries < 3:
                raise TimeoutError("no answer")
            return super().begin(logdir, run_id)

        def log(self, scalars: Mapping[str, float], step: int | None) -> None:
            super().log(scalars, step)
            logged.set()

    late = Late()
    run = trackers.TrackedRun(late, str(tmp_path))
    run.put({"loss": 1.0}, 1)
    assert logged.wait(60)
    run.finish("finished")
    assert late.series("loss") == [(1, 1.0)]
    assert caplog.text.count("TimeoutError: no answer") == 1


def test_only_a_chief_tracks(tmp_path: pathlib.Path) -> None:
    harness.get_or_create_global_step()
    supervisor = harness.Supervisor(is_chief=False, logdir=tmp_path, tracker=Notebook())
    assert supervisor.summary_writer is None


def test_a_tracker_without_a_place_is_refused() -> None:
    step = harness.get_or_create_global_step()
    with pytest.raises(ValueError, match="give a logdir, and no other writer"):
        harness.Supervisor(global_step=step, tracker=Notebook())
    with pytest.raises(ValueError, match="checkpoint_dir or summary_dir"):
        harness.MonitoredTrainingSession(tracker=Notebook())
    with pytest.raises(TypeError, match=r"tracker has no begin\(\)"):
        harness.Supervisor(global_step=step, logdir="unused", tracker=object())  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "module"), [(harness.WandbTracker, "wandb"), (harness.MlflowTracker, "mlflow")])
def test_a_library_that_is_missing_is_named(kind: type, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"{module} is not installed: pip install {module}"):
        kind()


Story = tuple[list[tuple[int, float]], dict[str, object], object]
"""What a tracker holds of a run: the losses by step, the config, how it has ended."""


def killed_and_taken_up(tracker: str, logdir: pathlib.Path, held: Callable[[], Story], *flags: str) -> Story:
    """What a tracker holds of a run whose chief was killed when it had given the tracker losses, and went on."""
    command = ("python", "-m", "tests.harness.monitoring.tracked_program", tracker, str(logdir))
    env = {"WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with Program(*command, "4", "--wait", *flags, cold=True, env=env) as program:
        program.expect("trained")
        until(lambda: held()[0])
        program.signal(signal.SIGKILL)
        program.wait()
    with Program(*command, "7", *flags, cold=True, env=env) as program:
        assert program.wait() == 0, program.story()
    losses, config, end = held()
    assert losses[0][0] < 4 and losses[-1][0] == 7
    return losses, config, end


@needs_wandb
@pytest.mark.cluster
@pytest.mark.parametrize("flags", [(), ("--monitored",)])
def test_wandb_has_one_run_for_both_lives_of_the_chief(tmp_path: pathlib.Path, flags: tuple[str, ...]) -> None:
    def held() -> Story:
        losses: list[tuple[int, float]] = []
        config: dict[str, object] = {}
        end: object = None
        for path in sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb")):
            for record in wandb_records(path):
                rows = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                if "loss" in rows:
                    losses.append((rows["global_step"], rows["loss"]))
                for update in (*record.config.update, *record.run.config.update):
                    config[update.key or update.nested_key[0]] = json.loads(update.value_json)
                if record.HasField("exit"):
                    end = record.exit.exit_code
        return losses, config, end

    _, config, end = killed_and_taken_up("wandb", tmp_path, held, *flags)
    run_id = (tmp_path / "wandb.run_id").read_text()
    assert [path.name.rpartition("-")[2] for path in (tmp_path / "wandb").glob("offline-run-*")] == [run_id] * 2
    assert {"rate": 0.5, "layers": [3, 2], "last_step": 7}.items() <= config.items()
    assert end == 0


def wandb_records(path: pathlib.Path) -> Iterator[Any]:
    """The records of a file of W&B's offline mode, up to where it ends or was cut off; it is a log of LevelDB."""
    from wandb.proto import wandb_internal_pb2

    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        part = data[at + 7 : at + 7 + length]
        if not kind or len(part) < length:
            return
        record += part
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


@needs_mlflow
@pytest.mark.cluster
@pytest.mark.parametrize("flags", [(), ("--monitored",)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the libraries under MLflow
@pytest.mark.parametrize("store", ["file://{}/mlruns", "sqlite:///{}/mlflow.db"])
def test_mlflow_has_one_run_for_both_lives_of_the_chief(
    tmp_path: pathlib.Path, store: str, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    uri = store.format(tmp_path)
    client = mlflow.MlflowClient(tracking_uri=uri)
    client.search_experiments()  # makes the tables of a data base, which two processes at once may not

    def held() -> Story:
        experiment = client.get_experiment_by_name("digits")
        runs = client.search_runs([experiment.experiment_id]) if experiment else []
        assert len(runs) <= 1
        if not runs:
            return [], {}, None
        history = client.get_metric_history(runs[0].info.run_id, "loss")
        return [(point.step, point.value) for point in history], dict(runs[0].data.params), runs[0].info.status

    _, config, end = killed_and_taken_up("mlflow", tmp_path, held, f"--store={uri}", *flags)
    assert config == {"rate": "0.5", "layers": "[3, 2]", "last_step": "4"}
    assert end == "FINISHED"
