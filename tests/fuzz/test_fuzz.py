"""Bounded parts of ``make fuzz``: each kind, some dozens to thousands of times."""

import pytest

from tests.fuzz.__main__ import KINDS

BOUNDED = {
    "frames": 3000,
    "handshakes": 3000,
    "protobufs": 1500,
    "programs": 200,
    "shapes": 30,
    "orders": 200,
    "checkpoints": 60,
}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", BOUNDED)
def test_damaged_input_ends_no_process(kind: str) -> None:
    """Damaged input of any kind is an error and never the end of the process."""
    assert KINDS[kind].fuzz(BOUNDED[kind], 15)


def test_any_flag_value_is_handled() -> None:
    """Any value of any flag is taken or refused by name."""
    assert KINDS["flags"].fuzz(500, 15)


def test_every_kind_has_a_bounded_part() -> None:
    """Every kind of fuzzing but flags has a bounded part."""
    assert BOUNDED.keys() | {"flags"} == KINDS.keys()
