"""What TensorBoard shows of the test set: digits with predictions, a confusion matrix, the first layer's weights.

The pictures are numpy arrays; a step of their own, fed with them, makes the summary.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import harness
import runtime as rt
from models.mnist.data import IMAGE_SIDE, NUM_CLASSES

Pixels = NDArray[np.uint8]
"""[height, width, channels]."""

# Ten digits, three pixels wide and five high, row by row.
_GLYPHS = (
    "111101101101111 010110010010111 111001111100111 111001111001111 101101111001001 "
    "111100111001111 111100111101111 111001001001001 111101111101111 111101111001111"
).split()
_RIGHT, _WRONG = (60, 200, 60), (240, 60, 60)
_SHOWN = (4, 8)
_BELOW = 9  # pixels under each digit, for what was predicted


def glyph(digit: int) -> NDArray[np.bool_]:
    """The shape of a digit, [5, 3]."""
    return np.array([bit == "1" for bit in _GLYPHS[digit]]).reshape(5, 3)


def digits(images: NDArray[np.float32], labels: NDArray[np.int32], predicted: NDArray[np.int32]) -> Pixels:
    """A table of digits, each with its prediction below: green where it is right, red with the label where not.

    Args:
        images: float32 [N, 784], 0 to 1.
        labels: int32 [N].
        predicted: int32 [N].

    Returns:
        uint8 [rows * 37, columns * 28, 3].
    """
    rows, columns = _SHOWN
    picture = np.zeros((rows * (IMAGE_SIDE + _BELOW), columns * IMAGE_SIDE, 3), np.uint8)
    for i in range(min(rows * columns, len(images))):
        top, left = (i // columns) * (IMAGE_SIDE + _BELOW), (i % columns) * IMAGE_SIDE
        image = np.clip(images[i].reshape(IMAGE_SIDE, IMAGE_SIDE) * 255, 0, 255).astype(np.uint8)
        picture[top : top + IMAGE_SIDE, left : left + IMAGE_SIDE] = image[:, :, None]
        right = predicted[i] == labels[i]
        _draw(picture, int(predicted[i]), top + IMAGE_SIDE + 2, left + 8, _RIGHT if right else _WRONG)
        if not right:
            _draw(picture, int(labels[i]), top + IMAGE_SIDE + 2, left + 18, (160, 160, 160))
    return picture


def _draw(picture: Pixels, digit: int, top: int, left: int, colour: tuple[int, int, int]) -> None:
    picture[top : top + 5, left : left + 3][glyph(digit)] = colour


def confusion(labels: NDArray[np.int32], predicted: NDArray[np.int32]) -> NDArray[np.int64]:
    """How often each digit (row) was taken for each digit (column); int64 [10, 10]."""
    return np.bincount(labels * NUM_CLASSES + predicted, minlength=NUM_CLASSES**2).reshape(NUM_CLASSES, NUM_CLASSES)


def confusion_picture(counts: NDArray[np.int64], cell: int = 16) -> Pixels:
    """The matrix as a picture: rows are labels, columns predictions; green right, red wrong, by share of the row.

    Mistakes are rare, so their colour grows with the square root of their share.
    """
    share = np.sqrt(counts / np.maximum(counts.sum(1, keepdims=True), 1))
    colours = np.zeros((NUM_CLASSES, NUM_CLASSES, 3), np.uint8)
    colours[..., 0] = 255 * share
    colours[np.diag_indices(NUM_CLASSES)] = 0
    colours[..., 1][np.diag_indices(NUM_CLASSES)] = 255 * share.diagonal()
    body = colours.repeat(cell, 0).repeat(cell, 1)
    picture = np.full((body.shape[0] + cell, body.shape[1] + cell, 3), 40, np.uint8)
    picture[cell:, cell:] = body
    for digit in range(NUM_CLASSES):
        at = (digit + 1) * cell + cell // 2
        _draw(picture, digit, cell // 2 - 2, at - 1, (230, 230, 230))
        _draw(picture, digit, at - 2, cell // 2 - 1, (230, 230, 230))
    return picture


def features(weights: NDArray[np.float32], columns: int = 10) -> Pixels:
    """What each unit of the first layer looks for, as a table of pictures: grey is 0, white positive, black negative.

    Args:
        weights: float32 [784, units].
        columns: of the table.
    """
    units = weights.shape[1]
    rows = -(-units // columns)
    picture = np.zeros((rows * (IMAGE_SIDE + 1), columns * (IMAGE_SIDE + 1), 1), np.uint8)
    scaled = 127.5 + 127.5 * weights / np.maximum(np.abs(weights).max(0), 1e-9)
    for unit in range(units):
        top, left = (unit // columns) * (IMAGE_SIDE + 1), (unit % columns) * (IMAGE_SIDE + 1)
        picture[top : top + IMAGE_SIDE, left : left + IMAGE_SIDE, 0] = scaled[:, unit].reshape(IMAGE_SIDE, IMAGE_SIDE)
    return picture


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
        """The serialized summary of a test.

        Args:
            session: runs the summary and reads the weights.
            images: float32 [N, 784].
            labels: int32 [N].
            predicted: int32 [N].
        """
        wrong_first = np.argsort(predicted == labels, kind="stable")
        shown = np.concatenate([wrong_first[: _SHOWN[1]], np.arange(_SHOWN[0] * _SHOWN[1])])[: _SHOWN[0] * _SHOWN[1]]
        values: list[NDArray | np.float32] = [
            np.float32((predicted == labels).mean()),
            digits(images[shown], labels[shown], predicted[shown])[None],
            confusion_picture(confusion(labels, predicted))[None],
        ]
        if self.weights is not None:
            values.append(features(session.run(self.weights))[None])
        summary: bytes = session.run(self.summary, dict(zip(self.fed, values, strict=True)))
        return summary
