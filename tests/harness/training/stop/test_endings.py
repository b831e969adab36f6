"""The table of endings in docs/endings.md, row by row, with real processes that no launcher looks after."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import exit_codes
from tests.faults import PRELOAD, LocalCluster, no_leaks
from tests.harness.cluster_kit import saved_step
from tests.kit.waits import until

pytestmark = pytest.mark.chaos

COMMAND = ["python", "-m", "benchmarks.endings_task"]


@contextlib.contextmanager
def cluster(
    logdir: Path, *, ps: int = 1, workers: int = 2, **options: object
) -> Iterator[LocalCluster]:
    """A cluster of which only the ps tasks are started; ``options`` are those of all tasks."""
    env = {
        "JAX_PLATFORMS": "cpu",
        **{f"ENDING_{name}": str(value) for name, value in options.items()},
    }
    command = [*COMMAND, f"--logdir={logdir}"]
    with (
        no_leaks(),
        LocalCluster(
            command, ps=ps, workers=workers, preload=PRELOAD, env=env, start=False
        ) as made,
    ):
        for index in range(ps):
            made.start(f"ps:{index}")
        yield made


def start(c: LocalCluster, index: int, *, ready: bool = True, **options: object) -> str:
    """Starts a worker, and waits until it trains."""
    name = f"worker:{index}"
    c.start(name, **{f"ENDING_{option}": str(value) for option, value in options.items()})
    if ready:
        c.expect(name, "READY")
    return name


def start_all(c: LocalCluster, logdir: Path, *steps: int) -> list[str]:
    """Starts workers with loops of these lengths, which begin together."""
    names = [start(c, index, STEPS=number, PAUSE_AT=0) for index, number in enumerate(steps)]
    for name in names:
        c.expect(name, "PAUSED")
    for index in range(len(names)):
        go(logdir, index)
    return names


def chief_and_other(c: LocalCluster, logdir: Path, **others_options: object) -> tuple[str, str]:
    """A chief that trains 10 steps, and another worker that pauses in the middle of its 10 by default."""
    chief = start(c, 0, PAUSE_AT=0)
    other = start(c, 1, **{"PAUSE_AT": 5, **others_options})
    if "PAUSE_AT" not in others_options:
        c.expect(other, "PAUSED")
    go(logdir, 0)
    return chief, other


def go(logdir: Path, index: int) -> None:
    """Lets a worker that has paused go on."""
    (logdir / f"go-{index}").touch()


def codes(c: LocalCluster) -> dict[str, int]:
    return {task: c.wait(task) for task in reversed(c.tasks) if c.lives(task)}


def all_well(c: LocalCluster) -> bool:
    return set(codes(c).values()) == {0}


# -- everybody comes to an end --------------------------------------------------------------------------------------


@pytest.mark.cluster
@pytest.mark.parametrize("style", ["stop", "block", "close", "managed", "monitored"])
def test_chief_ends_before_longer_loops(style: str, tmp_path: Path) -> None:
    """A chief that ends first waits for the longer loops, and the last checkpoint holds their
    steps.
    """
    with cluster(tmp_path, workers=3, STYLE=style, STEP_SECS=0.002) as c:
        start_all(c, tmp_path, 5, 40, 400)
        assert all_well(c)
        last = saved_step(tmp_path)
        if style == "close":  # the session was closed before anybody could save
            assert c.lines("worker:0", f"closed before the stop: .*steps {last + 1} to")
        else:
            assert last == 445
        assert not c.lines("worker:2", "recovering|Error")


@pytest.mark.nightly
def test_chief_ends_after_shorter_loops(tmp_path: Path) -> None:
    """A chief that ends last saves the steps of all workers."""
    with cluster(tmp_path, ps=2, workers=3, STYLE="stop", STEP_SECS=0.002) as c:
        start_all(c, tmp_path, 300, 5, 40)
        assert all_well(c)
        assert saved_step(tmp_path) == 345


def test_busy_worker_keeps_its_ps(tmp_path: Path) -> None:
    """A worker that is busy for longer than any limit keeps its ps and its chief."""
    with cluster(tmp_path, STYLE="stop", GRACE_SECS=1) as c:
        chief, busy = chief_and_other(c, tmp_path)
        c.expect(chief, "TRAINED")
        c.expect(chief, "waiting for /job:worker/task:1 ")
        # The test is one of time: longer than the grace period, and than the least silence that counts.
        time.sleep(6)
        assert c.running("ps:0") and c.running(chief)
        go(tmp_path, 1)
        assert all_well(c)
        assert saved_step(tmp_path) == 20
        assert not c.lines(chief, "not waiting any longer")


def test_second_stop_does_nothing(tmp_path: Path) -> None:
    """A second stop has nothing left to do."""
    with cluster(tmp_path, STYLE="managed", GRACE_SECS=7200) as c:
        start_all(c, tmp_path, 10, 10)
        assert all_well(c)
        assert saved_step(tmp_path) == 20
        for index in (0, 1):
            c.expect(f"worker:{index}", "STOPPED")
            assert not c.lines(f"worker:{index}", "could not tell|not saved")


@pytest.mark.nightly
def test_late_worker_lets_ps_go(tmp_path: Path) -> None:
    """A worker that comes late ends at once, and the ps leave."""
    with cluster(tmp_path, STYLE="stop", LATE_SECS=60) as c:
        chief = start(c, 0)
        assert c.wait(chief) == 0
        c.expect("ps:0", r"training is over; waiting for /job:worker/task:1 \(has not come\)")
        late = start(c, 1, STYLE="should_stop")
        c.expect(late, "TRAINED")
        assert all_well(c)
        assert c.lines(late, "nothing left to do: the chief has finished training")
        assert saved_step(tmp_path) == 10


def test_absent_worker_is_given_up(tmp_path: Path) -> None:
    """A ps gives up a worker that never comes."""
    with cluster(tmp_path, LATE_SECS=0.5) as c:
        start(c, 0)
        assert all_well(c)
        assert c.lines("ps:0", r"not waiting any longer for /job:worker/task:1")


# -- somebody is silent ---------------------------------------------------------------------------------------------


def test_chief_and_ps_give_up_dead(tmp_path: Path) -> None:
    """Chief and ps give up a dead worker."""
    with cluster(tmp_path, STYLE="stop") as c:
        chief, dead = chief_and_other(c, tmp_path)
        c.kill(dead)
        assert c.wait(chief) == 0
        assert c.wait("ps:0") == 0
        assert c.lines(
            chief, r"not waiting any longer for /job:worker/task:1 .*: no sign of life for \d+ s"
        )
        assert saved_step(tmp_path) == 15


@pytest.mark.cluster
def test_returning_worker_is_waited_for(tmp_path: Path) -> None:
    """A killed worker that comes back at once is waited for."""
    with cluster(tmp_path, GRACE_SECS=20) as c:
        chief, other = chief_and_other(c, tmp_path)
        c.expect(chief, "TRAINED")
        c.kill(other)
        start(c, 1, STEPS=7)
        assert c.wait(other) == 0
        assert c.wait(chief) == 0
        assert c.wait("ps:0") == 0
        assert saved_step(tmp_path) == 10 + 5 + 7


@pytest.mark.parametrize(
    ("style", "code"),
    [("stop", 1), ("managed", 0), pytest.param("monitored", 0, marks=pytest.mark.nightly)],
)
def test_waking_worker_learns_of_end(style: str, code: int, tmp_path: Path) -> None:
    """A worker that wakes after its ps have left is told that training is over."""
    with cluster(tmp_path, ps=2, STYLE=style) as c:
        chief, frozen = chief_and_other(c, tmp_path, PAUSE_AT=-1, STEPS=10**9, STEP_SECS=0.001)
        c.expect(chief, "TRAINED")
        c.freeze(frozen)
        assert c.wait(chief) == 0
        assert [c.wait("ps:0"), c.wait("ps:1")] == [0, 0]
        c.thaw(frozen)
        assert c.wait(frozen) == code
        assert c.lines(frozen, "/job:ps/task:[01]: it has left.*: training is over")
        assert code or c.lines(frozen, "what was done here since the last checkpoint is not saved")


@pytest.mark.nightly
def test_steps_after_giving_up_are_named(tmp_path: Path) -> None:
    """Steps that are trained after the chief has given a worker up are named as not saved."""
    with cluster(tmp_path, workers=3, LATE_SECS=60) as c:  # the third worker keeps the ps there
        chief, frozen = chief_and_other(c, tmp_path)
        c.freeze(frozen)
        assert c.wait(chief) == 0
        assert saved_step(tmp_path) == 15
        go(tmp_path, 1)
        c.thaw(frozen)
        assert c.wait(frozen) == 0
        assert c.lines(frozen, "its last checkpoint is of step 15, steps 16 to 20 are not saved")
        start(c, 2, STYLE="should_stop")
        assert all_well(c)
        assert c.lines("ps:0", "the last checkpoint is of step 15, .*steps 16 to 20 are not saved")


# -- a ps that leaves by itself --------------------------------------------------------------------------------------


@pytest.mark.skipif(
    sys.version_info[:3] in ((3, 12, 0), (3, 12, 1)),
    reason="this Python starts no thread when the main thread has ended",
)
@pytest.mark.parametrize("style", ["stop", "managed", "monitored", "after_stop"])
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(0, id="the chief first"),
        pytest.param(1, id="the other first", marks=pytest.mark.nightly),
    ],
)
def test_done_queue_ends_all_tasks(style: str, first: int, tmp_path: Path) -> None:
    """A ps that has the tokens of all workers serves until the chief has saved, and all end with 0."""
    with cluster(tmp_path, ps=2, STYLE=style, QUEUE=1, SAVE_SECS=1, GRACE_SECS=60) as c:
        start_all(c, tmp_path, *((10, 30) if first == 0 else (30, 10)))
        assert all_well(c)
        assert saved_step(tmp_path) == 40
        assert not c.lines("worker:0", "recovering|could not tell|has left")


def test_done_queue_and_worker_without_end(tmp_path: Path) -> None:
    """A ps waits at the end of its program for no worker whose process has ended."""
    with cluster(tmp_path, STYLE="close", QUEUE=1, EXITS=2) as c:
        start_all(c, tmp_path, 10, 10)
        assert all_well(c)


# -- a step after the stop -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closes", [0, 1], ids=["the process ends", "the session is closed"])
@pytest.mark.parametrize(
    "last",
    [
        pytest.param(0, id="the chief last"),
        pytest.param(1, id="the other last", marks=pytest.mark.nightly),
    ],
)
def test_steps_after_stop_keep_ps(closes: int, last: int, tmp_path: Path) -> None:
    """``stop`` is no goodbye: the ps stay until the session is closed, or its process has ended."""
    with cluster(tmp_path, ps=2, STYLE="after_stop", CLOSES=closes, GRACE_SECS=4) as c:
        for index in (0, 1):
            start(c, index, EVALUATE_SECS=8 if index == last else 0, PAUSE_AT=0)
        for index in (0, 1):
            go(tmp_path, index)
        assert all_well(c)
        assert c.lines(f"worker:{last}", "AFTER STOP 20")
        assert saved_step(tmp_path) == 20


def test_frozen_worker_is_given_up(tmp_path: Path) -> None:
    """A worker that is silent after its stop holds the ps for the grace period only."""
    with cluster(tmp_path, STYLE="after_stop") as c:
        chief, other = chief_and_other(c, tmp_path, EVALUATE_SECS=3600)
        go(tmp_path, 1)
        assert c.wait(chief) == 0
        c.freeze(other)
        assert c.wait("ps:0") == 0
        assert c.lines("ps:0", "not waiting any longer for /job:worker/task:1 .*no sign of life")
        c.kill(other)


def test_saver_hook_of_every_worker(tmp_path: Path) -> None:
    """The hook saves on the chief; another worker leaves the hook out and says so once."""
    with cluster(tmp_path, STYLE="saver_hook") as c:
        start_all(c, tmp_path, 10, 30)
        assert all_well(c)
        assert saved_step(tmp_path) == 40
        assert c.lines("worker:0", "SAVED") and not c.lines("worker:1", "SAVED")
        assert len(c.lines("worker:1", "leaves its CheckpointSaverHook out")) == 1
        assert not c.lines("worker:0", "leaves its CheckpointSaverHook out")


# -- processes that just exit ----------------------------------------------------------------------------------------


def test_exiting_worker_is_given_up(tmp_path: Path) -> None:
    """A worker that exits without an end is given up."""
    with cluster(tmp_path, STYLE="managed") as c:
        chief, other = chief_and_other(c, tmp_path, PAUSE_AT=-1, STYLE="close", EXITS=1)
        assert c.wait(other) == 0
        assert c.wait(chief) == 0 and c.wait("ps:0") == 0
        assert saved_step(tmp_path) == 20
        assert c.lines(other, "this process ends without .*: nobody is told that it is done")


def test_exiting_chief_leaves_the_ps(tmp_path: Path) -> None:
    """A chief that exits without an end leaves the ps to the next chief."""
    with cluster(tmp_path, STYLE="close") as c:
        chief = start(c, 0, EXITS=1, PAUSE_AT=0)
        other = start(c, 1, STYLE="stop")
        go(tmp_path, 0)
        assert c.wait(chief) == 0 and c.wait(other) == 0
        assert c.lines(
            chief,
            r"what was trained since the last checkpoint is not saved \(step \d+ was the last",
        )
        c.expect("ps:0", "some are done with training; waiting for /job:worker/task:0 ")
        start(c, 0, STYLE="stop", STEPS=1)
        assert all_well(c)
        assert saved_step(tmp_path) == 21


def test_early_ps_stop_names_the_cost(tmp_path: Path) -> None:
    """A ps that is stopped before the end says what that costs."""
    with cluster(tmp_path, STYLE="close") as c:
        assert c.wait(start(c, 0, EXITS=1)) == 0
        c.stop("ps:0")
        assert c.wait("ps:0") == 0
        assert c.lines(
            "ps:0",
            "stops before training has ended: started again, it goes on from the newest checkpoint",
        )


# -- work after the loop ---------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_evaluation_after_stop_is_unlimited(tmp_path: Path) -> None:
    """An evaluation after request_stop takes as long as it likes."""
    with cluster(tmp_path, workers=1, STYLE="managed", EVALUATE_SECS=6, GRACE_SECS=1) as c:
        chief = start(c, 0)
        c.expect(chief, "EVALUATED")
        assert all_well(c)
        assert saved_step(tmp_path) == 10
        assert not c.lines(chief, "cancelled|closed")


def test_error_after_stop_follows_save(tmp_path: Path) -> None:
    """An error after request_stop is raised when all is saved."""
    with cluster(tmp_path, workers=1, STYLE="managed", ERROR="no room for the export") as c:
        chief = start(c, 0)
        assert c.wait(chief) == 1
        assert c.lines(chief, "ValueError: no room for the export")
        assert c.wait("ps:0") == 0
        assert saved_step(tmp_path) == 10


@pytest.mark.parametrize("style", ["stop", pytest.param("monitored", marks=pytest.mark.nightly)])
def test_last_save_is_unlimited(style: str, tmp_path: Path) -> None:
    """The last save takes as long as it takes."""
    with cluster(tmp_path, workers=1, STYLE=style, SAVE_SECS=6, HOOK_SECS=6, GRACE_SECS=1) as c:
        chief = start(c, 0)
        assert c.wait(chief) == 0 and c.wait("ps:0") == 0
        assert saved_step(tmp_path) == 10
        assert not c.lines(chief, "cancelled|closed")


@pytest.mark.parametrize("style", ["managed", "monitored"])
def test_zero_grace_ends_well(style: str, tmp_path: Path) -> None:
    """A grace period of zero is enough for a good end."""
    with cluster(
        tmp_path, STYLE=style, GRACE_SECS=0, SAVE_SECS=1, TIMER_SECS=1.5, STEP_SECS=0.1
    ) as c:
        start_all(c, tmp_path, 10, 10)
        assert all_well(c)
        assert saved_step(tmp_path) == 20


# -- SIGTERM and Ctrl-C on the way out -------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["stop", "monitored"])
def test_preempted_waiting_chief_saves(style: str, tmp_path: Path) -> None:
    """A chief that is preempted while it waits saves, and training can continue."""
    with cluster(tmp_path, STYLE=style, GRACE_SECS=60) as c:
        chief, other = chief_and_other(c, tmp_path)
        c.expect(chief, "waiting for /job:worker/task:1")
        c.stop(chief)
        assert c.wait(chief) == exit_codes.PREEMPTED.plain
        assert saved_step(tmp_path) == 15
        go(tmp_path, 1)  # nobody was told that training is over
        assert c.wait(other) == 0
        start(c, 0, STEPS=1)
        assert c.wait(chief) == 0 and c.wait("ps:0") == 0
        assert saved_step(tmp_path) == 21


@pytest.mark.parametrize(
    ("style", "number"),
    [
        ("stop", signal.SIGTERM),
        ("managed", signal.SIGINT),
        ("monitored", signal.SIGTERM),
        ("monitored", signal.SIGINT),
    ],
)
def test_signal_spares_the_last_save(style: str, number: int, tmp_path: Path) -> None:
    """A signal during the last save does not cost the save."""
    with cluster(tmp_path, workers=1, STYLE=style, SAVE_SECS=1) as c:
        chief = start(c, 0, PAUSE_AT=5)
        until(lambda: bool(c.lines(chief, "SAVED")))  # the first one, of the beginning
        go(tmp_path, 0)
        c.expect(chief, "TRAINED")
        c.expect(chief, "SAVING")
        os.kill(c.lives(chief)[-1].pid, number)
        c.expect(chief, "SAVED")
        row = exit_codes.PREEMPTED if number == signal.SIGTERM else exit_codes.INTERRUPTED
        assert c.wait(chief) == row.plain
        assert saved_step(tmp_path) == 10


def test_signal_in_last_evaluation_saves(tmp_path: Path) -> None:
    """A signal during an evaluation at the end still saves."""
    with cluster(tmp_path, workers=1, STYLE="monitored", HOOK_SECS=30) as c:
        chief = start(c, 0)
        c.expect(chief, "EVALUATING")
        c.stop(chief)
        assert c.wait(chief, 15) == exit_codes.PREEMPTED.plain
        assert saved_step(tmp_path) == 10


# -- workers that keep step with each other --------------------------------------------------------------------------


def test_staleness_ignores_finished_workers(tmp_path: Path) -> None:
    """Bounded staleness does not wait for a worker that has finished."""
    with cluster(tmp_path, STYLE="stop", SYNC="stale", GRACE_SECS=60) as c:
        start_all(c, tmp_path, 5, 60)
        assert all_well(c)
        assert saved_step(tmp_path) == 65


@pytest.mark.parametrize("first", [0, 1], ids=["the chief first", "the other first"])
def test_synchronous_training_ends_with_first(first: int, tmp_path: Path) -> None:
    """Synchronous training ends with the first worker that is through."""
    with cluster(tmp_path, STYLE="managed", SYNC="quorum", GRACE_SECS=60) as c:
        for index in (0, 1):
            start(c, index, ready=False, STEPS=5 if index == first else 60)
        assert all_well(c)
        assert saved_step(tmp_path) == 5


# -- recoveries ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["managed", pytest.param("monitored", marks=pytest.mark.nightly)])
def test_start_limit_spares_recoveries(style: str, tmp_path: Path) -> None:
    """The time limit of the start does not bound a recovery."""
    with cluster(tmp_path, STYLE=style, START_SECS=3, GRACE_SECS=30) as c:
        chief = start(c, 0, PAUSE_AT=5)
        other = start(c, 1, PAUSE_AT=5)
        c.expect(chief, "PAUSED")
        c.expect(other, "PAUSED")
        c.kill("ps:0")
        go(tmp_path, 0)
        go(tmp_path, 1)
        c.expect(other, "recovering")
        # The test is one of time: the ps is away for longer than the limit of the start.
        time.sleep(5)
        c.start("ps:0")
        assert c.wait(other) == 0 and c.wait(chief) in (0, 1)
        assert not c.lines(chief, "DeadlineExceeded") and not c.lines(other, "DeadlineExceeded")


def restart_ps_while_waiting(c: LocalCluster, directory: Path, chief: str, other: str) -> None:
    """Restarts a ps while the chief waits for the worker, and expects a clean end of both."""
    c.expect(other, "PAUSED")
    go(directory, 0)
    c.expect(chief, "waiting for /job:worker/task:1 ")
    c.kill("ps:1")
    c.start("ps:1")
    go(directory, 1)
    assert c.wait(other) == 0
    assert c.wait(chief) == 0
    assert c.lines(other, "recovered within")


@pytest.mark.parametrize("style", ["managed", pytest.param("monitored", marks=pytest.mark.nightly)])
def test_waiting_chief_restores_ps(style: str, tmp_path: Path) -> None:
    """A chief that waits restores a lost ps for the workers."""
    with cluster(tmp_path, ps=2, STYLE=style, GRACE_SECS=60) as c:
        chief = start(c, 0, PAUSE_AT=0, STOPS=1)
        other = start(c, 1, PAUSE_AT=5, STEPS=40)
        restart_ps_while_waiting(c, tmp_path, chief, other)
        assert saved_step(tmp_path) == 35


def test_closed_chief_restores_for_workers(tmp_path: Path) -> None:
    """A chief that has closed its session by hand restores a lost ps for the workers that it waits
    for.
    """
    with cluster(tmp_path, ps=2, GRACE_SECS=60) as c:
        chief = start(c, 0, PAUSE_AT=0, STYLE="close", TIMER_SECS=0.5)
        other = start(c, 1, PAUSE_AT=5, STEPS=40, STYLE="managed")
        restart_ps_while_waiting(c, tmp_path, chief, other)
        assert c.lines(chief, "the session was closed before the stop")


def test_preempted_last_save_ends_nothing(
    tmp_path: Path,
) -> None:
    """A chief that is preempted during the last save does not end the training of the others."""
    with cluster(tmp_path, workers=1, STYLE="managed", SAVE_SECS=1) as c:
        chief = start(c, 0, PAUSE_AT=5)
        until(lambda: bool(c.lines(chief, "SAVED")))
        go(tmp_path, 0)
        c.expect(chief, "TRAINED")
        c.expect(chief, "SAVING")
        c.stop(chief)
        assert c.wait(chief) == exit_codes.PREEMPTED.plain
        start(c, 0, STEPS=3)  # it finds its ps there, and the model alive
        assert all_well(c)
        assert c.lines(chief, "READY 10")
        assert saved_step(tmp_path) == 13


def test_restarted_ps_knows_finished_workers(tmp_path: Path) -> None:
    """A ps that is started again knows which workers were through before."""
    with cluster(tmp_path, ps=2, STYLE="managed", LATE_SECS=600) as c:
        chief = start(c, 0, PAUSE_AT=2)
        assert c.wait(start(c, 1)) == 0
        c.kill("ps:1")
        c.start("ps:1")
        c.expect(chief, "recovered within")
        go(tmp_path, 0)
        assert c.wait(chief) == 0
        assert [c.wait("ps:0"), c.wait("ps:1")] == [0, 0]


def test_restarted_ps_learns_of_end(
    tmp_path: Path,
) -> None:
    """A ps that is started again after the last save learns that training is over."""
    with cluster(
        tmp_path, ps=2, workers=1, STYLE="managed", LATE_SECS=600, SAVED_SECS=3, GRACE_SECS=60
    ) as c:
        chief = start(c, 0, PAUSE_AT=5)
        until(lambda: bool(c.lines(chief, "SAVED")))
        go(tmp_path, 0)
        c.expect(chief, "TRAINED")
        c.expect(chief, "SAVED")
        c.kill("ps:1")
        c.start("ps:1")
        assert c.wait(chief) == 0
        assert not c.lines(chief, "could not tell")
        assert [c.wait("ps:0"), c.wait("ps:1")] == [0, 0]
        assert saved_step(tmp_path) == 10
