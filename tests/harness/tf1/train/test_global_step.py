"""A global step as TensorFlow 1's most copied program makes it: get_variable without a dtype, so it is float32."""

import logging
import os
from typing import Any

import numpy as np
import pytest

import harness.tf1 as tf


def _model(dtype: Any = None) -> tuple[Any, Any]:
    options = {} if dtype is None else {"dtype": dtype}
    step = tf.get_variable(
        "global_step", [], initializer=tf.constant_initializer(0), trainable=False, **options
    )
    w = tf.get_variable("w", [], initializer=tf.constant_initializer(5.0))
    tf.summary.scalar("w", w.read_value())
    return step, tf.train.GradientDescentOptimizer(0.1).minimize(w * w, global_step=step)


def _steps_in(logdir: Any) -> list[int]:
    return sorted(
        int(os.path.basename(path))
        for path in tf.train.get_checkpoint_state(logdir).all_model_checkpoint_paths
    )


def _events(logdir: Any) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(logdir)).Reload()


@pytest.mark.parametrize("found", [False, True], ids=["given", "found by its name"])
def test_supervisor_accepts_float_step(tmp_path: Any, found: bool, caplog: Any) -> None:
    """A Supervisor counts whole steps with a float32 global step, and warns of its limit."""
    logdir = str(tmp_path)

    def train(until: int) -> Any:
        with tf.Graph().as_default():
            step, train_op = _model()
            options = {} if found else {"global_step": step}
            sv = tf.train.Supervisor(
                logdir=logdir, save_model_secs=600, save_summaries_secs=600, **options
            )
            assert sv.global_step is step
            with sv.managed_session() as sess:
                while not sv.should_stop():
                    _, now = sess.run([train_op, step])
                    sv.summary_computed(sess, sess.run(sv.summary_op))
                    if now >= until:
                        sv.request_stop()
            return now

    with caplog.at_level(logging.WARNING):
        now = train(3)
    assert (now.dtype, now) == (np.float32, 3)
    assert "'global_step:0' is float32, which stands still at 16777216" in caplog.text
    steps = _steps_in(logdir)
    # the first one is saved beside the first steps, or the last
    assert steps[-1] == 3 and len(steps) <= 2
    now = train(5)
    assert now == 5 and _steps_in(logdir)[-1] == 5
    assert {4, 5} <= {event.step for event in _events(logdir).Scalars("w")}


def test_monitored_session_accepts_float_step(tmp_path: Any) -> None:
    """Monitored sessions and their hooks count with a float32 global step."""
    with tf.Graph().as_default():
        step, train_op = _model()
        hooks = [
            tf.train.StopAtStepHook(num_steps=4),
            tf.train.StepCounterHook(2, output_dir=str(tmp_path)),
        ]
        with tf.train.MonitoredTrainingSession(
            hooks=hooks,
            checkpoint_dir=str(tmp_path),
            save_checkpoint_secs=600,
            save_summaries_steps=1,
        ) as sess:
            while not sess.should_stop():
                sess.run(train_op)
            assert tf.train.get_global_step() is step
    assert _steps_in(str(tmp_path)) == [0, 4]
    assert [event.step for event in _events(tmp_path).Scalars("w")] == [1, 2, 3, 4]


def test_synchronous_training_accepts_float_step() -> None:
    """Synchronous training counts with a float32 global step."""
    with tf.Graph().as_default():
        step = tf.get_variable(
            "global_step", [], initializer=tf.constant_initializer(0), trainable=False
        )
        w = tf.get_variable("w", [], initializer=tf.constant_initializer(5.0))
        sync = tf.train.SyncReplicasOptimizer(
            tf.train.GradientDescentOptimizer(0.1), 1, replica_id=0
        )
        train_op = sync.minimize(w * w, global_step=step)
        with tf.train.Supervisor(global_step=step).managed_session() as sess:
            assert [sess.run([train_op, step])[1] for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64, tf.float64, tf.bfloat16], ids=repr)
def test_any_numeric_step_counts(dtype: Any) -> None:
    """A global step of any numeric dtype counts."""
    with tf.Graph().as_default():
        step, train_op = _model(dtype)
        with tf.train.Supervisor(global_step=step, save_model_secs=0).managed_session() as sess:
            sess.run(train_op)
            assert tf.train.global_step(sess, step) == 1


def test_text_is_no_global_step() -> None:
    """A variable of strings is no global step."""
    with tf.Graph().as_default():
        words = tf.Variable("zero", name="global_step", trainable=False)
        assert tf.train.get_global_step() is None
        with pytest.raises(ValueError, match="global_step is a variable that holds a number"):
            tf.train.Supervisor(global_step=words)
