"""A few of the histories of ``make endings``, and the ending of the old tutorials; ``python -m benchmarks.endings``."""

import pytest

from benchmarks.endings import classic, random_history, run_all

pytestmark = pytest.mark.chaos

SEEDS = [3, 8]


def test_histories_repeat_by_seed() -> None:
    """A history is repeated by its seed."""
    assert random_history(11) == random_history(11) != random_history(12)


@pytest.mark.timeout(400)
def test_random_histories_end_well() -> None:
    """Random histories come to a good end."""
    assert run_all([random_history(seed) for seed in SEEDS]) == []


def test_classic_ending_ends_well() -> None:
    """The ending of the old tutorials comes to a good end."""
    assert run_all([classic(1)]) == []
