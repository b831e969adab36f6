"""Powers of two matrices on two devices of this machine, added on a third; the time is told."""

import datetime

import numpy as np

import harness.tf1 as tf

N, POWER = 200, 4
config = tf.ConfigProto(log_device_placement=True, device_count={"CPU": 2})
a = np.random.RandomState(0).rand(N, N).astype("float32") / N
b = np.random.RandomState(1).rand(N, N).astype("float32") / N


def power(matrix, n):
    return matrix if n == 1 else tf.matmul(matrix, power(matrix, n - 1))


parts = []
with tf.device("/cpu:0"):
    parts.append(power(tf.placeholder(tf.float32, [N, N], name="a"), POWER))
with tf.device("/cpu:1"):
    parts.append(power(tf.placeholder(tf.float32, [N, N], name="b"), POWER))
with tf.device("/cpu:0"):
    total = tf.add_n(parts)

metadata = tf.RunMetadata()
with tf.Session(config=config) as sess:
    names = [device.name for device in sess.list_devices()]
    started = datetime.datetime.now()
    got = sess.run(
        total,
        {"a:0": a, "b:0": b},
        options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE),
        run_metadata=metadata,
    )
    took = datetime.datetime.now() - started
wanted = np.linalg.matrix_power(a, POWER) + np.linalg.matrix_power(b, POWER)
np.testing.assert_allclose(got, wanted, rtol=1e-3)
ran = {
    stats.device.rpartition("/device:")[2]
    for stats in metadata.step_stats.dev_stats
    if len(stats.node_stats)
}
print("devices", len(names), "ran on", sorted(ran), "in", took.total_seconds())
