"""A bounded part of ``make fuzz``: mutated programs never end the process that reads, compiles and runs them."""

import pytest

from tests.runtime.expressions.fuzz import fuzz


@pytest.mark.chaos
def test_mutated_programs_spare_the_process() -> None:
    """A damaged program is refused or runs, without an end of the process or growth of memory."""
    outcome = fuzz(70, seed=15)
    assert outcome.crashed == []
    assert outcome.counts.get("refused", 0) > 10
    assert outcome.counts.get("run", 0) > 10
    sizes = [run for run in outcome.memory if len(run) > 1]
    assert all(run[-1] < 1.5 * run[0] for run in sizes), "memory stays flat"
