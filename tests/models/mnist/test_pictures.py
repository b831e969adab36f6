"""The pictures of a test on the digits."""

import numpy as np

import runtime as rt
from models.mnist.pictures import Pictures, confusion, confusion_picture, digits, features, glyph


def test_confusion_counts_labels_by_predictions() -> None:
    labels, predicted = np.array([0, 1, 1, 9], np.int32), np.array([0, 1, 2, 4], np.int32)
    counts = confusion(labels, predicted)
    assert counts.sum() == 4
    assert (counts[0, 0], counts[1, 1], counts[1, 2], counts[9, 4]) == (1, 1, 1, 1)


def test_confusion_picture_is_green_where_right_and_red_where_wrong() -> None:
    counts = np.zeros((10, 10), np.int64)
    counts[3, 3], counts[5, 6] = 7, 2
    picture = confusion_picture(counts, cell=16)
    assert picture.shape == (176, 176, 3)
    assert picture[16 * 4 + 8, 16 * 4 + 8].tolist() == [0, 255, 0]
    assert picture[16 * 6 + 8, 16 * 7 + 8].tolist() == [255, 0, 0]
    assert picture[16 * 1 + 8, 16 * 2 + 8].tolist() == [0, 0, 0]


def test_digits_show_the_images_and_mark_mistakes() -> None:
    images = np.zeros((2, 784), np.float32)
    images[1] = 1.0
    picture = digits(images, np.array([4, 7], np.int32), np.array([4, 1], np.int32))
    assert picture.shape == (4 * 37, 8 * 28, 3)
    assert picture[:28, :28].max() == 0 and picture[:28, 28:56].min() == 255
    below = picture[28:37]
    assert (below[:, :28] == [60, 200, 60]).all(-1).sum() == glyph(4).sum()
    assert (below[:, 28:56] == [240, 60, 60]).all(-1).sum() == glyph(1).sum()


def test_features_are_grey_at_zero() -> None:
    weights = np.zeros((784, 12), np.float32)
    weights[0, 0], weights[1, 0] = 2.0, -1.0
    picture = features(weights)
    assert picture.shape == (2 * 29, 10 * 29, 1)
    assert picture[0, :3, 0].tolist() == [255, 63, 127]


def test_glyphs_differ() -> None:
    assert len({glyph(d).tobytes() for d in range(10)}) == 10


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
    assert values["digits/image"].image.width == 224
