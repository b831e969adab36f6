"""Files of records and what reads ahead: what the comparison with TensorFlow does not reach."""

import threading
from typing import Any

import numpy as np
import pytest

import harness.tf1 as tf
from harness.tf1.inputs.records import crc32c


@pytest.mark.parametrize("size", [0, 1, 3, 4, 4095, 4096, 4097, 10_000])
def test_crc_matches_bitwise_computation(size: int) -> None:
    """The CRC of any size matches a bit-by-bit computation."""
    data = np.random.default_rng(size).bytes(size)
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    assert crc32c(data) == crc ^ 0xFFFFFFFF


def test_crc_matches_known_value() -> None:
    """The CRC of the standard text has its known value."""
    assert crc32c(b"123456789") == 0xE3069283


def test_prefetch_thread_ends_with_iterator() -> None:
    """The thread that reads ahead ends with its iterator."""
    with tf.Graph().as_default():
        iterator = tf.data.Dataset.range(1000).prefetch(2).make_initializable_iterator()
        item = iterator.get_next()
        with tf.Session() as sess:
            sess.run(iterator.initializer)
            assert sess.run(item) == 0
            (thread,) = [t for t in threading.enumerate() if t.name == "prefetch"]
            sess.run(iterator.initializer)
            thread.join(60)
            assert not thread.is_alive() and sess.run(item) == 0


def test_generator_error_reaches_the_step() -> None:
    """An error of a generator is raised in the step."""

    def numbers() -> Any:
        yield 1
        raise KeyError("broken")

    with tf.Graph().as_default():
        dataset = tf.data.Dataset.from_generator(numbers, tf.int32, []).prefetch(3)
        item = dataset.make_one_shot_iterator().get_next()
        with tf.Session() as sess:
            assert sess.run(item) == 1
            with pytest.raises(KeyError, match="broken"):
                sess.run(item)


def test_shapes_from_files_are_used() -> None:
    """Shapes that a file tells are used for reshapes in the step."""
    with tf.Graph().as_default():
        height, pixels = tf.py_func(lambda: np.int64(3), [], tf.int64), tf.constant(np.arange(12))
        height.set_shape([])
        picture = tf.py_func(lambda: np.arange(12), [], tf.int64)
        decoded = tf.decode_raw(tf.constant(bytes(12)), tf.uint8)
        lines = tf.string_to_number("3", tf.int32)
        shaped = tf.reshape(decoded, [lines, 4])
        with tf.Session() as sess:
            assert shaped.shape == (None, 4) and sess.run(shaped).shape == (3, 4)
            assert sess.run([height, pixels, picture])[0] == 3


def test_generator_may_reuse_its_buffer() -> None:
    """A generator may yield one buffer again and again."""
    buffer = np.zeros(2, np.float32)

    def rows() -> Any:
        for number in range(3):
            buffer[:] = number
            yield buffer

    with tf.Graph().as_default():
        dataset = tf.data.Dataset.from_generator(rows, tf.float32, [2]).batch(3)
        item = dataset.make_one_shot_iterator().get_next()
        with tf.Session() as sess:
            np.testing.assert_array_equal(sess.run(item), [[0, 0], [1, 1], [2, 2]])


@pytest.mark.parametrize(
    ("dtype", "value"), [(tf.uint8, 300), (tf.uint8, [-1]), (tf.float32, 10**400)]
)
def test_out_of_range_element_is_refused(dtype: Any, value: object) -> None:
    """A generator's number out of range is refused."""
    with tf.Graph().as_default():
        dataset = tf.data.Dataset.from_generator(lambda: iter([value]), dtype)
        item = dataset.make_one_shot_iterator().get_next()
        with (
            tf.Session() as sess,
            pytest.raises(tf.errors.InvalidArgumentError, match="could not be converted"),
        ):
            sess.run(item)


@pytest.mark.parametrize("cached", [False, True])
def test_fetched_element_may_be_written(cached: bool) -> None:
    """A write to a fetched element changes neither the dataset nor its source."""
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    want = rows.copy()
    with tf.Graph().as_default():
        dataset = tf.data.Dataset.from_tensor_slices(rows)
        dataset = dataset.cache() if cached else dataset
        item = dataset.repeat().make_one_shot_iterator().get_next()
        with tf.Session() as sess:
            for _ in range(2):
                for row in want:
                    element = sess.run(item)
                    np.testing.assert_array_equal(element, row)
                    element[:] = -1
    np.testing.assert_array_equal(rows, want)
