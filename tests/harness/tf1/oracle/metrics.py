"""Programs with ``tf.metrics``: the value before, what each batch makes of it, and the value afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Case = Callable[[Any], Any]
CASES: dict[str, Case] = {}
"""As in ``programs``."""

LABELS = [[0, 1, 1, 0, 1], [1, 1, 0, 0, 0]]
SCORES = [[0.1, 0.9, 0.4, 0.35, 0.8], [0.6, 0.2, 0.7, 0.5, 0.0]]
WEIGHTS = [[1.0, 0.5, 2.0, 0.0, 1.0], [0.0, 0.0, 1.0, 3.0, 0.25]]


def batches(
    metric: Callable[[Any, Any, Any, Any], Any],
    labels: Any = LABELS,
    predictions: Any = SCORES,
    weights: Any = WEIGHTS,
) -> Case:
    """``metric(tf, labels, predictions, weights)`` of two fed batches, and the names of what it keeps."""

    def program(tf: Any) -> Any:
        y = tf.placeholder(np.asarray(labels).dtype, np.shape(labels)[1:])
        p = tf.placeholder(
            np.float32 if np.asarray(predictions).dtype.kind == "f" else np.int32, y.shape
        )
        w = tf.placeholder(tf.float32, np.shape(weights)[1:])
        value, update = metric(tf, y, p, w)
        names = [v.op.name for v in tf.get_collection("metric_variables")]
        assert names == [v.op.name for v in tf.local_variables()] and not tf.global_variables()
        with tf.Session() as sess:
            sess.run(tf.local_variables_initializer())
            seen = [sess.run(value)]
            for feeds in zip(labels, predictions, weights, strict=True):
                seen += [
                    sess.run(update, dict(zip((y, p, w), feeds, strict=True))),
                    sess.run(value),
                ]
        return seen, names

    return program


for _name in ("accuracy", "mean_absolute_error", "mean_squared_error", "root_mean_squared_error"):
    CASES[f"metrics_{_name}"] = batches(
        lambda tf, y, p, w, _name=_name: getattr(tf.metrics, _name)(y, p),
        predictions=np.int32(np.round(SCORES)),
        labels=np.int32(LABELS),
    )
    CASES[f"metrics_{_name}_weighted"] = batches(
        lambda tf, y, p, w, _name=_name: getattr(tf.metrics, _name)(y, p, w, name="mine"),
        labels=np.float32(LABELS),
        predictions=np.float32(np.round(SCORES)),
    )
for _name in (
    "precision",
    "recall",
    "true_positives",
    "false_positives",
    "true_negatives",
    "false_negatives",
):
    CASES[f"metrics_{_name}"] = batches(
        lambda tf, y, p, w, _name=_name: getattr(tf.metrics, _name)(y, p),
        predictions=np.round(SCORES).astype(int),
    )
    CASES[f"metrics_{_name}_weighted"] = batches(
        lambda tf, y, p, w, _name=_name: getattr(tf.metrics, _name)(y, p, w),
        predictions=np.round(SCORES).astype(int),
    )
CASES |= {
    "metrics_mean": batches(lambda tf, y, p, w: tf.metrics.mean(p)),
    "metrics_mean_weighted": batches(lambda tf, y, p, w: tf.metrics.mean(p, w)),
    "metrics_mean_of_nothing": batches(lambda tf, y, p, w: tf.metrics.mean(p, 0.0)),
    "metrics_auc": batches(lambda tf, y, p, w: tf.metrics.auc(y, p)),
    "metrics_auc_weighted": batches(lambda tf, y, p, w: tf.metrics.auc(y, p, w)),
    "metrics_auc_of_precision_and_recall": batches(
        lambda tf, y, p, w: tf.metrics.auc(y, p, curve="PR")
    ),
    "metrics_auc_with_few_thresholds": batches(
        lambda tf, y, p, w: tf.metrics.auc(y, p, num_thresholds=3, name="a")
    ),
    "metrics_accuracy_of_a_column": batches(
        lambda tf, y, p, w: tf.metrics.accuracy(tf.reshape(y, [5, 1]), p)
    ),
    "metrics_twice": batches(
        lambda tf, y, p, w: [tf.metrics.mean(y, name="m"), tf.metrics.mean(p, name="m")][1]
    ),
    "metrics_in_a_scope": batches(lambda tf, y, p, w: _in_a_scope(tf, p)),
}


def _in_a_scope(tf: Any, p: Any) -> Any:
    with tf.variable_scope("eval"):
        found = tf.metrics.mean(
            p, metrics_collections="values", updates_collections=["updates", "all"]
        )
    assert tf.get_collection("values") == [found[0]]
    assert tf.get_collection("updates") == tf.get_collection("all") == [found[1]]
    assert [t.op.name for t in found] == ["eval/mean/value", "eval/mean/update_op"]
    return found
