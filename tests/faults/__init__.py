"""Fault injection for tests: clusters of real processes, plans of what goes wrong in them, and leak checks.

from tests.faults import FaultPlan, LocalCluster, no_leaks

def test_training_survives_its_faults():
    plan = FaultPlan(seed=3).kill("worker", 1, at_step=200, restart_secs=1).freeze("ps", 0, secs=5)
    plan = plan.cut("worker:0", "ps:1", secs=2)
    with no_leaks(), LocalCluster(["python", "train.py"], ps=2, workers=2, links=True) as cluster:
        cluster.run(plan)
        assert cluster.wait("worker:0") == 0
"""

from tests.faults.cluster import PRELOAD, Injected, LocalCluster
from tests.faults.leaks import no_leaks
from tests.faults.links import Links
from tests.faults.plan import Fault, FaultPlan, Kind
from tests.faults.processes import Life, Line

__all__ = [
    "PRELOAD",
    "Fault",
    "FaultPlan",
    "Injected",
    "Kind",
    "Life",
    "Line",
    "Links",
    "LocalCluster",
    "no_leaks",
]
