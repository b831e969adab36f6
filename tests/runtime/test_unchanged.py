"""Reads that are skipped when nothing has changed: what crosses the wire is counted, and nothing is ever stale."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import runtime as rt
from tests.examples import costly
from tests.runtime.kit import TARGET, Task, addresses, processes, servers

PS = "/job:ps/task:0"
WIDTH = 25_000
SKIP = rt.SessionConfig(skip_unchanged=True)
OVERHEAD = 250
"""Bytes of a call and its reply, or of a reply that only says that nothing has changed: headers and a number."""


@pytest.fixture
def cluster() -> Iterator[dict[str, rt.Server]]:
    with servers(sockets=True, ps=1, worker=1) as made, rt.Graph().as_default():
        yield made


def _variable(name: str = "w") -> rt.Variable:
    with rt.device("/job:ps/task:0"):
        return rt.Variable(np.ones(WIDTH, np.float32), name=name)


def _total(w: rt.Variable) -> rt.Tensor:
    with rt.device(TARGET):
        return rt.numpy.sum(w)


def _bytes_out(cluster: dict[str, rt.Server]) -> int:
    return cluster[PS].transport_counters.bytes_out


def test_evaluating_unchanged_parameters_pulls_none_of_them(cluster: dict[str, rt.Server]) -> None:
    v, w = _variable("v"), _variable("w")
    with rt.device(TARGET):
        x = rt.placeholder(np.float32, [None], name="x")
        result = rt.numpy.sum(v) + rt.numpy.sum(w) + rt.numpy.sum(x)
    with rt.Session(cluster[TARGET].target, config=SKIP) as session:
        session.run(rt.global_variables_initializer())
        assert session.run(result, {x: [1]}) == 2 * WIDTH + 1
        before = _bytes_out(cluster)
        for k in range(20):
            assert session.run(result, {x: [k]}) == 2 * WIDTH + k
        for k in range(20):  # another shape is another plan: what was read is there for all of them
            assert session.run(result, {x: [k, k]}) == 2 * WIDTH + 2 * k
        assert _bytes_out(cluster) - before < 40 * OVERHEAD
        counted = cluster[TARGET].worker.counters.values()
        assert counted["step_bytes_total"] == 0
        session.run(w.assign_add(np.ones(WIDTH, np.float32)))
        before = _bytes_out(cluster)
        assert session.run(result, {x: [0]}) == 3 * WIDTH
        assert _bytes_out(cluster) - before > 2 * 4 * WIDTH  # one of a stage's variables has changed: it is read again


def test_without_the_option_every_read_carries_the_values_and_no_question(cluster: dict[str, rt.Server]) -> None:
    total = _total(_variable())
    with rt.Session(cluster[TARGET].target) as session:
        session.run(rt.global_variables_initializer())
        session.run(total)
        before = cluster[PS].transport_counters
        for _ in range(5):
            session.run(total)
        after = cluster[PS].transport_counters
    assert after.bytes_out - before.bytes_out == 5 * (32 + 4 * WIDTH)
    assert after.bytes_in - before.bytes_in == 5 * 32


@costly(10)
@given(st.lists(st.tuples(st.sampled_from(["read a", "read b", "add a", "add b", "set"]), st.integers(-9, 9))))
def test_any_mixture_of_sessions_reads_what_was_written_last(actions: list[tuple[str, int]]) -> None:
    with servers(sockets=True, ps=1, worker=1) as cluster, rt.Graph().as_default():
        w = _variable()
        with rt.device(TARGET):
            amount = rt.placeholder(np.float32, [], name="amount")
            first = w[0]
        add, put = w.assign_add(rt.numpy.full(WIDTH, amount)), w.assign(rt.numpy.full(WIDTH, amount))
        target = cluster[TARGET].target
        with rt.Session(target, config=SKIP) as a, rt.Session(target, config=SKIP) as b:
            a.run(rt.global_variables_initializer())
            value = 1.0
            for action, number in actions:
                session = b if action.endswith("b") else a
                if action.startswith("read"):
                    assert session.run(first) == value
                else:
                    session.run(put if action == "set" else add, {amount: number})
                    value = number if action == "set" else value + number
            assert a.run(first) == b.run(first) == value


def test_threads_of_a_session_never_see_an_older_value_than_was_there_when_they_asked(
    cluster: dict[str, rt.Server],
) -> None:
    w = _variable()
    total = _total(w)
    step = w.assign_add(np.ones(WIDTH, np.float32)).op
    written, errors = [1], []

    def read(session: rt.Session) -> None:
        for _ in range(40):
            least = written[0]
            found = float(session.run(total)) / WIDTH
            if found < least or found != int(found):  # stale, or half of an update
                errors.append((found, least))

    target = cluster[TARGET].target
    with rt.Session(target, config=SKIP) as reader, rt.Session(target) as writer:
        writer.run(rt.global_variables_initializer())
        threads = [threading.Thread(target=read, args=(reader,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            writer.run(step)
            written[0] += 1
        for thread in threads:
            thread.join()
        assert errors == []
        assert float(reader.run(total)) == written[0] * WIDTH


def test_training_computes_the_same_with_and_without_it() -> None:
    values = []
    for config in (rt.SessionConfig(), SKIP, rt.SessionConfig(prefetch=1, skip_unchanged=True)):
        with servers(sockets=True, ps=2, worker=1) as cluster, rt.Graph().as_default():
            with rt.device(rt.replica_device_setter(cluster=cluster[TARGET].cluster, worker_device=TARGET)):
                v = rt.Variable(np.ones(3, np.float32), name="v")
                w = rt.Variable(np.ones(3, np.float32), name="w")
                x = rt.placeholder(np.float32, [3], name="x")
                loss = rt.numpy.sum((v * w - x) ** 2)
                v_gradient, w_gradient = rt.gradients(loss, [v, w])
                train = rt.group(v.assign_sub(0.1 * v_gradient), w.assign_sub(0.1 * w_gradient))
            with rt.Session(cluster[TARGET].target, config=config) as session:
                session.run(rt.global_variables_initializer())
                session.run([train, loss], {x: np.zeros(3)})
                values.append([session.run([train, loss], {x: np.full(3, k)})[1] for k in range(5)])
    assert values[0] == values[1]
    assert values[0] != values[2]  # one step older


def test_in_training_every_step_pulls_everything(cluster: dict[str, rt.Server]) -> None:
    with rt.device(rt.replica_device_setter(cluster=cluster[TARGET].cluster, worker_device=TARGET)):
        w = rt.Variable(np.ones(WIDTH, np.float32), name="w")
        loss = rt.numpy.sum(w**2)
        train = w.assign_sub(0.1 * rt.gradients(loss, w))
    with rt.Session(cluster[TARGET].target, config=SKIP) as session:
        session.run(rt.global_variables_initializer())
        session.run([train.op, loss])
        for _ in range(5):
            before = _bytes_out(cluster)
            session.run([train.op, loss])
            assert 4 * WIDTH <= _bytes_out(cluster) - before < 4 * WIDTH + 2 * OVERHEAD


def test_a_fetched_value_cannot_be_changed_under_later_steps(cluster: dict[str, rt.Server]) -> None:
    w = _variable()
    with rt.Session(cluster[TARGET].target, config=SKIP) as session:
        session.run(rt.global_variables_initializer())
        value = session.run(w)
        with pytest.raises(ValueError, match="read-only"):
            value[0] = 7
        assert session.run(w)[0] == 1


def test_a_traced_step_says_all_that_it_reads(cluster: dict[str, rt.Server]) -> None:
    total = _total(_variable())
    with rt.Session(cluster[TARGET].target, config=SKIP) as session:
        session.run(rt.global_variables_initializer())
        session.run(total)
        metadata = rt.RunMetadata()
        options = rt.RunOptions(trace_level=rt.RunOptions.FULL_TRACE)
        assert session.run(total, options=options, run_metadata=metadata) == WIDTH
        assert metadata.step_stats.dev_stats
        before = _bytes_out(cluster)
        session.run(total)
        assert _bytes_out(cluster) - before < OVERHEAD


def test_cleared_and_restored_variables_are_not_what_they_were(cluster: dict[str, rt.Server]) -> None:
    w = _variable()
    total = _total(w)
    with rt.Session(cluster[TARGET].target, config=SKIP) as session:
        session.run(rt.global_variables_initializer())
        session.run(total)
        cluster[PS].worker.store.clear()
        for _ in range(2):
            with pytest.raises(rt.FailedPreconditionError, match="uninitialized value w"):
                session.run(total)
        session.run(w.initializer)
        assert session.run(total) == WIDTH
        cluster[PS].worker.store.run.generation += 1  # as a restore under this session does
        with pytest.raises(rt.AbortedError, match="restored since"):
            session.run(total)


@pytest.mark.cluster
def test_a_restarted_ps_is_seen() -> None:
    cluster = addresses(ps=1, worker=1)
    with processes(cluster, ("ps", 0)) as (ps,), rt.Server(cluster, "worker", 0) as server, rt.Graph().as_default():
        assert isinstance(ps, Task)
        w = _variable()
        total = _total(w)
        with rt.Session(server.target, config=SKIP) as session:
            session.run(rt.global_variables_initializer())
            assert session.run(total) == session.run(total) == WIDTH
            ps.kill()
            ps.restart()
            with pytest.raises((rt.AbortedError, rt.UnavailableError)):
                session.run(total)
        with rt.Session(server.target, config=SKIP) as session:
            session.run(w.assign(np.full(WIDTH, 2.0, np.float32)))
            assert session.run(total) == 2 * WIDTH
