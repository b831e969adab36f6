"""Policy gradient in TensorFlow 1's style: each of 40 episodes has a length of its own.

    python -m harness.tf1 benchmarks/many_sizes.py
    .venv-bench/bin/python benchmarks/many_sizes.py

Prints the seconds of the whole training, compilations included. The pole is a stand-in whose
episodes have given lengths, so that both runs do the same work.
"""

import time

import numpy as np
import tensorflow.compat.v1 as tf

EPISODES = 40
SHORTEST, LONGEST = 10, 200


def main() -> None:
    """Trains, and prints the seconds and the losses of the first and last episode."""
    states = tf.placeholder(tf.float32, [None, 4])
    actions = tf.placeholder(tf.float32, [None, 1])
    advantages = tf.placeholder(tf.float32, [None, 1])
    weights = tf.get_variable(
        "weights", initializer=np.linspace(-1, 1, 128, dtype="f").reshape(4, 32)
    )
    bias = tf.get_variable("bias", initializer=np.zeros(32, "f"))
    out = tf.get_variable("out", initializer=np.linspace(1, -1, 32, dtype="f").reshape(32, 1))
    right = tf.nn.sigmoid(tf.matmul(tf.nn.relu(tf.matmul(states, weights) + bias), out))
    likelihood = actions * tf.log(right + 1e-6) + (1 - actions) * tf.log(1 - right + 1e-6)
    loss = -tf.reduce_sum(likelihood * advantages)
    train = tf.train.AdamOptimizer(0.01).minimize(loss)

    drawn = np.random.default_rng(0)
    lengths = drawn.permutation(np.linspace(SHORTEST, LONGEST, EPISODES).astype(int))
    losses = []
    began = time.perf_counter()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for length in lengths:
            state, seen, taken = drawn.normal(size=4), [], []
            for _ in range(length):
                chance = session.run(right, {states: state[None]})[0, 0]
                seen.append(state)
                taken.append([float(drawn.random() < chance)])
                state = 0.9 * state + 0.1 * drawn.normal(size=4)
            falling = np.linspace(1, -1, length)[:, None]
            fed = {states: seen, actions: taken, advantages: falling}
            losses.append(session.run([loss, train], fed)[0])
    secs = time.perf_counter() - began
    print(f"{EPISODES} episodes: {secs:.2f} s, loss {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    with tf.Graph().as_default():
        main()
