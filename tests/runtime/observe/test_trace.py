"""Traced steps: what RunMetadata says of stages, operations, times and bytes, wherever the master is."""

import time

import numpy as np
import pytest

import runtime as rt
from runtime.master import tasks
from runtime.observe.trace import Span, Tracer, merge, nbytes, shifted, step_stats
from tests.runtime.kit import TARGET, addresses, processes, servers

FULL = rt.RunOptions(trace_level=rt.RunOptions.FULL_TRACE)
PS = "/job:ps/replica:0/task:{}/device:CPU:0"
WORKER = "/job:worker/replica:0/task:0/device:CPU:0"


def traced_step(target: str) -> tuple[rt.RunMetadata, list]:
    """One step that reads on the ps, computes on the worker and writes on the ps."""
    with rt.Graph().as_default() as graph:
        with rt.device("/job:ps/task:0"):
            w = rt.Variable(np.ones((10, 4), np.float32), name="w")
        x = rt.placeholder(np.float32, [None, 10], "x")
        with rt.device("/job:worker/task:0"):
            y = rt.numpy.matmul(x, w, name="y")
            update = w.assign_add(rt.numpy.ones_like(w) * rt.numpy.mean(y), name="update")
        metadata = rt.RunMetadata()
        with rt.Session(target, graph) as session:
            session.run(w.initializer)
            values = session.run([y, update], {x: np.ones((3, 10))}, FULL, metadata)
    return metadata, values


def by_name(metadata: rt.RunMetadata, device: str) -> dict:
    (found,) = [d for d in metadata.step_stats.dev_stats if d.device == device]
    return {node.node_name: node for node in found.node_stats}


@pytest.mark.parametrize("master", ["here", "elsewhere"])
def test_operations_show_device_time_bytes(master: str) -> None:
    """A traced step has each operation on its device, with its times and bytes."""
    with servers(sockets=True, ps=1, worker=1) as made:
        server = made[TARGET]
        if master == "elsewhere":
            tasks.withdraw(server.address, server)
        before = time.time_ns()
        metadata, values = traced_step(server.target)
        after = time.time_ns()
    assert np.array_equal(values[0], np.full((3, 4), 10.0))
    worker, ps = by_name(metadata, WORKER), by_name(metadata, PS.format(0))
    assert {"y", "stage:1"} <= worker.keys() and {
        "update",
        "stage:0",
        "stage:2",
        "recv:2",
    } <= ps.keys()
    assert not {"y"} & ps.keys()
    for node in (*worker.values(), *ps.values()):
        assert (
            before <= node.all_start_nanos <= node.all_start_nanos + node.all_end_rel_nanos <= after
        )
        assert node.all_start_micros == node.all_start_nanos // 1000
    # the graph's order is the order in time
    assert (
        ps["stage:0"].all_start_nanos
        < worker["stage:1"].all_start_nanos
        < ps["stage:2"].all_start_nanos
    )

    def moved(node: object) -> int:
        return node.output[0].tensor_description.allocation_description.requested_bytes  # type: ignore[attr-defined]

    assert moved(ps["recv:2"]) == moved(worker["send:2"]) == 160
    assert moved(worker["recv:0"]) == moved(ps["stage:0"]) == 160
    y = worker["y"].output[0].tensor_description
    assert [d.size for d in y.shape.dim] == [
        3,
        4,
    ] and y.allocation_description.requested_bytes == 48


def test_untraced_step_empties_the_metadata() -> None:
    """A step that is not traced empties the given metadata."""
    metadata = rt.RunMetadata()
    with rt.Graph().as_default(), rt.Session() as session:
        one = rt.constant(1.0)
        session.run(one, None, FULL, metadata)
        assert metadata.step_stats.dev_stats
        session.run(one, run_metadata=metadata)
        assert not metadata.step_stats.dev_stats


def test_tracing_changes_no_value() -> None:
    """A traced step runs its updates once and returns the same values."""
    with rt.Graph().as_default(), rt.Session() as session:
        w = rt.Variable(0.0, name="w")
        add = w.assign_add(1.0)
        session.run(w.initializer)
        for i in range(6):
            metadata = rt.RunMetadata()
            assert (
                session.run(add, None, FULL if i % 2 else None, metadata if i % 2 else None)
                == i + 1
            )


def test_failed_trace_leaves_next_clean() -> None:
    """A traced step that fails leaves nothing to the next trace."""
    with servers(sockets=True, ps=1, worker=1) as made, rt.Graph().as_default():
        with rt.device("/job:ps/task:0"):
            good = rt.Variable(1.0, name="good")
            bad = rt.Variable(1.0, name="bad")
        with rt.Session(made[TARGET].target) as session:
            session.run(good.initializer)
            metadata = rt.RunMetadata()
            with pytest.raises(rt.FailedPreconditionError, match="bad"):
                session.run([good.assign_add(1.0), bad], None, FULL, metadata)
            assert not metadata.step_stats.dev_stats
            session.run(good, None, FULL, metadata)
    names = [
        node.node_name for device in metadata.step_stats.dev_stats for node in device.node_stats
    ]
    assert len([n for n in names if n.startswith("stage:")]) == 1


@pytest.mark.cluster
def test_remote_ps_is_traced_too() -> None:
    """A trace has the operations of a ps in another process."""
    cluster = addresses(ps=1, worker=1)
    with processes(cluster, ("ps", 0)), rt.Server(cluster, "worker", 0) as server:
        metadata, _ = traced_step(server.target)
    assert "update" in by_name(metadata, PS.format(0))


def test_options_have_a_timeout() -> None:
    """A bad option of a step is refused, and timeout_in_ms ends a step."""
    with pytest.raises(ValueError, match="timeout_in_ms"):
        rt.RunOptions(timeout_in_ms=-1)
    with pytest.raises(ValueError, match="trace_level"):
        rt.RunOptions(trace_level=9)
    with servers(ps=1, worker=1) as made, rt.Graph().as_default():
        queue = rt.FIFOQueue(1, [np.float32], [()], name="q")
        with rt.Session(made[TARGET].target) as session, pytest.raises(rt.DeadlineExceededError):
            session.run(queue.dequeue(), None, rt.RunOptions(timeout_in_ms=50))


def test_trace_has_tensorflow_fields() -> None:
    """The message of a trace has TensorFlow's field numbers."""
    stats = step_stats([Span("/cpu:0", "stage:1", 1, 5_000, 9_500, 12, "x", ("a", "b"))])
    (device,) = stats.dev_stats
    assert [n.node_name for n in device.node_stats] == ["stage:1", "a", "b"]
    assert (device.node_stats[1].all_start_micros, device.node_stats[1].all_end_rel_micros) == (
        5,
        4,
    )
    raw = stats.dev_stats[0].node_stats[1].SerializeToString()
    assert raw.startswith(b"\x0a\x01a\x10\x05")  # field 1: name, field 2: all_start_micros


def test_clocks_of_others_are_corrected() -> None:
    """The times of another host are shifted to the caller's clock."""
    stats = step_stats([Span("/cpu:0", "stage:0", 0, 1_000_000, 2_000_000)])
    assert shifted(stats, 400_000).dev_stats[0].node_stats[0].all_start_nanos == 600_000


def test_merge_joins_one_device() -> None:
    """A merge of traces joins the entries of one device."""
    a = step_stats([Span("/cpu:0", "stage:0", 0, 1, 2)])
    b = step_stats([Span("/cpu:0", "stage:1", 1, 3, 4), Span("/cpu:1", "stage:0", 0, 1, 2)])
    merged = merge([a, b])
    assert [(d.device, len(d.node_stats)) for d in merged.dev_stats] == [
        ("/cpu:0", 2),
        ("/cpu:1", 1),
    ]


def test_tracer_keeps_sessions_apart() -> None:
    """A tracer keeps the spans of sessions apart, and gives them once."""
    tracer = Tracer()
    span = Span("/cpu:0", "stage:0", 0, 1, 2)
    tracer.add(1, span)
    tracer.add(2, span, span)
    assert (len(tracer.take(1)), len(tracer.take(1)), len(tracer.take(2))) == (1, 0, 2)


def test_bytes_of_strings_are_their_lengths() -> None:
    """The bytes of strings are the sum of their lengths."""
    assert nbytes([np.zeros(3, np.float32), np.array([b"ab", b"c"], object)]) == 15
