"""Synchronous training with SyncReplicasOptimizer as it was begun in TensorFlow 1.0: chief queue runner and tokens.

The workers pull one number to different places; what all gradients together do is known, step by
step.
"""

import tensorflow as tf

flags = tf.app.flags
flags.DEFINE_string("ps_hosts", "", "addresses of the parameter servers")
flags.DEFINE_string("worker_hosts", "", "addresses of the workers")
flags.DEFINE_string("job_name", "", "ps or worker")
flags.DEFINE_integer("task_index", 0, "number of this task")
flags.DEFINE_string("log_dir", "", "where checkpoints go")
FLAGS = flags.FLAGS

RATE, STEPS, START = 0.25, 12, 8.0


def main(_):
    workers = FLAGS.worker_hosts.split(",")
    cluster = tf.train.ClusterSpec({"ps": FLAGS.ps_hosts.split(","), "worker": workers})
    server = tf.train.Server(cluster, job_name=FLAGS.job_name, task_index=FLAGS.task_index)
    if FLAGS.job_name == "ps":
        server.join()

    is_chief = FLAGS.task_index == 0
    device = f"/job:worker/task:{FLAGS.task_index}/cpu:0"
    with tf.device(
        tf.train.replica_device_setter(
            worker_device=device, ps_device="/job:ps/cpu:0", cluster=cluster
        )
    ):
        global_step = tf.Variable(0, name="global_step", trainable=False)
        place = tf.Variable(START, name="place")
        mine = tf.placeholder(tf.float32, [], name="mine")
        loss = tf.square(place - mine) / 2  # the gradient is the way to it
        opt = tf.train.SyncReplicasOptimizer(
            tf.train.GradientDescentOptimizer(RATE),
            replicas_to_aggregate=len(workers),
            total_num_replicas=len(workers),
            name="together",
        )
        train_step = opt.minimize(loss, global_step=global_step)
        local_init = opt.chief_init_op if is_chief else opt.local_step_init_op
        tokens, runner = opt.get_init_tokens_op(), opt.get_chief_queue_runner()
        init = tf.global_variables_initializer()

    sv = tf.train.Supervisor(
        is_chief=is_chief,
        logdir=FLAGS.log_dir,
        init_op=init,
        local_init_op=local_init,
        ready_for_local_init_op=opt.ready_for_local_init_op,
        recovery_wait_secs=1,
        global_step=global_step,
    )
    sess = sv.prepare_or_wait_for_session(server.target)
    if is_chief:
        sess.run(tokens)
        sv.start_queue_runners(sess, [runner])

    step = 0
    while not sv.should_stop() and step < STEPS:
        _, step = sess.run([train_step, global_step], {mine: 2.0 * FLAGS.task_index})
    mean = sum(2.0 * i for i in range(len(workers))) / len(workers)
    wanted = mean + (START - mean) * (1 - RATE) ** step
    print(f"step {step} place {sess.run(place):.5f} wanted {wanted:.5f}")
    sv.stop()


if __name__ == "__main__":
    tf.app.run()
