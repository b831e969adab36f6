"""Python calls: operations that the session runs in its own process, between the parts of a step."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import runtime as rt
from tests.runtime.kit import servers


@pytest.fixture(autouse=True)
def _graph() -> Iterator[None]:
    with rt.Graph().as_default():
        yield


def _call(
    fn: Any, *inputs: Any, shape: Any = (), dtype: Any = np.float32, name: str = "python"
) -> rt.Tensor:
    return rt.lowlevel.python_call(
        lambda _, arrays: [fn(*arrays)], inputs, [(shape, dtype)], name=name
    ).outputs[0]


def _counter() -> rt.Tensor:
    """1, 2, 3 ... in an array of one, two, three elements."""
    seen: list[int] = []

    def count() -> np.ndarray:
        seen.append(0)
        return np.full(len(seen), len(seen), np.float32)

    return _call(count, shape=(None,))


def test_call_result_may_change_shape() -> None:
    """A Python call may return another shape in each step."""
    total = rt.numpy.sum(_counter())
    with rt.Session() as sess:
        assert [float(sess.run(total)) for _ in range(4)] == [1, 4, 9, 16]


def test_call_runs_once_in_a_step() -> None:
    """A Python call runs once in a step however many operations use it."""
    x = _counter()
    doubled = _call(lambda a: a * 2, x, shape=(None,))
    with rt.Session() as sess:
        a, b, c = sess.run([x, doubled, rt.numpy.sum(x) + rt.numpy.sum(doubled)])
        assert (a.tolist(), b.tolist(), float(c)) == ([1], [2], 3)


def test_computed_input_is_computed_once() -> None:
    """The input of a Python call is computed once and fed to the rest of the step."""
    drawn = rt.random.uniform(rt.random_key(), (3,))
    seen = _call(lambda a: a, drawn, shape=(3,))
    with rt.Session() as sess:
        a, b, c = sess.run([drawn, seen, drawn - seen])
        assert a.tolist() == b.tolist() and c.tolist() == [0, 0, 0]


def test_update_before_call_runs_once() -> None:
    """An update that comes before a Python call runs once."""
    v = rt.Variable(np.float32(0), name="v")
    add = v.assign_add(np.float32(1))
    with rt.control_dependencies([add]):
        after = _call(lambda: np.float32(7))
    with rt.control_dependencies([after]):
        end = v + after
    with rt.Session() as sess:
        sess.run(rt.global_variables_initializer())
        assert [float(sess.run([end, add])[0]) for _ in range(3)] == [8, 9, 10]
        assert float(sess.run(v)) == 3


def test_queue_before_call_gives_one_element() -> None:
    """A dequeue that comes before a Python call takes one element."""
    queue = rt.FIFOQueue(10, np.float32, ())
    taken = queue.dequeue()
    x = _call(lambda a: a + 1, taken)
    with rt.Session() as sess:
        sess.run(queue.enqueue_many(np.arange(4, dtype=np.float32)))
        assert [tuple(map(float, sess.run((taken, x, x + taken)))) for _ in range(2)] == [
            (0, 1, 1),
            (1, 2, 3),
        ]
        assert int(sess.run(queue.size())) == 2


def test_call_may_run_steps() -> None:
    """A Python call may run steps of its own session, and their errors end the step."""
    queue = rt.FIFOQueue(10, object, ())
    taken = queue.dequeue()

    def read(session: Any, _: Any) -> list[object]:
        return [session.run(taken) + b"!"]

    x = rt.lowlevel.python_call(read, [], [((), object)], name="read").outputs[0]
    with rt.Session() as sess:
        sess.run([queue.enqueue("a"), queue.close()])
        assert sess.run(x) == b"a!"
        with pytest.raises(rt.OutOfRangeError):
            sess.run(x)


def test_call_without_outputs_runs() -> None:
    """A Python call without outputs runs for its effect."""
    done: list[float] = []
    x = rt.placeholder(np.float32, ())
    note = rt.lowlevel.python_call(
        lambda _, arrays: done.append(float(arrays[0])) or [], [x * 2], name="note"
    )
    with rt.Session() as sess:
        assert sess.run([note, x], {x: 3})[0] is None
        assert sess.run(rt.group(note), {x: 4}) is None
    assert done == [6, 8]


def test_fed_call_does_not_run() -> None:
    """A Python call whose result is fed does not run."""
    x = _call(lambda: 1 / 0)
    with rt.Session() as sess:
        assert float(sess.run(x + 1, {x: 1})) == 2


@pytest.mark.parametrize(
    ("given", "told"),
    [(np.float64(1), "float64, not float32"), (np.zeros(2, np.float32), r"shape \[2\], not \[\]")],
)
def test_wrong_result_is_refused_by_name(given: Any, told: str) -> None:
    """A result of another dtype or shape is refused with the operation's name."""
    x = _call(lambda: given, name="mine")
    with (
        rt.Session() as sess,
        pytest.raises(rt.InvalidArgumentError, match=f"'mine': its function gave {told}"),
    ):
        sess.run(x)


def test_errors_of_function_come_unchanged() -> None:
    """An error of the function leaves the step unchanged."""
    x = _call(lambda: {}["missing"])
    with rt.Session() as sess, pytest.raises(KeyError, match="missing"):
        sess.run(x)


def test_call_has_no_gradient() -> None:
    """A Python call has no gradient."""
    v = rt.Variable(np.float32(2), name="v")
    assert rt.gradients(_call(lambda a: a, v * 2), [v]) == [None]


def test_traced_step_shows_tasks() -> None:
    """A traced step with a Python call has the events of the tasks."""
    y = rt.numpy.sum(_counter())
    told = rt.RunMetadata()
    with rt.Session() as sess:
        sess.run(y, options=rt.RunOptions(trace_level=rt.RunOptions.FULL_TRACE), run_metadata=told)
    assert told.step_stats.dev_stats


def test_call_runs_in_session_process() -> None:
    """A Python call runs in the thread of the session while the update lives on the ps."""
    with servers(ps=1, worker=1) as started:
        here: list[int] = []
        with rt.device("/job:ps"):
            v = rt.Variable(np.float32(0), name="v")
        x = _call(lambda: here.append(threading.get_ident()) or np.float32(2))
        add = v.assign_add(x)
        with rt.Session(started["/job:worker/task:0"].target) as sess:
            sess.run(rt.global_variables_initializer())
            for _ in range(3):
                sess.run(add)
            assert float(sess.run(v)) == 6
    assert here == [threading.get_ident()] * 3


def test_fetched_value_is_a_copy() -> None:
    """The caller may write into fetched values, and the function's arrays keep their values."""
    returned, received = np.zeros(3, np.float32), list[np.ndarray]()

    def keep(array: np.ndarray) -> np.ndarray:
        received.append(array)
        return returned

    doubled = rt.placeholder("float32", [3], name="x") * 2
    result = _call(keep, doubled, shape=(3,))
    with rt.Session() as sess:
        a, b, c = sess.run([result, result, doubled], {"x:0": np.ones(3, np.float32)})
        a[:] = c[:] = -1
    assert returned.tolist() == b.tolist() == [0, 0, 0]
    assert received[0].tolist() == [2, 2, 2]
