"""Habits of 57 public programs, each with the value that TensorFlow 2.21's compat.v1 gives."""

import collections
import sys
from typing import Any

import numpy as np
import pytest

import harness.tf1 as tf
from tests.harness.tf1.kit import evaluate


def test_batch_norm_updates_in_place() -> None:
    """``updates_collections=None`` updates the averages whenever the output is computed."""
    with tf.Graph().as_default() as graph:
        x = tf.placeholder(tf.float32, [None, 1])
        out = tf.contrib.layers.batch_norm(x, decay=0.5, updates_collections=None, scope="bn")
        mean = next(v for v in tf.global_variables() if v.name == "bn/moving_mean:0")
        assert graph.get_collection(tf.GraphKeys.UPDATE_OPS) == []
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            sess.run(out, {x: [[1.0], [3.0]]})
            assert sess.run(mean).tolist() == [1.0]


def test_batch_norm_updates_in_a_collection() -> None:
    """Updates go to the named collection, also with a fed switch."""
    with tf.Graph().as_default() as graph:
        x, training = tf.placeholder(tf.float32, [None, 1]), tf.placeholder(tf.bool, [])
        tf.contrib.layers.batch_norm(
            x, decay=0.5, updates_collections="mine", is_training=training, scope="bn"
        )
        assert (
            len(graph.get_collection("mine")) == 2
            and graph.get_collection(tf.GraphKeys.UPDATE_OPS) == []
        )


def test_generator_elements_are_cast() -> None:
    """A float64 element becomes the declared int32, cut off as NumPy does."""
    with tf.Graph().as_default():
        rows = tf.data.Dataset.from_generator(lambda: iter([np.array([7.9]), [1.5]]), tf.int32, [1])
        element = rows.make_one_shot_iterator().get_next()
        with tf.Session() as sess:
            found = [sess.run(element) for _ in range(2)]
        assert [f.tolist() for f in found] == [[7], [1]] and found[0].dtype == np.int32


def test_flags_are_iterated_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """``for name in FLAGS`` gives names, whose flags ``FLAGS[name]`` has."""
    monkeypatch.setattr(sys, "argv", ["program"])
    tf.app.flags.DEFINE_integer("second_corpus_units", 7, "")
    flags = tf.app.flags.FLAGS
    assert {name: flags[name].value for name in flags}["second_corpus_units"] == 7


def test_unknown_batch_in_sampled_losses() -> None:
    """``nce_loss`` and ``sampled_softmax_loss`` take a batch whose size is known in the step."""
    for loss in (tf.nn.nce_loss, tf.nn.sampled_softmax_loss):
        with tf.Graph().as_default():
            inputs, labels = (
                tf.placeholder(tf.float32, [None, 4]),
                tf.placeholder(tf.int64, [None, 1]),
            )
            weights, biases = tf.Variable(tf.ones([50, 4])), tf.Variable(tf.zeros([50]))
            found = loss(weights, biases, labels, inputs, 8, 50)
            gradient = tf.gradients(found, weights)[0]
            assert found.get_shape().as_list() == [None]
            with tf.Session() as sess:
                sess.run(tf.global_variables_initializer())
                feeds = {inputs: np.ones([3, 4]), labels: [[1], [2], [3]]}
                assert sess.run(found, feeds).shape == (3,) and sess.run(gradient, feeds).shape == (
                    50,
                    4,
                )


@pytest.mark.parametrize("constant", [True, False])
def test_string_slices_share_out_files(constant: bool) -> None:
    """A slice of a list of file names is made on the host, with numbers for its ends."""

    def make() -> list[Any]:
        names = tf.constant([b"a", b"b", b"c", b"d"])
        if not constant:
            names = tf.py_func(lambda: np.array([b"a", b"b", b"c", b"d"]), [], tf.string)
            names.set_shape([4])
        shares = [
            names[1::2],
            tf.strided_slice(names, [1], [1 << 30], strides=[2]),
            tf.slice(names, [1], [2]),
            names[0],
        ]
        assert [share.get_shape().as_list() for share in shares] == [[2], [2], [2], []]
        return shares

    assert [np.asarray(found).tolist() for found in evaluate(make)] == [
        [b"b", b"d"],
        [b"b", b"d"],
        [b"b", b"c"],
        b"a",
    ]


@pytest.mark.parametrize("nested", [False, True])
def test_condition_assigns_without_value(nested: bool) -> None:
    """A conditional assignment gives a variable its first value, and nothing where it does not run."""
    with tf.Graph().as_default():
        v, p, x = tf.Variable([0.0, 0.0]), tf.placeholder(tf.bool, []), tf.constant([3.0, 4.0])

        def assign() -> Any:
            return tf.assign(v, x)

        found = tf.cond(
            p,
            (lambda: tf.cond(p, assign, lambda: x)) if nested else assign,
            lambda: -x,
        )
        mean = tf.cond(p, lambda: tf.assign(v, v * 0.5), lambda: v)
        with tf.Session() as sess:
            assert sess.run(found, {p: False}).tolist() == [-3, -4]
            for again in (v, mean):
                with pytest.raises(tf.errors.FailedPreconditionError, match="uninitialized"):
                    sess.run(again, {p: True})
            assert sess.run(found, {p: True}).tolist() == [3, 4] == sess.run(v).tolist()
            assert sess.run(mean, {p: True}).tolist() == [1.5, 2]
            assert sess.run(found, {p: False}).tolist() == [-3, -4]
            assert sess.run(v).tolist() == [1.5, 2]


Pair = collections.namedtuple("Pair", "c h")


def test_nested_feeds_are_flattened() -> None:
    """A tuple of placeholders takes values of the same structure, and refuses another structure."""
    with tf.Graph().as_default():
        a, b, c = (tf.placeholder(tf.float32, []) for _ in range(3))
        total = a + 10 * b + 100 * c
        with tf.Session() as sess:
            assert sess.run(total, {(Pair(a, b), c): ((1.0, 2.0), 3.0)}) == 321
            assert sess.run(total, {Pair(a, b): Pair(1.0, 2.0), c: 3.0}) == 321
            assert sess.run(total, {(Pair(a, b), c): ({"h": 2.0, "c": 1.0}, 3.0)}) == 321
            with pytest.raises(ValueError, match="structure"):
                sess.run(total, {(a, b, c): (1.0, 2.0)})
            with pytest.raises(ValueError, match="structure"):
                sess.run(total, {(a, b, c): 1.0})


def test_gather_gradient_is_slices() -> None:
    """The gradient of a lookup has parts, of which a program makes an average of two towers."""
    with tf.Graph().as_default():
        table, other = tf.Variable(tf.ones([4, 2])), tf.Variable(tf.ones([2, 2]))
        optimizer = tf.train.GradientDescentOptimizer(1.0)
        towers: Any = [
            optimizer.compute_gradients(
                tf.reduce_sum(tf.matmul(tf.nn.embedding_lookup(table, ids), other))
            )
            for ids in ([1, 1], [1, 3])
        ]
        slices = [tower[0][0] for tower in towers]
        assert all(isinstance(g, tf.IndexedSlices) for g in slices)
        assert not isinstance(towers[0][1][0], tf.IndexedSlices)
        mean: Any = tf.IndexedSlices(
            tf.concat([g.values for g in slices], 0) / 2, tf.concat([g.indices for g in slices], 0)
        )
        assert isinstance(mean, tf.IndexedSlices)
        train = optimizer.apply_gradients([(mean, table)])
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            assert sess.run(mean.dense_shape).tolist() == [4, 2]
            sess.run(train)
            assert sess.run(table).tolist() == [[1, 1], [-2, -2], [1, 1], [0, 0]]


def test_final_graph_has_slices() -> None:
    """The parts of a gradient may be read for the first time in a final graph, which stays final."""
    with tf.Graph().as_default() as graph:
        table = tf.Variable(tf.ones([4, 2]))
        gradient: Any = tf.gradients(tf.nn.embedding_lookup(table, [1, 3]), table)[0]
        with tf.train.MonitoredSession() as sess:
            assert graph.finalized
            values, indices = sess.run([gradient.values, gradient.indices])
            assert sess.run(gradient.dense_shape).tolist() == [4, 2]
            assert np.array_equal(values, [[0, 0], [1, 1], [0, 0], [1, 1]])
            assert indices.tolist() == [0, 1, 2, 3]
            with pytest.raises(RuntimeError, match="finalized"):
                tf.constant(1)


def test_indexed_slices_add_up() -> None:
    """Rows of one place add up; without any shape the error says what to give."""
    with tf.Graph().as_default():
        slices: Any = tf.IndexedSlices([[1.0], [2.0], [4.0]], [0, 2, 2], [3, 1])
        assert slices.values.get_shape().as_list() == [3, 1]
        with tf.Session() as sess:
            assert sess.run(slices).tolist() == [[1], [0], [6]]
        with pytest.raises(ValueError, match="give dense_shape"):
            tf.IndexedSlices([[1.0]], [0])


def test_dense_gradients_explain_missing_rows() -> None:
    """A gradient of a product is dense: ``values`` and ``indices`` say so."""
    with tf.Graph().as_default():
        table = tf.Variable(tf.ones([4, 2]))
        gradient: Any = tf.gradients(tf.gather(table, [1, 1]) * tf.reduce_sum(table), table)[0]
        for name in ("values", "indices", "dense_shape"):
            with pytest.raises(
                AttributeError, match="gradients are dense here: .* is the whole tensor"
            ):
                getattr(gradient, name)


def test_fetched_arrays_may_be_written_to() -> None:
    """A fetched value is the caller's own: a write changes no variable, constant or fed array."""
    with tf.Graph().as_default():
        v, c, x = tf.Variable([1.0, 2.0]), tf.constant([3.0, 4.0]), tf.placeholder(tf.float32, [2])
        fed = np.array([5.0, 6.0], np.float32)
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            fetches = {"v": v, "read": v.read_value(), "list": [c, c + 1, v * x], "fed": x}
            for _ in range(2):
                found = sess.run(fetches, {x: fed})
                assert found["v"].tolist() == found["read"].tolist() == [1, 2] and found[
                    "fed"
                ].tolist() == [5, 6]
                assert [f.tolist() for f in found["list"]] == [[3, 4], [4, 5], [5, 12]]
                for array in (
                    found["v"],
                    found["read"],
                    *found["list"],
                    found["fed"],
                    v.eval(sess),
                ):
                    array[0] = -1


def test_rank_unknown_before_the_step() -> None:
    """A loop over a placeholder without a shape writes a row for each of its rows."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32)
        rows = tf.shape(x)[0]

        def body(i: Any, array: tf.TensorArray) -> Any:
            return i + 1, array.write(i, x[i] * 2)

        _, found = tf.while_loop(
            lambda i, _: i < rows, body, [0, tf.TensorArray(tf.float32, size=rows)]
        )
        with tf.Session() as sess:
            assert sess.run(found.stack(), {x: [1.0, 2.0, 3.0]}).tolist() == [2, 4, 6]
            assert sess.run(found.stack(), {x: [[1.0, 2.0]]}).tolist() == [[2, 4]]
