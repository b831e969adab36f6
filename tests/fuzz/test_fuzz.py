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
def test_what_is_made_up_and_damaged_is_an_error_and_never_the_end(kind: str) -> None:
    assert KINDS[kind].fuzz(BOUNDED[kind], 15)


def test_any_value_of_any_flag_is_taken_or_refused_by_name() -> None:
    assert KINDS["flags"].fuzz(500, 15)


def test_every_kind_has_a_bounded_part() -> None:
    assert BOUNDED.keys() | {"flags"} == KINDS.keys()
