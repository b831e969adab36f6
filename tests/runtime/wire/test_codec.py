import math
import struct

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from runtime.errors import DataLossError, InvalidArgumentError
from runtime.tensor_spec import NUMERIC_DTYPES, TensorSpec
from runtime.wire.codec import (
    TensorBuffer,
    TensorLayout,
    aligned_buffer,
    decode_dynamic,
    encode_dynamic,
    encode_payload,
)
from runtime.wire.sockets import byte_view
from tests.runtime.wire.kit import same

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
dtypes = st.sampled_from(sorted(NUMERIC_DTYPES))


@st.composite
def numeric_arrays(draw):
    shape, dtype = draw(shapes), NUMERIC_DTYPES[draw(dtypes)]
    nbytes = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=nbytes, max_size=nbytes))
    if dtype == np.bool_:
        data = bytes(byte & 1 for byte in data)
    array = np.frombuffer(bytearray(data), dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


@st.composite
def string_arrays(draw):
    array = np.empty(draw(shapes), object)
    for index in np.ndindex(array.shape):
        array[index] = draw(st.binary(max_size=5))
    return array


arrays = st.lists(st.one_of(numeric_arrays(), string_arrays()), max_size=5)


def join(segments):
    return b"".join(bytes(byte_view(segment)) for segment in segments)


@hypothesis.given(st.lists(numeric_arrays(), max_size=6))
def test_fixed_payload_matches_layout(values):
    """A payload of a fixed layout is read in place, aligned, and equals the arrays that were sent."""
    layout = TensorLayout([TensorSpec.of(value) for value in values])
    segments, length = encode_payload(values, False)
    payload = join(segments)
    assert segments[0] == b"" and length == len(payload) == layout.nbytes
    buffer = aligned_buffer(length + 64)
    buffer[64:] = np.frombuffer(payload, np.uint8)
    views = layout.views(buffer, 64)
    assert same(views, values)
    assert all(view.ctypes.data % 64 == 0 for view in views if view.size)
    assert all(np.shares_memory(view, buffer) for view in views if view.nbytes)


@hypothesis.given(arrays)
def test_dynamic_payload_round_trips(values):
    """A payload that describes itself decodes to the arrays that were encoded."""
    segments, nbytes = encode_dynamic(values)
    payload = join(segments)
    assert nbytes == len(payload)
    buffer = aligned_buffer(len(payload))
    buffer[:] = np.frombuffer(payload, np.uint8)
    decoded = decode_dynamic(buffer)
    assert len(decoded) == len(values)
    for got, sent in zip(decoded, values, strict=True):
        assert got.dtype == sent.dtype and got.shape == sent.shape
        if sent.dtype == object:
            assert got.tolist() == sent.tolist()
        else:
            assert got.tobytes() == sent.tobytes()
            assert not got.size or (got.ctypes.data % 64 == 0 and np.shares_memory(got, buffer))


@hypothesis.given(arrays, st.data())
def test_damaged_dynamic_payloads_are_data_loss(values, data):
    """A damaged payload raises DataLossError or decodes to no more than its own size."""
    payload = bytearray(join(encode_dynamic(values)[0]))
    for _ in range(data.draw(st.integers(1, 4))):
        match data.draw(st.sampled_from(["flip", "cut", "insert", "word"])):
            case "flip" if payload:
                payload[data.draw(st.integers(0, min(len(payload), 80) - 1))] = data.draw(
                    st.integers(0, 255)
                )
            case "cut":
                del payload[data.draw(st.integers(0, len(payload))) :]
            case "insert":
                at = data.draw(st.integers(0, len(payload)))
                payload[at:at] = data.draw(st.binary(max_size=20))
            case "word" if len(payload) >= 16:
                at = data.draw(st.integers(0, min(len(payload), 80) - 8))
                payload[at : at + 8] = struct.pack("<Q", data.draw(st.integers(0, 2**64 - 1)))
    try:
        decoded = decode_dynamic(bytes(payload))
    except DataLossError:
        return
    assert sum(array.size for array in decoded) <= 8 * len(payload)


def test_hostile_tables_are_data_loss():
    """A table of tensors whose sizes cannot be true raises DataLossError."""

    def entry(name, dims, nbytes):
        return bytes([len(name)]) + name + struct.pack(f"<B{len(dims)}QQ", len(dims), *dims, nbytes)

    head = struct.pack("<4sI", b"BWD1", 1)
    for payload in (
        b"",
        b"XXXX\0\0\0\0",
        struct.pack("<4sI", b"BWD1", 2**32 - 1),
        head + entry(b"float32", [2**62, 4], 2**64 - 1),
        head + entry(b"float32", [0, 2**63], 0),
        head + entry(b"float32", [2**32, 2**32], 0),
        head + entry(b"string", [2**40], 0),
        head + entry(b"string", [0, 2**63], 0),
        head + entry(b"object", [1], 8) + bytes(100),
        head + entry(b"float32", [1] * 70, 4),
        head + bytes([255]) + b"float32",
        struct.pack("<4sI", b"BWD1", 0) + b"x",
        head + entry(b"bool", [1], 1) + bytes(64 - 8 - len(entry(b"bool", [1], 1))) + b"\2",
    ):
        with pytest.raises(DataLossError):
            decode_dynamic(payload)


def test_numeric_data_is_not_copied():
    """The encoder hands numeric arrays on without a copy."""
    array = np.arange(1000.0)
    assert any(segment is array for segment in encode_dynamic([array])[0])
    assert any(segment is array for segment in encode_payload([array], False)[0])


def test_text_is_encoded_other_objects_refused():
    """Text is sent as UTF-8, and other objects are refused."""
    (decoded,) = decode_dynamic(join(encode_dynamic([np.array(["é", b"\0"], object)])[0]))
    assert decoded.tolist() == ["é".encode(), b"\0"]
    with pytest.raises(InvalidArgumentError, match="int"):
        encode_dynamic([np.array([1, None], object)])
    with pytest.raises(InvalidArgumentError):
        encode_dynamic([np.array(["a"])])


def test_foreign_byte_order_is_converted():
    """An array of foreign byte order arrives in the native order."""
    (decoded,) = decode_dynamic(join(encode_dynamic([np.array([1, 2], ">i4")])[0]))
    assert decoded.tolist() == [1, 2] and decoded.dtype == np.int32


def test_object_addresses_never_leave():
    """A payload of fixed size refuses arrays of objects, so that no address leaves the process."""
    with pytest.raises(InvalidArgumentError, match="dynamic=True"):
        encode_payload([np.array([b"x"], object)], False)
    with pytest.raises(InvalidArgumentError, match="string"):
        TensorLayout([TensorSpec((1,), np.dtype(object))])


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 1000, 5_000_000])
def test_aligned_buffer_has_size_and_alignment(nbytes):
    """An aligned buffer is writeable, of the wanted size and aligned to 64 bytes."""
    buffer = aligned_buffer(nbytes)
    assert buffer.nbytes == nbytes and buffer.flags.writeable
    assert nbytes == 0 or buffer.ctypes.data % 64 == 0


def test_jax_uses_received_memory_in_place():
    """JAX puts a received array on the CPU device without a copy."""
    import jax

    buffer = TensorBuffer(TensorLayout([TensorSpec((1000,), np.dtype(np.float32))]))
    array = jax.device_put(buffer.arrays[0])
    assert array.unsafe_buffer_pointer() == buffer.arrays[0].ctypes.data
