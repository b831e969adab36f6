"""Partitioned variables: where their parts lie, and what a checkpoint has of them."""

import pathlib

import numpy as np
import pytest

import harness.tf1 as tf
from tests.runtime.kit import addresses


def make_parts(parts: int) -> tf.PartitionedVariable:
    """Makes a variable [7, 2] in parts."""
    values = tf.random_uniform_initializer(seed=1)
    return tf.get_variable(
        "w", [7, 2], initializer=values, partitioner=tf.fixed_size_partitioner(parts)
    )


def test_parts_lie_on_all_ps() -> None:
    """The parts of a variable lie on one ps after the other."""
    cluster = addresses(ps=2, worker=1)
    with tf.Graph().as_default(), tf.device(tf.train.replica_device_setter(cluster=cluster)):
        assert [part.device for part in make_parts(3)] == [f"/job:ps/task:{i}" for i in (0, 1, 0)]


def test_checkpoint_fits_other_parts(tmp_path: pathlib.Path) -> None:
    """A checkpoint has one array with the slots of all parts, and fits another number of parts."""
    found = []
    for parts in (3, 2):
        with tf.Graph().as_default():
            w = make_parts(parts)
            loss = tf.reduce_sum(tf.square(w))
            train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
            saver = tf.train.Saver()
            with tf.Session() as sess:
                sess.run(tf.global_variables_initializer())
                if parts == 3:
                    sess.run(train)
                    path = saver.save(sess, str(tmp_path / "model"))
                else:
                    saver.restore(sess, path)
                sess.run(train)
                found.append(sess.run(w))
    np.testing.assert_array_equal(*found)
    assert tf.train.list_variables(str(tmp_path)) == [("w", [7, 2]), ("w/Momentum", [7, 2])]


def test_scope_gives_its_partitioner() -> None:
    """A scope's partitioner holds for vectors and matrices below, and for no scalar."""
    with tf.Graph().as_default(), tf.variable_scope("s") as scope:
        scope.set_partitioner(tf.fixed_size_partitioner(2))
        assert len(tf.get_variable("w", [4])) == 2
        assert isinstance(tf.get_variable("b", []), tf.Variable)
        with pytest.raises(ValueError, match="s/c: a partitioned variable needs a fully defined"):
            tf.get_variable("c", initializer=[1.0, 2.0])
        with pytest.raises(ValueError, match="along its first axis only"):
            tf.get_variable("d", [2, 2], partitioner=tf.fixed_size_partitioner(2, axis=1))
