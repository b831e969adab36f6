"""Pictures of a test for TensorBoard: digits (wrong ones first), a confusion matrix, first-layer weights.

The trainer's ``Tests`` computes them as numpy arrays. A step that is fed with the arrays makes the summary.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import harness
import runtime as rt
from models.mnist.data import IMAGE_SIDE, NUM_CLASSES

Pixels = NDArray[np.uint8]
"""[height, width, channels]."""

_SHOWN = 32
"""Digits of the test set in the picture of the digits."""
_COLUMNS = 8


def tile(images: NDArray[np.uint8], columns: int) -> Pixels:
    """Returns images as one picture, row by row.

    Args:
        images: uint8 [N, 28, 28].
        columns: images in a row.

    Returns:
        uint8 [rows * 29, columns * 29, 1], with a dark line between the images.
    """
    padded = np.pad(images, [(0, -len(images) % columns), (0, 1), (0, 1)])
    rows = padded.reshape(-1, columns, IMAGE_SIDE + 1, IMAGE_SIDE + 1).swapaxes(1, 2)
    return rows.reshape(-1, columns * (IMAGE_SIDE + 1), 1)


def confusion(labels: NDArray[np.int32], predicted: NDArray[np.int32], cell: int = 16) -> Pixels:
    """Returns the confusion matrix as a picture, correct predictions green and wrong ones red.

    Rows are labels and columns predictions. Brightness grows with the square root of the share of the row, because
    mistakes are rare.

    Args:
        labels: int32 [N].
        predicted: int32 [N].
        cell: pixels of a side of one cell.

    Returns:
        uint8 [10 * cell, 10 * cell, 3].
    """
    counts = np.bincount(labels * NUM_CLASSES + predicted, minlength=NUM_CLASSES**2).reshape(NUM_CLASSES, NUM_CLASSES)
    share = 255 * np.sqrt(counts / np.maximum(counts.sum(1, keepdims=True), 1))
    right = np.eye(NUM_CLASSES, dtype=bool)
    colours = np.stack([np.where(right, 0, share), np.where(right, share, 0), np.zeros_like(share)], axis=-1)
    return colours.astype(np.uint8).repeat(cell, 0).repeat(cell, 1)


def features(weights: NDArray[np.float32]) -> Pixels:
    """Returns the weights of each unit as a picture: grey for 0, white for positive, black for negative.

    Args:
        weights: float32 [784, units].
    """
    scaled = 127.5 + 127.5 * weights / np.maximum(np.abs(weights).max(0), 1e-9)
    return tile(scaled.T.reshape(-1, IMAGE_SIDE, IMAGE_SIDE).astype(np.uint8), 10)


@dataclass(frozen=True)
class Pictures:
    """The summary of a test, in the graph.

    Attributes:
        fed: the placeholders: accuracy, digits, confusion matrix and, where the model has them, first-layer weights.
        weights: the variable with the first layer's weights, or None.
        summary: the summary operation.
    """

    fed: tuple[rt.Tensor, ...]
    weights: rt.Variable | None
    summary: rt.Tensor

    @classmethod
    def build(cls, weights: rt.Variable | None) -> "Pictures":
        """Adds the summary to the default graph.

        Args:
            weights: a variable of shape [784, units], or None for a model that has none.
        """
        with rt.name_scope("test"):
            accuracy = rt.placeholder("float32", [], "accuracy_value")
            images = [
                rt.placeholder("uint8", [1, None, None, None], name) for name in ("digits", "confusion", "weights")
            ]
        tags = ("digits", "confusion_matrix", "first_layer")[: 2 if weights is None else 3]
        with rt.name_scope(None):
            parts = [harness.summary.scalar("test_accuracy", accuracy, collections=())]
            parts += [harness.summary.image(t, i, 1, collections=()) for t, i in zip(tags, images, strict=False)]
            return cls((accuracy, *images[: len(tags)]), weights, harness.summary.merge(parts))

    def evaluate(
        self, session: rt.Session, images: NDArray[np.float32], labels: NDArray[np.int32], predicted: NDArray[np.int32]
    ) -> bytes:
        """Returns the serialized summary of a test.

        Args:
            session: runs the summary and reads the weights.
            images: float32 [N, 784].
            labels: int32 [N].
            predicted: int32 [N].
        """
        wrong_first = np.argsort(predicted == labels, kind="stable")[:_SHOWN]
        digits = (images[wrong_first] * 255).astype(np.uint8).reshape(-1, IMAGE_SIDE, IMAGE_SIDE)
        values: list[NDArray | np.float32] = [
            np.float32((predicted == labels).mean()),
            tile(digits, _COLUMNS)[None],
            confusion(labels, predicted)[None],
        ]
        if self.weights is not None:
            values.append(features(session.run(self.weights))[None])
        summary: bytes = session.run(self.summary, dict(zip(self.fed, values, strict=True)))
        return summary
