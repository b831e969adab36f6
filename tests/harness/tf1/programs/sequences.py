"""Local kinds: word vectors, and a recurrent network over sequences."""

import numpy as np
import tensorflow as tf


def word_vectors():
    """Words that stand beside each other come to lie beside each other."""
    inputs, beside = tf.placeholder(tf.int32, [None]), tf.placeholder(tf.int32, [None])
    vectors = tf.Variable(tf.random_uniform([8, 6], -1.0, 1.0, seed=1))
    weights = tf.Variable(tf.truncated_normal([8, 6], stddev=0.4, seed=2))
    logits = tf.matmul(tf.nn.embedding_lookup(vectors, inputs), weights, transpose_b=True)
    loss = tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=beside, logits=logits)
    )
    train = tf.train.GradientDescentOptimizer(1.0).minimize(loss)
    unit = tf.nn.l2_normalize(vectors, 1)
    near = tf.matmul(unit, unit, transpose_b=True)
    pairs = np.array(
        [(a, b) for group in (range(4), range(4, 8)) for a in group for b in group if a != b]
    )
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        for _ in range(200):
            sess.run(train, {inputs: pairs[:, 0], beside: pairs[:, 1]})
        found = sess.run(near)
    print("words %s" % (found[:4, :4].mean() > found[:4, 4:].mean() + 0.3))


def recurrent():
    """Whether a sequence has more ones than zeros."""
    tf.reset_default_graph()
    tf.set_random_seed(3)
    x, y = tf.placeholder(tf.float32, [None, 6, 1]), tf.placeholder(tf.int32, [None])
    outputs, _ = tf.nn.dynamic_rnn(tf.contrib.rnn.BasicLSTMCell(12), x, dtype=tf.float32)
    logits = tf.layers.dense(outputs[:, -1], 2)
    loss = tf.losses.sparse_softmax_cross_entropy(y, logits)
    train = tf.train.AdamOptimizer(0.02).minimize(loss)
    right = tf.reduce_mean(
        tf.cast(tf.equal(tf.cast(tf.argmax(logits, 1), tf.int32), y), tf.float32)
    )
    rows = ((np.arange(64)[:, None] >> np.arange(6)) & 1).astype(np.float32)[:, :, None]
    labels = (rows.sum((1, 2)) > 3).astype(np.int32)
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        for _ in range(150):
            sess.run(train, {x: rows, y: labels})
        print("recurrent %s" % (sess.run(right, {x: rows, y: labels}) > 0.9))


if __name__ == "__main__":
    word_vectors()
    recurrent()
