"""What an evaluator decides and remembers, by itself."""

import math
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.training.evaluation.evaluations import (
    EvaluationGoal,
    RunStanding,
    StepEvaluation,
    added,
    load,
    next_key,
    standing,
    store,
)
from runtime import DataLossError

ACCURACY = EvaluationGoal("accuracy")


def run(*values: float, metric: str = "accuracy") -> list[StepEvaluation]:
    return [StepEvaluation(10 * n, 100.0 + n, {metric: value}) for n, value in enumerate(values)]


def test_best_is_first_of_highest() -> None:
    """The best evaluation is the first with the highest value, in the order of the steps."""
    evaluations = run(0.5, 0.9, 0.9, 0.2)
    assert standing(evaluations, ACCURACY) == RunStanding(evaluations[1], 2)
    # the order of the steps counts
    assert standing(reversed(evaluations), ACCURACY) == RunStanding(evaluations[1], 2)


def test_lowest_may_be_best() -> None:
    """With mode min the lowest value is best."""
    evaluations = run(0.5, 0.2, 0.3, metric="cost")
    assert standing(evaluations, EvaluationGoal("cost", "min")) == RunStanding(evaluations[1], 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_infinite_value_is_never_best(bad: float) -> None:
    """A value that is not finite is never the best."""
    evaluations = run(bad, 0.1, bad)
    assert standing(evaluations, ACCURACY) == RunStanding(evaluations[1], 1)
    assert standing(run(bad), ACCURACY).best is None
    assert (
        "never was finite" in standing(run(bad, bad), EvaluationGoal("accuracy", patience=2)).stop
    )


def test_patience_counts_evaluations_without_progress() -> None:
    """Patience ends after the given number of evaluations without progress by min_delta."""
    goal = EvaluationGoal("accuracy", patience=2, min_delta=0.05)
    assert standing(run(0.5, 0.6, 0.62), goal).stop == ""
    stop = standing(run(0.5, 0.6, 0.62, 0.64), goal).stop
    assert stop == "accuracy was best at step 10 (0.6) and no better in 2 evaluations since"
    assert standing(run(0.5, 0.6, 0.62, 0.66), goal).stop == ""


def test_no_metric_means_no_decision() -> None:
    """Without a metric no evaluation is best and training goes on."""
    assert standing(run(0.5, 0.1), EvaluationGoal()) == RunStanding()


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "most"},
        {"patience": 0, "best_by": "a"},
        {"patience": 3},
        {"min_delta": -1.0},
        {"min_delta": math.nan},
    ],
)
def test_senseless_goals_are_refused(wrong: dict[str, object]) -> None:
    """Goals that make no sense are refused."""
    with pytest.raises(ValueError, match="best_mode|patience|min_delta"):
        EvaluationGoal(**wrong)  # type: ignore[arg-type]


def test_next_is_oldest_then_newest() -> None:
    """The oldest checkpoint is next during training, and the newest after its end."""
    found = [(30, 3.0), (10, 1.0), (20, 2.0)]
    done = [StepEvaluation(10, 1.0, {})]
    assert next_key(found, done, over=False) == (20, 2.0)
    assert next_key(found, done, over=True) == (30, 3.0)
    assert next_key([(10, 1.0)], done, over=True) is None


def test_resaved_step_is_another_checkpoint() -> None:
    """A step that was lost and saved again is another checkpoint and replaces the first."""
    first, again = (
        StepEvaluation(10, 1.0, {"accuracy": 0.9}),
        StepEvaluation(10, 5.0, {"accuracy": 0.4}),
    )
    assert next_key([again.key], [first], over=False) == again.key
    assert added([first], again) == (again,)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.floats(allow_nan=False)), max_size=30), st.booleans()
)
def test_every_checkpoint_is_evaluated_once(found: list[tuple[int, float]], over: bool) -> None:
    """Every checkpoint is evaluated once."""
    done: list[StepEvaluation] = []
    while (key := next_key(found, done, over)) is not None:
        done.append(StepEvaluation(*key, {}))
    assert sorted(e.key for e in done) == sorted(set(found))


@given(st.lists(st.floats(), max_size=5))
def test_evaluations_survive_their_file(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:  # fmt: skip # noqa: E501
    """Evaluations are read as they were written."""
    path = str(tmp_path_factory.mktemp("state") / "evaluations.json")
    assert load(path) == ()
    store(path, run(*values))
    again = load(path)
    assert [e.key for e in again] == [e.key for e in run(*values)]
    assert [repr(e.metrics["accuracy"]) for e in again] == [repr(v) for v in values]


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 2, "evaluations": []}', '{"format": 1, "evaluations": [3]}'])  # fmt: skip # noqa: E501
def test_damaged_evaluations_file_is_named(tmp_path: pathlib.Path, text: str) -> None:
    """A damaged file of evaluations is named."""
    path = tmp_path / "evaluations.json"
    path.write_text(text)
    with pytest.raises(DataLossError, match="evaluations.json"):
        load(str(path))
