"""A few of the histories of ``make endings``, and the ending of the old tutorials; ``python -m benchmarks.endings``."""

import pytest

from benchmarks.endings import classic, random_history, run_all

pytestmark = pytest.mark.chaos

SEEDS = [3, 8]


def test_histories_are_repeated_by_their_seeds() -> None:
    assert random_history(11) == random_history(11) != random_history(12)


@pytest.mark.timeout(400)
def test_random_histories_come_to_a_good_end() -> None:
    assert run_all([random_history(seed) for seed in SEEDS]) == []


def test_the_classic_ending_comes_to_a_good_end() -> None:
    assert run_all([classic(1)]) == []
