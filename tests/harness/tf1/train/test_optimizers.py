"""tf.train's optimizers: three steps of each against its formula written down in numpy; rates that are tensors."""

import pathlib
from collections.abc import Callable

import numpy as np
import pytest

import harness
import harness.tf1 as tf

START = np.array([1.0, -2.0, 3.0], np.float32)
STEPS = 3


def _gradient(v: np.ndarray) -> np.ndarray:
    return 2 * v * np.array([1, 2, 3])  # of sum(c v^2)


def _trained(optimizer: Callable[[], tf.train.Optimizer]) -> np.ndarray:
    with tf.Graph().as_default():
        v = tf.Variable(START, name="v")
        op = optimizer().minimize(tf.reduce_sum(tf.square(v) * [1.0, 2.0, 3.0]))
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            for _ in range(STEPS):
                sess.run(op)
            return sess.run(v)


def _sgd(v: np.ndarray) -> np.ndarray:
    for _ in range(STEPS):
        v = v - 0.1 * _gradient(v)
    return v


def _momentum(v: np.ndarray, nesterov: bool = False) -> np.ndarray:
    a = np.zeros(3)
    for _ in range(STEPS):
        g = _gradient(v)
        a = 0.9 * a + g
        v = v - 0.1 * (g + 0.9 * a if nesterov else a)
    return v


def _adagrad(v: np.ndarray) -> np.ndarray:
    a = np.full(3, 0.1)
    for _ in range(STEPS):
        g = _gradient(v)
        a = a + g * g
        v = v - 0.1 * g / np.sqrt(a)
    return v


def _adam(v: np.ndarray) -> np.ndarray:
    m = s = np.zeros(3)
    for t in range(1, STEPS + 1):
        g = _gradient(v)
        m, s = 0.9 * m + 0.1 * g, 0.999 * s + 0.001 * g * g
        v = v - 0.1 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(s) + 1.0)
    return v


def _rmsprop(v: np.ndarray, centered: bool = False) -> np.ndarray:
    s, mean, a = np.ones(3), np.zeros(3), np.zeros(3)
    for _ in range(STEPS):
        g = _gradient(v)
        s, mean = 0.8 * s + 0.2 * g * g, 0.8 * mean + 0.2 * g
        a = 0.5 * a + 0.1 * g / np.sqrt(s - (mean * mean if centered else 0) + 1e-2)
        v = v - a
    return v


def _adadelta(v: np.ndarray) -> np.ndarray:
    s = u = np.zeros(3)
    for _ in range(STEPS):
        g = _gradient(v)
        s = 0.9 * s + 0.1 * g * g
        step = np.sqrt(u + 1e-2) / np.sqrt(s + 1e-2) * g
        u = 0.9 * u + 0.1 * step * step
        v = v - 0.5 * step
    return v


@pytest.mark.parametrize(
    ("optimizer", "formula"),
    [
        (lambda: tf.train.GradientDescentOptimizer(0.1), _sgd),
        (lambda: tf.train.MomentumOptimizer(0.1, 0.9), _momentum),
        (
            lambda: tf.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
            lambda v: _momentum(v, True),
        ),
        (lambda: tf.train.AdagradOptimizer(0.1), _adagrad),
        (lambda: tf.train.AdamOptimizer(0.1, epsilon=1.0), _adam),
        (lambda: tf.train.RMSPropOptimizer(0.1, 0.8, 0.5, 1e-2), _rmsprop),
        (
            lambda: tf.train.RMSPropOptimizer(0.1, 0.8, 0.5, 1e-2, centered=True),
            lambda v: _rmsprop(v, True),
        ),
        (lambda: tf.train.AdadeltaOptimizer(0.5, 0.9, 1e-2), _adadelta),
    ],
    ids=["sgd", "momentum", "nesterov", "adagrad", "adam", "rmsprop", "centered", "adadelta"],
)
def test_optimizer_follows_its_formula(optimizer: Callable, formula: Callable) -> None:
    """An optimizer follows its formula for three steps."""
    np.testing.assert_allclose(_trained(optimizer), formula(START.astype(np.float64)), rtol=2e-5)


def test_learning_rate_may_be_tensor() -> None:
    """A learning rate may be fed or follow the global step."""
    with tf.Graph().as_default():
        step = tf.Variable(0, trainable=False, name="global_step")
        v, w = tf.Variable([1.0]), tf.Variable([1.0])
        fed = tf.placeholder(tf.float32, [])
        decayed = tf.train.exponential_decay(1.0, step, 1, 0.5, staircase=True)
        by_feed = tf.train.MomentumOptimizer(fed, 0.5).minimize(tf.reduce_sum(v))
        by_step = tf.train.GradientDescentOptimizer(decayed).minimize(
            tf.reduce_sum(w), global_step=step
        )
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            sess.run(by_feed, {fed: 0.0})
            assert sess.run(v).tolist() == [1.0]
            sess.run(by_feed, {fed: 1.0})
            # the first gradient is in the momentum, the first rate is not
            assert sess.run(v).tolist() == [-0.5]
            for _ in range(3):
                sess.run(by_step)
            assert sess.run([w, step]) == [[1 - 1 - 0.5 - 0.25], 3]


def test_minimize_has_tensorflows_arguments() -> None:
    """minimize has TensorFlow's arguments, and slots have TensorFlow's names."""
    with tf.Graph().as_default():
        v, u = tf.Variable([1.0, 2.0], name="v"), tf.Variable([3.0], name="u")
        step = tf.Variable(0, trainable=False)
        optimizer = tf.train.AdamOptimizer(name="Mine")
        loss = tf.reduce_sum(v) + tf.reduce_sum(u)
        op = optimizer.minimize(
            loss,
            step,
            [v],
            gate_gradients=optimizer.GATE_OP,
            colocate_gradients_with_ops=True,
            name="train_it",
        )
        assert op.name.startswith("train_it/") and optimizer.get_name() == "Mine"
        assert optimizer.get_slot(v, "m").name == "v/Mine:0" and optimizer.get_slot(u, "m") is None
        pairs = optimizer.compute_gradients(loss, [u], grad_loss=2.0)
        clipped = optimizer.apply_gradients([(tf.clip_by_value(g, -1.0, 1.0), v) for g, v in pairs])
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            assert sess.run(pairs[0][0]).tolist() == [2.0]
            sess.run([op, clipped])
            assert sess.run(step) == 1 and sess.run(u)[0] == pytest.approx(2.999)
        with pytest.raises(ValueError, match="there are no variables to train"):
            optimizer.minimize(loss, var_list=[])


@pytest.mark.parametrize(
    "make", [tf.train.AdamOptimizer, lambda: tf.train.MomentumOptimizer(0.5, 0.5)]
)
def test_float64_variables_have_float64_slots(make: Callable) -> None:
    """A variable of float64 has slots of float64, also where the loss is a float32."""
    with tf.Graph().as_default(), tf.Session() as sess:
        v = tf.Variable(np.float64(2.0), name="v")
        optimizer = make()
        step = optimizer.minimize(tf.square(tf.cast(v, tf.float32)))
        sess.run(tf.global_variables_initializer())
        sess.run(step)
        assert sess.run(v) < 2.0
        assert {slot.dtype.name for slot in optimizer.variables()} <= {"float64", "int32"}


def test_slots_restore_from_their_former_names(tmp_path: pathlib.Path) -> None:
    """Slots restore from checkpoints of 0.1, which had optax's names, each optimizer from its own."""
    former = ("v/adam/count", "v/adam/m", "v/adam/v")
    former += tuple(f"{name}_1" for name in former)
    with tf.Graph().as_default(), tf.Session() as sess:
        tf.Variable(0.0, name="v")
        for number, name in enumerate(former, 1):
            tf.Variable(number if "count" in name else float(number), name=name)
        sess.run(tf.global_variables_initializer())
        saved = tf.train.Saver().save(sess, tmp_path / "model.ckpt")
    with tf.Graph().as_default(), tf.Session() as sess:
        v = tf.Variable(1.0, name="v")
        optimizers = tf.train.AdamOptimizer(), tf.train.AdamOptimizer()
        for optimizer in optimizers:
            optimizer.minimize(tf.square(v))
        saver = tf.train.Saver()
        saver.restore(sess, saved)
        slots = [o.get_slot(v, name) for o in optimizers for name in ("adam/count", "m", "v")]
        assert sess.run(slots) == [1, 2, 3, 4, 5, 6]
        again = saver.save(sess, tmp_path / "later.ckpt")
    names = [name for name, _ in tf.train.list_variables(again)]
    assert names == sorted([slot.op.name for slot in slots] + ["v"])


def test_centered_slots_restore_by_former_names(tmp_path: pathlib.Path) -> None:
    """The slots of a centered RMSProp restore from a checkpoint of 0.1."""
    former = "v/r_std_dev/mu", "v/r_std_dev/nu", "v/trace/trace"
    with tf.Graph().as_default(), tf.Session() as sess:
        for number, name in enumerate(("v", *former)):
            tf.Variable(float(number), name=name)
        sess.run(tf.global_variables_initializer())
        saved = tf.train.Saver().save(sess, tmp_path / "model.ckpt")
    with tf.Graph().as_default(), tf.Session() as sess:
        v = tf.Variable(1.0, name="v")
        optimizer = tf.train.RMSPropOptimizer(0.1, momentum=0.5, centered=True)
        optimizer.minimize(tf.square(v))
        tf.train.Saver().restore(sess, saved)
        slots = [optimizer.get_slot(v, name) for name in ("mg", "rms", "momentum")]
        assert sess.run(slots) == [1, 2, 3]


def test_parts_have_slots_of_each_optimizer(tmp_path: pathlib.Path) -> None:
    """Two optimizers of partitioned variables have keys of their own, restored into other parts, and from those of 0.1."""

    def build(parts: int) -> list[tf.Variable]:
        sizes = [6 // parts] * parts
        table = [tf.Variable(tf.zeros([n]), name=f"table/part_{i}") for i, n in enumerate(sizes)]
        harness.partitioned("table", table)
        optimizers = tf.train.MomentumOptimizer(0.1, 0.5), tf.train.MomentumOptimizer(0.1, 0.5)
        for optimizer in optimizers:
            optimizer.minimize(tf.add_n([tf.reduce_sum(part) for part in table]))
        return [o.get_slot(part, "momentum") for o in optimizers for part in table]

    values = np.arange(12, dtype=np.float32)
    for number, keys in enumerate(
        (["table/Momentum", "table/Momentum_1"], ["table/trace/trace", "table/trace/trace_1"])
    ):
        path = tmp_path / f"{number}.ckpt"
        with tf.Graph().as_default(), tf.Session() as sess:
            slots = build(2)
            sess.run(tf.global_variables_initializer())
            sess.run([tf.assign(s, v) for s, v in zip(slots, values.reshape(4, 3), strict=True)])
            if number == 0:
                saved = tf.train.Saver().save(sess, path)
            else:
                whole = {"table": tf.Variable(tf.zeros([6]), name="whole")}
                whole |= dict(
                    zip(keys, (tf.Variable(v) for v in values.reshape(2, 6)), strict=True)
                )
                sess.run([v.initializer for v in whole.values()])
                saved = tf.train.Saver(whole).save(sess, path)
        assert {name for name, _ in tf.train.list_variables(saved)} == {"table", *keys}
        with tf.Graph().as_default(), tf.Session() as sess:
            slots = build(3)
            tf.train.Saver().restore(sess, saved)
            np.testing.assert_array_equal(sess.run(slots), values.reshape(6, 2))


def test_decays_follow_their_formulas() -> None:
    """Decays of the learning rate follow their formulas."""
    with tf.Graph().as_default():
        step = tf.placeholder(tf.int64, [])
        decays = {
            "exponential": tf.train.exponential_decay(0.1, step, 10, 0.9),
            "staircase": tf.train.exponential_decay(0.1, step, 10, 0.9, True),
            "natural": tf.train.natural_exp_decay(0.1, step, 10, 0.9),
            "inverse": tf.train.inverse_time_decay(0.1, step, 10, 0.9),
            "polynomial": tf.train.polynomial_decay(0.1, step, 20, 0.01, 2.0),
            "cycle": tf.train.polynomial_decay(0.1, step, 10, 0.01, cycle=True),
            "piecewise": tf.train.piecewise_constant(step, [10, 15], [1.0, 0.5, 0.1]),
            "cosine": tf.train.cosine_decay(0.1, step, 30),
        }
        with tf.Session() as sess:
            got = sess.run(decays, {step: 15})
            assert sess.run(decays["piecewise"], {step: 10}) == 1.0
    expected = {
        "exponential": 0.1 * 0.9**1.5,
        "staircase": 0.1 * 0.9,
        "natural": 0.1 * np.exp(-0.9 * 1.5),
        "inverse": 0.1 / (1 + 0.9 * 1.5),
        "polynomial": 0.09 * (1 - 15 / 20) ** 2 + 0.01,
        "cycle": 0.09 * (1 - 15 / 20) + 0.01,
        "piecewise": 0.5,
        "cosine": 0.1 * 0.5 * (1 + np.cos(np.pi / 2)),
    }
    assert got == {name: pytest.approx(value, rel=1e-5) for name, value in expected.items()}
    assert all(value.dtype == np.float32 for value in got.values())


def test_moving_average_follows_its_formula() -> None:
    """A moving average follows its formula and has TensorFlow's names."""
    with tf.Graph().as_default():
        v = tf.Variable(1.0, name="v")
        average = tf.train.ExponentialMovingAverage(0.9)
        keep = average.apply([v])
        later = tf.train.ExponentialMovingAverage(0.9, num_updates=0, name="Later").apply([v])
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            sess.run(v.assign(2.0))
            sess.run([keep, later])
            assert sess.run(average.average(v)) == pytest.approx(1.1)
            assert sess.run("v/Later:0") == pytest.approx(1.9)  # the decay is (1 + 0) / (10 + 0)
        assert average.average_name(v) == "v/ExponentialMovingAverage"
        assert set(average.variables_to_restore()) == {"v/ExponentialMovingAverage", "v/Later"}


def test_averages_lie_on_the_ps() -> None:
    """The average of a variable or a tensor lies on the ps."""
    with tf.Graph().as_default():
        setter = tf.train.replica_device_setter(1, worker_device="/job:worker/task:0/cpu:0")
        with tf.device(setter):
            v = tf.get_variable("v", [2])
            mean = tf.reduce_mean(tf.placeholder(tf.float32, [3, 2]), axis=0)
            averages = tf.train.ExponentialMovingAverage(0.9)
            with tf.device("/job:worker/task:0/cpu:0"):
                averages.apply([v])
            averages.apply([mean])
        assert (
            averages.average(v).device
            == v.device
            == averages.average(mean).device
            == "/job:ps/task:0"
        )
