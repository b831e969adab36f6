"""A classifier of MNIST's digits on one parameter server, watched by a FileWriter, written for TensorFlow 1."""

import numpy as np

import harness.tf1 as tf
from models.mnist import data

flags = tf.app.flags
flags.DEFINE_string("ps_host", "", "address of the parameter server")
flags.DEFINE_string("worker_host", "", "address of the worker")
flags.DEFINE_string("job_name", "", "ps or worker")
flags.DEFINE_string("logdir", "", "where events go")
flags.DEFINE_integer("steps", 150, "how many batches")
FLAGS = flags.FLAGS


def main(_):
    cluster = tf.train.ClusterSpec({"ps": [FLAGS.ps_host], "worker": [FLAGS.worker_host]})
    server = tf.train.Server(cluster, FLAGS.job_name, 0)
    if FLAGS.job_name == "ps":
        server.join()
        return

    mnist = data.load()
    pixels = int(np.prod(mnist.train.images.shape[1:]))
    with tf.device(tf.train.replica_device_setter(cluster=cluster)):
        global_step = tf.get_variable(
            "global_step", [], tf.int32, initializer=tf.constant_initializer(0), trainable=False
        )
        with tf.name_scope("input"):
            x = tf.placeholder(tf.float32, shape=[None, pixels], name="x-input")
            y_ = tf.placeholder(tf.float32, shape=[None, 10], name="y-input")
        tf.set_random_seed(1)
        with tf.name_scope("weights"):
            w1 = tf.Variable(tf.random_normal([pixels, 100], stddev=0.05))
            w2 = tf.Variable(tf.random_normal([100, 10], stddev=0.05))
        with tf.name_scope("biases"):
            b1 = tf.Variable(tf.zeros([100]))
            b2 = tf.Variable(tf.zeros([10]))
        with tf.name_scope("softmax"):
            a2 = tf.nn.sigmoid(tf.add(tf.matmul(x, w1), b1))
            y = tf.nn.softmax(tf.add(tf.matmul(a2, w2), b2))
        with tf.name_scope("cross_entropy"):
            entropy = tf.reduce_mean(-tf.reduce_sum(y_ * tf.log(y), reduction_indices=[1]))
        with tf.name_scope("train"):
            train_op = tf.train.GradientDescentOptimizer(0.5).minimize(
                entropy, global_step=global_step
            )
        with tf.name_scope("accuracy"):
            correct = tf.equal(tf.argmax(y, 1), tf.argmax(y_, 1))
            accuracy = tf.reduce_mean(tf.cast(correct, tf.float32))
        tf.summary.scalar("cost", entropy)
        tf.summary.scalar("accuracy", accuracy)
        summary_op = tf.summary.merge_all()
        init_op = tf.global_variables_initializer()

    sv = tf.train.Supervisor(is_chief=True, global_step=global_step, init_op=init_op)
    with sv.prepare_or_wait_for_session(server.target) as sess:
        writer = tf.summary.FileWriter(FLAGS.logdir, graph=tf.get_default_graph())
        batches = data.Batches(mnist.train, 100, seed=1)
        for _ in range(FLAGS.steps):
            images, labels = batches.next()
            feed = {x: images.reshape(len(images), -1), y_: np.eye(10)[labels]}
            _, cost, summary, step = sess.run(
                [train_op, entropy, summary_op, global_step], feed_dict=feed
            )
            writer.add_summary(summary, step)
        test = {
            x: mnist.test.images.reshape(len(mnist.test), -1),
            y_: np.eye(10)[mnist.test.labels],
        }
        print("accuracy", sess.run(accuracy, feed_dict=test), "source", mnist.source)
        writer.close()
    sv.stop()
    print("done", flush=True)


if __name__ == "__main__":
    tf.app.run()
