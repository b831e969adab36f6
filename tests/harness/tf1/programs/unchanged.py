"""A program as they were written for TensorFlow 1: every name by the module that it had there."""

import sys

import tensorflow as tf
import tensorflow.contrib.slim as slim
from tensorflow.contrib.session_bundle import exporter
from tensorflow.core.framework import summary_pb2
from tensorflow.examples.tutorials.mnist import input_data
from tensorflow.python.client import device_lib, timeline
from tensorflow.python.framework import ops
from tensorflow.python.ops import array_ops
from tensorflow.python.ops import variable_scope as vs
from tensorflow.python.platform import flags as platform_flags
from tensorflow.python.platform import gfile, tf_logging
from tensorflow.python.saved_model import builder as saved_model_builder

flags = tf.app.flags
flags.DEFINE_string("data_dir", "", "where the data is")
flags.DEFINE_string("log_dir", "", "where the events go")
FLAGS = flags.FLAGS


def main(_):
    assert isinstance(tf.constant(0), ops.Tensor) and vs.get_variable is tf.get_variable
    assert array_ops.reshape is tf.reshape and platform_flags.FLAGS.data_dir == FLAGS.data_dir
    assert gfile.Exists(FLAGS.data_dir) and device_lib.list_local_devices()[0].device_type == "CPU"
    tf_logging.info("begun")
    mnist = input_data.read_data_sets(FLAGS.data_dir, one_hot=True, validation_size=10)
    x = tf.placeholder(tf.float32, [None, 784])
    y_ = tf.placeholder(tf.float32, [None, 10])
    with slim.arg_scope([slim.fully_connected], weights_regularizer=slim.l2_regularizer(1e-4)):
        y = slim.fully_connected(x, 10, activation_fn=None)
    loss = tf.losses.softmax_cross_entropy(y_, y)
    step = tf.contrib.framework.get_or_create_global_step()
    train = tf.train.AdamOptimizer(0.01).minimize(loss, global_step=step)
    writer = tf.summary.FileWriter(FLAGS.log_dir)
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        losses = []
        for i in range(30):
            images, labels = mnist.train.next_batch(20)
            metadata = tf.RunMetadata()
            options = tf.RunOptions(
                trace_level=tf.RunOptions.FULL_TRACE if i == 29 else tf.RunOptions.NO_TRACE
            )
            losses.append(sess.run([train, loss], {x: images, y_: labels}, options, metadata)[1])
            value = tf.Summary.Value(tag="loss", simple_value=float(losses[-1]))
            writer.add_summary(summary_pb2.Summary(value=[value]), i)
        assert (
            "traceEvents" in timeline.Timeline(metadata.step_stats).generate_chrome_trace_format()
        )
    writer.close()
    assert losses[-1] < losses[0]
    for use in (
        lambda: exporter.Exporter(None),
        lambda: saved_model_builder.SavedModelBuilder("x"),
        lambda: tf.contrib.factorization.KMeansClustering,
        lambda: tf.image.sample_distorted_bounding_box,
    ):
        try:
            use()
            sys.exit("it is there?")
        except AttributeError as error:
            print(error)
    print("argv", sys.argv[1:])


if __name__ == "__main__":
    tf.app.run()
