"""The workers that a step of synchronous training waits for."""

import pytest

from runtime.kernels.roster import ElasticRoster

pytestmark = pytest.mark.unit


def test_elastic_roster_forgets_reported_workers() -> None:
    """A worker that has left is not reported again when all others have left, too."""
    roster = ElasticRoster("test", lambda client: True)
    for worker in (0, 1):
        roster.meet(worker, worker + 10)
    assert roster.take_heard() == (0, 1)
    roster.end_client(10, ())
    roster.end_client(11, ())
    assert roster.take_heard() == ()
