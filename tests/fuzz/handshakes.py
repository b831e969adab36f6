"""TLS handshakes with both ports of a task, many at once: whole, torn and damaged, with good certificates and without.

They are Python's own TLS, so that what is damaged was right before. Whoever has a certificate of
the CA and does nothing wrong is let in each time; nobody else ever hears more than a refusal.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import pathlib
import random
import socket
import ssl
import struct
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

from harness.certs import CA
from runtime.cluster.spec import split_address
from runtime.wire import frames
from tests.fuzz.victim import Victim
from tests.kit import certificates
from tests.runtime.server.kit import PREFACE

AT_ONCE: Final = 24
HELD: Final = 32
"""So many torn handshakes are left open: fewer than what a port lets wait before it ends the oldest."""
ANSWER_SECS: Final = 60.0
CHECKS: Final = 20
SETTINGS: Final = 4
"""The kind of the first frame that a server of HTTP/2 sends (RFC 9113, 3.4)."""
HEAD: Final = 5
"""Bytes of the head of a record of TLS: its type, its version and its length (RFC 8446, 5.1)."""
TYPES: Final = (20, 21, 22, 23, 24, 0, 128, 255)
VERSIONS: Final = (0x0000, 0x0200, 0x0300, 0x0301, 0x0302, 0x0303, 0x0304, 0xFFFF)
LENGTHS: Final = (0, 1, 2, 1 << 14, (1 << 14) + 256, (1 << 14) + 257, 0xFFFF)
PROTOCOLS: Final = ([], ["h2"], ["h2"], ["grpc-exp", "h2"], ["http/1.1"], ["x" * 255] * 20)
"""What a client offers to speak (RFC 7301)."""
Port = Literal["grpc", "tensors"]
How = Literal["whole", "damaged", "torn", "damaged later"]
WHO: Final = ("ours", "nothing", "another CA", "ended", "not begun")


class Refused(Exception):
    """The server has hung up, or said that it does not take the client."""


def records(flight: bytes) -> list[bytes]:
    """The records of what one side says at a time."""
    found = []
    while flight:
        size = HEAD + int.from_bytes(flight[3:HEAD])
        found.append(flight[:size])
        flight = flight[size:]
    return found


def record(kind: int, body: bytes, version: int = 0x0303) -> bytes:
    """A record of TLS, its body as it is."""
    return struct.pack(">BHH", kind, version, len(body)) + body


def _flip(said: list[bytes], chance: random.Random) -> list[bytes]:
    whole = bytearray(b"".join(said))
    for _ in range(chance.choice((1, 1, 2, 8, 64))):
        whole[chance.randrange(len(whole))] = chance.randrange(256)
    return [bytes(whole)]


def _number(said: list[bytes], chance: random.Random) -> list[bytes]:
    """Puts a number that is no length of anything where one may stand."""
    whole = bytearray(b"".join(said))
    size = chance.choice((1, 2, 2, 3))
    at = chance.randrange(len(whole) - size)
    whole[at : at + size] = chance.choice((0, 1, (1 << 8 * size) - 1, 1 << 8 * size - 1)).to_bytes(
        size
    )
    return [bytes(whole)]


def _head(said: list[bytes], chance: random.Random) -> list[bytes]:
    at = chance.randrange(len(said))
    kind, version, length = struct.unpack(">BHH", said[at][:HEAD])
    match chance.randrange(3):
        case 0:
            kind = chance.choice(TYPES)
        case 1:
            version = chance.choice(VERSIONS)
        case _:
            length = chance.choice((length - 1, length + 1, *LENGTHS)) & 0xFFFF
    return [
        *said[:at],
        struct.pack(">BHH", kind, version, length) + said[at][HEAD:],
        *said[at + 1 :],
    ]


def _cut(said: list[bytes], chance: random.Random) -> list[bytes]:
    at = chance.randrange(len(said))
    return [*said[:at], said[at][: chance.randrange(len(said[at]))], *said[at + 1 :]]


def _twice(said: list[bytes], chance: random.Random) -> list[bytes]:
    at = chance.randrange(len(said))
    return [*said[:at], *[said[at]] * chance.choice((2, 3, 40)), *said[at + 1 :]]


def _turned(said: list[bytes], chance: random.Random) -> list[bytes]:
    return chance.sample(said, len(said)) if len(said) > 2 else said[::-1]


def _inserted(said: list[bytes], chance: random.Random) -> list[bytes]:
    at = chance.randrange(len(said) + 1)
    body = chance.choice(
        (
            b"",
            b"\x01",
            b"\x01\x00",
            b"\x01\x5a",
            b"\x02\x28",
            chance.randbytes(chance.randrange(300)),
        )
    )
    made = record(chance.choice(TYPES), body, chance.choice(VERSIONS))
    return [*said[:at], *[made] * chance.choice((1, 1, 2, 33, 1000)), *said[at:]]


def _split(said: list[bytes], chance: random.Random) -> list[bytes]:
    """Puts a record into many small ones, which is right while nothing is encrypted."""
    at, size = chance.randrange(len(said)), chance.choice((1, 2, 7, 100))
    kind, version, _ = struct.unpack(">BHH", said[at][:HEAD])
    body = said[at][HEAD:]
    parts = [record(kind, body[i : i + size], version) for i in range(0, len(body), size)]
    return [*said[:at], *parts, *said[at + 1 :]]


DAMAGE: Final[Sequence[Callable[[list[bytes], random.Random], list[bytes]]]] = (
    *[_flip, _number, _head, _cut, _twice, _turned, _inserted, _split],
)


class Client:
    """One handshake, flight by flight.

    Args:
        sock: the connection.
        context: has the certificate, or none.
        session: of an earlier connection that this one goes on with.
    """

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, session: ssl.SSLSession | None
    ) -> None:
        self._sock = sock
        self._heard, self._said = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(
            self._heard, self._said, server_hostname="localhost", session=session
        )
        self._shaken = False

    def flight(self) -> bytes:
        """What is to be said next; empty when the handshake is over.

        Hears the server where that has to come first.

        Raises:
            Refused: there is no next.
        """
        while not self._shaken:
            try:
                self.tls.do_handshake()
                self._shaken = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                raise Refused(error.reason) from None
            if self._said.pending:
                return self._said.read()
            if not self._shaken:
                self._hear()
        return b""

    def _hear(self) -> None:
        try:
            heard = self._sock.recv(1 << 16)
        except ConnectionError as error:
            raise Refused("reset") from error
        if not heard:
            raise Refused("hung up")
        self._heard.write(heard)

    def packed(self, said: bytes) -> bytes:
        """What goes out when the handshake is over, encrypted."""
        self.tls.write(said)
        return self._said.read()

    def answer(self) -> bytes:
        """What the server says when the handshake is over; raises Refused."""
        while True:
            try:
                heard = self.tls.read(1 << 14)
            except ssl.SSLWantReadError:
                self._hear()
            except ssl.SSLError as error:
                raise Refused(error.reason) from None
            else:
                if not heard:
                    raise Refused("ended")
                return heard


class Flood:
    """The two ports, what clients have to show, and how it goes."""

    def __init__(self, victim: Victim, seed: int, directory: pathlib.Path, authority: CA) -> None:
        self._ports: Mapping[Port, int] = {
            "grpc": split_address(victim.address)[1],
            "tensors": victim.data_port,
        }
        self._seed = seed
        self._contexts = _contexts(directory, authority)
        self._lock = threading.Lock()
        self._sessions: dict[ssl.SSLContext, ssl.SSLSession] = {}
        self._held: deque[socket.socket] = deque()
        self.counts: Counter[str] = Counter()

    def one(self, number: int) -> None:
        """Makes one handshake, which its number and the seed tell all of."""
        chance = random.Random(f"handshakes:{self._seed}:{number}")
        port = chance.choice(("grpc", "tensors"))
        who = chance.choice((*["ours"] * 5, *WHO))
        how: How = chance.choice((*["whole"] * 3, *["damaged"] * 5, "torn", "damaged later"))
        try:
            found = self._tried(port, who, how, chance, number)
        except (OSError, AssertionError) as error:
            raise AssertionError(
                f"handshake {number} of seed {self._seed}, {port}, {who}, {how}: {error!r}"
            ) from error
        with self._lock:
            self.counts[f"{how}: {found}"] += 1

    def release(self) -> None:
        """Closes what was left open."""
        while self._held:
            self._held.popleft().close()

    def _tried(self, port: Port, who: str, how: How, chance: random.Random, number: int) -> str:
        context = chance.choice(self._contexts[who])
        with contextlib.ExitStack() as stack:
            sock = socket.create_connection(("127.0.0.1", self._ports[port]), timeout=ANSWER_SECS)
            stack.callback(sock.close)
            session = self._sessions.get(context) if chance.random() < 0.3 else None
            client = Client(sock, context, session)
            harmed = chance.randrange(2)
            try:
                passed = 0
                while flight := client.flight():
                    if how == "torn" and passed == harmed:
                        return self._torn(sock, flight, chance, stack)
                    if how == "damaged" and passed == harmed:
                        return self._damaged(sock, flight, chance)
                    self._send(sock, flight, chance)
                    passed += 1
                said = self._begins(port, number)
                if how == "damaged later":
                    return self._damaged(sock, client.packed(said), chance)
                self._send(sock, client.packed(said), chance)
                answer = client.answer()
            except Refused as refused:
                wanted = who == "ours" and (
                    port == "tensors" or client.tls.selected_alpn_protocol() == "h2"
                )
                assert how != "whole" or not wanted, refused
                return "refused"
            assert who == "ours", f"let in, and told {answer!r}"
            right = (
                answer[3] == SETTINGS
                if port == "grpc"
                else frames.unpack_header(answer)[1] == frames.WELCOME
            )
            assert right, answer
            if client.tls.session is not None:
                self._sessions[context] = client.tls.session
            return "let in"

    def _begins(self, port: Port, number: int) -> bytes:
        if port == "grpc":
            return PREFACE
        hello = frames.encode_hello(frames.LaneHello(number + 1, 1, 1, bytes(frames.NONCE_BYTES)))
        return frames.pack_header(frames.MAGIC, frames.HELLO, 0, 0, 0, 0, len(hello)) + hello

    def _send(self, sock: socket.socket, said: bytes, chance: random.Random) -> None:
        """Sends all of it, now and then in pieces; the server may hang up meanwhile, which is heard next."""
        with contextlib.suppress(ConnectionError):
            if chance.random() < 0.1:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while said:
                    size = chance.choice((1, 3, 5, 6, 50, 500))
                    sock.sendall(said[:size])
                    said = said[size:]
            else:
                sock.sendall(said)

    def _damaged(self, sock: socket.socket, flight: bytes, chance: random.Random) -> str:
        """Sends it damaged and no more; the server says what it likes, and then hangs up."""
        said = records(flight)
        for _ in range(chance.choice((1, 1, 2))):
            said = chance.choice(DAMAGE)(
                [part for part in said if len(part) > HEAD] or [flight], chance
            )
        self._send(sock, b"".join(said), chance)
        _hear_out(sock)
        return "over"

    def _torn(
        self, sock: socket.socket, flight: bytes, chance: random.Random, stack: contextlib.ExitStack
    ) -> str:
        """Sends a part of it, and then leaves, in one of the ways that there are."""
        self._send(sock, flight[: chance.randrange(len(flight))], chance)
        match chance.randrange(4):
            case 0:
                return "closed"
            case 1:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return "reset"
            case 2:
                _hear_out(sock)
                return "half closed"
        stack.pop_all()
        with self._lock:
            self._held.append(sock)
            if len(self._held) > HELD:
                self._held.popleft().close()
        return "left open"


def _hear_out(sock: socket.socket) -> None:
    """Says that nothing more comes, and hears the server until it hangs up, which it has to in time."""
    with contextlib.suppress(OSError):  # it has hung up already
        sock.shutdown(socket.SHUT_WR)
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass


def _contexts(directory: pathlib.Path, authority: CA) -> dict[str, list[ssl.SSLContext]]:
    """By who a client is, what it may connect with: of each version, and of each list of protocols."""
    pairs = {
        "ours": certificates.pair_of(authority),
        "nothing": None,
        "another CA": certificates.pair_of(CA.make()),
        "ended": certificates.pair_of(authority, begins=-7200.0, ends=-3600.0),
        "not begun": certificates.pair_of(authority, begins=3600.0, ends=7200.0),
    }
    made: dict[str, list[ssl.SSLContext]] = {who: [] for who in WHO}
    for who, pair in pairs.items():
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            for protocols in PROTOCOLS:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                context.minimum_version = context.maximum_version = version
                if protocols:
                    context.set_alpn_protocols(protocols)
                if pair is not None:
                    certificates.write(directory, "client", authority, pair)
                    context.load_cert_chain(directory / "client.pem", directory / "client.key")
                made[who].append(context)
    return made


def fuzz(count: int, seed: int) -> str:
    """Makes so many handshakes, and has the certificate of both tasks replaced now and then."""
    authority = CA.make()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        directory = certificates.make(pathlib.Path(name) / "tasks", authority)
        victim = stack.enter_context(Victim(directory))
        flood = Flood(victim, seed, pathlib.Path(name) / "clients", authority)
        stack.callback(flood.release)
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(AT_ONCE))
        done = 0
        for check in range(1, CHECKS + 1):
            for _ in pool.map(flood.one, range(done, done := count * check // CHECKS)):
                pass
            flood.release()
            victim.lives()
            certificates.write(directory, "here", authority, certificates.pair_of(authority))
        return f"{count:,} handshakes: {dict(flood.counts.most_common())}; {victim.story()}"
