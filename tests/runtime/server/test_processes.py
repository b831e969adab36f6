"""What a cluster of processes promises: shared variables, nothing lost, and a name for every failure."""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import runtime as rt
from runtime import timeouts
from tests.kit.changes import SetTimes
from tests.kit.processes import Program, programs
from tests.kit.waits import until
from tests.runtime.kit import TARGET, addresses, processes, servers

pytestmark = pytest.mark.cluster

WAIT = rt.SessionConfig(start_timeout_secs=60)
NO_LIMIT = rt.SessionConfig(start_timeout_secs=60, reconnect_secs=7200)
"""A task that is silent would be waited for until the test's own time limit."""


@pytest.fixture(autouse=True)
def graph() -> Iterator[rt.Graph]:
    with rt.Graph().as_default() as made:
        yield made


@contextlib.contextmanager
def ps_and_worker(**jobs: int) -> Iterator[tuple[rt.Server, list[Program]]]:
    """This process is worker 0; every other task is a process of its own."""
    cluster = addresses(**{"ps": 1, "worker": 1, **jobs})
    others = [
        (job, i)
        for job, hosts in cluster.items()
        for i in range(len(hosts))
        if (job, i) != ("worker", 0)
    ]
    with processes(cluster, *others) as tasks, rt.Server(cluster, "worker", 0) as server:
        yield server, tasks


ADD = """
import json, sys, runtime as rt
cluster, index, times = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
with rt.Server(cluster, "worker", index) as server, rt.device("/job:ps/task:0"):
    v = rt.Variable(0, name="count")
    add = v.assign_add(1)
    config = rt.SessionConfig(start_timeout_secs=60, device_filters=["/job:ps"])
    with rt.Session(server.target, config=config) as session:
        for _ in range(times):
            session.run(add.op)
"""


@pytest.mark.chaos
def test_workers_lose_no_addition() -> None:
    """Two workers in processes of their own lose no addition."""
    cluster = addresses(ps=1, worker=3)
    with processes(cluster, ("ps", 0)), rt.Server(cluster, "worker", 0) as server:
        with rt.device("/job:ps/task:0"):
            v = rt.Variable(0, name="count")
        config = rt.SessionConfig(start_timeout_secs=60, device_filters=["/job:ps"])
        with rt.Session(server.target, config=config) as session:
            session.run(v.initializer)
            with programs() as start:
                for worker in [
                    start("python", "-c", ADD, json.dumps(cluster), str(i), "10000") for i in (1, 2)
                ]:
                    worker.result()
            assert session.run(v) == 20_000


def test_killed_ps_is_named_at_once(graph: rt.Graph) -> None:
    """A killed ps is UnavailableError, its return AbortedError for the old session, and a new
    session works.
    """
    with ps_and_worker(ps=2) as (server, (ps0, ps1)), contextlib.ExitStack() as stack:
        with rt.device("/job:ps/task:0"):
            w = rt.Variable(0.0, name="w")
        with rt.device("/job:ps/task:1"):
            v = rt.Variable(1.0, name="v")
        x = rt.placeholder(np.float32, [])
        step = v.assign_add(x * 2.0)
        missing = rt.report_uninitialized_variables()
        config = rt.SessionConfig(start_timeout_secs=60, reconnect_secs=1.0)
        session = stack.enter_context(rt.Session(server.target, config=config))
        session.run(rt.global_variables_initializer())
        session.run([step, w], {x: 1.0})
        ps1.kill()
        with pytest.raises(rt.UnavailableError) as caught:
            session.run(step, {x: 1.0})
        assert caught.value.task == "/job:ps/task:1"
        assert session.run(w) == 0.0  # steps that do not touch it go on
        ps1.restart()
        deadline = time.monotonic() + 60
        while True:
            with pytest.raises((rt.UnavailableError, rt.AbortedError)) as again:
                session.run(step, {x: 1.0})
            if isinstance(again.value, rt.AbortedError):
                break
            assert time.monotonic() < deadline
        assert again.value.task == "/job:ps/task:1"
        assert "restarted" in str(again.value)
        with rt.Session(server.target, config=config) as fresh:
            assert fresh.run(missing).tolist() == [b"v"]
            with pytest.raises(
                rt.FailedPreconditionError, match="/job:ps/task:1.*uninitialized value v"
            ):
                fresh.run(step, {x: 1.0})
            fresh.run(v.initializer)
            assert fresh.run(step, {x: 1.0}) == 3.0
            assert fresh.run(w) == 0.0


def test_ps_may_die_during_step(graph: rt.Graph) -> None:
    """A step whose ps dies in the middle is UnavailableError with the task."""
    with ps_and_worker() as (server, (ps,)):
        with rt.device("/job:ps/task:0"):
            v = rt.Variable(np.zeros(4, np.float32), name="v")
            slow = rt.call(busy, v.value(), name="slow")
        with rt.Session(server.target, config=WAIT) as session:
            session.run(v.initializer)
            killer = threading.Timer(1.0, ps.kill)
            killer.start()
            try:
                with pytest.raises(rt.UnavailableError, match="/job:ps/task:0"):
                    session.run(slow)
            finally:
                killer.cancel()
                killer.join()
        assert ps.code == -signal.SIGKILL


def busy(x: Any) -> Any:
    """Computes for minutes."""
    import jax

    return jax.lax.fori_loop(0, 2**40, lambda _, a: a * 1.0001 + 0.5, x)


def test_close_leaves_the_dead() -> None:
    """Closing a session does not wait for a dead task."""
    with ps_and_worker() as (server, (ps,)):
        session = rt.Session(server.target, config=NO_LIMIT)
        ps.kill()
        session.close()


def test_frozen_ps_ends_limited_step() -> None:
    """A step with a time limit ends although its ps is frozen."""
    with ps_and_worker() as (server, (ps,)):
        with rt.device("/job:ps/task:0"):
            v = rt.Variable(0, name="v")
        with rt.Session(server.target, config=NO_LIMIT) as session:
            session.run(v.initializer)
            ps.freeze()
            try:
                with pytest.raises(
                    (rt.DeadlineExceededError, rt.UnavailableError), match="/job:ps/task:0"
                ):
                    session.run(v, timeout_secs=1.0)
            finally:
                ps.thaw()


def test_client_uses_remote_master() -> None:
    """A client that is no task runs steps through the master of any server."""
    cluster = addresses(ps=1, worker=1)
    with processes(cluster, ("ps", 0), ("worker", 0)):
        with rt.device("/job:ps/task:0"):
            v = rt.Variable([1.0, 2.0], name="v")
        with rt.device("/job:worker/task:0"):
            y = v * 10.0
        target = f"grpc://{cluster['worker'][0]}"
        with rt.Session(target, config=WAIT) as session:
            session.run(v.initializer)
            assert session.run(y).tolist() == [10.0, 20.0]
            assert {d.task_name for d in session.list_devices()} == {
                "/job:ps/task:0",
                "/job:worker/task:0",
            }
        # any server has a master
        with rt.Session(f"grpc://{cluster['ps'][0]}", config=WAIT) as other:
            assert other.run(y).tolist() == [10.0, 20.0]


def test_reset_clears_containers_and_sessions() -> None:
    """A reset clears the named containers, or all, and ends sessions."""
    cluster = addresses(ps=1, worker=1)
    with processes(cluster, ("ps", 0), ("worker", 0)):
        with rt.device("/job:ps/task:0"):
            kept = rt.Variable(1, name="kept")
            rt.Variable(2, name="dropped", container="experiment")
        target = f"grpc://{cluster['worker'][0]}"
        session = rt.Session(target, config=WAIT)
        session.run(rt.global_variables_initializer())
        rt.Session.reset(target, ["experiment"])
        with pytest.raises(rt.AbortedError, match="is not found"):
            session.run(kept)
        session.close()
        with rt.Session(target, config=WAIT) as fresh:
            assert fresh.run(kept) == 1
            assert fresh.run(rt.report_uninitialized_variables()).tolist() == [b"dropped"]
        rt.Session.reset(target)
        with rt.Session(target, config=WAIT) as fresh:
            assert fresh.run(rt.report_uninitialized_variables()).tolist() == [b"kept", b"dropped"]


def test_reset_needs_all_tasks() -> None:
    """A reset clears nothing while a task is away."""
    cluster = addresses(ps=1, worker=2)
    with processes(cluster, ("ps", 0), ("worker", 0)), rt.device("/job:ps/task:0"):
        kept = rt.Variable(1, name="kept")
        target = f"grpc://{cluster['worker'][0]}"
        only = rt.SessionConfig(
            start_timeout_secs=60, device_filters=("/job:ps", "/job:worker/task:0")
        )
        with rt.Session(target, config=only) as session:
            session.run(kept.initializer)
            with pytest.raises(rt.DeadlineExceededError) as caught:
                rt.Session.reset(target, timeout_secs=3)
            assert caught.value.task == "/job:worker/task:1"
            assert session.run(kept) == 1


def test_reset_spares_other_clusters() -> None:
    """A reset clears no task of another cluster."""
    theirs = addresses(ps=1, worker=1)
    ours = {**addresses(worker=1), "ps": theirs["ps"]}
    with processes(theirs, ("ps", 0), ("worker", 0)), processes(ours, ("worker", 0)):
        with rt.device("/job:ps/task:0"):
            kept = rt.Variable(1, name="kept")
        with rt.Session(f"grpc://{theirs['worker'][0]}", config=WAIT) as session:
            session.run(kept.initializer)
            with pytest.raises(rt.InvalidArgumentError, match="another cluster"):
                rt.Session.reset(f"grpc://{ours['worker'][0]}")
            assert session.run(kept) == 1


def test_large_tensor_bypasses_the_master() -> None:
    """A large tensor between two other tasks does not pass the master."""
    with servers(sockets=True, ps=1, worker=2) as made:
        ps, worker = made["/job:ps/task:0"], made["/job:worker/task:1"]
        with rt.device("/job:ps/task:0"):
            v = rt.Variable(np.ones(1_000_000, np.float32), name="v")
        with rt.device("/job:worker/task:1"):
            total = rt.numpy.sum(v * 2.0)
        with rt.Session(made[TARGET].target, config=WAIT) as session:
            session.run(v.initializer)
            sent, received = ps.tensors.counters.bytes_out, worker.tensors.counters.bytes_in
            assert session.run(total) == 2e6
            assert ps.tensors.counters.bytes_out - sent > 4_000_000
            assert worker.tensors.counters.bytes_in - received < 10_000


# -- joining ---------------------------------------------------------------------------------------------------------


def test_session_names_missing_tasks() -> None:
    """A session that waits for tasks names all of them when its time ends."""
    cluster = addresses(ps=1, worker=2)
    with rt.Server(cluster, "worker", 0) as server:
        started = time.monotonic()
        with pytest.raises(rt.DeadlineExceededError) as caught:
            rt.Session(server.target, config=rt.SessionConfig(start_timeout_secs=1.0))
        assert time.monotonic() - started > 0.9
        for name, address in (
            ("/job:ps/task:0", cluster["ps"][0]),
            ("/job:worker/task:1", cluster["worker"][1]),
        ):
            assert f"{name} at {address}" in str(caught.value)


def test_waiting_session_logs_the_task(
    caplog: pytest.LogCaptureFixture, set_times: SetTimes
) -> None:
    """A session that waits logs the task for which it waits."""
    set_times(timeouts, LOG_EVERY_SECS=0.3)
    cluster = addresses(ps=1, worker=1)
    with rt.Server(cluster, "worker", 0) as server, caplog.at_level("INFO"):
        with pytest.raises(rt.DeadlineExceededError):
            rt.Session(server.target, config=rt.SessionConfig(start_timeout_secs=1.0))
    assert f"still waiting for /job:ps/task:0 at {cluster['ps'][0]}" in caplog.text


def test_unknown_host_is_named(caplog: pytest.LogCaptureFixture, set_times: SetTimes) -> None:
    """A session that waits names the host that cannot be resolved."""
    set_times(timeouts, LOG_EVERY_SECS=0.3)
    cluster = {**addresses(worker=1), "ps": ["no-such-host.invalid:2222"]}
    with rt.Server(cluster, "worker", 0) as server, caplog.at_level("INFO"):
        with pytest.raises(
            rt.DeadlineExceededError, match="no-such-host.invalid:2222 .no such host"
        ):
            rt.Session(server.target, config=rt.SessionConfig(start_timeout_secs=6.0))
    said = [
        r.getMessage()
        for r in caplog.records
        if "still waiting for /job:ps/task:0" in r.getMessage()
    ]
    assert said and all("at no-such-host.invalid:2222 (no such host" in line for line in said)


def test_device_filters_skip_other_tasks() -> None:
    """A session with device filters waits for no other task and cannot use one."""
    cluster = addresses(ps=1, worker=2)
    with rt.Server(cluster, "ps", 0), rt.Server(cluster, "worker", 0) as server:
        config = rt.SessionConfig(
            start_timeout_secs=20, device_filters=["/job:ps", "/job:worker/task:0"]
        )
        with rt.Session(server.target, config=config) as session:
            assert {d.task_name for d in session.list_devices()} == {
                "/job:ps/task:0",
                "/job:worker/task:0",
            }
            with rt.device("/job:worker/task:1"):
                x = rt.placeholder(np.float32, []) * 2.0
            with pytest.raises(rt.InvalidArgumentError, match="asks for '/job:worker/task:1'"):
                session.run(x, {x.op.inputs[0]: 1.0})


def test_silent_target_is_named() -> None:
    """A session at a target where nobody listens ends with the target's name."""
    (address,) = addresses(nobody=1)["nobody"]
    with pytest.raises(
        rt.DeadlineExceededError, match=f"nobody listens at the session's target grpc://{address}"
    ):
        rt.Session(f"grpc://{address}", config=rt.SessionConfig(start_timeout_secs=0.5))


def test_differing_clusters_are_named() -> None:
    """A session between different cluster definitions is refused with both addresses."""
    ps, first, second = (hosts[0] for hosts in addresses(a=1, b=1, c=1).values())
    with rt.Server({"ps": [ps], "worker": [first]}, "ps", 0):
        with rt.Server({"ps": [ps], "worker": [second]}, "worker", 0) as server:
            with pytest.raises(rt.InvalidArgumentError) as caught:
                rt.Session(server.target, config=rt.SessionConfig(start_timeout_secs=20))
    assert "cluster definition of /job:ps/task:0 differs" in str(caught.value)
    assert first in str(caught.value)
    assert second in str(caught.value)


def test_two_tasks_at_one_address() -> None:
    """A session is refused if another task serves at a task's address."""
    (address,) = addresses(a=1)["a"]
    other = addresses(a=1)["a"][0]
    with rt.Server({"ps": [address]}, "ps", 0):
        with rt.Server({"ps": [other, address]}, "ps", 0) as server:
            with pytest.raises(rt.InvalidArgumentError, match="/job:ps/task:0, not /job:ps/task:1"):
                rt.Session(server.target, config=rt.SessionConfig(start_timeout_secs=20))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("ps", 3), r"No task with index 3 in job 'ps'"),
        (("chief", 0), "No such job in cluster: 'chief'"),
        ((None, None), "explicit `job_name`"),
        (("worker", None), "explicit `task_index`"),
    ],
)
def test_server_must_be_in_cluster(args: Any, said: str) -> None:
    """A server that is not in its cluster, or not named, is refused."""
    with pytest.raises(ValueError, match=said):
        rt.Server(addresses(ps=1, worker=2), *args)


def test_stopped_server_ends_its_process() -> None:
    """SIGTERM ends join and the process of a server."""
    cluster = addresses(ps=1)
    with processes(cluster, ("ps", 0)) as (ps,):
        with rt.Session(f"grpc://{cluster['ps'][0]}", config=WAIT):
            pass
        until(lambda: ps.handles(signal.SIGTERM), "it serves, and joins a moment later")
        ps.signal(signal.SIGTERM)
        assert ps.wait(60) == 0


def test_variables_outlive_their_client() -> None:
    """Variables are shared by name and outlive their client."""
    with ps_and_worker() as (server, _):
        code = (
            "import sys, runtime as rt\n"
            "with rt.device('/job:ps/task:0'): v = rt.Variable(41, name='shared')\n"
            "with rt.Session(sys.argv[1], config=rt.SessionConfig(start_timeout_secs=60)) as s:\n"
            "    s.run(v.initializer); s.run(v.assign_add(1).op)\n"
        )
        with Program("python", "-c", code, server.target) as client:
            client.result()
        with rt.device("/job:ps/task:0"):
            v = rt.Variable(0, name="shared")
        with rt.Session(server.target, config=WAIT) as session:
            assert session.run(v) == 42
