"""Summaries: what each operation puts into the message, its tag, and what it refuses."""

import io
import tracemalloc
import wave
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image
from tensorboardX.proto import summary_pb2

import runtime as rt
from harness import summary
from runtime.kernels.summaries import _bucket_limits, encode_png, histogram_proto, to_pixels


@pytest.fixture(autouse=True)
def graph() -> Iterator[rt.Graph]:
    with rt.Graph().as_default() as made:
        yield made


def value_of(tensor: rt.Tensor, feeds: Any = None) -> Any:
    with rt.Session() as session:
        message = session.run(tensor, feeds)
    assert isinstance(message, bytes)
    return summary_pb2.Summary.FromString(message).value


def test_scalar_holds_tag_and_number() -> None:
    """A scalar summary holds its scoped tag and the number."""
    x = rt.placeholder(np.float32, [], "x")
    with rt.name_scope("train"):
        tensor = summary.scalar("loss", x * 2)
    (value,) = value_of(tensor, {x: 1.5})
    assert (value.tag, value.simple_value) == ("train/loss", 3.0)


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool", "bfloat16", "uint8"])
def test_scalar_takes_every_numeric_dtype(dtype: str) -> None:
    """A scalar summary takes every numeric dtype."""
    (value,) = value_of(summary.scalar("n", rt.numpy.ones((), dtype)))
    assert value.simple_value == 1.0


def test_tag_ignores_operation_names(graph: rt.Graph) -> None:
    """A tag is the given name, even where an operation has that name."""
    loss = rt.identity(rt.constant(1.0), name="loss")
    first, second = summary.scalar("loss", loss), summary.scalar("loss", loss)
    assert [value_of(t)[0].tag for t in (first, second)] == ["loss", "loss_1"]


def test_family_prefixes_a_clean_tag() -> None:
    """A family prefixes the tag, whose illegal characters are replaced."""
    with rt.name_scope("scope"):
        tensor = summary.scalar("my loss!", 1.0, family="fam")
    assert value_of(tensor)[0].tag == "fam/scope/fam/my_loss_"


def test_scalar_refuses_vectors() -> None:
    """A scalar summary refuses a vector when it is built or run."""
    with pytest.raises(rt.InvalidArgumentError, match="takes one number"):
        summary.scalar("v", rt.numpy.ones(3))
    x = rt.placeholder(np.float32, None, "x")
    with rt.Session() as session, pytest.raises(rt.InvalidArgumentError, match=r"'v'.*\[3\]"):
        session.run(summary.scalar("v", x), {x: np.ones(3)})


def test_histogram_counts_every_element() -> None:
    """A histogram counts every element, with minimum, maximum and sum."""
    values = np.array([-1.0, 0.0, 0.5, 0.5, 3.0], np.float32)
    (value,) = value_of(summary.histogram("h", values))
    assert (value.histo.min, value.histo.max, value.histo.num, value.histo.sum) == (-1, 3, 5, 3)
    assert sum(value.histo.bucket) == 5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_histogram_of_nan_names_the_tag(bad: float) -> None:
    """A histogram of NaN or infinity raises an error with its tag."""
    x = rt.placeholder(np.float32, [None], "x")
    tensor = summary.histogram("weights", x)
    with (
        rt.Session() as session,
        pytest.raises(rt.InvalidArgumentError, match="histogram for: weights"),
    ):
        session.run(tensor, {x: [1.0, bad]})


@given(hnp.arrays(np.float64, st.integers(0, 50), elements=st.floats(-1e15, 1e15)))
def test_buckets_obey_their_limits(values: np.ndarray) -> None:
    """Each bucket of a histogram counts the values between its limits."""
    proto = histogram_proto(values)
    limits = np.array(proto.bucket_limit)
    assert (np.diff(limits) > 0).all()
    assert sum(proto.bucket) == values.size
    for i, count in enumerate(proto.bucket):
        low = limits[i - 1] if i else -np.inf
        assert count == ((values >= low) & (values < limits[i])).sum()


def test_limits_separate_adjacent_numbers() -> None:
    """A histogram separates numbers at its limits from their neighbours."""
    limits = _bucket_limits()[1:-1]
    values = np.concatenate(
        [limits, np.nextafter(limits, -np.inf), [-0.0, 5e-324, -5e-324, 1e150, -1e150]]
    )
    proto = histogram_proto(values)
    places = np.searchsorted(_bucket_limits(), values, side="right")
    wanted = np.bincount(places)[places.min() :]
    assert [int(count) for count in proto.bucket][-wanted.size :] == wanted.tolist()


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_png_is_read_by_pillow(channels: int, mode: str) -> None:
    """Another library reads an encoded PNG back exactly."""
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), np.uint8)
    image = Image.open(io.BytesIO(encode_png(pixels)))
    assert image.mode == mode
    assert np.array_equal(np.asarray(image).reshape(pixels.shape), pixels)


def test_images_get_one_tag_each() -> None:
    """Images have one tag each, as in TensorFlow."""
    images = np.zeros((5, 4, 6, 1), np.uint8)
    values = value_of(summary.image("digits", images, max_outputs=2))
    assert [v.tag for v in values] == ["digits/image/0", "digits/image/1"]
    assert (values[0].image.height, values[0].image.width, values[0].image.colorspace) == (4, 6, 1)
    assert [v.tag for v in value_of(summary.image("one", images, max_outputs=1))] == ["one/image"]


def test_max_outputs_costs_no_memory() -> None:
    """A large max_outputs costs no memory."""
    tensor = summary.image("all", np.zeros((2, 4, 6, 1), np.uint8), max_outputs=300_000)
    with rt.Session() as session:
        session.run(tensor)
        tracemalloc.start()
        try:
            session.run(tensor)
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
        finally:
            tracemalloc.stop()


def test_float_images_are_scaled() -> None:
    """Float images are scaled to pixels as in TensorFlow."""
    positive = to_pixels(np.array([[[0.0], [0.5], [2.0]]]))
    assert positive.ravel().tolist() == [0, 63, 255]
    signed = to_pixels(np.array([[[-1.0], [0.0], [1.0]]]))
    assert signed.ravel().tolist() == [1, 128, 255]
    bad = to_pixels(np.array([[[np.nan, 0, 0], [1.0, 1.0, 1.0]]]))
    assert bad[0, 0].tolist() == [255, 0, 0]


def test_wrong_image_shapes_are_refused() -> None:
    """Images with a wrong shape or number of channels are refused."""
    with pytest.raises(rt.InvalidArgumentError, match="batch, height, width"):
        summary.image("i", rt.numpy.ones((4, 4)))
    with rt.Session() as session, pytest.raises(rt.InvalidArgumentError, match="1 or 3 or 4"):
        session.run(summary.image("i", rt.numpy.ones((1, 4, 4, 2))))


def test_audio_is_a_wav_clip() -> None:
    """An audio summary holds a WAV file with its rate and length."""
    clip = np.sin(np.linspace(0, 100, 800)).astype(np.float32)[None]
    (value,) = value_of(summary.audio("tone", clip, 8000, max_outputs=1))
    assert (value.tag, value.audio.sample_rate, value.audio.length_frames) == (
        "tone/audio",
        8000,
        800,
    )
    with wave.open(io.BytesIO(value.audio.encoded_audio_string)) as file:
        assert (file.getframerate(), file.getnframes(), file.getnchannels()) == (8000, 800, 1)


def test_text_takes_strings_only() -> None:
    """A text summary holds strings with their shape, and refuses numbers."""
    (value,) = value_of(summary.text("note", rt.constant([["a", "b"]])))
    assert list(value.tensor.string_val) == [b"a", b"b"]
    assert [d.size for d in value.tensor.tensor_shape.dim] == [1, 2]
    assert value.metadata.plugin_data.plugin_name == "text"
    with pytest.raises(ValueError, match="strings"):
        summary.text("note", rt.constant(1.0))


def test_merge_all_merges_the_collection() -> None:
    """merge_all merges a collection by scope, and returns None when the collection is empty."""
    assert summary.merge_all() is None
    a, b = summary.scalar("a", 1.0), summary.scalar("b", 2.0)
    summary.scalar("elsewhere", 3.0, collections=["mine"])
    merged = summary.merge_all()
    assert merged is not None
    assert [v.tag for v in value_of(merged)] == ["a", "b"]
    assert [v.tag for v in value_of(summary.merge([b, a, b]))] == ["b", "a"]
    chosen = summary.merge_all(scope="b")
    assert chosen is not None and [v.tag for v in value_of(chosen)] == ["b"]


def test_merge_refuses_numbers() -> None:
    """merge refuses a tensor of numbers by name."""
    with pytest.raises(rt.InvalidArgumentError, match="Const:0"):
        summary.merge([rt.constant(1.0)])


def test_summaries_ignore_device_scopes() -> None:
    """Summaries do not follow a device scope."""
    with rt.device("/job:ps/task:0"):
        assert summary.scalar("s", 1.0).device == ""
