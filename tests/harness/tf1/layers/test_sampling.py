"""The samplers of ``tf.nn`` draw each class as often as they say it is to be expected."""

import numpy as np
import pytest

import harness.tf1 as tf


@pytest.mark.parametrize("name", ["log_uniform_candidate_sampler", "uniform_candidate_sampler"])
@pytest.mark.parametrize("unique", [True, False])
def test_samplers_draw_expected_frequencies(name: str, unique: bool) -> None:
    """A sampler draws each class as often as its expected count says."""
    times = 300
    with tf.Graph().as_default():
        tf.set_random_seed(7)
        found = getattr(tf.nn, name)(tf.constant([[0, 1, 5]], tf.int64), 3, 3, unique, 6)
        with tf.Session() as sess:
            drawn = [sess.run(found) for _ in range(times)]
    counts = np.bincount(np.concatenate([d[0] for d in drawn]), minlength=6) / times
    expected = np.mean([d[1] for d in drawn], axis=0)[0]
    assert np.all(np.abs(counts[[0, 1, 5]] - expected) < 0.15)
    assert (counts[0] > 2 * counts[5]) == name.startswith("log")
    if unique:
        assert all(len(set(d[0].tolist())) == 3 for d in drawn)
