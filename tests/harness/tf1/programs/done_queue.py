"""Workers that tell the ps by a queue that they are done, and the ps that ends by itself when all have."""

import harness.tf1 as tf

flags = tf.app.flags
flags.DEFINE_string("ps_hosts", "", "addresses of the parameter servers")
flags.DEFINE_string("worker_hosts", "", "addresses of the workers")
flags.DEFINE_string("job_name", "", "ps or worker")
flags.DEFINE_integer("task_index", 0, "number of this task")
FLAGS = flags.FLAGS


def done_queue(index, workers):
    """The queue on a ps; everybody finds it by its shared name."""
    with tf.device(f"/job:ps/task:{index}"):
        return tf.FIFOQueue(workers, tf.int32, shared_name=f"done_queue{index}")


def main(_):
    ps, workers = FLAGS.ps_hosts.split(","), FLAGS.worker_hosts.split(",")
    cluster = tf.train.ClusterSpec({"ps": ps, "worker": workers})
    server = tf.train.Server(cluster, job_name=FLAGS.job_name, task_index=FLAGS.task_index)
    if FLAGS.job_name == "ps":
        queue = done_queue(FLAGS.task_index, len(workers))
        with tf.Session(server.target) as sess:
            seen = sorted(int(sess.run(queue.dequeue())) for _ in workers)
        print("done", seen, flush=True)
        return

    with tf.device(tf.train.replica_device_setter(cluster=cluster)):
        total = tf.get_variable("total", [], tf.int32, initializer=tf.zeros_initializer())
    with tf.name_scope("ending"):
        tell = [done_queue(i, len(workers)).enqueue(FLAGS.task_index) for i in range(len(ps))]
    with tf.Session(server.target) as sess:
        if FLAGS.task_index == 0:
            sess.run(tf.global_variables_initializer())
        while len(sess.run(tf.report_uninitialized_variables())):
            pass
        for _ in range(10):
            sess.run(total.assign_add(1))
        sess.run(tell)
    print("told", flush=True)


if __name__ == "__main__":
    tf.app.run()
