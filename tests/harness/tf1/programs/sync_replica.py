"""Synchronous training with the hook made before the training operation, in the style of TensorFlow 1's examples."""

import harness.tf1 as tf

flags = tf.app.flags
flags.DEFINE_string("ps_hosts", "", "addresses of the parameter servers")
flags.DEFINE_string("worker_hosts", "", "addresses of the workers")
flags.DEFINE_string("job_name", "", "ps or worker")
flags.DEFINE_integer("task_index", 0, "number of this task")
FLAGS = flags.FLAGS


def main(_):
    ps, workers = FLAGS.ps_hosts.split(","), FLAGS.worker_hosts.split(",")
    cluster = tf.train.ClusterSpec({"ps": ps, "worker": workers})
    server = tf.train.Server(cluster, job_name=FLAGS.job_name, task_index=FLAGS.task_index)
    if FLAGS.job_name == "ps":
        server.join()

    is_chief = FLAGS.task_index == 0
    with tf.device(
        tf.train.replica_device_setter(
            worker_device=f"/job:worker/task:{FLAGS.task_index}", cluster=cluster
        )
    ):
        global_step = tf.train.get_or_create_global_step()
        target = tf.get_variable("target", [], initializer=tf.constant_initializer(8.0))
        # the workers pull to 0 and to 2: the mean is at 1
        loss = tf.square(target - float(2 * FLAGS.task_index))
        opt = tf.train.SyncReplicasOptimizer(
            tf.train.GradientDescentOptimizer(0.1),
            replicas_to_aggregate=len(workers),
            total_num_replicas=len(workers),
        )
        sync_hook = opt.make_session_run_hook(is_chief)
        train_op = opt.minimize(loss, global_step=global_step)

    hooks = [sync_hook, tf.train.StopAtStepHook(last_step=40)]
    with tf.train.MonitoredTrainingSession(
        master=server.target, is_chief=is_chief, hooks=hooks
    ) as sess:
        while not sess.should_stop():
            _, value, step = sess.run([train_op, target, global_step])
        print(f"target {value:.2f} step {step}", flush=True)


if __name__ == "__main__":
    tf.app.run()
