"""Under whose leadership a session's orders go: a chief's own, or that of whoever leads, whom it never deposes."""

import contextlib
import itertools
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import harness
import runtime as rt
from harness.checkpoints import names
from runtime.checkpoint import times
from runtime.lowlevel import RunRecords
from runtime.proto.run_record_pb2 import RunOrder, RunReply
from runtime.session.lead import Authority, Lead, next_epoch
from runtime.state.cancellation import Cancellation
from runtime.state.leadership import EPOCHS_AT_ONCE, NOBODY, Leadership
from tests.kit.changes import SetTimes
from tests.runtime.kit import TARGET, servers, target_of_kind

pytestmark = pytest.mark.cluster

PS = ["/job:ps/task:0", "/job:ps/task:1"]
W = "/job:worker/task:1"


@pytest.mark.parametrize(
    ("obeyed", "epoch"),
    [
        ([(0, 0)], 1),
        ([(0, 0), (5, 7)], 5),  # one that was started again
        ([(4, 8), (5, 7)], 5),  # one that it has not led yet
        ([(5, 7), (5, 7)], 5),
        ([(5, 7), (5, 8)], 6),
        ([(5, 7), (6, 8)], 7),
        ([(5, 8)], 6),
    ],
)
def test_latest_chief_keeps_its_epoch(obeyed: list[tuple[int, int]], epoch: int) -> None:
    """A chief keeps its epoch while no other chief has led later."""
    assert next_epoch(7, [Leadership(*pair) for pair in obeyed]) == epoch


class Tasks:
    """Tasks that are claimed, without records and sockets."""

    def __init__(self, *obeyed: tuple[int, int]) -> None:
        self.obeyed = {f"task {index}": Leadership(*pair) for index, pair in enumerate(obeyed)}
        self.raised: list[int] = []

    def ask(self, leadership: Leadership) -> dict[str, Leadership]:
        if leadership:
            self.raised.append(leadership.epoch)
        for task, before in self.obeyed.items():
            assert leadership.epoch < before.epoch + EPOCHS_AT_ONCE
            if leadership.epoch > before.epoch:
                self.obeyed[task] = leadership
        return dict(self.obeyed)


def test_far_epoch_takes_several_steps() -> None:
    """A task that is far behind takes a large epoch in several steps."""
    tasks, lead = Tasks((0, 0), (2 * EPOCHS_AT_ONCE, 1)), Lead()
    assert lead.claim(tasks.ask).epoch == 2 * EPOCHS_AT_ONCE + 1
    assert set(tasks.obeyed.values()) == {lead.leadership} and len(tasks.raised) == 3


def test_held_lead_is_not_taken_back() -> None:
    """A chief claims its own tasks again, and leaves those that obey a later chief."""
    tasks, lead = Tasks((0, 0), (0, 0)), Lead()
    lead.claim(tasks.ask)
    tasks.obeyed["task 0"] = NOBODY  # was started again
    lead.claim(tasks.ask, lead.tasks)
    assert set(tasks.obeyed.values()) == {lead.leadership}
    tasks.obeyed["task 1"] = Leadership(2, 1)
    assert lead.claim(tasks.ask, lead.tasks).epoch == 1
    assert tasks.obeyed["task 1"] == Leadership(2, 1)
    assert lead.claim(tasks.ask).epoch == 3  # as a recovery does


class SharedLead(Lead):
    """A lead that another session of the chief spreads to one more task after each look."""

    @property
    def tasks(self) -> frozenset[str]:  # type: ignore[override]
        seen, self._claimed = self._claimed, self._claimed | {f"task {len(self._claimed) + 1}"}
        return seen

    @tasks.setter
    def tasks(self, tasks: frozenset[str]) -> None:
        self._claimed = tasks


def test_sessions_of_a_chief_claim_together() -> None:
    """A session claims its tasks while another session of the same chief claims further tasks."""
    tasks = Tasks((0, 0), (0, 0), (0, 0))

    def send(task: str, order: RunOrder) -> RunReply:
        leadership = Leadership.from_proto(order.leadership)
        return RunReply(leadership=tasks.ask(leadership)[task].to_proto())

    authority = Authority(send)
    authority.lead_with(SharedLead())
    assert set(authority.over(["task 0"])) == {"task 0"}


def test_chiefs_that_meet_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chiefs that meet at each claim give up and say that one chief should run."""
    monkeypatch.setattr("runtime.concurrency.uniform", lambda low, high: 0.0)
    tasks = Tasks((0, 0), (0, 0))
    epochs = itertools.count(1)

    def meets(leadership: Leadership) -> dict[str, Leadership]:
        if leadership:  # the other one was first on task 1, each time
            tasks.obeyed["task 1"] = Leadership(max(leadership.epoch, next(epochs)), 1)
        return tasks.ask(leadership)

    with pytest.raises(rt.AbortedError, match="run one chief only"):
        Lead().claim(meets)


@pytest.fixture(params=["tasks here", "tasks elsewhere"])
def cluster(request: pytest.FixtureRequest) -> Iterator[dict[str, rt.Server]]:
    with servers(sockets=request.param != "tasks here", ps=2, worker=2) as made:
        yield made


def obeyed(cluster: dict[str, rt.Server], *tasks: str) -> set[Leadership]:
    return {cluster[task].worker.store.run.leader.leadership for task in tasks}


@contextlib.contextmanager
def sessions(cluster: dict[str, rt.Server], count: int) -> Iterator[list[rt.Session]]:
    with contextlib.ExitStack() as stack, rt.Graph().as_default() as graph:
        for index, task in enumerate((*PS, W)):
            with rt.device(task):
                rt.Variable(np.full(4, index, np.float32), name=f"v{index}")
        made = [
            stack.enter_context(rt.Session(cluster[TARGET].target, graph)) for _ in range(count)
        ]
        made[0].run(rt.global_variables_initializer())
        yield made


def test_plain_session_claims_or_follows(
    cluster: dict[str, rt.Server],
) -> None:
    """A plain session claims a task that nobody leads and follows the leader of any other."""
    with sessions(cluster, 3) as (first, second, chiefs):
        own = first.authority.over(PS[:1])
        assert set(own.values()) == obeyed(cluster, PS[0]) != {NOBODY} == obeyed(cluster, PS[1], W)
        both = second.authority.over(PS)
        assert both[PS[0]] == own[PS[0]] and both[PS[1]].owner != own[PS[0]].owner
        lead = RunRecords(cluster[TARGET].target, is_chief=True).claim()
        assert lead.leadership.epoch == 2
        assert (
            first.authority.over(PS)
            == second.authority.over(PS)
            == dict.fromkeys(PS, lead.leadership)
        )
        chiefs.authority.lead_with(lead)
        assert chiefs.authority.over([*PS, W]) == dict.fromkeys([*PS, W], lead.leadership)
        assert lead.leadership.epoch == 2 and obeyed(cluster, *PS, W) == {lead.leadership}


def test_late_task_raises_all_epochs(
    cluster: dict[str, rt.Server],
) -> None:
    """A task that is claimed late and is ahead raises the epoch of all tasks."""
    records = RunRecords(cluster[TARGET].target, is_chief=True)
    with sessions(cluster, 1) as (sess,):
        sess.authority.lead_with(records.claim())
        assert records.lead and sess.authority.over(PS[:1])[PS[0]].epoch == 1
        cluster[W].worker.store.run.leader.leadership = Leadership(5, 1)
        assert sess.authority.over([W])[W] == Leadership(6, records.lead.owner)
        assert obeyed(cluster, *PS, W) == {records.lead.leadership}
        records.load()  # its run orders go under the same
        records.open()


def test_deposed_chief_saves_nothing(cluster: dict[str, rt.Server], tmp_path: pathlib.Path) -> None:
    """A deposed chief can neither save nor restore, and the new chief keeps the lead."""
    old = RunRecords(cluster[TARGET].target, is_chief=True)
    with sessions(cluster, 2) as (saved_before, fresh):
        for sess in (saved_before, fresh):
            sess.authority.lead_with(old.claim())
        saver = harness.Saver()
        saver.save(saved_before, tmp_path / "m", 1)
        new = RunRecords(cluster[TARGET].target, is_chief=True).claim()
        for sess in (saved_before, fresh):
            with pytest.raises(rt.AbortedError, match="has taken the lead"):
                saver.save(sess, tmp_path / "m", 2)
            with pytest.raises(rt.AbortedError, match="has taken the lead"):
                saver.restore(sess, f"{tmp_path}/m/1")
        assert obeyed(cluster, *PS) == {new.leadership} and not old.leads()
        with pytest.raises(rt.PermissionDeniedError, match="has taken the lead"):
            old.load()


@pytest.mark.parametrize("transfer", ["shared", "stream"])
def test_plain_saver_deposes_nobody(
    cluster: dict[str, rt.Server], tmp_path: pathlib.Path, transfer: str
) -> None:
    """A plain saver deposes no chief, and a new chief ends the jobs of both."""
    records = RunRecords(cluster[TARGET].target, is_chief=True)
    with sessions(cluster, 2) as (chiefs, plain):
        chiefs.authority.lead_with(records.claim())
        saver = harness.Saver(transfer=transfer)
        chiefs_path = saver.save(chiefs, tmp_path / "chief", 1)
        slices = names.slices_of(chiefs, names.saved_variables(None), stream=transfer == "stream")
        snapshots = [sess.checkpoint_coordinator.snapshot(slices) for sess in (chiefs, plain)]
        for path in (
            chiefs_path,
            harness.Saver(transfer=transfer).save(plain, tmp_path / "plain", 1),
        ):
            assert [harness.load_variable(path, f"v{i}")[0] for i in range(3)] == [0, 1, 2]
        assert (
            records.leads()
            and records.lead
            and obeyed(cluster, *PS, W) == {records.lead.leadership}
        )
        chiefs.checkpoint_coordinator.confirm(snapshots[0])  # nothing of it was lost
        new = RunRecords(cluster[TARGET].target, is_chief=True)
        new.claim()
        for sess, snapshot in zip((chiefs, plain), snapshots, strict=True):
            with pytest.raises(rt.AbortedError, match="has taken the lead"):
                sess.checkpoint_coordinator.write(
                    snapshot, str(tmp_path), stream=transfer == "stream"
                )
        # under the new chief
        assert harness.Saver(transfer=transfer).save(plain, tmp_path / "plain", 2)


def test_remote_client_claims_and_follows(tmp_path: pathlib.Path) -> None:
    """A client of a remote master claims the task, follows its leader and saves."""
    with target_of_kind("remote master") as target, rt.Graph().as_default() as graph:
        variable = rt.Variable(np.ones(4, np.float32), name="v")
        with rt.Session(target, graph) as sess:
            sess.run(variable.initializer)
            (task,) = {device.task_name for device in sess.placement([variable]).values()}
            mine = sess.authority.over([task])
            assert mine[task] and sess.authority.over([task]) == mine
            with pytest.raises(rt.NotFoundError, match="not among this session's tasks"):
                sess.authority.over(["/job:none/task:0"])
            assert harness.load_variable(harness.Saver().save(sess, tmp_path / "m", 1), "v")[0] == 1


def test_restore_loses_to_later_claim(
    cluster: dict[str, rt.Server], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore swaps no values in when another chief claims the task before the swap."""
    store = cluster[PS[0]].worker.store
    replace: Callable[..., object] = store.replace
    with sessions(cluster, 1) as (sess,):
        saver = harness.Saver()
        path = saver.save(sess, tmp_path / "m", 1)
        sess.run("v0:0")
        sess.run([v.assign(np.full(4, 9, np.float32)).op for v in rt.global_variables()])

        def claimed_first(*args: object) -> object:
            RunRecords(cluster[TARGET].target, is_chief=True).claim()
            return replace(*args)

        monkeypatch.setattr(store, "replace", claimed_first)
        with pytest.raises(rt.AbortedError, match="refused to save or restore"):
            saver.restore(sess, path)
        assert sess.run("v0:0").tolist() == [9.0] * 4


def test_first_order_waits_for_old_write(
    cluster: dict[str, rt.Server], tmp_path: pathlib.Path, set_times: SetTimes
) -> None:
    """A chief's first save waits until the write of the chief before it has ended."""
    old, new = (RunRecords(cluster[TARGET].target, is_chief=True) for _ in range(2))
    with sessions(cluster, 2) as (olds, news):
        olds.authority.lead_with(old.claim())
        saver = harness.Saver()
        participant = cluster[PS[0]].worker.checkpoint_participant
        snapshot = olds.checkpoint_coordinator.snapshot(
            names.slices_of(olds, names.saved_variables(None))
        )
        job = participant.jobs.find(snapshot.job)
        with participant.jobs.reserve(job, Cancellation(), "writes"):
            news.authority.lead_with(new.claim())  # a claim waits for nothing
            assert not job.ended.is_set()
            set_times(times, JOIN_SECS=0.05)
            for _ in range(2):
                with pytest.raises(
                    rt.UnavailableError, match="an earlier chief's job still writes"
                ):
                    saver.save(news, tmp_path / "m", 1)
            assert job.ended.is_set()
        saver.save(news, tmp_path / "m", 1)
        assert not participant.jobs.list_jobs()
