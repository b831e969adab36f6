"""Pipelined steps: what they compute is the strict loop with gradients that are one step older, no more and no less."""

import numpy as np

import runtime as rt
from tests.runtime.kit import TARGET, servers

RATE = 0.1


def _graph(cluster: dict[str, rt.Server]) -> tuple[rt.Operation, rt.Tensor, rt.Variable, rt.Variable, rt.Tensor]:
    setter = rt.replica_device_setter(cluster=cluster[TARGET].cluster, worker_device=TARGET)
    with rt.device(setter):
        step = rt.Variable(0, dtype=np.int64, name="step", trainable=False)
        w = rt.Variable(np.ones(300, np.float32), name="w")
        x = rt.placeholder(np.float32, [300], name="x")
        loss = rt.numpy.sum((w - x) ** 2)
        push = w.assign_sub(RATE * rt.gradients(loss, w))
        with rt.control_dependencies([push]):
            count = step.assign_add(1)
    return rt.group(push, count), loss, step, w, x


def test_a_pipelined_run_equals_the_loop_with_gradients_one_step_older() -> None:
    rng = np.random.default_rng(0)
    data = rng.standard_normal((12, 300)).astype(np.float32)
    with servers(sockets=True, ps=1, worker=1) as cluster, rt.Graph().as_default():
        train, loss, step, w, x = _graph(cluster)
        with rt.Session(cluster[TARGET].target, config=rt.SessionConfig(prefetch=1)) as session:
            session.run(rt.global_variables_initializer())
            found = [session.run([train, loss, step], {x: batch}) for batch in data]
            final = session.run(w)

    pulled = [np.ones(300, np.float32)]  # what step k computes with
    value = pulled[0].copy()
    losses = []
    for k, batch in enumerate(data):
        losses.append(float(np.sum((pulled[k] - batch) ** 2)))
        pulled.append(value.copy())  # step k+1 pulls while k computes: it holds the pushes before k
        value = value - RATE * 2 * (pulled[k] - batch)
    np.testing.assert_allclose([f[1] for f in found], losses, rtol=1e-5)
    np.testing.assert_allclose(final, value, rtol=1e-5)  # nothing is lost at the end, and no push is applied twice
    steps = [int(f[2]) for f in found]
    assert steps == [1, *range(1, len(data))]  # each step gives the count of the push before it


def test_batches_of_another_size_do_not_compute_with_what_was_pulled_for_the_last_one_of_that_size() -> None:
    with servers(sockets=True, ps=1, worker=1) as cluster, rt.Graph().as_default():
        with rt.device(rt.replica_device_setter(cluster=cluster[TARGET].cluster, worker_device=TARGET)):
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
    assert found[3:12] == list(range(2, 11))  # pulled before the last push
    assert found[12:] == [12, 13]
    assert final == len(sizes)


def test_another_fetch_sees_what_earlier_pipelined_steps_pushed() -> None:
    with servers(sockets=True, ps=2, worker=1) as cluster, rt.Graph().as_default():
        train, loss, step, _, x = _graph(cluster)
        with rt.Session(cluster[TARGET].target, config=rt.SessionConfig(prefetch=1)) as session:
            session.run(rt.global_variables_initializer())
            for k in range(5):
                session.run([train, loss, step], {x: np.full(300, k, np.float32)})
                assert session.run(step) == k + 1
