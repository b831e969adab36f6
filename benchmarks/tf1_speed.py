"""What TensorFlow 1's names cost: a program in ``harness.tf1`` beside the same program in the runtime's own names.

    python -m benchmarks.tf1_speed

Prints one line for each: a step of ten operations and of a thousand, in turns, with the median of the turns' ratios;
the first training step of an LSTM whose program calls its cell 20 times, with an empty directory of kept compilations
and with that of the process before; a step with 14 histograms of 0.6 million values together.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import app, flags

import harness
import harness.tf1 as tf
import runtime as rt

_TURNS = flags.DEFINE_integer("turns", 40, "Turns of each of the two programs.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 100, "Steps in a turn.", lower_bound=1)
_LSTM = flags.DEFINE_bool("lstm", False, "Only one first step of the LSTM.")

UNITS, BATCH, TIME = 128, 20, 20
HISTOGRAM_VALUES = [784 * 500, 500, 100 * 500, 100 * 500, 100 * 500, 500 * 10, 10] + [100 * 70] * 7


def _seconds(run: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        run()
    return time.perf_counter() - start


def _program(names: Any, count: int) -> tuple[Any, Any]:
    """A placeholder and ``count`` operations behind it; ``names`` are those of one of the two packages."""
    x = y = rt.placeholder(np.float32, [64], "x") if names is rt else names.placeholder(names.float32, [64], "x")
    add, tanh = (rt.numpy.add, rt.numpy.tanh) if names is rt else (names.add, names.tanh)
    for i in range(count):
        y = tanh(y) if i % 2 else add(y, 0.5)
    return x, y


def paired(count: int, turns: int, steps: int) -> tuple[float, float, float]:
    """Microseconds of a step in ``harness.tf1`` and in native names, medians, and the median of their ratios."""
    runs, sessions = [], []
    value = np.ones(64, np.float32)
    for names in (tf, rt):
        graph = rt.Graph()
        with graph.as_default():
            x, y = _program(names, count)
            session = tf.Session() if names is tf else rt.Session()
        session.run(y, {x: value})
        sessions.append(session)
        runs.append(lambda session=session, x=x, y=y: session.run(y, {x: value}))
    times: list[list[float]] = [[], []]
    for turn in range(turns):
        for which in (0, 1) if turn % 2 else (1, 0):
            times[which].append(_seconds(runs[which], steps) / steps * 1e6)
    for session in sessions:
        session.close()
    ratios = [one / other for one, other in zip(*times, strict=True)]
    return statistics.median(times[0]), statistics.median(times[1]), statistics.median(ratios)


def first_lstm_step() -> float:
    """Seconds from the first line of the model to the end of the first training step."""
    harness.keep_compilations()
    start = time.perf_counter()
    with tf.Graph().as_default():
        x, y = tf.placeholder(tf.float32, [BATCH, TIME, UNITS]), tf.placeholder(tf.int32, [BATCH])
        cell = tf.nn.rnn_cell.BasicLSTMCell(UNITS)
        state = cell.zero_state(BATCH, tf.float32)
        with tf.variable_scope("lstm"):
            for t in range(TIME):
                if t:
                    tf.get_variable_scope().reuse_variables()
                output, state = cell(x[:, t, :], state)
        logits = tf.matmul(output, tf.get_variable("w", [UNITS, 10]))
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        train = tf.train.AdamOptimizer(0.001).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {x: np.zeros([BATCH, TIME, UNITS], np.float32), y: np.zeros([BATCH], np.int32)})
    return time.perf_counter() - start


def histograms(steps: int) -> float:
    """Milliseconds of a step with 14 histograms, less the same step without them; median."""
    rng = np.random.default_rng(0)
    with tf.Graph().as_default():
        values = [tf.Variable(rng.standard_normal(n).astype(np.float32)) for n in HISTOGRAM_VALUES]
        total = tf.add_n([tf.reduce_sum(v) for v in values])
        for i, v in enumerate(values):
            tf.summary.histogram(f"values_{i}", v)
        merged = tf.summary.merge_all()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run([total, merged])
            session.run(total)
            pairs = [
                _seconds(lambda: session.run([total, merged]), 1) - _seconds(lambda: session.run(total), 1)
                for _ in range(steps)
            ]
    return statistics.median(pairs) * 1e3


def main(argv: list[str]) -> None:
    """Prints the lines."""
    if _LSTM.value:
        print(f"{first_lstm_step():.2f}")
        return
    for count in (10, 1000):
        ours, native, ratio = paired(count, _TURNS.value, _STEPS.value)
        print(f"{count} operations: tf1 {ours:.0f} us, native {native:.0f} us, ratio {ratio:.3f}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for start in ("nothing kept", "compilations kept"):
            command = [sys.executable, "-m", "benchmarks.tf1_speed", "--lstm"]
            environment = {**os.environ, "XDG_CACHE_HOME": directory}
            took = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.strip()
            print(f"unrolled LSTM of {TIME} steps, {start}: first training step after {took} s", flush=True)
    print(f"14 histograms of {sum(HISTOGRAM_VALUES)} values: {histograms(30):.1f} ms a step")


if __name__ == "__main__":
    app.run(main)
