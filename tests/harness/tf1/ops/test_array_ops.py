"""Making, joining, cutting and reshaping: argument orders of 1.0 and 0.8, shapes that come from tensors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import harness.tf1 as tf
from tests.harness.tf1.kit import check_all, evaluate

A = np.arange(12, dtype=np.float32).reshape(3, 4)
V = np.array([3, 1, 2], np.int32)


def _cases() -> dict:
    a, v = tf.constant(A), tf.constant(V)
    first, second = tf.split(0, 3, a)[:2], tf.split(a, [1, -1], 1)
    return {
        "constant fills up": (
            tf.constant([1, 2], shape=[2, 2]),
            np.array([[1, 2], [2, 2]], np.int32),
        ),
        "constant dtype": (tf.constant(1, tf.float32, [2]), np.ones(2, np.float32)),
        "zeros": (tf.zeros([2, 3]), np.zeros((2, 3), np.float32)),
        "zeros wide": (tf.zeros([2], tf.int64), np.zeros(2, np.int64)),
        "ones": (tf.ones((2,), dtype=tf.int32), np.ones(2, np.int32)),
        "zeros_like": (tf.zeros_like(v), np.zeros(3, np.int32)),
        "ones_like": (tf.ones_like(a, dtype=tf.int32), np.ones((3, 4), np.int32)),
        "fill": (tf.fill([2, 2], 9), np.full((2, 2), 9, np.int32)),
        "eye": (tf.eye(2, 3), np.eye(2, 3, dtype=np.float32)),
        "linspace": (tf.linspace(0.0, 1.0, 3), np.array([0, 0.5, 1], np.float32)),
        "lin_space": (tf.lin_space(0.0, 1.0, 3), np.array([0, 0.5, 1], np.float32)),
        "range": (tf.range(3), np.arange(3, dtype=np.int32)),
        "range three": (tf.range(3, 9, 2), np.arange(3, 9, 2, np.int32)),
        "range limit": (tf.range(start=1, limit=3), np.arange(1, 3, dtype=np.int32)),
        "one_hot": (tf.one_hot(v, 4), np.eye(4, dtype=np.float32)[V]),
        "one_hot values": (
            tf.one_hot([0, 2], 3, 5, -1),
            np.array([[5, -1, -1], [-1, -1, 5]], np.int32),
        ),
        "one_hot axis": (tf.one_hot(v, 4, axis=0), np.eye(4, dtype=np.float32)[V].T),
        "diag": (tf.diag([1, 2]), np.diag([1, 2]).astype(np.int32)),
        "diag_part": (tf.diag_part(tf.diag([1, 2])), np.array([1, 2], np.int32)),
        "matrix_diag": (tf.matrix_diag([[1.0, 2.0]]), np.diag([1, 2]).astype(np.float32)[None]),
        "matrix_diag_part": (tf.matrix_diag_part(a), np.diagonal(A)),
        "matrix_band_part": (tf.matrix_band_part(a, 0, -1), np.triu(A)),
        "sequence_mask": (tf.sequence_mask([1, 3], 3), np.array([[1, 0, 0], [1, 1, 1]], bool)),
        "shape": (tf.shape(a), np.array([3, 4], np.int32)),
        "shape wide": (tf.shape(a, out_type=tf.int64), np.array([3, 4], np.int64)),
        "size": (tf.size(a), np.int32(12)),
        "rank": (tf.rank(a), np.int32(2)),
        "reshape": (tf.reshape(a, [2, -1]), A.reshape(2, 6)),
        "reshape numpy": (tf.reshape(a, np.array([4, 3])), A.reshape(4, 3)),
        "reshape shape": (tf.reshape(a, tf.constant([4, 3])), A.reshape(4, 3)),
        "expand_dims": (tf.expand_dims(a, 1), A[:, None]),
        "expand_dims old": (tf.expand_dims(a, dim=-1), A[..., None]),
        "squeeze": (tf.squeeze(A[None, :, None]), A),
        "squeeze old": (tf.squeeze(A[None, :, None], squeeze_dims=[0]), A[:, None]),
        "transpose": (tf.transpose(a), A.T),
        "transpose perm": (tf.transpose(A[None], [2, 0, 1]), A[None].transpose(2, 0, 1)),
        "matrix_transpose": (tf.matrix_transpose(A[None]), A.T[None]),
        "broadcast_to": (tf.broadcast_to(v, [2, 3]), np.broadcast_to(V, (2, 3))),
        "concat": (tf.concat([a, a], 1), np.concatenate([A, A], 1)),
        "concat old": (tf.concat(1, [a, a]), np.concatenate([A, A], 1)),
        "concat names": (tf.concat(values=[a, a], axis=0), np.concatenate([A, A])),
        "concat_v2": (tf.concat_v2([a, a], 0), np.concatenate([A, A])),
        "stack": (tf.stack([v, v], axis=1), np.stack([V, V], 1)),
        "pack": (tf.pack([v, [1, 2, 3]]), np.stack([V, np.array([1, 2, 3], np.int32)])),
        "unstack": (tf.unstack(a, axis=1)[2], A[:, 2]),
        "unpack": (tf.unpack(a, 3)[1], A[1]),
        "split old": (first[1], A[1:2]),
        "split sizes": (second[1], A[:, 1:]),
        "split new": (tf.split(a, 2, axis=1)[1], A[:, 2:]),
        "split names": (tf.split(value=a, num_or_size_splits=3)[2], A[2:]),
        "split old names": (tf.split(split_dim=1, num_split=4, value=a)[3], A[:, 3:]),
        "slice": (tf.slice(a, [1, 0], [2, -1]), A[1:, :]),
        "strided_slice": (tf.strided_slice(a, [0, 1], [3, 4], [2, 2]), A[0:3:2, 1:4:2]),
        "tile": (tf.tile(v, [2]), np.tile(V, 2)),
        "pad": (tf.pad(v, [[1, 2]]), np.pad(V, (1, 2))),
        "pad reflect": (tf.pad(v, [[1, 1]], "REFLECT"), np.pad(V, 1, "reflect")),
        "reverse": (tf.reverse(a, [1]), A[:, ::-1]),
        "reverse old": (tf.reverse(a, [True, False]), A[::-1]),
        "gather": (tf.gather(a, [2, 0]), A[[2, 0]]),
        "gather axis": (tf.gather(a, v, axis=1), A[:, V]),
        "gather_nd": (tf.gather_nd(a, [[0, 1], [2, 3]]), A[[0, 2], [1, 3]]),
        "scatter_nd": (tf.scatter_nd([[1], [1]], [5, 6], [3]), np.array([0, 11, 0], np.int32)),
        "where": (tf.where(tf.greater(a, 5), a, -a), np.where(A > 5, A, -A)),
        "select rows": (
            tf.select([True, False, True], a, -a),
            np.where([[True], [False], [True]], A, -A),
        ),
        "invert_permutation": (tf.invert_permutation([2, 0, 1]), np.array([1, 2, 0], np.int32)),
        "meshgrid": (
            tf.meshgrid([1, 2], [3, 4, 5])[1],
            np.meshgrid([1, 2], [3, 4, 5])[1].astype(np.int32),
        ),
        "identity": (tf.identity(a, name="same"), A),
        "convert packs": (tf.convert_to_tensor([v, v]), np.stack([V, V])),
        "nested tensors": (tf.add([tf.constant(1.0), 2.0], 1.0), np.array([2, 3], np.float32)),
    }


def test_array_functions_match_numpy() -> None:
    """Every array function matches NumPy."""
    with tf.Graph().as_default():
        cases = _cases()
        with tf.Session() as sess:
            check_all(cases, sess.run({name: tensor for name, (tensor, _) in cases.items()}))


def test_shapes_may_come_from_tensors() -> None:
    """A shape may be computed from the shapes of tensors."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None, 4], name="x")
        rows = tf.shape(x)[0]
        flat = tf.reshape(x, tf.stack([rows * 2, 2]))
        noise = tf.random_uniform(tf.shape(x))
        zeros = tf.zeros([tf.size(x), 1])
        with tf.Session() as sess:
            for n in (2, 3):
                got = sess.run([flat, noise, zeros], {x: np.ones((n, 4))})
                assert [g.shape for g in got] == [(2 * n, 2), (n, 4), (4 * n, 1)]
        assert flat.get_shape().as_list() == [None, 2]


def test_shape_from_values_is_refused() -> None:
    """A shape that is computed from values is refused."""
    with tf.Graph().as_default():
        n = tf.placeholder(tf.int32, [], name="n")
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="the value of 'stack:0' is known only in the step"
        ):
            tf.zeros(tf.stack([n, 2]))


def test_missing_static_shape_is_named() -> None:
    """A function without a static shape says so."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None, 2], name="x")
        with pytest.raises(ValueError, match="no static shape"):
            tf.where(tf.greater(x, 0))
        with pytest.raises(ValueError, match="'x:0' is not known before the step: give num"):
            tf.unstack(x)
        with pytest.raises(ValueError, match="sequence_mask needs maxlen"):
            tf.sequence_mask([1, 2])


def test_constants_have_tensorflows_dtypes() -> None:
    """NumPy arrays keep their dtype, and Python numbers are 32 bits wide."""
    values = {
        "float64": np.ones(2),
        "int64": np.arange(2),
        "float32": [1.0, 2.0],
        "int32": [1, 2],
        "complex128": 1j,
        "bool": True,
    }
    with tf.Graph().as_default():
        assert {name: tf.constant(v).dtype.name for name, v in values.items()} == {
            name: name for name in values
        }
        assert tf.Variable(np.ones(2)).dtype == tf.float64
        assert tf.constant(2**40).dtype == tf.int64
        assert tf.convert_to_tensor(np.float64(1)).dtype == tf.float64


def test_strings_are_tensors_too() -> None:
    """Strings are tensors, and refuse arithmetic."""
    assert evaluate(lambda: tf.constant("hello")) == b"hello"
    assert evaluate(lambda: tf.identity(tf.constant([["a", "b"]]))).tolist() == [[b"a", b"b"]]
    with tf.Graph().as_default(), pytest.raises(TypeError, match="x is string"):
        tf.add(tf.constant("a"), 1)
    with tf.Graph().as_default(), pytest.raises(TypeError, match="is not float32"):
        tf.constant("a", tf.float32)


def test_constant_checks_its_shape_and_type() -> None:
    """constant checks its shape and dtype."""
    with tf.Graph().as_default():
        with pytest.raises(ValueError, match="3 elements do not fit"):
            tf.constant([1, 2, 3], shape=[2])
        with pytest.raises(TypeError, match="shape"):
            tf.constant([1, 2], shape=[4], verify_shape=True)
        with pytest.raises(TypeError, match="float32 given where int32|float64 given where int32"):
            tf.constant(1.5, tf.int32)
        with pytest.raises(ValueError, match="is float32, not int32: use tf.cast"):
            tf.convert_to_tensor(tf.constant(1.0), tf.int32)


def test_placeholder_default_may_be_fed() -> None:
    """placeholder_with_default gives its default or the fed value."""
    with tf.Graph().as_default():
        x = tf.placeholder_with_default([1.0, 2.0], [2])
        doubled = x * 2.0
        with tf.Session() as sess:
            assert sess.run(doubled).tolist() == [2, 4]
            assert sess.run(doubled, {x: [5.0, 6.0]}).tolist() == [10, 12]


SIZES: dict[str, Callable[[Any], Any]] = {
    "reshape": lambda n: tf.reshape(tf.zeros([12]), [n, -1]),
    "reshape from a sum": lambda n: tf.reshape(tf.zeros([12]), tf.stack([n * 2, -1])),
    "zeros": lambda n: tf.zeros([n, 2]),
    "tile": lambda n: tf.tile(tf.constant([1.0]), [n]),
    "slice": lambda n: tf.slice(tf.range(5.0), [0], [n]),
    "end of a slice": lambda n: tf.range(5.0)[:n],
    "axis": lambda n: tf.reduce_sum(tf.zeros([2, 3, 4]), n),
    "range": lambda n: tf.range(n),
    "beside a shape": lambda n: tf.zeros([tf.shape(tf.zeros([4]))[0], n]),
}


@pytest.mark.parametrize("make", [tf.placeholder_with_default, lambda value, _: tf.constant(value)])
@pytest.mark.parametrize("use", SIZES.values(), ids=SIZES)
def test_value_of_a_size_stays(
    make: Callable[[int, list[int]], Any], use: Callable[[Any], Any]
) -> None:
    """A default or a constant that gave a shape takes its own value alone, and another one is an error."""
    with tf.Graph().as_default(), tf.Session() as sess:
        n = make(2, [])
        made = use(n)
        assert sess.run(made, {n: 2}).shape == sess.run(made).shape
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=f"'{n.name}' cannot be fed with another"
        ):
            sess.run(made, {n: 1})


def test_place_of_a_slice_changes() -> None:
    """A default that is a place and no size takes any value."""
    with tf.Graph().as_default(), tf.Session() as sess:
        n = tf.placeholder_with_default(1, [])
        x = tf.range(6)
        pair = [x[n : n + 2], x[n], tf.slice(x, [n], [2])]
        assert [v.tolist() for v in sess.run(pair)] == [[1, 2], 1, [1, 2]]
        assert [v.tolist() for v in sess.run(pair, {n: 4})] == [[4, 5], 4, [4, 5]]


@pytest.mark.cluster
def test_random_tensors_follow_the_seed() -> None:
    """Random tensors are new in every step, the same in every run with a seed, and in their range."""

    def make() -> list:
        tf.set_random_seed(7)
        return [
            tf.random_normal([1000], 3.0, 2.0),
            tf.random_uniform([1000], -1.0, 1.0),
            tf.random_uniform([1000], 2, 5, tf.int32),
            tf.truncated_normal([1000], 0.0, 1.0),
            tf.random_shuffle(tf.range(10)),
            tf.multinomial(tf.log([[0.5, 0.5], [1e-9, 1.0]]), 100),
            tf.random_gamma([50], [1.0, 2.0]),
            tf.random_crop(tf.reshape(tf.range(12), [3, 4]), [2, 2]),
        ]

    with tf.Graph().as_default():
        tensors = make()
        with tf.Session() as sess:
            normal, uniform, whole, truncated, shuffled, drawn, gamma, crop = sess.run(tensors)
            again = sess.run(tensors)
    assert abs(normal.mean() - 3) < 0.3 and abs(normal.std() - 2) < 0.3
    assert -1 <= uniform.min() and uniform.max() < 1
    assert set(whole.tolist()) == {2, 3, 4} and whole.dtype == np.int32
    assert abs(truncated).max() <= 2
    assert sorted(shuffled.tolist()) == list(range(10))
    assert drawn.shape == (2, 100) and drawn.dtype == np.int64 and set(drawn[1].tolist()) == {1}
    assert gamma.shape == (50, 2) and gamma.min() > 0
    assert crop.shape == (2, 2) and crop[0, 0] + 1 == crop[0, 1] and crop[0, 0] + 4 == crop[1, 0]
    assert not np.array_equal(normal, again[0])
    assert np.array_equal(normal, evaluate(make)[0])
    with tf.Graph().as_default(), pytest.raises(ValueError, match="needs maxval"):
        tf.random_uniform([2], dtype=tf.int32)


@pytest.mark.parametrize(
    ("begin", "end", "strides"), [([0, 0], [1], None), ([0], [1, 1], None), ([0, 0], [1, 1], [1])]
)
def test_strided_slice_checks_its_lengths(begin: list, end: list, strides: list | None) -> None:
    """strided_slice refuses lists of different lengths."""
    with tf.Graph().as_default():
        place = tf.placeholder(tf.int32, [])
        with pytest.raises(ValueError, match=r"tf\.strided_slice: . places, . ends and . strides"):
            tf.strided_slice(A, [place, *begin[1:]], [place + 1, *end[1:]], strides)
        with pytest.raises(ValueError, match=r"tf\.strided_slice: . places, . ends and . strides"):
            tf.strided_slice([["a", "b"]], begin, end, strides)


@pytest.mark.parametrize(
    ("begin", "size"), [([1], [3]), ([-1], [1]), ([4], [-1]), ([0], [-2]), ([0, 0], [1, 1])]
)
def test_string_slice_checks_its_range(begin: list, size: list) -> None:
    """A slice of strings outside the tensor is refused."""
    with tf.Graph().as_default(), pytest.raises(tf.errors.InvalidArgumentError, match="are not in"):
        tf.slice(tf.constant(["a", "b", "c"]), begin, size)
    with tf.Graph().as_default(), tf.Session() as session:
        text = tf.placeholder(tf.string)
        part = tf.slice(text, begin, size)
        with pytest.raises(tf.errors.InvalidArgumentError, match="are not in"):
            session.run(part, {text: ["a", "b", "c"]})


def test_string_outside_is_named() -> None:
    """An index outside of a string tensor fails the step with TensorFlow's kind of error."""
    with tf.Graph().as_default(), tf.Session() as session:
        words = tf.placeholder(tf.string, [None], name="words")
        picked = words[5]
        with pytest.raises(tf.errors.InvalidArgumentError, match="'words:0'.*out of bounds"):
            session.run(picked, {words: ["a", "b"]})


def test_sizes_of_wide_tensor_widen_nothing() -> None:
    """A tensor made of literals and the sizes of another is as wide as the literals, and has no gradient."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float64, [None])
        n = tf.shape(x)[0]
        made = [tf.fill([n, 2], 1.5), tf.range(n), tf.linspace(0.0, 1.0, n), tf.zeros([n])]
        assert [t.dtype for t in made] == [tf.float32, tf.int32, tf.float32, tf.float32]
        assert tf.gradients(made[0], [x]) == [None]
        with tf.Session() as sess:
            found = sess.run(made, {x: np.zeros(2)})
    assert [a.dtype.name for a in found] == ["float32", "int32", "float32", "float32"]
