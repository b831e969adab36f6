"""Drawn programs give in harness.tf1 what TensorFlow gives: from a record, and at night beside TensorFlow itself."""

import json
import pathlib

import pytest

import harness.tf1 as tf
from tests.harness.tf1.oracle import running
from tests.harness.tf1.oracle.drawing import Statement, draw

RECORD = json.loads((pathlib.Path(__file__).parent / "oracle" / "drawn_2_21.json").read_text())
TENSORFLOW = pathlib.Path(".venv-bench/bin/python")
PARTS = 4


def test_record_holds_programs_drawn_today() -> None:
    """The record of TensorFlow is of the programs that the seeds draw; else make tf1-oracle records anew."""
    assert len(RECORD) >= 100
    stale = [
        seed for seed, told in enumerate(RECORD) if running.digest(draw(seed)) != told["digest"]
    ]
    assert stale == []


@pytest.mark.cluster  # hundreds of steps to compile
@pytest.mark.parametrize("part", range(PARTS))
def test_drawn_programs_match_record(part: int) -> None:
    """Every drawn program gives TensorFlow's values, shapes, dtypes and kinds of errors."""
    wrong = []
    for seed in range(part, len(RECORD), PARTS):
        program = draw(seed)
        found = running.difference(running.outcome(tf, program), RECORD[seed]["outcome"])
        if found is not None:
            at, kind, both = found
            text = "\n".join(s.source for s in program[: at + 1])
            wrong.append(f"seed {seed}: {kind}\n{text}\n{both}")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.nightly
def test_drawn_programs_match_tensorflow() -> None:
    """2,000 programs give the same in TensorFlow and here."""
    if not TENSORFLOW.exists():
        pytest.skip("TensorFlow is not there: make bench-setup")
    assert running.search(2000, 0, str(TENSORFLOW)) == []


def test_shrinking_keeps_what_differs() -> None:
    """A shrunk program has only the statements that its difference needs."""
    program = [Statement(f"x{i} = {i}") for i in range(20)]

    def compare(part: list[Statement]) -> tuple[int, str, str] | None:
        needs = [s.source in [p.source for p in part] for s in (program[3], program[11])]
        return (len(part) - 1, "kind", "") if all(needs) else None

    assert running.shrink(program, "kind", compare) == [program[3], program[11]]
