"""Input pipelines of queues: every element once per epoch, in batches, until the input ends."""

from typing import Any

import numpy as np
import pytest

import harness.tf1 as tf


def run_out(fetches: Any) -> list[Any]:
    """What a tensor or several give until the input ends."""
    found = []
    with tf.Session() as sess:
        sess.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        coord = tf.train.Coordinator()
        threads = tf.train.start_queue_runners(sess, coord)
        try:
            while not coord.should_stop():
                found.append(sess.run(fetches))
        except tf.errors.OutOfRangeError:
            coord.request_stop()
        coord.join(threads)
    return found


def test_rows_come_once_per_epoch() -> None:
    """Every row comes once in an epoch, in order without a shuffle."""
    with tf.Graph().as_default():
        rows = np.arange(10.0, dtype=np.float32).reshape(5, 2)
        queue = tf.train.input_producer(rows, num_epochs=2, shuffle=False)
        assert [row.tolist() for row in run_out(queue.dequeue())] == rows.tolist() * 2
    with tf.Graph().as_default():
        numbers = [
            int(n)
            for n in run_out(tf.train.range_input_producer(6, num_epochs=3, seed=1).dequeue())
        ]
        epochs = [numbers[i : i + 6] for i in (0, 6, 12)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(6))] * 3 and len(
            {tuple(e) for e in epochs}
        ) > 1


def test_string_producer_yields_strings() -> None:
    """string_input_producer yields its strings."""
    with tf.Graph().as_default():
        queue = tf.train.string_input_producer(["a", "b", "c"], num_epochs=1, shuffle=False)
        assert run_out(queue.dequeue()) == [b"a", b"b", b"c"]


def test_slices_stay_together_in_batches() -> None:
    """Slices of several tensors stay together, and the last batch may be smaller."""
    with tf.Graph().as_default():
        images, labels = np.arange(14.0).reshape(7, 2), np.arange(7)
        image, label = tf.train.slice_input_producer(
            [images, labels], num_epochs=1, shuffle=True, seed=2
        )
        batch = tf.train.batch({"x": image, "y": label}, 3, allow_smaller_final_batch=True)
        found = run_out(batch)
        assert [len(b["y"]) for b in found] == [3, 3, 1]
        for b in found:
            np.testing.assert_array_equal(b["x"][:, 0], 2 * b["y"])
        assert sorted(int(n) for b in found for n in b["y"]) == list(range(7))


def test_batches_split_and_shuffle_rows() -> None:
    """batch splits rows with enqueue_many, and shuffle_batch mixes them."""
    with tf.Graph().as_default():
        row = tf.train.input_producer(
            np.arange(8).reshape(4, 2), num_epochs=1, shuffle=False
        ).dequeue()
        assert [b.tolist() for b in run_out(tf.train.batch(row, 4, enqueue_many=True))] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
        ]
    with tf.Graph().as_default():
        number = tf.train.range_input_producer(40, num_epochs=1, shuffle=False).dequeue()
        (batch,) = run_out(
            tf.train.shuffle_batch([number], 40, capacity=50, min_after_dequeue=30, seed=3)
        )
        assert sorted(batch.tolist()) == list(range(40)) != batch.tolist()


def test_restarted_runners_add_nothing() -> None:
    """Runners that are started again after the last epoch find the end again, without an error."""
    with tf.Graph().as_default(), tf.Session() as sess:
        number = tf.train.range_input_producer(3, num_epochs=2, shuffle=False).dequeue()
        sess.run(tf.local_variables_initializer())
        for wanted in ([0, 1, 2] * 2, []):
            coord = tf.train.Coordinator()
            threads = tf.train.start_queue_runners(sess, coord)
            found = []
            with pytest.raises(tf.errors.OutOfRangeError):
                while True:
                    found.append(int(sess.run(number)))
            coord.request_stop()
            coord.join(threads)
            assert found == wanted


def test_impossible_inputs_are_refused() -> None:
    """Inputs that cannot be are refused by name."""
    with tf.Graph().as_default():
        with pytest.raises(ValueError, match="num_epochs must be > 0"):
            tf.train.range_input_producer(3, num_epochs=0)
        with pytest.raises(ValueError, match="non-null"):
            tf.train.string_input_producer([])
        with pytest.raises(ValueError, match="at least one row"):
            tf.train.input_producer(np.zeros((0, 2)))
        with pytest.raises(ValueError, match="batch: the shape of 'x:0' must be known"):
            tf.train.batch(tf.placeholder(tf.float32, [None], name="x"), 2)
        with pytest.raises(ValueError, match="dynamic_pad"):
            tf.train.batch(tf.constant(1.0), 2, dynamic_pad=True)
