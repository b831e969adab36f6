"""The hook of SyncReplicasOptimizer where programs make it: before the training operation."""

import pytest

import harness.tf1 as tf


def _model() -> tuple[object, object, object]:
    step = tf.train.get_or_create_global_step()
    w = tf.get_variable("w", [], initializer=tf.constant_initializer(4.0))
    return (
        step,
        w,
        tf.train.SyncReplicasOptimizer(tf.train.GradientDescentOptimizer(0.25), 1, replica_id=0),
    )


def test_hook_may_precede_training_operation() -> None:
    """The hook may be made before the training operation."""
    with tf.Graph().as_default():
        step, w, sync = _model()
        hook = sync.make_session_run_hook(True)
        train_op = sync.minimize(w * w, global_step=step)
        hooks = [hook, tf.train.StopAtStepHook(last_step=2)]
        with tf.train.MonitoredTrainingSession(is_chief=True, hooks=hooks) as sess:
            while not sess.should_stop():
                value, _ = sess.run([w, train_op])
        assert value in (2, 4)


def test_missing_operation_is_named_at_start() -> None:
    """A missing training operation is named when the session begins."""
    with tf.Graph().as_default():
        _, _, sync = _model()
        hook = sync.make_session_run_hook(True)
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="apply_gradients should be called before"
        ):
            tf.train.MonitoredTrainingSession(hooks=[hook])


def test_too_few_tokens_are_refused() -> None:
    """Too few tokens for the first step are refused."""
    with tf.Graph().as_default():
        step, w, _ = _model()
        sync = tf.train.SyncReplicasOptimizer(
            tf.train.GradientDescentOptimizer(0.25), 3, 1, replica_id=0
        )
        hook = sync.make_session_run_hook(True, num_tokens=1)
        sync.minimize(w * w, global_step=step)
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="Too few tokens to finish the first step: 1"
        ):
            tf.train.MonitoredTrainingSession(hooks=[hook])


def test_training_operation_returns_the_step() -> None:
    """The training operation returns the step as in TensorFlow."""
    with tf.Graph().as_default():
        step, w, sync = _model()
        train_op = sync.minimize(w * w, global_step=step)
        summary = tf.summary.histogram("step", train_op)
        with tf.control_dependencies([train_op]):
            after = tf.identity(w)
        with tf.train.MonitoredTrainingSession(
            is_chief=True, hooks=[sync.make_session_run_hook(True)]
        ) as sess:
            assert sess.run(train_op) == 1
            assert sess.run([train_op, step, after]) == [2, 2, 1.0]
            assert sess.run(summary)
