import pathlib
import re

import hypothesis
import pytest
from hypothesis import strategies as st

from runtime.errors import DataLossError, FailedPreconditionError, OpError, UnknownError
from runtime.wire import frames, times
from runtime.wire.versions import WIRE_VERSION

u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


def test_header_is_32_bytes():
    """A frame's header has 32 bytes."""
    assert frames.HEADER_BYTES == 32


@hypothesis.given(u64, u64, u32, st.binary(min_size=16, max_size=16))
def test_hello_round_trips(client, lane, attempt, nonce):
    """A hello decodes to what was encoded."""
    hello = frames.LaneHello(client, lane, attempt, nonce)
    assert frames.decode_hello(frames.encode_hello(hello)) == hello


@hypothesis.given(st.binary(max_size=100))
def test_any_bytes_are_hello_or_error(payload):
    """Any bytes decode to a hello of the same bytes or raise DataLossError."""
    try:
        assert frames.encode_hello(frames.decode_hello(payload)) == payload
    except DataLossError as error:
        assert "hello" in str(error)


@hypothesis.given(st.text(max_size=50), st.text(max_size=20))
def test_error_round_trips(message, task):
    """An error keeps its type, text and task through a frame."""
    task = task.encode(errors="replace").decode()
    error = frames.decode_error(
        frames.pack_error(0, FailedPreconditionError(message, task=task))[frames.HEADER_BYTES :],
        "/job:ps/task:9",
    )
    assert type(error) is FailedPreconditionError
    assert error.message == message.encode(errors="replace").decode()
    assert error.task == (task or "/job:ps/task:9")


@hypothesis.given(st.binary(max_size=100))
def test_any_bytes_are_clean_error(payload):
    """Any bytes decode to an error or raise DataLossError with the task."""
    try:
        assert isinstance(frames.decode_error(payload, "t"), OpError)
    except DataLossError as error:
        assert error.task == "t"


def test_long_errors_fit_a_frame():
    """An error with long texts is cut to the size of a control frame."""
    payload = frames.pack_error(0, UnknownError("x" * 10**6, task="y" * 10**6))[
        frames.HEADER_BYTES :
    ]
    assert len(payload) <= frames.MAX_CONTROL_BYTES
    assert frames.decode_error(payload, "").task == "y" * 1024


def header(magic=frames.MAGIC, kind=frames.CALL, length=0):
    return frames.unpack_header(frames.pack_header(magic, kind, 0, 0, 0, 0, length))


def test_good_header_passes():
    """A header of this version within the limit passes the check."""
    frames.check_header(header(length=10), 10)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (header(magic=0x1234), "not a frame"),
        (
            header(magic=frames.MAGIC + 1),
            f"wire version {WIRE_VERSION + 1}, and this process {WIRE_VERSION}",
        ),
        (header(kind=0), "unknown kind 0"),
        (header(kind=99), "unknown kind 99"),
        (header(length=11), "11 bytes, the limit is 10"),
        (header(length=2**64 - 1), "the limit is 10"),
    ],
)
def test_bad_headers_are_refused(fields, text):
    """A header that is no frame, of another version, kind or size, is refused with the reason."""
    with pytest.raises(DataLossError, match=text):
        frames.check_header(fields, 10)


def test_times_stand_in_one_table() -> None:
    """No module of the room but `times` has a time of its own."""
    modules = [
        path for path in pathlib.Path(times.__file__).parent.glob("*.py") if path.name != "times.py"
    ]
    assert [
        path.name for path in modules if re.search(r"^\w+_SECS\b.* = ", path.read_text(), re.M)
    ] == []
