"""How many sessions a recovery opens, over the death of a real ps process: one beside the one that it recovers."""

from pathlib import Path
from typing import Any

import pytest

import harness
import runtime as rt
from runtime.master.master import Master, MasterSession
from tests.harness import cluster_kit

pytestmark = pytest.mark.cluster


def chief(target: str, monitored: bool, logdir: str) -> Any:
    """The chief's session that recovers, not entered yet."""
    if monitored:
        options: Any = {
            "save_summaries_steps": None,
            "log_step_count_steps": None,
            "save_checkpoint_secs": None,
        }
        return harness.MonitoredTrainingSession(target, True, checkpoint_dir=logdir, **options)
    supervisor = harness.Supervisor(is_chief=True, logdir=logdir, saver=None, save_summaries_secs=0)
    return supervisor.managed_session(target)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[MasterSession]:
    """The sessions that masters of this process have opened."""
    found: list[MasterSession] = []
    create = Master.create_session

    def counted(self: Master, *args: Any, **kwargs: Any) -> MasterSession:
        session = create(self, *args, **kwargs)
        found.append(session)
        return session

    monkeypatch.setattr(Master, "create_session", counted)
    return found


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("monitored", [False, True])
def test_recovery_opens_one_session(
    opened: list[MasterSession], dies: int, monitored: bool, tmp_path: Path
) -> None:
    """A recovery opens one session and closes the old."""
    with cluster_kit.cluster(2, 1) as c, rt.Graph().as_default():
        ps = [c.ps(0), c.ps(1)]
        with rt.device(
            rt.replica_device_setter(cluster=c.spec, worker_device="/job:worker/task:0")
        ):
            count = harness.get_or_create_global_step().assign_add(1)
            add = rt.Variable(0.0, name="v").assign_add(1.0)
        assert [op.device for op in (count, add)] == ["/job:ps/task:0", "/job:ps/task:1"]
        with (
            rt.Server(c.spec, "worker", 0) as server,
            chief(server.target, monitored, str(tmp_path)) as session,
        ):
            assert len(opened) == 1
            session.run([count, add])
            for deaths in (1, 2):
                ps[dies].kill()
                # without values; the other ps has some, and begins a new generation
                ps[dies] = c.ps(dies)
                # of a step that saw both as they were at first
                assert session.run([count, add]) == [1, 1.0]
                assert len(opened) == 1 + deaths
                assert [old.closed for old in opened] == [True] * deaths + [False]
