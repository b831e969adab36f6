"""A3C's kind: each worker has a network of its own, pulls the shared one, and pushes gradients; a thread plays."""

import threading

import numpy as np
import tensorflow as tf

flags = tf.app.flags
flags.DEFINE_string("ps_hosts", "", "addresses of the parameter servers")
flags.DEFINE_string("worker_hosts", "", "addresses of the workers")
flags.DEFINE_string("job_name", "worker", "ps or worker")
flags.DEFINE_integer("task_index", 0, "number of the task")
FLAGS = flags.FLAGS


class Network:
    """A policy over two actions."""

    def __init__(self, scope, collections=None):
        with tf.variable_scope(scope):
            self.state = tf.placeholder(tf.float32, [None, 3], "state")
            self.action = tf.placeholder(tf.int32, [None], "action")
            self.reward = tf.placeholder(tf.float32, [None], "reward")
            weights = tf.get_variable(
                "weights", [3, 2], initializer=tf.zeros_initializer(), collections=collections
            )
            logits = tf.matmul(self.state, weights)
            self.policy = tf.nn.softmax(logits)
            chosen = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels=self.action, logits=logits
            )
            self.loss = tf.reduce_mean(chosen * self.reward)
            self.variables = [weights]


def play(sess, network, steps, out):
    draw = np.random.RandomState(FLAGS.task_index)
    for _ in range(steps):
        states = np.eye(3, dtype=np.float32)[draw.randint(0, 3, 16)]
        odds = sess.run(network.policy, {network.state: states})
        actions = (draw.uniform(size=16) < odds[:, 1]).astype(np.int32)
        rewards = np.where(actions == states[:, 0], 1.0, -1.0)
        out.append((states, actions, rewards.astype(np.float32)))


def main(_):
    cluster = tf.train.ClusterSpec(
        {"ps": FLAGS.ps_hosts.split(","), "worker": FLAGS.worker_hosts.split(",")}
    )
    server = tf.train.Server(cluster, job_name=FLAGS.job_name, task_index=FLAGS.task_index)
    if FLAGS.job_name == "ps":
        server.join()
    here = f"/job:worker/task:{FLAGS.task_index}"
    with tf.device(tf.train.replica_device_setter(worker_device=here, cluster=cluster)):
        step = tf.train.get_or_create_global_step()
        shared = Network("shared")
    with tf.device(here):
        own = Network("own", [tf.GraphKeys.LOCAL_VARIABLES])
        pull = tf.group(
            *[tf.assign(a, b) for a, b in zip(own.variables, shared.variables, strict=False)]
        )
        gradients = tf.clip_by_global_norm(tf.gradients(own.loss, own.variables), 5.0)[0]
        push = tf.train.RMSPropOptimizer(0.05).apply_gradients(
            zip(gradients, shared.variables, strict=False), global_step=step
        )
    with tf.train.MonitoredTrainingSession(
        server.target, is_chief=FLAGS.task_index == 0, hooks=[tf.train.StopAtStepHook(last_step=80)]
    ) as sess:
        while not sess.should_stop():
            sess.run(pull)
            batch = []
            thread = threading.Thread(target=play, args=(sess, own, 1, batch))
            thread.start()
            thread.join()
            if sess.should_stop() or not batch:
                break
            states, actions, rewards = batch[0]
            policy = sess.run(
                [push, shared.policy],
                {
                    own.state: states,
                    own.action: actions,
                    own.reward: rewards,
                    shared.state: np.eye(3, dtype=np.float32),
                },
            )[1]
    print(
        "right %s"
        % [int(row.argmax() == want) for row, want in zip(policy, (1, 0, 0), strict=False)]
    )


if __name__ == "__main__":
    tf.app.run()
