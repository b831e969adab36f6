"""Pipelined steps: what they compute is the strict loop with gradients that are some steps older."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import runtime as rt
from runtime.task.worker import Worker
from runtime.wire.channel import Lane
from tests.runtime.kit import TARGET, addresses, processes, servers

RATE = 0.1


def _graph(
    cluster: dict[str, rt.Server], size: int = 300
) -> tuple[rt.Operation, rt.Tensor, rt.Variable, rt.Variable, rt.Tensor]:
    setter = rt.replica_device_setter(cluster=cluster[TARGET].cluster, worker_device=TARGET)
    with rt.device(setter):
        step = rt.Variable(0, dtype=np.int64, name="step", trainable=False)
        w = rt.Variable(np.ones(size, np.float32), name="w")
        x = rt.placeholder(np.float32, [size], name="x")
        loss = rt.numpy.sum((w - x) ** 2)
        push = w.assign_sub(RATE * rt.gradients(loss, w))
        with rt.control_dependencies([push]):
            count = step.assign_add(1)
    return rt.group(push, count), loss, step, w, x


sizes = pytest.mark.parametrize("size", [300, 200_000], ids=["step", "threads"])
"""Elements of a variable: small messages travel in the step, large ones on threads."""


@sizes
@pytest.mark.parametrize("prefetch", [1, 2])
def test_gradients_are_bounded_steps_older(size: int, prefetch: int) -> None:
    """A pipelined run equals a loop whose parameters lack the newest gradients, ``prefetch`` at most."""
    rng = np.random.default_rng(0)
    data = rng.standard_normal((12, size)).astype(np.float32)
    config = rt.SessionConfig(prefetch=prefetch)
    with servers(sockets=True, ps=1, worker=1) as cluster, rt.Graph().as_default():
        train, loss, step, w, x = _graph(cluster, size)
        with rt.Session(cluster[TARGET].target, config=config) as session:
            session.run(rt.global_variables_initializer())
            found = [session.run([train, loss, step], {x: batch}) for batch in data]
            final = session.run(w)

    # The values after 0, 1, 2, ... pushes, in the order of the steps.
    values = [np.ones(size, np.float32)]
    for k, (batch, (_, loss_found, _)) in enumerate(zip(data, found, strict=True)):
        # A ps may serve a pull after the pull of a later step, which has a connection of its own.
        allowed = range(max(0, k - prefetch), k + 1)
        losses = {i: float(np.sum((values[i] - batch) ** 2)) for i in allowed}
        seen = min(losses, key=lambda i: abs(losses[i] - loss_found))
        np.testing.assert_allclose(loss_found, losses[seen], rtol=1e-5)
        values.append(values[-1] - RATE * 2 * (values[seen] - batch))
    # nothing is lost at the end, and no push is applied twice
    np.testing.assert_allclose(final, values[-1], rtol=1e-4)
    steps = [int(f[2]) for f in found]
    assert steps == [1, *range(1, len(data))]  # each step gives the count of the push before it


@sizes
@pytest.mark.parametrize("prefetch", [1, 2])
def test_pushes_keep_their_order(size: int, prefetch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ps applies the pushes of a worker in their order and once, also when connections break."""
    bits = np.random.default_rng(1).integers(0, 2, 20)
    with servers(sockets=True, ps=2, worker=1) as cluster, rt.Graph().as_default():
        push, w, mask = _line(cluster, size, doubled=True)
        config = rt.SessionConfig(prefetch=prefetch)
        with rt.Session(cluster[TARGET].target, config=config) as session:
            session.run(rt.global_variables_initializer())
            lost = _lose_frames(monkeypatch, lambda buffers: True)
            for bit in bits:
                session.run(push.outputs[0], {mask: np.full(size, bit, np.float32)})
            found = session.run(w)
    # Each push doubles the value and adds its bit, so the value has the bits in their order.
    np.testing.assert_array_equal(found, np.full(size, int("".join(map(str, bits)), 2)))
    assert len(lost) >= 40


@sizes
def test_pause_outlasts_deadline(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause between two steps that is longer than the time of a step ends no call."""
    config = rt.SessionConfig(prefetch=1, operation_timeout_secs=2.0)
    with servers(sockets=True, ps=1, worker=1) as cluster, rt.Graph().as_default():
        push, w, mask = _line(cluster, size)
        with rt.Session(cluster[TARGET].target, config=config) as session:
            session.run(
                rt.global_variables_initializer(), options=rt.RunOptions(timeout_in_ms=60_000)
            )
            session.run(push.outputs[0], {mask: np.ones(size)}, rt.RunOptions(timeout_in_ms=60_000))
            # Each call is sent again when its reply is asked for, so after the pause.
            _lose_frames(monkeypatch, lambda buffers: True)
            for _ in range(2):
                session.run(push.outputs[0], {mask: np.ones(size)})
                threading.Event().wait(2.1)
            session.run(push.outputs[0], {mask: np.ones(size)})
            np.testing.assert_array_equal(session.run(w), np.full(size, 4, np.float32))


@pytest.mark.cluster
@sizes
@pytest.mark.parametrize("prefetch", [1, 2])
def test_killed_ps_ends_the_steps(size: int, prefetch: int) -> None:
    """After kill -9 of a ps a pipelined session fails by name, and closes at once."""
    cluster = addresses(ps=2, worker=1)
    with (
        processes(cluster, ("ps", 0), ("ps", 1)) as tasks,
        rt.Server(cluster, "worker", 0) as server,
        rt.Graph().as_default(),
    ):
        with rt.device("/job:ps/task:0"):
            first = rt.Variable(np.zeros(size, np.float32), name="first")
        with rt.device("/job:ps/task:1"):
            second = rt.Variable(np.zeros(size, np.float32), name="second")
        with rt.device(TARGET):
            ones = [rt.nn.relu(v) * 0.0 + 1.0 for v in (first, second)]
        train = rt.group(first.assign_add(ones[0]), second.assign_add(ones[1]))
        config = rt.SessionConfig(prefetch=prefetch, reconnect_secs=1.0)
        with rt.Session(server.target, config=config) as session:
            session.run(rt.global_variables_initializer())
            for _ in range(5):
                session.run(train)
            tasks[0].kill()
            done = 5
            with pytest.raises((rt.UnavailableError, rt.AbortedError), match="ps/task:0"):
                for _ in range(3 + prefetch):
                    session.run(train)
                    done += 1
        with rt.Session(
            server.target, config=rt.SessionConfig(device_filters=["/job:ps/task:1"])
        ) as other:
            # The ps that lives has each push once: the answered pushes and one more at most.
            count = other.run(second)[0]
        assert done <= count + 1 and count <= done + 1


def test_changed_batch_size_pulls_anew() -> None:
    """A batch of another size computes with values that hold all earlier pushes."""
    with servers(sockets=True, ps=1, worker=1) as cluster, rt.Graph().as_default():
        with rt.device(
            rt.replica_device_setter(cluster=cluster[TARGET].cluster, worker_device=TARGET)
        ):
            w = rt.Variable(np.float32(0), name="w")
            x = rt.placeholder(np.float32, [None], name="x")
            seen = w + 0 * rt.numpy.sum(x)
            pushed = w.assign_add(rt.numpy.mean(x) + 0 * seen)
        with rt.Session(cluster[TARGET].target, config=rt.SessionConfig(prefetch=1)) as session:
            session.run(rt.global_variables_initializer())
            sizes = [3, 5, *[3] * 10, 5, 3]
            results = [session.run([pushed.op, seen], {x: np.ones(size)}) for size in sizes]
            final = session.run(w)
    found = [float(result[1]) for result in results]
    assert found[:3] == [0, 1, 2]  # a change of size: what is pulled holds all that was pushed
    assert all(k - 1 <= value <= k for k, value in enumerate(found[3:12], 3))
    assert found[12:] == [12, 13]
    assert final == len(sizes)


def test_other_fetch_sees_earlier_pushes() -> None:
    """Another fetch sees what the earlier pipelined steps pushed."""
    with servers(sockets=True, ps=2, worker=1) as cluster, rt.Graph().as_default():
        train, loss, step, _, x = _graph(cluster)
        with rt.Session(cluster[TARGET].target, config=rt.SessionConfig(prefetch=1)) as session:
            session.run(rt.global_variables_initializer())
            for k in range(5):
                session.run([train, loss, step], {x: np.full(300, k, np.float32)})
                assert session.run(step) == k + 1


def _line(
    cluster: dict[str, rt.Server], size: int = 300, doubled: bool = False
) -> tuple[rt.Operation, rt.Variable, rt.Tensor]:
    """A training step whose push takes a fed array beside what is computed, and doubles the value before."""
    factor = 1.0 + doubled
    with rt.device(rt.replica_device_setter(cluster=cluster[TARGET].cluster, worker_device=TARGET)):
        w = rt.Variable(np.zeros(size, np.float32), name="w")
        mask = rt.placeholder(np.float32, [size], name="mask")
        gradient = rt.nn.relu(w) * 0.0 + 1.0
    scalar = ((), np.float32)
    push = rt.update(
        [w],
        lambda old, g, m: ([factor * old + g * m], [old[0]]),
        [gradient, mask],
        outputs=[scalar],
    )
    return push, w, mask


def _lose_frames(
    monkeypatch: pytest.MonkeyPatch, which: Callable[[Sequence[Any]], bool]
) -> list[int]:
    """The connection breaks as such a call is sent: it is sent again when its reply is asked for."""
    lost: list[int] = []
    send = Lane.send

    def broken(_: Any) -> int:
        raise ConnectionResetError("cut")

    def watched(self: Lane, handle: int, step: int, buffers: Sequence[Any], **options: Any) -> None:
        if which(buffers):
            lost.append(step)
            self._sendmsg = broken
        send(self, handle, step, buffers, **options)

    monkeypatch.setattr(Lane, "send", watched)
    return lost


def test_repeated_push_keeps_callers_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A push that is sent again has the caller's values of its own step."""
    with servers(sockets=True, ps=1, worker=1) as cluster, rt.Graph().as_default():
        push, w, mask = _line(cluster)
        with rt.Session(cluster[TARGET].target, config=rt.SessionConfig(prefetch=1)) as session:
            session.run(rt.global_variables_initializer())
            lost = _lose_frames(monkeypatch, lambda buffers: len(buffers) == 2)
            batch = np.ones(300, np.float32)
            for _ in range(3):
                batch[:] = 1.0
                session.run(push.outputs[0], {mask: batch})
                batch[:] = 50.0  # the next batch is read into the same memory
            np.testing.assert_array_equal(session.run(w), np.full(300, 3, np.float32))
    assert len(lost) == 3


def test_repeated_push_keeps_pulled_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A push that is sent again has the values that were pulled for it."""
    with servers(sockets=True, ps=2, worker=1) as cluster, rt.Graph().as_default():
        with rt.device("/job:ps/task:0"):
            count = rt.Variable(np.zeros(300, np.float32), name="count")
        with rt.device("/job:ps/task:1"):
            total = rt.Variable(np.zeros(300, np.float32), name="total")
        with rt.device("/job:ps/task:0"):
            value = count.read_value()
        with rt.device(TARGET):
            value = rt.identity(value)
            one = rt.nn.relu(value) * 0.0 + 1.0
        counted = count.assign_add(one)
        added = rt.update(
            [total],
            lambda old, v, g: ([old + v * g], [old[0]]),
            [value, one],
            outputs=[((), np.float32)],
        )
        with rt.device(TARGET):
            pulled = rt.numpy.max(value)
        step = [counted.op, added.outputs[0], pulled]
        with rt.Session(cluster[TARGET].target, config=rt.SessionConfig(prefetch=1)) as session:
            session.run(rt.global_variables_initializer())
            lost = _lose_frames(monkeypatch, lambda buffers: len(buffers) == 2)
            values = [session.run(step)[2] for _ in range(5)]
            found = session.run(total)
    assert lost
    assert all(max(0, k - 1) <= value <= k for k, value in enumerate(values))
    np.testing.assert_array_equal(found, np.full(300, sum(values), np.float32))


def test_unfetched_push_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipelined step without fetches does not wait for the answer to its push."""
    call, held_up, go_on = Worker.call, threading.Semaphore(0), threading.Event()

    def slow(self: Worker, handle: int, client: int, step: int, inputs: list[Any]) -> Any:
        if len(inputs) == 2:
            held_up.release()
            assert go_on.wait(60)
        return call(self, handle, client, step, inputs)

    with servers(sockets=True, ps=1, worker=1) as cluster, rt.Graph().as_default():
        push, w, mask = _line(cluster)
        with rt.Session(cluster[TARGET].target, config=rt.SessionConfig(prefetch=1)) as session:
            session.run(rt.global_variables_initializer())
            for _ in range(3):
                session.run(push, {mask: np.ones(300)})
            session.run(w)
            monkeypatch.setattr(Worker, "call", slow)
            thread = threading.Thread(
                target=lambda: session.run(push, {mask: np.ones(300)}), daemon=True
            )
            thread.start()
            assert held_up.acquire(timeout=60)
            thread.join(60)
            assert not thread.is_alive(), "the step waited for the answer to its push"
            go_on.set()
            np.testing.assert_array_equal(session.run(w), np.full(300, 4, np.float32))


def _close_while_frozen(
    cluster: Mapping[str, Sequence[str]], act: Callable[[rt.Session, Any], None]
) -> None:
    """Closes a session after ``act``, with a ps that is frozen then and would be waited for for two hours."""
    with (
        processes(cluster, ("ps", 0)) as (ps,),
        rt.Server(cluster, "worker", 0) as server,
        rt.Graph().as_default(),
    ):
        with rt.device(rt.replica_device_setter(cluster=server.cluster, worker_device=TARGET)):
            w = rt.Variable(np.float32(0), name="w")
            push = w.assign_add(rt.nn.relu(w) * 0.0 + 1.0)
        config = rt.SessionConfig(prefetch=1, reconnect_secs=7200.0)
        session = rt.Session(server.target, config=config)
        session.run(rt.global_variables_initializer())
        for _ in range(3):
            session.run(push.op)
        ps.freeze()
        try:
            act(session, push.op)
            session.close()
        finally:
            ps.thaw()


@pytest.mark.cluster
def test_close_leaves_frozen_ps_running_step() -> None:
    """Closing a session with a running step does not wait for a frozen ps."""
    ended: list[Any] = []

    def run(session: rt.Session, push: rt.Operation) -> None:
        def steps() -> None:
            try:
                while True:
                    session.run(push)
            except rt.OpError as error:
                ended.append(error)

        threads.append(threading.Thread(target=steps, daemon=True))
        threads[0].start()
        threads[0].join(0.5)

    threads: list[threading.Thread] = []
    _close_while_frozen(addresses(ps=1, worker=1), run)
    threads[0].join(60)
    assert [type(error) for error in ended] == [rt.CancelledError]


@pytest.mark.cluster
def test_close_leaves_silent_frozen_ps() -> None:
    """Closing a session does not wait for the push that a frozen ps has not answered."""
    _close_while_frozen(addresses(ps=1, worker=1), lambda session, push: None)


def test_close_awaits_the_last_push() -> None:
    """Closing a session waits for the last push to a living ps."""
    with servers(sockets=True, ps=1, worker=1) as cluster, rt.Graph().as_default():
        push, w, mask = _line(cluster)
        for k in range(1, 4):
            with rt.Session(cluster[TARGET].target, config=rt.SessionConfig(prefetch=1)) as session:
                if k == 1:
                    session.run(rt.global_variables_initializer())
                session.run(push, {mask: np.ones(300)})
                session.run(push, {mask: np.ones(300)})
            with rt.Session(cluster[TARGET].target) as other:
                np.testing.assert_array_equal(other.run(w), np.full(300, 2 * k, np.float32))
