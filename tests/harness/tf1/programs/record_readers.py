"""Readers, queues and queue runners under a Supervisor: the input pipelines of before tf.data."""

import tensorflow as tf

flags = tf.app.flags
flags.DEFINE_string("ps_hosts", "", "addresses of the parameter servers")
flags.DEFINE_string("worker_hosts", "", "addresses of the workers")
flags.DEFINE_string("job_name", "worker", "ps or worker")
flags.DEFINE_integer("task_index", 0, "number of the task")
flags.DEFINE_string("data_dir", "", "where the records are")
flags.DEFINE_string("log_dir", None, "where checkpoints go")
FLAGS = flags.FLAGS


def inputs(batch_size):
    files = tf.train.match_filenames_once(FLAGS.data_dir + "/*.tfrecord")
    names = tf.train.string_input_producer(files, num_epochs=4)
    _, record = tf.TFRecordReader().read(names)
    features = tf.parse_single_example(
        record,
        {"pixels": tf.FixedLenFeature([], tf.string), "label": tf.FixedLenFeature([], tf.int64)},
    )
    pixels = tf.decode_raw(features["pixels"], tf.uint8)
    pixels.set_shape([16])
    image = tf.cast(pixels, tf.float32) * (1.0 / 255)
    return tf.train.shuffle_batch(
        [image, features["label"]], batch_size, capacity=60, min_after_dequeue=20
    )


def main(_):
    cluster = tf.train.ClusterSpec(
        {"ps": FLAGS.ps_hosts.split(","), "worker": FLAGS.worker_hosts.split(",")}
    )
    server = tf.train.Server(cluster, job_name=FLAGS.job_name, task_index=FLAGS.task_index)
    if FLAGS.job_name == "ps":
        server.join()
    here = f"/job:worker/task:{FLAGS.task_index}"
    with tf.device(tf.train.replica_device_setter(worker_device=here, cluster=cluster)):
        images, labels = inputs(8)
        step = tf.Variable(0, name="global_step", trainable=False)
        weights = tf.Variable(tf.zeros([16, 4]), name="weights")
        logits = tf.matmul(images, weights)
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        )
        train = tf.train.GradientDescentOptimizer(0.5).minimize(loss, global_step=step)
    sv = tf.train.Supervisor(is_chief=FLAGS.task_index == 0, logdir=FLAGS.log_dir, global_step=step)
    batches = 0
    with sv.managed_session(server.target) as sess:
        try:
            while not sv.should_stop():
                last = sess.run([train, loss])[1]
                batches += 1
        except tf.errors.OutOfRangeError:
            print(f"batches {batches} loss {last:.4f}")
    sv.stop()


if __name__ == "__main__":
    tf.app.run()
