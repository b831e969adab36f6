"""Queues and accumulators by TensorFlow's arguments."""

import numpy as np
import pytest

import harness.tf1 as tf


def test_a_list_is_a_list_of_components() -> None:
    with tf.Graph().as_default():
        one = tf.FIFOQueue(10, tf.float32, shapes=[[]], name="one")
        two = tf.FIFOQueue(10, [tf.int32, tf.string], [[2], []], shared_name="two")
        ops = [one.enqueue(1.0), one.enqueue([tf.constant(2.0)]), one.enqueue_many([[3.0, 4.0]])]
        pair = two.enqueue([[5, 6], "word"])
        with tf.Session() as sess:
            for op in ops:
                sess.run(op)
            assert sess.run(one.dequeue_many(4)).tolist() == [1, 2, 3, 4]
            sess.run(pair)
            assert sess.run(two.size()) == 1
            numbers, word = sess.run(list(two.dequeue()))
            assert (numbers.tolist(), word) == ([5, 6], b"word")
            sess.run(one.close())
            with pytest.raises(tf.errors.OutOfRangeError):
                sess.run(one.dequeue())
        assert two.name == "two"
        with pytest.raises(ValueError, match="has 2 components, 1 were given"):
            two.enqueue([1])
        with pytest.raises(ValueError, match="names= is not in harness.tf1"):
            tf.FIFOQueue(1, tf.int32, names=["a"])


def test_shuffling_padding_and_accumulating() -> None:
    with tf.Graph().as_default():
        shuffled = tf.RandomShuffleQueue(20, 0, tf.int32, shapes=[()], seed=1)
        padded = tf.PaddingFIFOQueue(4, [tf.int32], [[None]])
        mean = tf.ConditionalAccumulator(tf.float32, [2])
        with tf.Session() as sess:
            sess.run(shuffled.enqueue_many([np.arange(20)]))
            drawn = sess.run(shuffled.dequeue_many(20)).tolist()
            assert sorted(drawn) == list(range(20)) != drawn
            sess.run(padded.enqueue([[1]]))
            sess.run(padded.enqueue([[2, 3]]))
            assert sess.run(padded.dequeue_many(2)).tolist() == [[1, 0], [2, 3]]
            sess.run(mean.apply_grad(tf.constant([2.0, 4.0]), local_step=0))
            assert sess.run(mean.take_grad(1)).tolist() == [2.0, 4.0]
