"""harness.tf1 gives what TensorFlow gives: the programs of ``oracle/programs.py`` beside the record of TensorFlow.

What is different on purpose is in ``DIFFERENT``, and in docs/tf1_differences.md.
"""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

import harness.tf1 as tf
from tests.harness.tf1.oracle import differences, programs, record
from tests.harness.tf1.oracle.tables import PROGRAMS

pytestmark = pytest.mark.cluster

RECORD = json.loads(
    (pathlib.Path(__file__).parent / "oracle" / "tensorflow_2_21.json").read_text()
)["programs"]

NAN, LEAST = float("nan"), -(2**31)
FIRST = [[1.0, 2.0], [NAN, NAN]]


def _is(dtype: str, values: Any) -> Any:
    return {"dtype": dtype, "values": np.ravel(values).tolist()}


UNCHANGED = _is("float32", programs.ROWS)

DIFFERENT: dict[str, Any] = {
    # The gradient at the value that the loss was computed from. TensorFlow races: its loss is that
    # of after the update.
    "gradient_through_a_read_after_an_update": [_is("float32", 16.0), _is("float32", 8.0)],
    # A compiled program cannot raise: what is computed in the step and lies outside is NaN or the
    # smallest integer.
    "index_computed_beyond": _is("float32", [NAN, NAN]),
    "index_computed_below": _is("float32", [NAN, NAN]),
    "index_of_unknown_size_beyond": _is("float32", [NAN, NAN]),
    "gather_negative": _is("float32", FIRST),
    "gather_beyond": _is("float32", FIRST),
    "gather_of_integers_beyond": _is("int32", [7, LEAST]),
    "gather_of_a_later_axis_negative": _is("float32", [[NAN], [NAN], [NAN]]),
    "gather_nd_negative": _is("float32", [2.0, NAN]),
    "gather_nd_beyond": _is("float32", [2.0, NAN]),
    "embedding_negative": _is("float32", FIRST),
    "embedding_beyond": _is("float32", FIRST),
    "embedding_of_parts_negative": _is("float32", FIRST),
    "sparse_xent_negative": [
        _is("float32", [0.407606, NAN]),
        _is("float32", [[0.0900306, 0.2447285, -0.3347591], [NAN, NAN, NAN]]),
    ],
    "sparse_xent_beyond": [
        _is("float32", [NAN, 0.169846]),
        _is("float32", [[NAN, NAN, NAN], [-0.1562053, 0.1141952, 0.0420101]]),
    ],
    # JAX derives of the operand, whatever value the result is fed.
    "derivative_of_a_fed_result": [_is("float32", 1.0)],
    # As TensorFlow has it on GPU: it is left out.
    "scatter_nd_negative": _is("float32", [1.0, 0.0, 0.0]),
    "scatter_nd_beyond": _is("float32", [1.0, 0.0, 0.0]),
    "segment_sum_beyond": _is("float32", [[6.0, 8.0], [0.0, 0.0], [0.0, 0.0]]),
    # docs/tf1_differences.md: what XLA gives.
    "floordiv_by_zero": _is("int32", [-2, 4]),
    "div_by_zero": _is("int32", [-2, 4]),
    "floormod_by_zero": _is("int32", [0, 0]),
    "mod_by_zero": _is("int32", [0, 0]),
    "truncatediv_by_zero": _is("int32", [-1, 4]),
    "truncatemod_by_zero": _is("int32", [0, 0]),
    # docs/tf1_differences.md: int32 / int32 is float32.
    "divide_int32": _is("float32", [3.5, -3.5, -3.5, 3.5, 16777216.0, 0.0]),
    # The size of a TensorArray is known before the step; what lies beyond it is left out, or NaN.
    "array_that_grows": {"error": "ValueError"},
    "array_write_beyond": _is("float32", [0.0]),
    "array_read_beyond": _is("float32", NAN),
    # What lies outside of a slice from a computed place is NaN; its size is known before the step.
    "slice_beyond": _is("float32", [NAN] * 4),
    "slice_below": _is("float32", [NAN] * 4),
    "getitem_partly_beyond": _is("float32", [NAN] * 2),
    **dict.fromkeys(
        "slice_of_a_fed_size slice_to_the_end_from_a_fed_place getitem_to_a_computed_end "
        "getitem_from_a_computed_begin "
        "getitem_between_two strided_slice_of_a_computed_size".split(),
        {"error": "InvalidArgumentError"},
    ),
    # Gradients are dense: the norm is that of the sum, where TensorFlow takes the row for two.
    "norm_of_a_row_that_is_looked_up_twice": [
        _is("float32", 8**0.5),
        _is("float32", [[0.5**0.5, 0.5**0.5], [0.0, 0.0]]),
    ],
    "truediv_int32": _is("float32", [3.5, -3.5, -3.5, 3.5, 16777216.0, 0.0]),
    # docs/tf1_differences.md: TensorFlow looks for the average, as it reuses variables, and finds
    # none.
    "average_of_a_variable_after_reuse_variables": _is("float32", [2.0, 4.0]),
}
# the same error, but TensorFlow has changed the rows before it
for _kind in ("add", "sub", "update", "mul"):
    DIFFERENT[f"scatter_{_kind}_negative"] = DIFFERENT[f"scatter_{_kind}_beyond"] = [
        "InvalidArgumentError",
        UNCHANGED,
    ]
    # as soon as it is built
    DIFFERENT[f"scatter_{_kind}_literal_negative"] = {"error": "InvalidArgumentError"}


def _agrees(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return (
            isinstance(found, list)
            and len(found) == len(wanted)
            and all(map(_agrees, found, wanted))
        )
    if isinstance(wanted, str) or "error" in wanted:
        return bool(found == wanted) or "error" in wanted and "error" in found
    if "error" in found or found["dtype"] != wanted["dtype"]:
        return False
    x, y = (np.asarray(v["values"], v["dtype"]) for v in (found, wanted))
    rtol = 0 if x.dtype.kind in "iub" else 2e-3 if x.dtype == np.float16 else 2e-5
    return bool(x.shape == y.shape) and np.allclose(
        x, y, rtol=rtol, atol=rtol and 1e-6, equal_nan=True
    )


def test_recorded_differences_are_real() -> None:
    """Every recorded difference differs from TensorFlow and is a known program."""
    # TensorFlow gives now the one, now the other
    races = {"gradient_through_a_read_after_an_update"}
    assert [
        name
        for name, value in DIFFERENT.items()
        if name not in races and _agrees(value, RECORD[name])
    ] == []
    assert {name for difference in differences.DIFFERENCES for name in difference.programs} <= set(
        DIFFERENT
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_matches_tensorflow(name: str) -> None:
    """A program gives the recorded result of TensorFlow, or its documented difference."""
    found, wanted = record.program(tf, PROGRAMS[name]), DIFFERENT.get(name, RECORD[name])
    assert _agrees(found, wanted), f"{name}: {found}, not {wanted}; TensorFlow gives {RECORD[name]}"
