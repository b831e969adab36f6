"""Each worker reads its share of files of records by tf.data, in a monitored session with a hook of its own."""

import tensorflow as tf

flags = tf.app.flags
flags.DEFINE_string("ps_hosts", "", "addresses of the parameter servers")
flags.DEFINE_string("worker_hosts", "", "addresses of the workers")
flags.DEFINE_string("job_name", "worker", "ps or worker")
flags.DEFINE_integer("task_index", 0, "number of the task")
flags.DEFINE_string("data_dir", "", "where the records are")
flags.DEFINE_string("log_dir", None, "where checkpoints go")
FLAGS = flags.FLAGS


def parse(record):
    features = tf.parse_single_example(
        record,
        {"pixels": tf.FixedLenFeature([], tf.string), "label": tf.FixedLenFeature([], tf.int64)},
    )
    pixels = tf.reshape(tf.decode_raw(features["pixels"], tf.uint8), [16])
    return tf.cast(pixels, tf.float32) / 255.0, tf.cast(features["label"], tf.int32)


class Elements(tf.train.SessionRunHook):
    """Counts what this worker has read."""

    def __init__(self, labels):
        self.labels, self.seen = labels, []

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(self.labels)

    def after_run(self, run_context, run_values):
        self.seen += run_values.results.tolist()


def main(_):
    cluster = tf.train.ClusterSpec(
        {"ps": FLAGS.ps_hosts.split(","), "worker": FLAGS.worker_hosts.split(",")}
    )
    server = tf.train.Server(cluster, job_name=FLAGS.job_name, task_index=FLAGS.task_index)
    if FLAGS.job_name == "ps":
        server.join()
    workers = len(FLAGS.worker_hosts.split(","))
    here = f"/job:worker/task:{FLAGS.task_index}"
    with tf.device(tf.train.replica_device_setter(worker_device=here, cluster=cluster)):
        files = tf.gfile.Glob(FLAGS.data_dir + "/*.tfrecord")
        dataset = tf.data.TFRecordDataset(files).shard(workers, FLAGS.task_index).map(parse)
        images, labels = (
            dataset.shuffle(20).repeat(10).batch(7).prefetch(2).make_one_shot_iterator().get_next()
        )
        step = tf.train.get_or_create_global_step()
        weights = tf.get_variable("weights", [16, 4], initializer=tf.zeros_initializer())
        loss = tf.losses.sparse_softmax_cross_entropy(labels, tf.matmul(images, weights))
        train = tf.train.GradientDescentOptimizer(0.5).minimize(loss, global_step=step)
    count = Elements(labels)
    with tf.train.MonitoredTrainingSession(
        server.target, is_chief=FLAGS.task_index == 0, checkpoint_dir=FLAGS.log_dir, hooks=[count]
    ) as sess:
        while not sess.should_stop():
            last = sess.run([train, loss])[1]
    print(f"read {len(count.seen)} of {sorted(set(count.seen))} loss {last:.4f}")


if __name__ == "__main__":
    tf.app.run()
