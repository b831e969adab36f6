"""Between-graph training of a line with any number of parameter servers and workers, written for TensorFlow 1."""

import numpy as np

import harness.tf1 as tf

flags = tf.app.flags
flags.DEFINE_string("ps_hosts", "", "addresses of the parameter servers, separated by commas")
flags.DEFINE_string("worker_hosts", "", "addresses of the workers, separated by commas")
flags.DEFINE_string("job_name", "", "ps or worker")
flags.DEFINE_integer("task_index", 0, "number of this task in its job")
flags.DEFINE_string("logdir", "", "where checkpoints and events go")
flags.DEFINE_integer("last_step", 300, "where training ends")
flags.DEFINE_boolean("sync", False, "average the gradients of all workers")
FLAGS = flags.FLAGS


def main(_):
    ps_hosts = FLAGS.ps_hosts.split(",")
    worker_hosts = FLAGS.worker_hosts.split(",")
    cluster = tf.train.ClusterSpec({"ps": ps_hosts, "worker": worker_hosts})
    server = tf.train.Server(cluster, job_name=FLAGS.job_name, task_index=FLAGS.task_index)
    if FLAGS.job_name == "ps":
        server.join()
        return

    is_chief = FLAGS.task_index == 0
    setter = tf.train.replica_device_setter(
        worker_device=f"/job:worker/task:{FLAGS.task_index}", cluster=cluster
    )
    with tf.device(setter):
        global_step = tf.Variable(0, name="global_step", trainable=False)
        with tf.variable_scope("line"):
            slope = tf.get_variable("slope", [], initializer=tf.zeros_initializer())
            offset = tf.get_variable("offset", [], initializer=tf.constant_initializer(0.0))
        x = tf.placeholder(tf.float32, [None], name="x")
        y = tf.placeholder(tf.float32, [None], name="y")
        loss = tf.reduce_mean(tf.square(slope * x + offset - y))
        rate = tf.train.exponential_decay(0.2, global_step, 100, 0.9)
        optimizer = tf.train.GradientDescentOptimizer(rate)
        if FLAGS.sync:
            optimizer = tf.train.SyncReplicasOptimizer(
                optimizer,
                replicas_to_aggregate=len(worker_hosts),
                total_num_replicas=len(worker_hosts),
            )
        train_op = optimizer.minimize(loss, global_step=global_step)
        tf.scalar_summary("loss", tf.identity(slope))
        saver = tf.train.Saver()
        summary_op = tf.merge_all_summaries()
        init_op = tf.initialize_all_variables()

    sv = tf.train.Supervisor(
        is_chief=is_chief,
        logdir=FLAGS.logdir,
        init_op=init_op,
        summary_op=summary_op,
        saver=saver,
        global_step=global_step,
        save_model_secs=60,
    )
    config = tf.ConfigProto(allow_soft_placement=True, log_device_placement=False)
    rng = np.random.RandomState(FLAGS.task_index)
    with sv.managed_session(server.target, config=config) as sess:
        step = 0
        while not sv.should_stop() and step < FLAGS.last_step:
            batch = rng.uniform(-1, 1, 32)
            _, loss_value, step = sess.run(
                [train_op, loss, global_step], feed_dict={x: batch, y: 3 * batch - 1}
            )
        print("devices", slope.device, offset.device, global_step.device)
        found = sess.run([slope, offset])
        print(f"line {found[0]:.3f} {found[1]:.3f} step {step}", flush=True)


if __name__ == "__main__":
    tf.app.run()
