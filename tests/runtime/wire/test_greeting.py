"""The greeting of the tensor channel, byte by byte: what a client is told, and what ends it."""

import contextlib
import secrets
import threading

import hypothesis
import hypothesis.strategies as st
import pytest

from runtime.errors import DataLossError, InvalidArgumentError, OpError, UnauthenticatedError
from runtime.wire import frames
from runtime.wire.greeting import ClientGreeting, tensor_proof
from tests.kit.waits import until
from tests.runtime.wire import kit
from tests.runtime.wire.kit import SECRET, TASK
from tests.runtime.wire.test_many_connections import connected, hello, is_open, serving

HELLO = frames.LaneHello(7, 1, 1, bytes(range(16)))


def frame(kind: int, payload: bytes) -> bytes:
    return frames.pack_header(frames.MAGIC, kind, 0, 0, 0, 0, len(payload)) + payload


def heard(greeting: ClientGreeting, said: bytes, cuts: list[int]) -> bytes:
    """Tells a greeting something in pieces; gives all that it answers."""
    answers, at = b"", 0
    pieces = iter(cuts)
    while at < len(said) and greeting.wanted:
        count = min(greeting.wanted, next(pieces, 1000), len(said) - at)
        answers += greeting.hear(said[at : at + count])
        at += count
    return answers


@hypothesis.given(st.lists(st.integers(1, 40)))
def test_greeting_may_come_in_pieces(cuts: list[int]) -> None:
    """A greeting is read in whatever pieces it comes."""
    greeting = ClientGreeting(TASK, SECRET, 77)
    challenge = heard(greeting, frame(frames.HELLO, frames.encode_hello(HELLO)), cuts)
    fields = frames.unpack_header(challenge)
    assert (fields[1], fields[5], fields[6]) == (
        frames.CHALLENGE,
        77,
        frames.NONCE_BYTES + frames.PROOF_BYTES,
    )
    nonce = challenge[frames.HEADER_BYTES :][: frames.NONCE_BYTES]
    assert challenge.endswith(tensor_proof(SECRET, b"server", nonce, HELLO, TASK, 77))
    proof = tensor_proof(SECRET, b"client", nonce, HELLO, TASK, 77)
    assert heard(greeting, frame(frames.PROOF, proof), cuts) == b""
    assert greeting.wanted == 0 and greeting.hello == HELLO


def test_without_key_hello_is_enough() -> None:
    """A hello is the whole greeting where there is no key."""
    greeting = ClientGreeting(TASK, None, 77)
    assert heard(greeting, frame(frames.HELLO, frames.encode_hello(HELLO)), []) == b""
    assert greeting.wanted == 0 and greeting.hello == HELLO


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"GET / HTTP/1.0\r\n\r\n" + bytes(40), DataLossError),
        (frame(frames.CALL, b""), DataLossError),
        (frame(frames.HELLO, b""), DataLossError),
        (frame(frames.HELLO, bytes(frames.HELLO_BYTES + 1)), DataLossError),
        (frame(frames.HELLO, frames.encode_hello(HELLO._replace(client=0))), InvalidArgumentError),
        (
            frame(frames.HELLO, frames.encode_hello(HELLO)) + frame(frames.PROOF, b""),
            UnauthenticatedError,
        ),
        (
            frame(frames.HELLO, frames.encode_hello(HELLO)) + frame(frames.PROOF, bytes(32)),
            UnauthenticatedError,
        ),
        (
            frame(frames.HELLO, frames.encode_hello(HELLO)) + frame(frames.HELLO, bytes(9)),
            DataLossError,
        ),
    ],
)
def test_bad_greeting_ends(said: bytes, error: type[OpError]) -> None:
    """Bytes that are no greeting end the greeting with an error."""
    with pytest.raises(error):
        heard(ClientGreeting(TASK, SECRET, 77), said, [])


def test_other_user_is_told_so() -> None:
    """A process of another user is told so."""
    with pytest.raises(UnauthenticatedError, match="another user"):
        heard(
            ClientGreeting(TASK, SECRET, 77, of_other_user=True),
            frame(frames.HELLO, frames.encode_hello(HELLO)),
            [],
        )


def test_greeting_strangers_have_no_thread() -> None:
    """A stranger that says hello has no thread and no lane before its proof."""
    with serving(hello_secs=60.0) as (server, _), connected(server) as (_, known):
        assert hello(known, 1)[0] == frames.WELCOME
        threads = threading.active_count()
        with contextlib.ExitStack() as stack:
            for number in range(50):
                sock, file = stack.enter_context(connected(server))
                said = HELLO._replace(lane=number, nonce=secrets.token_bytes(16))
                kit.send(file, frames.HELLO, frames.encode_hello(said))
                assert kit.read(file)[0] == frames.CHALLENGE
            assert threading.active_count() == threads
            assert server.counters.connections == 51 and server.counters.lanes == 1
            assert is_open(sock)
        until(lambda: server.counters.connections == 1)
        with connected(server) as (_, file):
            assert hello(file, 2)[0] == frames.WELCOME
