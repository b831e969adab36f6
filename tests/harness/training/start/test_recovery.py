"""What happens when a task dies, freezes or comes late: real processes, real signals."""

import re
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import SessionLog

import harness
import runtime as rt
from tests.harness import cluster_kit
from tests.harness.cluster_kit import consistent
from tests.kit.events import read_events

pytestmark = pytest.mark.chaos


@pytest.mark.cluster
def test_worker_dies_and_comes_back() -> None:
    """A worker that dies and comes back continues, and the chief is not disturbed."""
    with cluster_kit.cluster(1, 2) as c:
        c.ps(0)
        chief, other = c.worker(0), c.worker(1)
        other.tell("train")
        other.hear("STEP")
        other.kill()
        before = chief.request("steps", 20)  # nobody waits for the dead
        assert not chief.said_so_far("LOG", "recovering")
        again = c.start("worker", 1, env={"BELLWETHER_ATTEMPT": "1"})
        assert again.hear("READY")[1] == before
        assert again.said_so_far("LOG", "start number 2")
        assert again.request("steps", 5) == before + 5
        assert consistent(chief.request("values")) == before + 5


@pytest.mark.cluster
def test_chief_death_loses_no_step(tmp_path: Path) -> None:
    """The death of the chief loses no step, and its services work again."""
    with cluster_kit.cluster(2, 2, logdir=str(tmp_path)) as c:
        c.ps(0)
        c.ps(1)
        chief, other = c.worker(0), c.worker(1)
        assert chief.request("steps", 10) == 10
        chief.request("save", answer="SAVED")
        chief.kill()
        assert other.request("steps", 10) == 20  # training goes on
        again = c.start("worker", 0)
        _, step, _ = again.hear("READY")
        assert step == 20  # the classic Supervisor goes back to 10
        assert again.said_so_far("LOG", "keep the live model")
        assert other.request("steps", 10) == 30
        assert not other.said_so_far("LOG", "recovering")
        assert consistent(again.request("values")) == 30
        assert again.request("save", answer="SAVED").endswith("/30")  # its services work again


def test_restarted_chief_continues_its_events(tmp_path: Path) -> None:
    """The events of a restarted chief continue at the live step."""
    with cluster_kit.cluster(1, 2, logdir=str(tmp_path), summary_secs=0.1) as c:
        c.ps(0)
        chief, other = c.worker(0), c.worker(1)
        assert chief.request("steps", 10) == 10
        chief.request("save", answer="SAVED")
        chief.kill()
        assert other.request("steps", 10) == 20
        again = c.worker(0)
        assert other.request("steps", 5) == 25
        other.tell("end")
        again.tell("end")
        assert [other.wait(), again.wait()] == [0, 0]
    newest = max(tmp_path.glob("events*"), key=lambda path: path.stat().st_mtime)
    events = list(read_events(str(newest)))
    name = SessionLog.SessionStatus.Name
    marks = [(name(e.session_log.status), e.step) for e in events if e.HasField("session_log")]
    assert marks == [("START", 20), ("CHECKPOINT", 25), ("STOP", 0)]
    early = {
        v.tag for e in events if e.HasField("summary") and e.step < 20 for v in e.summary.value
    }
    assert early == {"custom_scalars__config__"}  # the layout has no step


def test_ps_death_returns_to_one_step(tmp_path: Path) -> None:
    """After the death of one ps all tasks return to one step, and the log counts the lost steps."""
    with cluster_kit.cluster(2, 2, logdir=str(tmp_path)) as c:
        c.ps(0)
        second = c.ps(1)
        chief, other = c.worker(0), c.worker(1)
        assert chief.request("steps", 10) == 10
        chief.request("save", answer="SAVED")
        assert other.request("steps", 7) == 17
        second.kill()
        chief.tell("train")
        other.tell("train")
        chief.hear("LOG", r"recovering: .*/job:ps/task:1.* \(gives up after 60 s\)")
        other.hear("LOG", "recovering: .*/job:ps/task:1")
        c.ps(1)
        for worker in (chief, other):
            worker.hear("LOG", "recovered within")
            worker.hear("STEP")
        # A step that was cut off in the middle has counted on the ps that is left.
        assert chief.said_so_far("LOG", r"back from step 1[7-9] to step 10, [7-9] steps are lost")
        done = cluster_kit.pause(chief, other)
        assert consistent(chief.request("values")) == 10 + done


def test_recovery_ignores_users_saver(tmp_path: Path) -> None:
    """A recovery ignores a newer checkpoint of a user's own Saver."""
    with cluster_kit.cluster(1, 1, logdir=str(tmp_path)) as c:
        ps = c.ps(0)
        chief = c.worker(0)
        assert chief.request("steps", 10) == 10
        chief.request("save", answer="SAVED")
        with rt.Graph().as_default() as graph:
            other = rt.Variable(0.0, name="other")
            with rt.Session("", graph) as session:
                session.run(other.initializer)
                harness.Saver([other]).save(session, str(tmp_path / "best"), 99)
        ps.kill()
        chief.tell("steps", 5)
        chief.hear("LOG", "recovering")
        c.ps(0)
        chief.hear("LOG", "recovered .* at step 10")
        assert chief.hear("STEPS")[1] == 15
        assert consistent(chief.request("values")) == 15


def test_ps_deaths_during_constant_saves(tmp_path: Path) -> None:
    """Deaths of a ps during constant saves leave a consistent model."""
    with cluster_kit.cluster(2, 1, logdir=str(tmp_path), save_secs=0.02) as c:
        c.ps(0)
        second = c.ps(1)
        chief = c.worker(0)
        for _ in range(3):
            chief.tell("train")
            chief.hear("STEP")
            second.kill()
            chief.hear("LOG", "recovering")
            second = c.ps(1)
            chief.hear("LOG", "recovered within")
            chief.hear("STEP")
            chief.tell("pause")
            chief.hear("TRAINED")
            consistent(chief.request("values"))
        chief.tell("end")
        assert chief.wait() == 0


def test_death_of_global_step_ps(tmp_path: Path) -> None:
    """The death of the ps with the global step goes back to the checkpoint and counts the lost
    steps.
    """
    with cluster_kit.cluster(2, 1, logdir=str(tmp_path)) as c:
        first = c.ps(0)
        c.ps(1)
        chief = c.worker(0)
        chief.request("steps", 10)
        chief.request("save", answer="SAVED")
        chief.request("steps", 5)
        first.kill()
        chief.tell("steps", 5)
        chief.hear("LOG", "recovering")
        c.ps(0)
        chief.hear(
            "LOG", r"recovered .* at step 10: 5 steps are lost \(step 15 was the last seen here\)"
        )
        assert chief.hear("STEPS")[1] == 15
        assert consistent(chief.request("values")) == 15


def test_power_cut_restores_the_checkpoint(tmp_path: Path) -> None:
    """After a power cut all tasks continue from the checkpoint, started in any order."""
    with cluster_kit.cluster(2, 2, logdir=str(tmp_path)) as c:
        tasks = [c.ps(0), c.ps(1), c.worker(0), c.worker(1)]
        tasks[2].request("steps", 10)
        tasks[2].request("save", answer="SAVED")
        tasks[3].request("steps", 10)
        for task in tasks:
            task.kill()
        other = c.start("worker", 1)  # in any order
        c.start("ps", 1)
        chief = c.start("worker", 0)
        c.start("ps", 0)
        assert chief.hear("READY")[1] == other.hear("READY")[1] == 10
        assert other.request("steps", 10) == 20
        assert consistent(chief.request("values")) == 20


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
def test_restart_with_other_ps_count(before: int, after: int, tmp_path: Path) -> None:
    """A restart with more or fewer ps continues from the same checkpoint."""
    with cluster_kit.cluster(before, 1, logdir=str(tmp_path)) as c:
        tasks = [c.ps(index) for index in range(before)]
        chief = c.worker(0)
        chief.request("steps", 10)
        chief.tell("end")
        assert [t.wait() for t in (chief, *tasks)] == [0] * (before + 1)
    with cluster_kit.cluster(after, 1, logdir=str(tmp_path)) as c:
        for index in range(after):
            c.ps(index)
        chief = c.worker(0)
        assert chief.request("steps", 5) == 15
        assert consistent(chief.request("values")) == 15


def test_worker_is_added_during_training() -> None:
    """A worker is added during training and waited for at the end."""
    with cluster_kit.cluster(1, 2) as c:
        added = c.spec["worker"].pop()
        ps = c.ps(0)
        chief = c.worker(0)
        assert chief.request("steps", 3) == 3
        c.spec["worker"].append(added)  # only the new one knows of itself
        new = c.worker(1)
        assert new.request("steps", 3) == 6
        chief.tell("end")
        chief.hear("LOG", "waiting for /job:worker/task:1")
        assert ps.code is None
        assert new.request("steps", 3) == 9
        new.tell("end")
        assert [new.wait(), chief.wait(), ps.wait()] == [0, 0, 0]


def test_ps_and_chief_deaths_recover(tmp_path: Path) -> None:
    """A worker waits for the chief's restore when ps and chief have died."""
    with cluster_kit.cluster(2, 2, logdir=str(tmp_path)) as c:
        c.ps(0)
        second = c.ps(1)
        chief, other = c.worker(0), c.worker(1)
        chief.request("steps", 10)
        chief.request("save", answer="SAVED")
        second.kill()
        chief.kill()
        other.tell("steps", 10)
        other.hear("LOG", "recovering")
        c.ps(1)
        other.hear(
            "LOG",
            r"wait: the chief has not yet initialised .*; waiting for /job:worker/task:0 at "
            r"\S+:\d+",
        )  # it does not restore on its own
        again = c.worker(0)
        assert other.hear("STEPS")[1] == 20
        assert consistent(again.request("values")) == 20


def test_restore_waits_for_second_ps(tmp_path: Path) -> None:
    """A restore waits for a second ps that dies meanwhile."""
    with cluster_kit.cluster(2, 1, logdir=str(tmp_path)) as c:
        first, second = c.ps(0), c.ps(1)
        chief = c.worker(0)
        chief.request("steps", 10)
        chief.request("save", answer="SAVED")
        second.kill()
        chief.tell("steps", 5)
        chief.hear("LOG", "recovering")
        first.kill()
        c.ps(1)
        c.ps(0)
        assert chief.hear("STEPS")[1] == 15
        assert consistent(chief.request("values")) == 15


def test_total_loss_is_warned() -> None:
    """The loss of everything without a checkpoint is a warning."""
    with cluster_kit.cluster(1, 1) as c:
        ps = c.ps(0)
        chief = c.worker(0)
        chief.request("steps", 10)
        ps.kill()
        chief.tell("steps", 5)
        chief.hear("LOG", "recovering")
        c.ps(0)
        # a program without INFO shows it too
        assert chief.hear("LOG", "ALL STEPS SO FAR ARE LOST")[2] == "WARNING"
        assert chief.hear("STEPS")[1] == 5


def test_frozen_ps_keeps_steps_exact() -> None:
    """A frozen ps loses and doubles no step."""
    with cluster_kit.cluster(2, 2) as c:
        c.ps(0)
        second = c.ps(1)
        cluster_kit.check_freeze(second, 1, c.worker(0), c.worker(1))


def test_sleeping_worker_adds_no_old_step(tmp_path: Path) -> None:
    """A worker that slept through a restore adds no step from before."""
    with cluster_kit.cluster(2, 2, logdir=str(tmp_path)) as c:
        c.ps(0)
        second = c.ps(1)
        chief, other = c.worker(0), c.worker(1)
        chief.request("steps", 10)
        chief.request("save", answer="SAVED")
        other.tell("train")
        other.hear("STEP")
        other.freeze()
        second.kill()
        c.ps(1)
        assert chief.request("steps", 5) == 15
        other.thaw()
        # restarted, restored or a cut connection: whichever it notices first
        other.hear("LOG", "recovering: ")
        told = other.hear("LOG", "recovered within")[1]
        assert re.search("steps are lost", told), told  # it had seen step 11
        other.tell("pause")
        other.hear("TRAINED")
        consistent(chief.request("values"))


def test_frozen_worker_holds_nobody_up() -> None:
    """A frozen worker holds no other task up."""
    with cluster_kit.cluster(1, 2) as c:
        c.ps(0)
        chief, other = c.worker(0), c.worker(1)
        other.tell("train")
        other.hear("STEP")
        other.freeze()
        chief.request("steps", 20)
        other.thaw()
        other.tell("pause")
        other.hear("TRAINED")
        other.tell("end")
        consistent(chief.request("values"))


def test_processes_wait_for_init_fn() -> None:
    """Workers in other processes wait for the init_fn of the chief."""
    with cluster_kit.cluster(1, 2, init_fn=True) as c:
        c.ps(0)
        other = c.start("worker", 1)
        chief = c.start("worker", 0)
        chief.hear("INIT_FN")  # the variables have values by now
        other.hear("LOG", "still giving /job:ps/task:0 values")
        assert not any(said[0] == "READY" for said in other.said)
        chief.tell("go")
        other.hear("READY")


def test_recover_false_raises_the_loss() -> None:
    """With recover=False the loss of a ps ends the worker."""
    with cluster_kit.cluster(1, 1, recover=False) as c:
        ps = c.ps(0)
        chief = c.worker(0)
        ps.kill()
        chief.tell("steps", 1)
        assert chief.wait() == 1


def test_clean_end_has_an_order() -> None:
    """At a clean end the chief is last, and the ps leave after the chief."""
    with cluster_kit.cluster(2, 2) as c:
        ps = [c.ps(0), c.ps(1)]
        chief, other = c.worker(0), c.worker(1)
        chief.tell("end")
        chief.hear("LOG", f"waiting for /job:worker/task:1 at {c.spec['worker'][1]} to finish")
        assert other.request("steps", 3) == 3  # nobody is cut off
        other.tell("end")
        assert [t.wait() for t in (other, chief, *ps)] == [0, 0, 0, 0]


def test_last_checkpoint_holds_all_steps(tmp_path: Path) -> None:
    """The last checkpoint holds the steps of all workers."""
    with cluster_kit.cluster(1, 2, logdir=str(tmp_path)) as c:
        c.ps(0)
        chief, other = c.worker(0), c.worker(1)
        chief.request("steps", 3)
        chief.tell("end")
        other.request("steps", 4)
        other.tell("end")
        assert [chief.wait(), other.wait()] == [0, 0]
        assert [p.name for p in (tmp_path / "model.ckpt").iterdir() if p.name.isdigit()] == ["7"]


def test_ps_stay_under_a_launcher() -> None:
    """Under a launcher the ps stay after the end."""
    with cluster_kit.cluster(1, 1, env={"BELLWETHER_ATTEMPT": "0"}) as c:
        ps = c.ps(0)
        chief = c.worker(0)
        chief.tell("end")
        assert chief.wait() == 0
        assert c.worker(0).request("steps", 1) == 1  # it still serves
        assert ps.code is None


def test_ps_leave_with_own_launcher() -> None:
    """A ps with a launcher of its own leaves by itself."""
    with cluster_kit.cluster(
        1, 1, env={"BELLWETHER_ATTEMPT": "0", "BELLWETHER_PER_TASK": "1"}
    ) as c:
        ps = c.ps(0)
        chief = c.worker(0)
        chief.tell("end")
        assert [chief.wait(), ps.wait()] == [0, 0]


def test_late_worker_has_nothing_left() -> None:
    """A worker that comes after the end has nothing left to do."""
    with cluster_kit.cluster(1, 2) as c:
        ps = c.ps(0)
        chief = c.worker(0)
        chief.request("steps", 3)
        chief.tell("end")
        assert chief.wait() == 0
        late = c.worker(1)
        assert late.said_so_far("LOG", "nothing left to do: the chief has finished training")
        assert [late.wait(), ps.wait()] == [0, 0]


def test_dead_worker_is_given_up() -> None:
    """The chief gives up a worker that is dead for good."""
    with cluster_kit.cluster(1, 2, grace_secs=1) as c:
        ps = c.ps(0)
        chief, other = c.worker(0), c.worker(1)
        other.kill()
        chief.tell("end")
        chief.hear("LOG", "not waiting any longer for /job:worker/task:1")
        assert [chief.wait(), ps.wait()] == [0, 0]


@pytest.mark.parametrize(
    "own_manager",
    [
        pytest.param(False, id=""),
        pytest.param(True, id="own-session-manager", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("how", [pytest.param("kill", marks=pytest.mark.nightly), "freeze"])
def test_dead_ps_does_not_hold_end(how: str, own_manager: bool) -> None:
    """A dead or frozen ps does not hold up the chief's end."""
    with cluster_kit.cluster(1, 1, grace_secs=1, own_manager=own_manager) as c:
        ps = c.ps(0)
        chief = c.worker(0)
        chief.request("steps", 1)
        getattr(ps, how)()
        chief.tell("end")
        chief.wait()


@pytest.mark.parametrize(
    "monitored",
    [
        pytest.param(False, id="supervisor"),
        pytest.param(True, id="monitored", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("how", [pytest.param("kill", marks=pytest.mark.nightly), "freeze"])
def test_dead_ps_holds_no_worker(how: str, monitored: bool) -> None:
    """A dead or frozen ps does not hold up a worker's end."""
    with cluster_kit.cluster(2, 2, grace_secs=1, monitored=monitored) as c:
        c.ps(0)
        second = c.ps(1)
        chief, other = c.worker(0), c.worker(1)
        other.request("steps", 1)
        getattr(second, how)()
        other.tell("end")
        other.wait()
        chief.tell("end")
        chief.wait()


def test_error_ends_its_worker_only() -> None:
    """An error ends its worker and no other task."""
    with cluster_kit.cluster(1, 2) as c:
        ps = c.ps(0)
        chief, other = c.worker(0), c.worker(1)
        other.tell("raise")
        assert other.wait() == 1
        chief.request("steps", 3)
        assert ps.code is None


def test_lonely_chief_gives_up() -> None:
    """A chief without its ps gives up at the time limit."""
    with cluster_kit.cluster(1, 1, max_wait_secs=1) as c:
        chief = c.start("worker", 0)
        assert chief.wait() == 1


def test_monitored_session_recovers_too(tmp_path: Path) -> None:
    """Monitored sessions recover from the death of a ps, and the end saves."""
    with cluster_kit.cluster(2, 2, logdir=str(tmp_path), monitored=True, save_steps=10) as c:
        c.ps(0)
        second = c.ps(1)
        chief, other = c.worker(0), c.worker(1)
        # one that is still under way at step 10 would be saved instead of it
        cluster_kit.wait_saved(tmp_path, 0)
        assert chief.request("steps", 10) == 10
        cluster_kit.wait_saved(tmp_path, 10)  # by the hook
        assert other.request("steps", 3) == 13
        second.kill()
        chief.tell("steps", 5)
        other.tell("steps", 5)
        chief.hear("LOG", "recovering")
        other.hear("LOG", "recovering")
        c.ps(1)
        chief.hear("STEPS")
        other.hear("STEPS")
        assert consistent(chief.request("values")) == 20
        chief.tell("end")
        other.tell("end")
        assert [chief.wait(), other.wait()] == [0, 0]
        assert "20" in {p.name for p in (tmp_path / "model.ckpt").iterdir()}
