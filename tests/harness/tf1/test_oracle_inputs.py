"""What harness.tf1 reads, it reads as TensorFlow does: the programs of ``oracle/inputs.py`` beside their record."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

import harness.tf1 as tf
from tests.harness.tf1.oracle import inputs, record

pytestmark = pytest.mark.cluster

RECORD = json.loads((pathlib.Path(__file__).parent / "oracle" / "inputs_2_21.json").read_text())[
    "programs"
]

DIFFERENT: dict[str, str] = {
    "a_batch_of_examples": "the static shape of a sparse tensor tells only its rank, where the number of rows is known",
    "a_file_cut_off_in_a_length": "DataLossError, where TensorFlow takes it for the end of the file",
    "dataset_flattened_no_dataset": "TypeError, as in 1.x; AttributeError in 2.21",
    "no_example_at_all": "InvalidArgumentError, as in the step of 1.x; in 2.21 the message cannot be decoded",
    **{
        f"picture_turned_{n}": "the static shape is known where that of the picture is; in TensorFlow it never is"
        for n in (1, 2, 3, 5)
    },
}
"""Program -> why it gives something else here."""


def _agrees(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return (
            isinstance(found, list)
            and len(found) == len(wanted)
            and all(map(_agrees, found, wanted))
        )
    if not isinstance(wanted, dict) or "error" in wanted:
        return bool(found == wanted)
    if not isinstance(found, dict) or "error" in found:
        return False
    if (found["dtype"], found["shape"]) != (wanted["dtype"], wanted["shape"]):
        return False
    if wanted["dtype"].startswith(("object", "bytes", "str")):
        return bool(found["values"] == wanted["values"])
    x, y = (np.asarray(v["values"], v["dtype"]) for v in (found, wanted))
    slack = 0 if x.dtype.kind in "iub" else 2e-5
    return bool(x.shape == y.shape) and np.allclose(x, y, rtol=slack, atol=slack, equal_nan=True)


def test_input_programs_are_recorded() -> None:
    """All input programs are recorded, and each difference names a program."""
    assert set(RECORD) == set(inputs.CASES)
    assert set(DIFFERENT) <= set(RECORD)


@pytest.mark.parametrize("name", inputs.CASES)
def test_inputs_match_tensorflow(name: str) -> None:
    """An input program reads as TensorFlow does, unless the difference is listed."""
    found, wanted = record.program(tf, inputs.CASES[name]), RECORD[name]
    assert _agrees(found, wanted) == (name not in DIFFERENT), (
        f"{name}: {found}; TensorFlow gives {wanted}"
    )
