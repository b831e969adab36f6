"""Files of records and what reads ahead: what the comparison with TensorFlow does not reach."""

import threading
from typing import Any

import numpy as np
import pytest

import harness.tf1 as tf
from harness.tf1.inputs.records import crc32c


@pytest.mark.parametrize("size", [0, 1, 3, 4, 4095, 4096, 4097, 10_000])
def test_the_crc_of_any_size_is_that_of_a_bit_by_bit_computation(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    assert crc32c(data) == crc ^ 0xFFFFFFFF


def test_the_known_crc() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_a_thread_that_reads_ahead_ends_with_its_iterator() -> None:
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


def test_an_error_of_a_generator_comes_out_of_the_thread() -> None:
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


def test_sizes_that_a_file_tells() -> None:
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


def test_a_generator_may_yield_one_buffer_again_and_again() -> None:
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
def test_a_generator_that_yields_a_number_out_of_range_names_it(dtype: Any, value: object) -> None:
    with tf.Graph().as_default():
        dataset = tf.data.Dataset.from_generator(lambda: iter([value]), dtype)
        item = dataset.make_one_shot_iterator().get_next()
        with (
            tf.Session() as sess,
            pytest.raises(tf.errors.InvalidArgumentError, match="could not be converted"),
        ):
            sess.run(item)


@pytest.mark.parametrize("cached", [False, True])
def test_a_fetched_element_is_the_programs_own(cached: bool) -> None:
    """Writing to a fetched element changes neither the dataset nor the array that it was made of."""
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
