"""The tutorials' model of MNIST, which programs import: two hidden layers, by the tutorials' names."""

from __future__ import annotations

import math

import harness.tf1 as tf
import runtime as rt
from harness.tf1.tools.mnist_data import IMAGE_PIXELS, IMAGE_SIZE, NUM_CLASSES

__all__ = [
    "IMAGE_PIXELS",
    "IMAGE_SIZE",
    "NUM_CLASSES",
    "evaluation",
    "inference",
    "loss",
    "training",
]


def _layer(scope: str, inputs: rt.Tensor, size: int, units: int, hidden: bool) -> rt.Tensor:
    with tf.name_scope(scope):
        weights = tf.Variable(
            tf.truncated_normal([size, units], stddev=1.0 / math.sqrt(size)), name="weights"
        )
        biases = tf.Variable(tf.zeros([units]), name="biases")
        values: rt.Tensor = tf.matmul(inputs, weights) + biases
        return tf.nn.relu(values) if hidden else values


def inference(images: rt.Tensor, hidden1_units: int, hidden2_units: int) -> rt.Tensor:
    """Computes the logits, [batch, 10], of pictures, [batch, 784]."""
    first = _layer("hidden1", images, IMAGE_PIXELS, hidden1_units, True)
    second = _layer("hidden2", first, hidden1_units, hidden2_units, True)
    return _layer("softmax_linear", second, hidden2_units, NUM_CLASSES, False)


def loss(logits: rt.Tensor, labels: rt.Tensor) -> rt.Tensor:
    """Computes the mean cross entropy; labels are [batch]."""
    mean: rt.Tensor = tf.losses.sparse_softmax_cross_entropy(
        labels=tf.cast(labels, tf.int64), logits=logits
    )
    return mean


def training(loss: rt.Tensor, learning_rate: float) -> rt.Operation:
    """Makes a step of gradient descent, which counts a global step of its own, and a summary of the loss."""
    tf.summary.scalar("loss", loss)
    step = tf.Variable(0, name="global_step", trainable=False)
    train: rt.Operation = tf.train.GradientDescentOptimizer(learning_rate).minimize(
        loss, global_step=step
    )
    return train


def evaluation(logits: rt.Tensor, labels: rt.Tensor) -> rt.Tensor:
    """Counts the right answers of a batch, int32."""
    right: rt.Tensor = tf.reduce_sum(tf.cast(tf.nn.in_top_k(logits, labels, 1), tf.int32))
    return right
