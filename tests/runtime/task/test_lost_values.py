"""A program that fails has taken the variables along that it would have updated in place: they are told by name.

The memory that these programs ask for is more than any machine's address space has.
"""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import runtime as rt
from runtime.expressions import reader
from runtime.task.compiler import Compiler, Executable
from tests.kit.processes import Program
from tests.runtime.kit import KINDS, SERVE, TARGET, addresses, servers, target_of_kind

TOO_MANY = 2**43
NO_LIMIT = "from runtime.expressions import reader; reader.VALUE_BYTES = 2**60\n"


@pytest.fixture(autouse=True)
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks here take programs of any size, so that these run out of memory instead of being refused."""
    monkeypatch.setattr(reader, "VALUE_BYTES", 2**60)


@pytest.fixture(autouse=True)
def graph() -> Iterator[rt.Graph]:
    with rt.Graph().as_default() as made:
        yield made


def sorted_out(x: jax.Array) -> jax.Array:
    """A number that takes 32 TiB to compute."""
    return jnp.sort(x + jnp.arange(TOO_MANY, dtype=jnp.float32))[5]


def model(device: str = "") -> tuple[rt.Variable, rt.Variable, rt.Tensor]:
    """w, v and an update of w for which there is not enough memory."""
    with rt.device(device):
        w = rt.Variable(np.arange(4, dtype=np.float32), name="w")
        v = rt.Variable(np.zeros(4, np.float32), name="v")
        return w, v, w.update(lambda old, x: old + sorted_out(x), 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_error_names_lost_variables(kind: str) -> None:
    """An update that runs out of memory names the variable that it has lost, and the others keep
    their values.
    """
    w, v, too_large = model("" if kind == "private" else "/job:ps")
    more, missing = w.assign_add(np.ones(4, np.float32)), rt.report_uninitialized_variables()
    with target_of_kind(kind) as target, rt.Session(target) as session:
        session.run(rt.global_variables_initializer())
        with pytest.raises(
            rt.AbortedError, match=r"out of memory running \[.*Update\].* lost their values.*: w$"
        ) as raised:
            session.run(too_large)
        assert raised.value.out_of_memory
        assert raised.value.task == (
            "/job:localhost/task:0" if kind == "private" else "/job:ps/task:0"
        )
        for fetch in (w, more, w * 2.0):  # also for those who have nothing to do with it
            with pytest.raises(
                rt.AbortedError,
                match=r"uninitialized value w: it was lost when \[.*Update\] failed",
            ):
                session.run(fetch)
        assert session.run(missing).tolist() == [b"w"]
        assert not session.run(rt.is_variable_initialized(w))
        assert session.run(v).tolist() == [0.0] * 4
        session.run(w.initializer)
        assert session.run(more).tolist() == [1.0, 2.0, 3.0, 4.0]
        assert session.run(missing).tolist() == []


def test_memory_error_may_lose_nothing() -> None:
    """A program that runs out of memory and writes nothing loses nothing."""
    w, _, _ = model()
    with rt.Session() as session:
        session.run(rt.global_variables_initializer())
        with pytest.raises(
            rt.ResourceExhaustedError, match=r"out of memory running \[.*sorted_out\]"
        ):
            session.run(rt.call(sorted_out, rt.constant(np.float32(1)), name="sorted_out"))
        with pytest.raises(rt.ResourceExhaustedError):
            # reads, and does not write
            session.run(rt.call(sorted_out, w.value()[0], name="sorted_out"))
        assert session.run(w).tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(("sockets", "prefetch"), [(False, 0), (True, 0), (True, 1)])
def test_worker_without_memory_names_batch(sockets: bool, prefetch: int) -> None:
    """A training step that is too large for its worker names the batch and a cure, and changes no variable."""
    with rt.device("/job:ps"):
        w = rt.Variable(np.arange(4, dtype=np.float32), name="w")
    x = rt.placeholder(np.float32, [None, 3], name="x")
    with rt.device("/job:worker/task:0"):
        slope = rt.call(lambda w, x: w + sorted_out(w[0]) * x.sum(), w, x, name="slope")
        small = rt.call(lambda w, x: w + x.sum(), w, x, name="small")
    too_large, fitting = (w.assign_sub(gradient).op for gradient in (slope, small))
    config = rt.SessionConfig(prefetch=prefetch)
    with (
        servers(sockets=sockets, ps=1, worker=1) as made,
        rt.Session(made[TARGET].target, config=config) as session,
    ):
        session.run(rt.global_variables_initializer())
        with pytest.raises(
            rt.ResourceExhaustedError,
            match=r"worker/task:0: out of memory running \[.*slope.*"
            r"; the batch was x float32\(256, 3\); no variable has lost its value: feed a smaller",
        ) as raised:
            # A pipeline reports a failed step at the latest with the next.
            for _ in range(1 + prefetch):
                session.run(too_large, {x: np.ones((256, 3), np.float32)})
        assert raised.value.out_of_memory
        assert session.run(w).tolist() == [0.0, 1.0, 2.0, 3.0]
        session.run(fitting, {x: np.zeros((2, 3), np.float32)})
        assert session.run(w).tolist() == [0.0] * 4


@pytest.mark.cluster
def test_memory_error_on_asking_thread() -> None:
    """An update that runs out of memory on the thread that asks names the variable that it has
    lost.
    """
    code = (
        "import numpy as np, pytest, runtime as rt; from tests.runtime.task.test_lost_values "
        "import *\n"
        "w, v, too_large = model()\n"
        "with rt.Session() as session:\n"
        "    session.run(rt.global_variables_initializer())\n"
        "    with pytest.raises(rt.AbortedError, match='out of memory.*lost their values.*: w$'):\n"
        "        session.run(too_large)\n"
        "    with pytest.raises(rt.AbortedError, match='uninitialized value w: it was lost'):\n"
        "        session.run(w)\n"
        "    assert session.run(rt.report_uninitialized_variables()).tolist() == [b'w']\n"
        "    session.run(w.initializer)\n"
        "    assert session.run(w).tolist() == [0.0, 1.0, 2.0, 3.0]\n"
    )
    with Program("python", "-c", code, env={"JAX_CPU_ENABLE_ASYNC_DISPATCH": "false"}) as program:
        program.result()


def test_quorum_hears_of_lost_update() -> None:
    """Every worker of a quorum whose update is lost is told."""
    with rt.device("/job:ps"):
        step = rt.Variable(0, name="step", dtype=np.int64)
        w = rt.Variable(np.zeros(4, np.float32), name="w")
        grad = rt.placeholder(np.float32, [])
        updates = [
            w.update(lambda old, x: old + sorted_out(x), grad).op,
            step.assign_add(np.int64(1)).op,
        ]
        quorum = rt.lowlevel.Quorum(step, needed=2, total=2, alone=True)
    pushes = [quorum.push(updates, rt.constant(np.int64(0)), worker=worker) for worker in range(2)]
    init = rt.global_variables_initializer()
    with servers(sockets=True, ps=1, worker=1) as made, rt.Session(made[TARGET].target) as session:
        session.run(init)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            ends = [
                pool.submit(session.run, push, {grad: 1.0}, timeout_secs=30.0) for push in pushes
            ]
            for end in ends:  # the one whose gradient was the last, and the one that waited
                with pytest.raises(rt.AbortedError, match="lost their values"):
                    end.result()
        assert session.run(rt.report_uninitialized_variables()).tolist() == [b"step", b"w"]


def interrupted(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Lets a signal come at the worst moment: when the next program has run, before its results are kept."""
    came: list[int] = []
    real = Compiler.executable

    def executable(self: Compiler, *arguments: Any) -> Executable:
        program = real(self, *arguments)

        def run(*arrays: Any) -> list[Any]:
            results = program(*arrays)
            came.append(number)
            os.kill(os.getpid(), number)
            return results

        return program if came else run

    monkeypatch.setattr(Compiler, "executable", executable)
    return came


def test_ctrl_c_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a step loses no value."""
    # it is ignored where the tests run in background
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _interrupt(signal.SIGINT, KeyboardInterrupt, monkeypatch)
    finally:
        signal.signal(signal.SIGINT, before)


def test_sigterm_costs_nothing_when_preemptible(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM in a preemptible block loses no value."""
    with harness.preemptible():
        _interrupt(signal.SIGTERM, SystemExit, monkeypatch)


def _interrupt(number: int, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    w, v, _ = model()
    with rt.Session() as session:
        session.run(rt.global_variables_initializer())
        more = [w.assign_add(np.ones(4, np.float32)), v.assign_add(np.ones(4, np.float32))]
        handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
        came = interrupted(monkeypatch, number)
        with pytest.raises(raised):
            session.run(more)
        assert came
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
        assert not any(slot.readers for slot in session._engine.worker.store._slots.values())  # type: ignore[attr-defined]
        # the update was made, as it had begun
        assert session.run(w).tolist() == [1.0, 2.0, 3.0, 4.0]
        assert session.run(v).tolist() == [1.0] * 4


def test_other_signal_names_lost_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal whose handler raises in an update names the variable that was lost."""
    w, v, _ = model()

    def leave(number: int, frame: object) -> None:
        raise SystemExit(number)

    before = signal.signal(signal.SIGUSR2, leave)
    try:
        with rt.Session() as session:
            session.run(rt.global_variables_initializer())
            interrupted(monkeypatch, signal.SIGUSR2)
            with pytest.raises(SystemExit):
                session.run(w.assign_add(np.ones(4, np.float32)))
            with pytest.raises(
                rt.AbortedError,
                match=r"value w: it was lost when \[.*AssignAdd\] failed: SystemExit",
            ):
                session.run(w)
            assert session.run(rt.report_uninitialized_variables()).tolist() == [b"w"]
            assert session.run(v).tolist() == [0.0] * 4
    finally:
        signal.signal(signal.SIGUSR2, before)


def supervised(
    logdir: pathlib.Path,
) -> tuple[harness.Supervisor, rt.Operation, rt.Tensor, rt.Tensor]:
    """A chief with a model on the ps; its training operation, and the update for which there is too little memory."""
    with rt.device("/job:ps"):
        step = harness.get_or_create_global_step()
    w, _, too_large = model("/job:ps")
    train = rt.group(w.assign_add(np.ones(4, np.float32)), step.assign_add(1))
    rt.wait_until_initialized(name="awaited")
    supervisor = harness.Supervisor(
        is_chief=True,
        logdir=str(logdir),
        global_step=step,
        save_model_secs=0,
        save_summaries_secs=0,
        summary_op=None,
    )
    return supervisor, train, w.value(), too_large


@pytest.mark.cluster
def test_recovery_follows_another_sessions_loss(
    tmp_path: pathlib.Path,
) -> None:
    """A managed session recovers from values that another session has lost."""
    cluster = addresses(ps=1, worker=2)
    with (
        Program("python", "-c", NO_LIMIT + SERVE, json.dumps(cluster), "ps", "0"),
        rt.Server(cluster, "worker", 0) as server,
        rt.Server(cluster, "worker", 1) as other,
    ):
        supervisor, train, value, too_large = supervised(tmp_path)
        filters = rt.SessionConfig(device_filters=["/job:ps"])
        with (
            supervisor.managed_session(server.target) as managed,
            rt.Session(other.target, config=filters) as session,
        ):
            for _ in range(3):
                managed.run(train)
            supervisor.saver.save(managed, supervisor.save_path, global_step=supervisor.global_step)
            managed.run(train)
            with pytest.raises(rt.AbortedError, match="lost their values"):
                session.run(too_large)
            managed.run(train)  # restored at step 3
            assert managed.run(supervisor.global_step) == 4
            assert managed.run(value).tolist() == [4.0, 5.0, 6.0, 7.0]
            assert managed.recoveries == 1


def test_chief_restores_while_idle(
    tmp_path: pathlib.Path,
) -> None:
    """The chief restores lost values while it runs no step."""
    with servers(sockets=True, ps=1, worker=2) as made:
        supervisor, train, value, too_large = supervised(tmp_path)
        filters = rt.SessionConfig(device_filters=["/job:ps"])
        with supervisor.managed_session(made[TARGET].target) as managed:
            managed.run(train)
            supervisor.saver.save(managed, supervisor.save_path, global_step=supervisor.global_step)
            with rt.Session(made["/job:worker/task:1"].target, config=filters) as session:
                with pytest.raises(rt.AbortedError, match="lost their values"):
                    session.run(too_large)
            found: Any = None
            while found is None:  # nothing is run in the managed session meanwhile
                with rt.Session(made["/job:worker/task:1"].target, config=filters) as session:
                    with contextlib.suppress(rt.AbortedError):
                        session.run("awaited/all_names:0")
                        found = session.run(value)
            assert found.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_managed_session_gives_up(tmp_path: pathlib.Path) -> None:
    """A managed session that loses its values again and again gives up after three recoveries."""
    with servers(sockets=True, ps=1, worker=1) as made:
        supervisor, train, _, too_large = supervised(tmp_path)
        with pytest.raises(
            rt.ResourceExhaustedError, match="out of memory running .* 3 recoveries"
        ):
            with supervisor.managed_session(made[TARGET].target) as managed:
                managed.run(train)
                managed.run(too_large)
        assert managed.recoveries == 3


def test_failed_initializer_keeps_no_bytes() -> None:
    """A variable that a failed program should have made has no bytes in the ledger."""
    source = rt.Variable(np.zeros(4, np.float32), name="source")
    copy = rt.Variable(source.value(), name="copy")
    large = rt.Variable(lambda: rt.call(sorted_out, rt.constant(1.0)) * np.ones(4, np.float32))
    with servers(worker=1) as cluster, rt.Session(cluster[TARGET].target) as session:
        store = cluster[TARGET].worker.store
        for failing in (copy, large):
            with pytest.raises(rt.OpError):
                session.run(failing.initializer)
            store.validate()
        session.run(source.initializer)
        session.run(copy.initializer)
        store.validate()
