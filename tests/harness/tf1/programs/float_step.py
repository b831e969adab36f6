"""Asynchronous training as many TensorFlow 1 programs have it: a step without a dtype, a Supervisor, summaries."""

import numpy as np

import harness.tf1 as tf

tf.app.flags.DEFINE_string("ps_hosts", "", "addresses of the parameter servers")
tf.app.flags.DEFINE_string("worker_hosts", "", "addresses of the workers")
tf.app.flags.DEFINE_string("job_name", "", "ps or worker")
tf.app.flags.DEFINE_integer("task_index", 0, "number of this task")
tf.app.flags.DEFINE_string("log_dir", "", "where events and checkpoints go")
FLAGS = tf.app.flags.FLAGS

cluster = tf.train.ClusterSpec(
    {"ps": FLAGS.ps_hosts.split(","), "worker": FLAGS.worker_hosts.split(",")}
)
server = tf.train.Server(cluster, job_name=FLAGS.job_name, task_index=FLAGS.task_index)
if FLAGS.job_name == "ps":
    server.join()

# A ps never comes here: join() does not return.
with tf.device(
    tf.train.replica_device_setter(
        worker_device=f"/job:worker/task:{FLAGS.task_index}", cluster=cluster
    )
):
    global_step = tf.get_variable(
        "global_step", [], initializer=tf.constant_initializer(0), trainable=False
    )
    x = tf.placeholder("float", [None, 2], name="points")
    y = tf.placeholder(tf.int32, [None], name="sides")
    w = tf.Variable(tf.zeros([2, 2]))
    logits = tf.matmul(x, w)
    cost = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    train_op = tf.train.GradientDescentOptimizer(0.5).minimize(cost, global_step=global_step)
    hits = tf.cast(tf.nn.in_top_k(logits, y, 1), "float")
    tf.summary.scalar("cost", cost)
    summary_op = tf.summary.merge_all()
    init_op = tf.global_variables_initializer()

sv = tf.train.Supervisor(
    is_chief=(FLAGS.task_index == 0),
    logdir=FLAGS.log_dir,
    global_step=global_step,
    init_op=init_op,
    summary_op=None,
)
rng = np.random.RandomState(FLAGS.task_index)
with sv.managed_session(server.target) as sess:
    writer = tf.summary.FileWriter(
        f"{FLAGS.log_dir}/worker{FLAGS.task_index}", graph=tf.get_default_graph()
    )
    for i in range(30):
        points = rng.randn(50, 2)
        # float64, as one-hot and class labels often are
        sides = np.floor((np.sign(points[:, 0]) + 1) / 2)
        _, loss, summary, step = sess.run(
            [train_op, cost, summary_op, global_step], {x: points, y: sides}
        )
        writer.add_summary(summary, i)
    writer.close()
    print(
        f"accuracy {sess.run(hits, {x: points, y: sides}).mean():.2f} step {step:.0f}", flush=True
    )
sv.stop()
print("done", flush=True)
