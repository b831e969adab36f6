"""One process of the single-operation benchmark: TensorFlow's distributed runtime (tf.compat.v1)."""

import functools
import json
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow.compat.v1 as tf


def main(job: str, cluster_json: str, sizes_json: str, seconds: float) -> None:
    """Serves as the ps, or measures push+assign_add and pull+reduce for each size in bytes."""
    tf.disable_eager_execution()
    tf.disable_resource_variables()
    server = tf.train.Server(tf.train.ClusterSpec(json.loads(cluster_json)), job_name=job, task_index=0)
    if job == "ps":
        server.join()
    operations = {}
    for size in json.loads(sizes_json):
        with tf.device("/job:ps/task:0"):
            variable = tf.Variable(tf.zeros([size // 4]), name=f"v{size}")
        with tf.device("/job:worker/task:0"):
            value = tf.placeholder(tf.float32, [size // 4])
            total = tf.reduce_sum(variable)
        operations[size] = (variable.assign_add(value).op, total, value)
    session = tf.Session(server.target)
    session.run(tf.global_variables_initializer())
    print("READY", flush=True)
    for line in sys.stdin:
        size = int(line)
        push, pull, value = operations[size]
        array = np.ones(size // 4, np.float32)
        pushing = session.make_callable(push, [value])
        pulling = session.make_callable(pull, [])
        push_ms = timed(functools.partial(pushing, array), seconds)
        print(json.dumps({"push": push_ms, "pull": timed(pulling, seconds)}), flush=True)


def timed(call, seconds):
    """Median milliseconds of one call."""
    for _ in range(5):
        call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return float(np.median(times) * 1e3)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
