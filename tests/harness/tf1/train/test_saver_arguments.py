"""tf.train.Saver and tf.summary.FileWriter by the arguments that programs give them."""

import glob
from typing import Any

import pytest

import harness.tf1 as tf


def test_saver_takes_tensorflows_arguments(tmp_path: Any) -> None:
    """A Saver takes all of TensorFlow's arguments and refuses those that mean nothing here."""
    path = str(tmp_path / "model.ckpt")
    with tf.Graph().as_default():
        v = tf.Variable(1.0, name="v")
        saver = tf.train.Saver(
            [v], reshape=False, sharded=True, max_to_keep=2, name="mine", restore_sequentially=True,
            write_version=tf.train.SaverDef.V2, save_relative_paths=True,
        )  # fmt: skip
        by_position = tf.train.Saver({"v": v}, False, False, 3, 2.0, "saver")
        with tf.Session() as sess:
            sess.run(v.initializer)
            first = saver.save(sess, path, 1, "checkpoint", "meta", False)
            sess.run(v.assign(2.0))
            second = saver.save(
                sess, path, global_step=2, write_meta_graph=False, meta_graph_suffix="graph"
            )
            assert tf.train.latest_checkpoint(str(tmp_path)) == second != first
            by_position.restore(sess, first)
            assert sess.run(v) == 1
            assert saver.last_checkpoints == [first, second]
            with pytest.raises(ValueError, match="latest_filename='best'.*a directory of its own"):
                saver.save(sess, path, 3, latest_filename="best")
            with pytest.raises(ValueError, match="write_state=False"):
                saver.save(sess, path, 3, write_state=False)
        with pytest.raises(ValueError, match="reshape=True"):
            tf.train.Saver(reshape=True)


def test_writer_takes_tensorflows_arguments(tmp_path: Any) -> None:
    """A FileWriter takes TensorFlow's arguments and writes the graph."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tf.Graph().as_default() as graph:
        tf.constant(1.0, name="shown")
        with tf.summary.FileWriter(str(tmp_path), None, 10, 60, graph, ".mine"):
            pass
        assert tf.train.SummaryWriter is tf.summary.FileWriter
    (file,) = glob.glob(str(tmp_path / "events.out.tfevents.*"))
    assert file.endswith(".mine")
    assert [node.name for node in EventAccumulator(str(tmp_path)).Reload().Graph().node] == [
        "shown"
    ]
