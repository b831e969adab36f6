"""Damaged and made-up frames of a client of the tensor channel that has the token, or says that it has."""

from __future__ import annotations

import contextlib
import random
import socket
from collections import Counter
from typing import Any, Final

import runtime as rt
from runtime.wire import frames
from runtime.wire.handles import BACKUP, FETCH, PULL, PUSH
from tests.fuzz.victim import PS, Victim
from tests.runtime.wire.kit import read, say_hello

ANSWER_SECS: Final = 30.0
CLIENTS: Final = 64
"""So many clients come again and again, each with a few lanes."""
CHECKS: Final = 20
NUMBERS: Final = (
    0,
    1,
    2,
    7,
    255,
    256,
    65535,
    1 << 31,
    (1 << 32) - 1,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
HANDLES: Final = (FETCH, PULL, PUSH, BACKUP, 1, 2, 3, 4, 99, 1 << 31)


def payload(chance: random.Random) -> bytes:
    """What may be a table of tensors that describe themselves, or anything."""
    size = chance.choice((0, 1, 8, 10, 48, 64, 200, 1000))
    made = bytearray(chance.randbytes(size))
    for _ in range(chance.randrange(4)):
        if size >= 8:
            at = chance.randrange(size - 7)
            made[at : at + 8] = chance.choice(NUMBERS).to_bytes(8, "little")
    return bytes(made)


def call(chance: random.Random, seq: int) -> bytes:
    """A call that is whole, of any handle and with any payload."""
    said = payload(chance)
    flags = chance.choice((0, frames.DYNAMIC, frames.DYNAMIC, 255))
    number = chance.choice(NUMBERS) if chance.random() < 0.05 else seq
    head = frames.pack_header(
        frames.MAGIC,
        frames.CALL,
        flags,
        chance.choice(HANDLES),
        number,
        chance.choice(NUMBERS),
        len(said),
    )
    return head + said


def damaged(chance: random.Random) -> bytes:
    """A frame of any kind with a few bytes changed, or cut off, or with another length."""
    said = payload(chance)
    length = chance.choice((len(said), *NUMBERS))
    kind = chance.choice((*range(12), 255))
    flags = chance.choice((0, 1, 2, 4, 255))
    head = frames.pack_header(frames.MAGIC, kind, flags, chance.choice(HANDLES), 1, 1, length)
    made = bytearray(head + said)
    for _ in range(chance.choice((0, 1, 1, 2, 8))):
        made[chance.randrange(len(made))] = chance.randrange(256)
    return bytes(made[: chance.choice((len(made), len(made), chance.randrange(len(made)) + 1))])


def fuzz(count: int, seed: int) -> str:
    """Sends so many frames."""
    chance = random.Random(f"frames:{seed}")
    counts: Counter[str] = Counter()
    with Victim() as victim:
        sent = checked = 0
        while sent < count:
            sent += _one_connection(victim.data_port, victim.key, chance, counts, count - sent)
            if sent * CHECKS // count > checked:
                checked = sent * CHECKS // count
                victim.lives()
        victim.lives()
        return (
            f"{sent:,} frames on {counts['connections']:,} connections, {counts['answers']:,} "
            "answers; " + (victim.story())
        )


def _one_connection(
    port: int, key: bytes, chance: random.Random, counts: Counter[str], most: int
) -> int:
    """Sends frames until the connection is of no use; gives how many."""
    counts["connections"] += 1
    sent = 0
    with (
        socket.create_connection(("127.0.0.1", port), timeout=ANSWER_SECS) as sock,
        sock.makefile("rwb") as file,
    ):
        try:
            if chance.random() < 0.3:  # before the welcome
                _damage(sock, file, chance)
                return 1
            client, lane = chance.randrange(1, CLIENTS), chance.randrange(1, 4)
            counts["attempts"] += 1
            kind, said = say_hello(
                file, client, key, PS, lane=lane, attempt=counts["attempts"] & 0xFFFF_FFFF
            )
            assert kind in (frames.WELCOME, frames.ERROR), (kind, said)
            while kind == frames.WELCOME and sent < most:
                sent += 1
                if chance.random() < 0.02:
                    _damage(sock, file, chance)
                    return sent
                sock.sendall(call(chance, sent))
                answer, _, said = read(file)
                assert answer in (frames.REPLY, frames.ERROR), answer
                if answer == frames.ERROR:
                    error = frames.decode_error(said, "")
                    # something that nobody has thought of
                    assert not isinstance(error, rt.InternalError), error
                counts["answers"] += 1
        except (ConnectionError, ValueError):
            counts["cut"] += 1
    return max(sent, 1)


def _damage(sock: socket.socket, file: Any, chance: random.Random) -> None:
    """Sends a damaged frame, and hears what there is to hear until the end."""
    with contextlib.suppress(ConnectionError, BrokenPipeError):
        sock.sendall(damaged(chance))
        with contextlib.suppress(OSError):  # ENOTCONN: it has hung up already
            sock.shutdown(socket.SHUT_WR)
        while file.read(65536):
            pass
