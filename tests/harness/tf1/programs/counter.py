"""A parameter server and workers that add to one variable, each so many times."""

import harness.tf1 as tf

flags = tf.app.flags
flags.DEFINE_string("ps_hosts", "", "addresses of the parameter servers, separated by commas")
flags.DEFINE_string("worker_hosts", "", "addresses of the workers, separated by commas")
flags.DEFINE_string("job_name", "", "ps or worker")
flags.DEFINE_integer("task_index", 0, "number of this task in its job")
flags.DEFINE_integer("times", 100, "how often a worker adds")
FLAGS = flags.FLAGS


def main(_):
    cluster = tf.train.ClusterSpec(
        {"ps": FLAGS.ps_hosts.split(","), "worker": FLAGS.worker_hosts.split(",")}
    )
    server = tf.train.Server(cluster, job_name=FLAGS.job_name, task_index=FLAGS.task_index)
    if FLAGS.job_name == "ps":
        server.join()
        return

    with tf.device("/job:ps/task:0"):
        total = tf.Variable(0, name="total")
        finished = tf.Variable(0, name="finished")
    with tf.device(f"/job:worker/task:{FLAGS.task_index}"):
        one = tf.constant(1)
    add = total.assign_add(one)
    finish = finished.assign_add(1)

    with tf.Session(server.target) as sess:
        if FLAGS.task_index == 0:
            sess.run(tf.initialize_all_variables())
        else:
            missing = tf.report_uninitialized_variables()
            while len(sess.run(missing)):
                pass
        for _ in range(FLAGS.times):
            sess.run(add)
        sess.run(finish)
        workers = len(FLAGS.worker_hosts.split(","))
        while sess.run(finished) < workers:
            pass
        print("total", sess.run(total), flush=True)


if __name__ == "__main__":
    tf.app.run()
