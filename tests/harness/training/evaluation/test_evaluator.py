"""The evaluator: every checkpoint once, whatever dies; the best one kept; training ended early; nobody held up."""

import json
import os
import pathlib
import threading
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import harness
import runtime as rt
from harness import timeouts
from harness.training.evaluation import evaluator as evaluator_module
from harness.training.stop.run_end import end_mark, note_end
from tests.kit.changes import SetTimes
from tests.kit.processes import Program
from tests.kit.waits import until

pytestmark = pytest.mark.cluster

HERE = pathlib.Path(__file__).parent


class Trainer:
    """Saves checkpoints whose one variable says what they are worth."""

    def __init__(self, logdir: pathlib.Path, keep: int = 5) -> None:
        self.path = str(logdir / "model.ckpt")
        graph = rt.Graph()
        with graph.as_default():
            self.value = rt.Variable(0.0, name="value")
            self.step = harness.get_or_create_global_step()
            self.saver = harness.Saver(max_to_keep=keep)
            self.loads = [rt.placeholder(np.float32, []), rt.placeholder(np.int64, [])]
            self.assign = rt.group(
                self.value.assign(self.loads[0]), self.step.assign(self.loads[1])
            )
            init = rt.global_variables_initializer()
        self.session = rt.Session("", graph)
        self.session.run(init)

    def save(self, step: int, value: float) -> str:
        self.session.run(
            self.assign, dict(zip(self.loads, (np.float32(value), np.int64(step)), strict=True))
        )
        return str(self.saver.save(self.session, self.path, self.step))


class Worth:
    """A graph to evaluate with, and an evaluation that remembers its calls."""

    def __init__(self) -> None:
        self.graph = rt.Graph()
        with self.graph.as_default():
            self.value = rt.Variable(-1.0, name="value")
            harness.get_or_create_global_step()
        self.calls: list[int] = []

    def __call__(self, session: rt.Session, step: int) -> dict[str, float]:
        self.calls.append(step)
        return {"accuracy": float(session.run(self.value))}

    def evaluator(self, logdir: pathlib.Path, **options: Any) -> harness.Evaluator:
        options = {"best_by": "accuracy", "silence_secs": 0.0, **options}
        return harness.Evaluator(self, logdir, graph=self.graph, **options)


def worth(checkpoint: str | None) -> float:
    assert checkpoint is not None
    return float(harness.load_variable(checkpoint, "value"))


def test_evaluator_keeps_the_best(
    tmp_path: pathlib.Path,
) -> None:
    """Every checkpoint is evaluated once over restarts, and the best outlives the trainer's
    retention.
    """
    trainer, first = Trainer(tmp_path, keep=2), Worth()
    for step, value in [(10, 0.5), (20, 0.9)]:
        trainer.save(step, value)
    note_end(str(tmp_path), 20)
    end = first.evaluator(tmp_path).run()
    assert sorted(first.calls) == [10, 20] and end.best is not None and end.best.step == 20
    for step, value in [(30, 0.7), (40, 0.8)]:  # step 20 goes
        trainer.save(step, value)
    note_end(str(tmp_path), 40)
    assert not (tmp_path / "model.ckpt" / "20").exists()
    second = Worth()
    again = second.evaluator(tmp_path)
    again.run()
    assert sorted(second.calls) == [30, 40], "an evaluator that is started again goes on"
    assert worth(again.best_checkpoint) == pytest.approx(0.9)
    assert os.listdir(tmp_path / "eval" / "best") == ["20"]
    assert harness.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt" / "40"), (
        "the best is none of the run's"
    )
    assert not (tmp_path / "eval" / "held").exists()
    with rt.Graph().as_default() as graph:
        value = rt.Variable(0.0, name="value")
        with rt.Session("", graph) as session:
            harness.Saver([value]).restore(session, str(again.best_checkpoint))
            assert session.run(value) == pytest.approx(0.9)


def test_evaluator_writes_own_series(tmp_path: pathlib.Path) -> None:
    """The evaluator writes its series into a directory of its own."""
    trainer = Trainer(tmp_path)
    for step, value in [(10, 0.25), (20, 0.5)]:
        trainer.save(step, value)
    note_end(str(tmp_path), 20)
    Worth().evaluator(tmp_path, name="validation").run()
    events = EventAccumulator(str(tmp_path / "validation"))
    events.Reload()
    assert sorted((e.step, e.value) for e in events.Scalars("accuracy")) == [(10, 0.25), (20, 0.5)]
    assert not list(tmp_path.glob("events*"))


def test_deleted_checkpoint_is_evaluated_whole(
    tmp_path: pathlib.Path,
) -> None:
    """A checkpoint that is deleted during its evaluation is evaluated whole."""
    trainer = Trainer(tmp_path, keep=1)
    trainer.save(10, 0.5)
    evaluated: list[float] = []

    class Deletes(Worth):
        def __call__(self, session: rt.Session, step: int) -> dict[str, float]:
            if step == 10:
                trainer.save(20, 0.4)
                note_end(str(tmp_path), 20)
                assert not (tmp_path / "model.ckpt" / "10").exists()
                with self.graph.as_default():
                    evaluated.append(worth(str(tmp_path / "eval" / "held" / "10")))
            return super().__call__(session, step)

    deletes = Deletes()
    evaluator = deletes.evaluator(tmp_path)
    evaluator.run()
    assert deletes.calls == [10, 20] and evaluated == [0.5]
    assert worth(evaluator.best_checkpoint) == 0.5


def test_best_is_copied_without_links(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best checkpoint is a copy on a disk that refuses hard links."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(evaluator_module.errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    Trainer(tmp_path).save(10, 0.5)
    note_end(str(tmp_path), 10)
    evaluator = Worth().evaluator(tmp_path)
    evaluator.run()
    assert worth(evaluator.best_checkpoint) == 0.5


def test_evaluator_skips_damaged_checkpoint(tmp_path: pathlib.Path) -> None:
    """The evaluator passes over a damaged checkpoint."""
    trainer = Trainer(tmp_path)
    damaged = pathlib.Path(trainer.save(10, 0.5))
    (damaged / "bellwether.json").write_text("{}")
    trainer.save(20, 0.6)
    note_end(str(tmp_path), 20)
    worths = Worth()
    worths.evaluator(tmp_path).run()
    assert worths.calls == [20]


def test_killed_evaluator_continues(tmp_path: pathlib.Path) -> None:
    """An evaluator that was killed continues where it was."""
    trainer = Trainer(tmp_path)
    for step, value in [(10, 0.9), (20, 0.5), (30, 0.6)]:
        trainer.save(step, value)
    script = str(HERE / "evaluator_program.py")
    with Program("python", script, str(tmp_path), "20") as program:
        program.expect("EVALUATES 20")
        assert (tmp_path / "eval" / "held" / "20").is_dir()
        program.kill()
    told = json.loads((tmp_path / "eval" / "evaluations.json").read_text())["evaluations"]
    assert [row["step"] for row in told] == [10]
    note_end(str(tmp_path), 30)
    with Program("python", script, str(tmp_path)) as program:
        program.expect("OVER")
        assert program.wait() == 0
        said = [line for line in program.output().splitlines() if line.startswith("EVALUATES")]
    assert sorted(said) == ["EVALUATES 20", "EVALUATES 30"]
    assert not (tmp_path / "eval" / "held").exists()
    assert os.listdir(tmp_path / "eval" / "best") == ["10"]


def test_old_end_mark_is_ignored(
    tmp_path: pathlib.Path,
) -> None:
    """The mark of an earlier end is ignored once the run has saved a later step."""
    trainer = Trainer(tmp_path)
    trainer.save(10, 0.5)
    assert end_mark(str(tmp_path)) is None
    note_end(str(tmp_path), 10)
    assert end_mark(str(tmp_path)) is not None
    trainer.save(20, 0.5)
    assert end_mark(str(tmp_path)) is None
    (tmp_path / "finished.json").write_text("[]")
    assert end_mark(str(tmp_path)) is None


def test_evaluator_and_training_end_together(
    tmp_path: pathlib.Path,
) -> None:
    """An evaluator without progress ends the training, and the end of training ends the evaluator."""
    graph = rt.Graph()
    with graph.as_default(), rt.Server.create_local_server() as server:
        rt.Variable(0.5, name="value")
        step = harness.get_or_create_global_step().assign_add(1)
        supervisor = harness.Supervisor(
            graph=graph, logdir=str(tmp_path), save_model_secs=0.2, save_summaries_secs=0
        )
        worths = Worth()
        evaluator = worths.evaluator(tmp_path, master=server.target, patience=2)
        standings: list[Any] = []
        follower = threading.Thread(target=lambda: standings.append(evaluator.run()))
        with supervisor.managed_session(server.target) as session:
            follower.start()
            while not supervisor.should_stop():
                session.run(step)
        follower.join(60)
        assert not follower.is_alive()
    assert len(worths.calls) == len(set(worths.calls)) >= 3
    assert "no better in" in standings[0].stop
    newest = harness.latest_checkpoint(str(tmp_path))
    assert newest is not None and int(os.path.basename(newest)) == max(worths.calls), (
        "the last one is evaluated"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"patience": 3}, "patience needs master"),
        ({"patience": 3, "best_by": "", "master": "grpc://h:1"}, "needs best_by"),
        ({"best_mode": "most"}, "best_mode"),
        ({"name": "a/b"}, "one sub-directory"),
    ],
)
def test_senseless_evaluators_are_refused(
    tmp_path: pathlib.Path, options: dict[str, Any], said: str
) -> None:
    """Options of an evaluator that make no sense are refused."""
    with pytest.raises(ValueError, match=said):
        Worth().evaluator(tmp_path, **options)


@pytest.mark.parametrize("logdir", ["", "gs://bucket/run"])
def test_unmounted_directory_is_refused(logdir: Any) -> None:
    """A run directory that is not mounted is refused."""
    with pytest.raises(ValueError, match="mounted here"):
        Worth().evaluator(logdir)


def test_missing_metric_is_an_error(tmp_path: pathlib.Path) -> None:
    """An evaluation without the metric that decides is an error."""
    Trainer(tmp_path).save(10, 0.5)
    with pytest.raises(ValueError, match="gave no 'f1', which is best_by: it gave accuracy"):
        Worth().evaluator(tmp_path, best_by="f1").run()


HOLDS = """
import sys
from harness.training.start.log_directory import DirectoryLock

lock = DirectoryLock()
assert not lock.take(sys.argv[1], ["another evaluator"])
print("HOLDS", flush=True)
sys.stdin.read()
"""


def test_second_evaluator_waits(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, set_times: SetTimes
) -> None:
    """A second evaluator of a name waits for the first and says so."""
    set_times(timeouts, LOG_EVERY_SECS=0.0)
    Trainer(tmp_path).save(10, 0.5)
    note_end(str(tmp_path), 10)
    worth_of = Worth()
    with Program("python", "-c", HOLDS, str(tmp_path / "eval")) as first:
        first.expect("^HOLDS$")
        second = threading.Thread(target=worth_of.evaluator(tmp_path).run)
        second.start()
        until(lambda: caplog.text.count(f"another evaluator, process {first.pid} on") > 1)
        assert worth_of.calls == []
        first.kill()
    second.join(60)
    assert worth_of.calls == [10]


@pytest.mark.parametrize("taken", ["eval", "eval/chief.lock"])
def test_unusable_evaluation_directory_is_error(tmp_path: pathlib.Path, taken: str) -> None:
    """A directory that cannot be used is an error at once."""
    Trainer(tmp_path).save(10, 0.5)
    if taken == "eval":
        (tmp_path / taken).touch()
    else:
        (tmp_path / taken).mkdir(parents=True)
    with pytest.raises(OSError, match=f"{tmp_path}/{taken}"):
        Worth().evaluator(tmp_path).run()


def test_wrong_evaluation_result_is_named(tmp_path: pathlib.Path) -> None:
    """A wrong result of an evaluation is named, and an array of one number is accepted."""
    Trainer(tmp_path).save(10, 0.5)
    note_end(str(tmp_path), 10)
    graph = Worth().graph
    with pytest.raises(
        TypeError, match=r"evaluate\(\) returns a dict with one number for each name, not None"
    ):
        harness.Evaluator(lambda session, step: None, tmp_path, graph=graph, silence_secs=0.0).run()  # type: ignore[arg-type, return-value]
    evaluator = harness.Evaluator(
        lambda session, step: {"accuracy": np.array([0.5])},  # type: ignore[dict-item]
        *(tmp_path,),
        graph=graph,
        silence_secs=0.0,
    )
    evaluator.run()
    assert evaluator.evaluations[0].metrics == {"accuracy": 0.5}
