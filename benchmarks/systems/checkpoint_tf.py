"""TensorFlow's Saver (tf.compat.v1) on the model of `benchmarks/checkpoint.py`: how long a save holds up training.

TensorFlow 1's training loop calls the Saver between two steps and goes on when it returns. Runs in an environment with
tensorflow-cpu; shares nothing with this project. As a worker it prints one JSON object.
"""

import json
import os
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow.compat.v1 as tf  # noqa: E402

ARRAY_BYTES = 32 << 20


def main(job, index, cluster_json, options_json):
    """Serves as a ps, or measures as the worker."""
    tf.disable_eager_execution()
    tf.disable_resource_variables()
    cluster = tf.train.ClusterSpec(json.loads(cluster_json))
    server = tf.train.Server(cluster, job_name=job, task_index=index)
    if job == "ps":
        server.join()
    options = json.loads(options_json)
    ps = cluster.num_tasks("ps")
    large, touched = [], []
    for i in range(max(ps, (options["mb"] << 20) // ARRAY_BYTES)):
        with tf.device(f"/job:ps/task:{i % ps}"):
            large.append(tf.Variable(tf.random_normal([ARRAY_BYTES // 4]), name=f"w{i}"))
    for i in range(ps):
        with tf.device(f"/job:ps/task:{i}"):
            touched.append(tf.Variable(tf.zeros([options["touched_kb"] * 256]), name=f"t{i}"))
    with tf.device("/job:ps/task:0"):
        step = tf.train.get_or_create_global_step()
    train = tf.group(*[t.assign_add(tf.ones(t.shape)) for t in touched], tf.assign_add(step, 1))
    saver = tf.train.Saver(sharded=True, max_to_keep=1)
    with tf.Session(server.target) as session:
        session.run(tf.global_variables_initializer())
        for _ in range(50):
            session.run(train)
        blocked, restores = [], []
        path = os.path.join(options["directory"], "model.ckpt")
        saved = saver.save(session, path, global_step=step)
        for _ in range(options["saves"]):
            session.run(train)
            began = time.perf_counter()
            saved = saver.save(session, path, global_step=step)
            blocked.append(time.perf_counter() - began)
        for _ in range(3):
            began = time.perf_counter()
            saver.restore(session, saved)
            restores.append(time.perf_counter() - began)
    size = sum(t.shape.num_elements() * 4 for t in (*large, *touched))
    found = {
        "system": "tensorflow",
        "ps": ps,
        "mb": round(size / 2**20),
        "blocked_ms_p50": round(statistics.median(blocked) * 1e3, 1),
        "blocked_ms_max": round(max(blocked) * 1e3, 1),
        "save_gb_s": round(size / min(blocked) / 1e9, 2),
        "restore_gb_s": round(size / min(restores) / 1e9, 2),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
