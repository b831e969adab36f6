"""The pictures of a test on the digits."""

import numpy as np

import runtime as rt
from models.mnist.pictures import Pictures, confusion, features, tile


def test_confusion_is_green_where_right() -> None:
    """Right predictions are green, wrong ones red, as bright as the root of their share of the label."""
    labels, predicted = np.array([3, 3, 5, 5, 5, 5], np.int32), np.array([3, 3, 5, 5, 5, 6], np.int32)
    picture = confusion(labels, predicted, cell=16)
    assert picture.shape == (160, 160, 3)
    assert picture[16 * 3 + 8, 16 * 3 + 8].tolist() == [0, 255, 0]
    assert picture[16 * 5 + 8, 16 * 6 + 8].tolist() == [127, 0, 0]
    assert picture[16 * 1 + 8, 16 * 2 + 8].tolist() == [0, 0, 0]


def test_tiles_stand_row_by_row() -> None:
    """Images fill the rows in their order, and places without an image are dark."""
    images = np.stack([np.full((28, 28), n, np.uint8) for n in (10, 20, 30)])
    picture = tile(images, 2)
    assert picture.shape == (2 * 29, 2 * 29, 1)
    assert [int(picture[y, x, 0]) for y in (0, 29) for x in (0, 29)] == [10, 20, 30, 0]
    assert picture[28].max() == 0


def test_features_are_grey_at_zero() -> None:
    weights = np.zeros((784, 12), np.float32)
    weights[0, 0], weights[1, 0] = 2.0, -1.0
    picture = features(weights)
    assert picture.shape == (2 * 29, 10 * 29, 1)
    assert picture[0, :3, 0].tolist() == [255, 63, 127]


def test_the_summary_holds_all_of_it() -> None:
    from tensorboardX.proto import summary_pb2

    with rt.Graph().as_default(), rt.Session() as session:
        weights = rt.Variable(np.ones((784, 5), np.float32), name="w1")
        session.run(weights.initializer)
        made = Pictures.build(weights)
        images, labels = np.zeros((40, 784), np.float32), np.arange(40, dtype=np.int32) % 10
        message = made.evaluate(session, images, labels, np.where(labels == 0, 1, labels).astype(np.int32))
    values = {v.tag: v for v in summary_pb2.Summary.FromString(message).value}
    assert set(values) == {"test_accuracy", "digits/image", "confusion_matrix/image", "first_layer/image"}
    assert abs(values["test_accuracy"].simple_value - 0.9) < 1e-6
    assert values["digits/image"].image.width == 8 * 29
