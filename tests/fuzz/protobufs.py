"""Damaged and made-up requests to all methods of both services, of a client that has the token."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from runtime.proto import run_record_pb2, services_pb2_grpc
from runtime.proto import services_pb2 as pb
from runtime.rpc import rpc
from tests.fuzz.victim import Victim

CHECKS: Final = 20
ANSWER_SECS: Final = 30.0
FORBIDDEN: Final = {"Clear", "Reset"}
"""Methods whose very meaning is to take the victim's variables away."""
LEADS: Final = {
    *("claim", "load", "open", "finish", "done", "stop", "pause"),
    *("wait_stop", "wait_loaded", "wait_done"),
}
"""Orders that whoever has the token may give, and that end or hold up training, or wait."""
NUMBERS: Final = (-(1 << 31), -1, 0, 1, 2, 3, 100, (1 << 31) - 1)
WORDS: Final = (
    "",
    "w",
    "/job:ps/task:0",
    "/job:worker/task:0",
    "..",
    "/dev/zero",
    "http://127.0.0.1/",
    "a" * 2000,
    "\x1b[2J\n",
)
DEPTH: Final = 6
Known = Mapping[str, int]
"""By the name of a field, the number that means something to the task: its incarnation, an open session."""


def made_up(message: Message, chance: random.Random, known: Known, depth: int = 0) -> None:
    """Fills a message with values that its fields may have."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() < 0.5 or depth > DEPTH:
            continue
        if field.is_repeated:
            for _ in range(chance.randrange(3)):
                _add(message, field, chance, known, depth)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            getattr(message, field.name).SetInParent()
            made_up(getattr(message, field.name), chance, known, depth + 1)
        else:
            setattr(message, field.name, _value(field, chance, known))


def _add(
    message: Message, field: FieldDescriptor, chance: random.Random, known: Known, depth: int
) -> None:
    values: Any = getattr(message, field.name)
    if field.type != FieldDescriptor.TYPE_MESSAGE:
        values.append(_value(field, chance, known))
    elif field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        if value.type == FieldDescriptor.TYPE_MESSAGE:
            made_up(values[_value(key, chance, known)], chance, known, depth + 1)
        else:
            values[_value(key, chance, known)] = _value(value, chance, known)
    else:
        made_up(values.add(), chance, known, depth + 1)


def _value(field: FieldDescriptor, chance: random.Random, known: Known) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = chance.choice(WORDS)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return chance.choice((0.0, -1.0, 0.01, 1e300, float("nan"), float("inf")))
        case FieldDescriptor.CPPTYPE_ENUM:
            return chance.choice([value.number for value in field.enum_type.values])
        case FieldDescriptor.CPPTYPE_UINT64:
            real = known.get(field.name)
            if real is not None and chance.random() < 0.8:
                return real
            return chance.choice((0, 1, 5, 1 << 63, (1 << 64) - 1))
        case FieldDescriptor.CPPTYPE_UINT32:
            return chance.choice((0, 1, 5, (1 << 32) - 1))
        case FieldDescriptor.CPPTYPE_INT64:
            return chance.choice((*NUMBERS, -(1 << 63), (1 << 63) - 1))
    return chance.choice(NUMBERS)


def harmless(message: Message) -> bool:
    """Whether a request is none of those that end or hold up training by what they mean, whoever gives them."""
    for sub in _orders(message):
        if sub.WhichOneof("order") in LEADS:
            return False
    return True


def _orders(message: Message) -> Iterator[Any]:
    if isinstance(message, (run_record_pb2.RunOrder, pb.CheckpointOrder)):
        yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE and not field.is_repeated:
            yield from _orders(value)


def methods(channel: grpc.Channel) -> Iterator[tuple[str, type[Message], Callable[..., Any]]]:
    """All methods that are tried, by bytes: a damaged request need not be a message."""
    for service in pb.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            if method.name not in FORBIDDEN:
                path = f"/{service.full_name}/{method.name}"
                call = channel.unary_unary(
                    path, request_serializer=bytes, response_deserializer=bytes
                )
                yield method.name, GetMessageClass(method.input_type), call


def fuzz(count: int, seed: int) -> str:
    """Sends so many requests."""
    chance = random.Random(f"protobufs:{seed}")
    codes: Counter[str] = Counter()
    with Victim() as victim, rpc.open_channel(victim.address) as channel:
        known = list(methods(channel))
        about = _known(victim, {})
        for number in range(count):
            _, kind, call = chance.choice(known)
            codes[_sent(kind, call, chance, about)] += 1
            if (number + 1) * CHECKS // count > number * CHECKS // count:
                victim.lives()
                about = _known(victim, about)
        return f"{count:,} requests: {dict(codes.most_common())}; {victim.story()}"


def _known(victim: Victim, before: Known) -> Known:
    """Opens a session, in the place of one that may have been closed; gives that when there are too many."""
    options = pb.SessionOptions(device_filters=["/job:ps/task:0"], start_timeout_secs=60.0)
    request = pb.CreateSessionRequest(options=options)
    with rpc.open_channel(victim.address) as channel:
        try:
            opened = services_pb2_grpc.MasterServiceStub(channel).CreateSession(
                request, timeout=120
            )
        except grpc.RpcError as error:
            assert before and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
            return before
    return {"incarnation": victim.incarnation, "session": opened.session}


def _sent(
    kind: type[Message], call: Callable[..., Any], chance: random.Random, known: Known
) -> str:
    while True:
        message = kind()
        made_up(message, chance, known)
        data = bytearray(message.SerializeToString())
        for _ in range(chance.choice((0, 0, 1, 4)) if data else 0):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            if not harmless(kind.FromString(bytes(data))):
                continue
        except DecodeError:
            pass  # which the task has to find, too
        break
    try:
        call(bytes(data), timeout=ANSWER_SECS)
    except grpc.RpcError as error:
        code = error.code()
        lost = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)
        assert not lost, f"{kind.DESCRIPTOR.name} {bytes(data)!r}: {error}"
        assert code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), (
            error
        )  # something that nobody has thought of
        return str(code.name)
    return "OK"
