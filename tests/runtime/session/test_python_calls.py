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


def test_what_it_gives_may_have_another_shape_in_each_step() -> None:
    total = rt.numpy.sum(_counter())
    with rt.Session() as sess:
        assert [float(sess.run(total)) for _ in range(4)] == [1, 4, 9, 16]


def test_it_runs_once_in_a_step_whoever_uses_it() -> None:
    x = _counter()
    doubled = _call(lambda a: a * 2, x, shape=(None,))
    with rt.Session() as sess:
        a, b, c = sess.run([x, doubled, rt.numpy.sum(x) + rt.numpy.sum(doubled)])
        assert (a.tolist(), b.tolist(), float(c)) == ([1], [2], 3)


def test_a_computed_input_is_computed_once_and_fed_to_the_rest() -> None:
    drawn = rt.random.uniform(rt.random_key(), (3,))
    seen = _call(lambda a: a, drawn, shape=(3,))
    with rt.Session() as sess:
        a, b, c = sess.run([drawn, seen, drawn - seen])
        assert a.tolist() == b.tolist() and c.tolist() == [0, 0, 0]


def test_an_update_before_it_runs_once() -> None:
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


def test_a_queue_before_it_gives_one_element() -> None:
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


def test_it_may_run_steps_of_the_session() -> None:
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


def test_operations_without_outputs_run_for_their_effect() -> None:
    done: list[float] = []
    x = rt.placeholder(np.float32, ())
    note = rt.lowlevel.python_call(
        lambda _, arrays: done.append(float(arrays[0])) or [], [x * 2], name="note"
    )
    with rt.Session() as sess:
        assert sess.run([note, x], {x: 3})[0] is None
        assert sess.run(rt.group(note), {x: 4}) is None
    assert done == [6, 8]


def test_feeding_what_it_gives_spares_it() -> None:
    x = _call(lambda: 1 / 0)
    with rt.Session() as sess:
        assert float(sess.run(x + 1, {x: 1})) == 2


@pytest.mark.parametrize(
    ("given", "told"),
    [(np.float64(1), "float64, not float32"), (np.zeros(2, np.float32), r"shape \[2\], not \[\]")],
)
def test_what_does_not_fit_is_refused_by_name(given: Any, told: str) -> None:
    x = _call(lambda: given, name="mine")
    with (
        rt.Session() as sess,
        pytest.raises(rt.InvalidArgumentError, match=f"'mine': its function gave {told}"),
    ):
        sess.run(x)


def test_errors_of_the_function_come_out_as_they_are() -> None:
    x = _call(lambda: {}["missing"])
    with rt.Session() as sess, pytest.raises(KeyError, match="missing"):
        sess.run(x)


def test_it_has_no_gradient() -> None:
    v = rt.Variable(np.float32(2), name="v")
    assert rt.gradients(_call(lambda a: a, v * 2), [v]) == [None]


def test_a_traced_step_tells_what_the_tasks_did() -> None:
    y = rt.numpy.sum(_counter())
    told = rt.RunMetadata()
    with rt.Session() as sess:
        sess.run(y, options=rt.RunOptions(trace_level=rt.RunOptions.FULL_TRACE), run_metadata=told)
    assert told.step_stats.dev_stats


def test_it_runs_in_the_process_of_the_session_and_updates_live_on_the_ps() -> None:
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


def test_a_fetched_value_is_no_array_of_the_function() -> None:
    """The caller may write into fetched values; the function keeps what it returned and received."""
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
