"""Queues and accumulators by TensorFlow's arguments."""

import numpy as np
import pytest

import harness.tf1 as tf


def test_list_is_components_of_element() -> None:
    """A list of values is an element's components, as in TensorFlow."""
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
        assert (two.name, two.shared_name) == ("fifo_queue", "two")
        with pytest.raises(ValueError, match="has 2 components, 1 were given"):
            two.enqueue([1])
        with pytest.raises(ValueError, match="names= is not in harness.tf1"):
            tf.FIFOQueue(1, tf.int32, names=["a"])


def test_queues_shuffle_pad_and_accumulate() -> None:
    """Queues shuffle and pad, and an accumulator gives the mean."""
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


def test_shared_name_makes_one_queue() -> None:
    """Queues with one shared name are one queue."""
    with tf.Graph().as_default():
        one = tf.FIFOQueue(10, tf.int32, shapes=[[]], shared_name="tokens")
        with tf.name_scope("worker"):
            other = tf.FIFOQueue(10, tf.int32, shapes=[[]], shared_name="tokens", name="mine")
        apart = tf.FIFOQueue(10, tf.int32, shapes=[[]], name="tokens")
        by_node_name = tf.FIFOQueue(10, tf.int32, shapes=[[]], shared_name="worker/lonely")
        with tf.name_scope("worker/"):
            lonely = tf.FIFOQueue(10, tf.int32, shapes=[[]], name="lonely")
        with tf.Session() as sess:
            sess.run([one.enqueue(1), lonely.enqueue(7)])
            sess.run(other.enqueue(2))
            assert sess.run([one.size(), other.size(), by_node_name.size(), lonely.size()]) == [
                2,
                2,
                1,
                1,
            ]
            assert sess.run(apart.size()) == 2, (
                "without a shared name the operation's name is the key"
            )
            assert sess.run(apart.dequeue()) == 1
        assert [q.name for q in (one, other, apart, lonely)] == [
            "fifo_queue",
            "worker/mine",
            "tokens",
            "worker/lonely",
        ]


def test_shared_name_makes_one_accumulator() -> None:
    """Accumulators with one shared name are one accumulator."""
    with tf.Graph().as_default():
        one = tf.ConditionalAccumulator(tf.float32, [], shared_name="mean")
        with tf.name_scope("worker"):
            other = tf.ConditionalAccumulator(tf.float32, [], shared_name="mean")
        with tf.Session() as sess:
            sess.run(other.apply_grad(tf.constant(3.0), local_step=0))
            assert sess.run(one.num_accumulated()) == 1


def test_kinds_have_separate_shared_names() -> None:
    """A queue and an accumulator with one shared name are two resources."""
    with tf.Graph().as_default():
        queue = tf.FIFOQueue(10, tf.int32, shapes=[[]], shared_name="both")
        mean = tf.ConditionalAccumulator(tf.float32, [], shared_name="both")
        with tf.Session() as sess:
            sess.run(queue.enqueue(1))
            assert sess.run([queue.size(), mean.num_accumulated()]) == [1, 0]


def test_unlike_shared_queue_is_refused() -> None:
    """A shared queue with another capacity is refused by its shared name."""
    with tf.Graph().as_default():
        tf.FIFOQueue(10, tf.int32, shapes=[[]], shared_name="tokens")
        with tf.Session() as sess:
            sess.run(tf.get_default_graph().get_operations()[0])
            other = tf.FIFOQueue(11, tf.int32, shapes=[[]], shared_name="tokens", name="larger")
            with pytest.raises(
                tf.errors.InvalidArgumentError, match="'tokens' is there with another capacity"
            ):
                sess.run(other.size())


def test_graphs_meet_in_shared_name() -> None:
    """Graphs of several sessions meet in a shared name."""
    server = tf.train.Server.create_local_server()
    with tf.Graph().as_default(), server:
        first = tf.FIFOQueue(10, tf.int32, shapes=[[]], shared_name="done")
        with tf.Session(server.target) as sess:
            sess.run(first.enqueue(5))
        with tf.Graph().as_default(), tf.name_scope("another/graph"):
            second = tf.FIFOQueue(10, tf.int32, shapes=[[]], shared_name="done", name="other")
            with tf.Session(server.target) as sess:
                assert sess.run(second.dequeue()) == 5
