"""The end of one task's part as a table: by the facts about the task, what it saves and what it reports."""

import logging
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest

import runtime as rt
from harness.training.stop.ending import end_part
from harness.training.stop.task_run import TaskRun


class _Records:
    """Run records that keep the orders which they receive."""

    def __init__(self, acts: list[str]) -> None:
        self._acts = acts

    def finish(self, silence_secs: float, key: object, step: int | None, elastic: bool) -> None:
        self._acts.append("finish")

    def done(self, leave: bool, session: int, goodbye: bool = False) -> dict[str, Any]:
        self._acts.append("goodbye" if goodbye else "done")
        return {}


def _task(
    acts: list[str],
    *,
    is_chief: bool = True,
    counts: bool = True,
    late: bool = False,
    left: bool = False,
    closed: bool = False,
    silenced: str = "",
    shared: bool = True,
    elastic: bool = False,
) -> TaskRun:
    """Returns the part of a task in a run whose tasks are not there."""
    session = SimpleNamespace(
        seen=SimpleNamespace(variable="global_step" if counts else None),
        left=rt.TaskLeftError("it has left") if left else None,
        raw=SimpleNamespace(left_tasks=[], value_ids={}, run=lambda fetches: 3),
        closed=closed,
        id=1,
        last_loss=None,
    )
    records = _Records(acts) if shared else None
    sessions = SimpleNamespace(late=late)
    made: Any = TaskRun(session, sessions, records, is_chief, elastic, 10.0, 3, silenced)  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize(
    ("facts", "acts"),
    [
        ({}, "save finish done"),
        ({"counts": False}, "save finish done"),
        ({"shared": False}, "save mark"),
        ({"shared": False, "counts": False}, "save"),
        ({"is_chief": False}, "save done"),
        ({"over": False}, "save interrupted"),
        ({"signals": [15]}, "save interrupted"),
        ({"over": False, "is_chief": False}, "save"),
        ({"over": False, "is_chief": False, "elastic": True}, "save goodbye"),
        ({"over": False, "is_chief": False, "elastic": True, "shared": False}, "save"),
        ({"late": True}, "done"),
        ({"late": True, "over": False}, ""),
        ({"late": True, "shared": False}, ""),
        ({"closed": True}, "not-saved finish done"),
        ({"closed": True, "counts": False}, "finish done"),
        ({"closed": True, "late": True}, "done"),
        ({"closed": True, "is_chief": False}, "done"),
        ({"silenced": "it is silent", "closed": True}, "error"),
        ({"silenced": "it is silent", "closed": True, "is_chief": False}, "done"),
        ({"left": True}, "left"),
        ({"left": True, "closed": True, "silenced": "it is silent"}, "left"),
    ],
)
def test_facts_decide_the_end(
    facts: dict[str, Any],
    acts: str,
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The facts about a task decide its save, its reports and its log lines."""
    seen: list[str] = []
    over, signals = facts.pop("over", True), facts.pop("signals", [])

    def save(session: object) -> None:
        seen.append("save")

    monkeypatch.setattr("harness.training.stop.ending.saved_step", lambda directory: 3)
    run = _task(seen, **facts)
    try:
        end_part(run, save, over=over, checkpoint_dir=str(tmp_path), signals=signals)
    except rt.UnavailableError as error:
        assert (
            error.message
            == "it is silent; step 3 is not saved, there is no checkpoint: steps 1 to 3 are lost"
        )
        seen.append("error")
    warnings = " ".join(r.message for r in caplog.records if r.levelno >= logging.WARNING)
    marks = {
        "interrupted": "interrupted:",
        "not-saved": "closed before the stop",
        "left": "it has left",
    }
    noticed = [act for act, words in marks.items() if words in warnings]
    if not run.records and (tmp_path / "finished.json").exists():
        noticed.append("mark")
    assert sorted([*seen, *noticed]) == sorted(acts.split())
