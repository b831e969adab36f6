"""One chief leads at a time, whatever it orders: real processes that are killed, frozen and started at once."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import harness
import runtime as rt
from runtime.lowlevel import RunRecords
from tests.harness import cluster_kit
from tests.harness.cluster_kit import consistent
from tests.harness.optimizers.task import Model, batches
from tests.kit.processes import Task

pytestmark = pytest.mark.cluster

Spec = dict[str, list[str]]


def leader(records: RunRecords) -> tuple[int, str]:
    """The epoch that all ps obey, and the chief's name and address."""
    ((epoch, chief),) = {
        (record.leadership.epoch, record.chief) for record in records.inspect().values()
    }
    return epoch, chief


def claims_only(index: int, spec: Spec, pipe: Any) -> None:
    """Claims the ps, and gives no other order."""
    with rt.Server(spec, "worker", index) as server:
        RunRecords(server.target, is_chief=True).claim()
        pipe.send(("CLAIMED",))
        pipe.recv()


def test_killed_claimer_holds_nobody_up(
    tmp_path: Path,
) -> None:
    """A chief that is killed after its claim does not hold up the next chief."""
    with cluster_kit.cluster(2, 2, logdir=str(tmp_path)) as c:
        c.ps(0)
        c.ps(1)
        dead = Task(claims_only, 0, c.spec)
        try:
            dead.hear("CLAIMED")
            dead.kill()
        finally:
            dead.close()
        chief = c.worker(0)
        assert chief.request("steps", 5) == 5
        assert chief.request("save", answer="SAVED").endswith("/5")
        with rt.Server(c.spec, "worker", 1) as server:
            assert leader(RunRecords(server.target)) == (
                2,
                f"/job:worker/task:0 at {c.spec['worker'][0]}",
            )


@pytest.mark.chaos
def test_one_of_two_chiefs_continues(tmp_path: Path) -> None:
    """Of two chiefs that start at once exactly one continues."""
    with cluster_kit.cluster(2, 2) as c:
        c.ps(0)
        c.ps(1)
        chiefs = [
            c.start("worker", index, chief=True, logdir=str(tmp_path / str(index)))
            for index in range(2)
        ]
        for chief in chiefs:
            chief.wait_for(lambda said: any(what[0] in ("READY", "ERROR") for what in said))
        for chief in chiefs:
            if chief.said_so_far("READY"):
                chief.tell("steps", 5)
                chief.tell("save")
            chief.wait_for(lambda said: any(what[0] in ("SAVED", "ERROR") for what in said))
        saved = [chief for chief in chiefs if chief.said_so_far("SAVED")]
        assert len(saved) == 1
        (other,) = set(chiefs) - set(saved)
        (refused,) = other.said_so_far("ERROR")
        assert re.search("has taken the lead|run one chief only", str(refused)), refused
        saved[0].tell("end")
        assert saved[0].wait() == 0


def saves_beside(index: int, spec: Spec, series: str, times: int, pipe: Any) -> None:
    """Saves the variables of a training that others lead, in a session without a Supervisor."""
    with rt.Server(spec, "worker", index) as server:
        with rt.device(
            rt.replica_device_setter(cluster=spec, worker_device=f"/job:worker/task:{index}")
        ):
            step = harness.get_or_create_global_step()
            for name in ("first", "second"):
                rt.Variable(np.zeros(4, np.float32), name=name)
        saver = harness.Saver(max_to_keep=None)
        with rt.Session(
            server.target, config=rt.SessionConfig(device_filters=("/job:ps",))
        ) as session:
            for _ in range(times):
                saver.save(session, series, step)
        pipe.send(("SAVED", saver.last_checkpoints))


@pytest.mark.chaos
def test_plain_saver_deposes_no_chief(
    tmp_path: Path,
) -> None:
    """A plain Saver beside a chief does not depose the chief, and both save whole steps."""
    with cluster_kit.cluster(2, 3, logdir=str(tmp_path), save_secs=0.05) as c:
        c.ps(0)
        c.ps(1)
        chief = c.worker(0)
        chief.tell("train")
        chief.hear("STEP")
        plain = Task(saves_beside, 1, c.spec, str(tmp_path / "beside"), 10)
        try:
            beside = plain.hear("SAVED")[1]
        finally:
            plain.close()
        chief.tell("save")
        chief.hear("TRAINED")
        last = chief.hear("SAVED")[1]
        with rt.Server(c.spec, "worker", 2) as server:
            assert leader(RunRecords(server.target)) == (
                1,
                f"/job:worker/task:0 at {c.spec['worker'][0]}",
            )
        consistent(chief.request("values"))
        chief.tell("end")
        assert chief.wait() == 0
        assert not chief.said_so_far("LOG", "was not saved|taken the lead")
    assert len(beside) == 10
    for path in [
        *beside,
        *(str(p) for p in (tmp_path / "model.ckpt").iterdir() if p.name.isdigit()),
        last,
    ]:
        values = [harness.load_variable(path, name) for name in ("global_step", "first", "second")]
        assert set(values[1]) == set(values[2]) == {float(values[0])}, path


def leads_synchronously(index: int, spec: Spec, series: str, pipe: Any) -> None:
    """A chief of synchronous steps on two ps that saves and gives run orders too; tells what becomes of each."""

    def wrap(optimizer: harness.Optimizer) -> Any:
        return harness.SyncReplicas(optimizer, 1, 1, worker=0, is_chief=False)

    config = rt.SessionConfig(device_filters=("/job:ps",), start_timeout_secs=60)
    with rt.Server(spec, "worker", index) as server:
        model = Model(server, "sgd", wrap, by_step=True)
        x, y = (everything[:, 0] for everything in batches(1))
        with rt.Session(server.target, model.graph, config) as session, model.graph.as_default():
            records, coord, saver = (
                RunRecords(server.target, is_chief=True),
                harness.Coordinator(),
                harness.Saver(),
            )
            session.authority.lead_with(records.claim())
            if len(session.run(model.missing)):
                session.run(model.init)
            runner = model.optimizer.get_chief_queue_runner()
            threads = runner.create_threads(session, coord, daemon=True, start=True)

            def train(wait_secs: float = 0.0) -> int:
                """A step that the runner of this process decides on; raises what that has stopped with."""
                if coord.wait_for_stop(wait_secs):
                    coord.join(threads, stop_grace_period_secs=10)
                return int(session.run(model.fetches(), {model.x: x, model.y: y})[-1])

            orders: dict[str, Callable[[], object]] = {
                "save": lambda: saver.save(session, series, 2),
                "restore": lambda: saver.restore(session, f"{series}/1"),
                "run order": records.open,
                "synchronous order": lambda: train(
                    0.0 if index else 60.0
                ),  # a runner listens for ten seconds at a time
            }
            saver.save(session, series, 1)
            records.open()
            pipe.send(("STEP", train()))
            pipe.recv()
            for kind, order in orders.items():
                try:
                    order()
                except rt.OpError as error:
                    pipe.send(("REFUSED", (kind, type(error).__name__, str(error))))
            pipe.send(("TRIED",))
            coord.request_stop()


@pytest.mark.chaos
def test_deposed_chief_is_refused(tmp_path: Path) -> None:
    """A deposed chief that wakes up is refused, whatever the order."""
    with cluster_kit.cluster(2, 2) as c:
        c.ps(0)
        c.ps(1)
        old = Task(leads_synchronously, 0, c.spec, str(tmp_path / "old"))
        try:
            assert old.hear("STEP")[1] == 1
            old.freeze()
            new = Task(leads_synchronously, 1, c.spec, str(tmp_path / "new"))
            try:
                assert new.hear("STEP")[1] == 2
                old.thaw()
                old.tell("again")
                old.hear("TRIED")
                refused = {kind: (error, text) for kind, error, text in old.said_so_far("REFUSED")}
                assert {kind: error for kind, (error, _) in refused.items()} == {
                    "save": "AbortedError",
                    "restore": "AbortedError",
                    "run order": "PermissionDeniedError",
                    "synchronous order": "PermissionDeniedError",
                }
                for _, text in refused.values():
                    assert "/job:worker/task:1 has taken the lead" in text
                assert harness.latest_checkpoint(str(tmp_path / "old")) == f"{tmp_path}/old/1"
                new.tell("again")
                new.hear("TRIED")
                assert not new.said_so_far("REFUSED")
            finally:
                new.close()
        finally:
            old.close()
