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
def test_a_worker_dies_and_comes_back() -> None:
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
def test_the_chief_dies_and_no_step_is_lost(tmp_path: Path) -> None:
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


def test_the_events_of_a_restarted_chief_go_on_at_the_live_step(tmp_path: Path) -> None:
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


def test_one_ps_of_two_dies_and_all_go_back_to_one_step(tmp_path: Path) -> None:
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
        chief.tell("pause")
        other.tell("pause")
        done = chief.hear("TRAINED")[1] + other.hear("TRAINED")[1]
        assert consistent(chief.request("values")) == 10 + done


def test_recovery_passes_over_a_users_own_saver(tmp_path: Path) -> None:
    """A checkpoint of other variables below the log directory is not restored, though it is the newest."""
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


def test_a_ps_dies_while_checkpoints_are_written_all_the_time(tmp_path: Path) -> None:
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


def test_the_ps_with_the_global_step_dies(tmp_path: Path) -> None:
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


def test_power_cut(tmp_path: Path) -> None:
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
def test_a_restart_with_more_or_fewer_ps_from_the_same_checkpoint(
    before: int, after: int, tmp_path: Path
) -> None:
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


def test_a_worker_is_added_while_training_runs() -> None:
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


def test_a_ps_dies_and_the_chief_too(tmp_path: Path) -> None:
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


def test_a_restore_waits_for_a_second_ps_that_dies_meanwhile(tmp_path: Path) -> None:
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


def test_without_a_checkpoint_the_loss_of_everything_is_told_loudly() -> None:
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


def test_a_frozen_ps_loses_and_doubles_nothing() -> None:
    with cluster_kit.cluster(2, 2) as c:
        c.ps(0)
        second = c.ps(1)
        workers = [c.worker(0), c.worker(1)]
        for worker in workers:
            worker.tell("train")
            worker.hear("STEP")
        second.freeze()
        for worker in workers:
            worker.hear("LOG", "No answer from /job:ps/task:1")
        for worker in workers:
            worker.tell("pause")
        second.thaw()
        done = sum(worker.hear("TRAINED")[1] for worker in workers)
        assert not any(worker.said_so_far("LOG", "recovering") for worker in workers)
        assert consistent(workers[0].request("values")) == done


def test_a_worker_that_slept_through_a_restore_adds_nothing_old_to_it(tmp_path: Path) -> None:
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


def test_a_frozen_worker_holds_nobody_up() -> None:
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


def test_workers_wait_for_the_init_fn_of_the_chief() -> None:
    with cluster_kit.cluster(1, 2, init_fn=True) as c:
        c.ps(0)
        other = c.start("worker", 1)
        chief = c.start("worker", 0)
        chief.hear("INIT_FN")  # the variables have values by now
        other.hear("LOG", "still giving /job:ps/task:0 values")
        assert not any(said[0] == "READY" for said in other.said)
        chief.tell("go")
        other.hear("READY")


def test_recover_false_lets_the_error_out() -> None:
    with cluster_kit.cluster(1, 1, recover=False) as c:
        ps = c.ps(0)
        chief = c.worker(0)
        ps.kill()
        chief.tell("steps", 1)
        assert chief.wait() == 1


def test_clean_end_the_chief_is_last_and_the_ps_leave() -> None:
    with cluster_kit.cluster(2, 2) as c:
        ps = [c.ps(0), c.ps(1)]
        chief, other = c.worker(0), c.worker(1)
        chief.tell("end")
        chief.hear("LOG", f"waiting for /job:worker/task:1 at {c.spec['worker'][1]} to finish")
        assert other.request("steps", 3) == 3  # nobody is cut off
        other.tell("end")
        assert [t.wait() for t in (other, chief, *ps)] == [0, 0, 0, 0]


def test_the_last_steps_are_saved_with_those_of_the_others(tmp_path: Path) -> None:
    with cluster_kit.cluster(1, 2, logdir=str(tmp_path)) as c:
        c.ps(0)
        chief, other = c.worker(0), c.worker(1)
        chief.request("steps", 3)
        chief.tell("end")
        other.request("steps", 4)
        other.tell("end")
        assert [chief.wait(), other.wait()] == [0, 0]
        assert [p.name for p in (tmp_path / "model.ckpt").iterdir() if p.name.isdigit()] == ["7"]


def test_under_a_launcher_the_ps_stay() -> None:
    with cluster_kit.cluster(1, 1, env={"BELLWETHER_ATTEMPT": "0"}) as c:
        ps = c.ps(0)
        chief = c.worker(0)
        chief.tell("end")
        assert chief.wait() == 0
        assert c.worker(0).request("steps", 1) == 1  # it still serves
        assert ps.code is None


def test_where_each_task_has_a_launcher_the_ps_leave_by_themselves() -> None:
    with cluster_kit.cluster(
        1, 1, env={"BELLWETHER_ATTEMPT": "0", "BELLWETHER_PER_TASK": "1"}
    ) as c:
        ps = c.ps(0)
        chief = c.worker(0)
        chief.tell("end")
        assert [chief.wait(), ps.wait()] == [0, 0]


def test_a_late_worker_gets_a_defined_end() -> None:
    with cluster_kit.cluster(1, 2) as c:
        ps = c.ps(0)
        chief = c.worker(0)
        chief.request("steps", 3)
        chief.tell("end")
        assert chief.wait() == 0
        late = c.worker(1)
        assert late.said_so_far("LOG", "nothing left to do: the chief has finished training")
        assert [late.wait(), ps.wait()] == [0, 0]


def test_a_worker_that_died_for_good_does_not_keep_the_chief() -> None:
    with cluster_kit.cluster(1, 2, grace_secs=1) as c:
        ps = c.ps(0)
        chief, other = c.worker(0), c.worker(1)
        other.kill()
        chief.tell("end")
        chief.hear("LOG", "not waiting any longer for /job:worker/task:1")
        assert [chief.wait(), ps.wait()] == [0, 0]


@pytest.mark.parametrize("own_manager", [False, True], ids=["", "own-session-manager"])
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_dead_ps_does_not_keep_the_end(how: str, own_manager: bool) -> None:
    with cluster_kit.cluster(1, 1, grace_secs=1, own_manager=own_manager) as c:
        ps = c.ps(0)
        chief = c.worker(0)
        chief.request("steps", 1)
        getattr(ps, how)()
        chief.tell("end")
        chief.wait()


@pytest.mark.parametrize("monitored", [False, True], ids=["supervisor", "monitored"])
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_dead_ps_keeps_no_worker_from_its_end(how: str, monitored: bool) -> None:
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


def test_an_error_ends_its_worker_and_no_other() -> None:
    with cluster_kit.cluster(1, 2) as c:
        ps = c.ps(0)
        chief, other = c.worker(0), c.worker(1)
        other.tell("raise")
        assert other.wait() == 1
        chief.request("steps", 3)
        assert ps.code is None


def test_a_chief_that_is_alone_gives_up_in_time() -> None:
    with cluster_kit.cluster(1, 1, max_wait_secs=1) as c:
        chief = c.start("worker", 0)
        assert chief.wait() == 1


def test_a_monitored_session_recovers_by_the_same_way(tmp_path: Path) -> None:
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
