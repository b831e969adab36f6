"""gRPC the way this runtime uses it: channel options, errors that keep their name and task across the wire."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc

from runtime import timeouts
from runtime.errors import CancelledError, OpError, error_from_code, wire_code
from runtime.transport import http_proxy

_TASK = "bellwether-task"
_TYPE = "bellwether-error"
"""Metadata of a failed call: the task that failed, and the number of its error's type."""
_MAX_MESSAGE = 2**31 - 1


def _ms(secs: float) -> int:
    return round(secs * 1000)


CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", _MAX_MESSAGE),
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    ("grpc.enable_http_proxy", 0),  # a proxy of the environment must not take local traffic
    ("grpc.initial_reconnect_backoff_ms", _ms(timeouts.GRPC_BACKOFF_SECS)),
    ("grpc.min_reconnect_backoff_ms", _ms(timeouts.ATTEMPT_SECS)),  # after a refusal the next comes sooner
    ("grpc.max_reconnect_backoff_ms", _ms(timeouts.GRPC_BACKOFF_SECS)),  # everybody waits for a restarted ps
    ("grpc.dns_min_time_between_resolutions_ms", _ms(timeouts.GRPC_DNS_SECS)),  # a restarted task may have moved
    ("grpc.keepalive_time_ms", _ms(timeouts.GRPC_IDLE_SECS)),
    ("grpc.keepalive_timeout_ms", _ms(timeouts.GRPC_PING_SECS)),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.ping_timeout_ms", _ms(timeouts.GRPC_PING_SECS)),  # a frozen peer would go unseen for a minute
]
MAX_REQUEST_BYTES = 64 << 20
"""Longest message that a server takes, by default. Tensors go over the tensor channel; what is long here is what a
client in another process feeds, and the constants of its graph."""
_TOO_LONG = "larger than max"

_T = TypeVar("_T")


def server_options(max_request_bytes: int) -> list[tuple[str, Any]]:
    """Channel options of a server that takes messages up to a length, as they are: a compressed one may be any."""
    return [
        ("grpc.max_send_message_length", _MAX_MESSAGE),
        ("grpc.max_receive_message_length", max_request_bytes),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # bit 0: none
        ("grpc.so_reuseport", 0),  # a second server on one port must fail, not share it
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ]


def open_channel(address: str) -> grpc.Channel:
    """A channel to ``host:port``; connects when it is used."""
    return grpc.insecure_channel(address, options=list(dict([*CHANNEL_OPTIONS, *http_proxy.grpc_options()]).items()))


def call(
    method: Callable[..., _T], request: Any, *, timeout: float | None, task: str, wait_for_ready: bool = False
) -> _T:
    """Calls a stub method; gRPC's errors become ours.

    Raises:
        OpError: of the class that the code says, naming ``task`` unless the other side named another.
        CancelledError: this side has closed the channel.
    """
    try:
        return method(request, timeout=timeout, wait_for_ready=wait_for_ready)
    except grpc.RpcError as error:
        raise _from_grpc(error, task) from None
    except ValueError as error:  # what grpc raises when another thread has closed the channel; only its text tells
        if "closed" not in str(error):
            raise
        raise CancelledError(f"the connection was closed: {error}", task=task) from None


def _from_grpc(error: grpc.RpcError, task: str) -> OpError:
    told = {entry.key: str(entry.value) for entry in error.trailing_metadata() or ()}
    code, number = error.code().value[0], told.get(_TYPE, "")
    if number.isdecimal() and int(number) & 0xFF == code:
        code = int(number)
    text = error.details() or error.code().name
    if _TOO_LONG in text:
        text += "; the server takes longer ones with Server(max_request_bytes=...)"
    return error_from_code(code, text, told.get(_TASK, task))


class _Running(threading.local):
    context: grpc.ServicerContext | None = None


_running = _Running()


@contextlib.contextmanager
def when_abandoned(action: Callable[[], None]) -> Iterator[None]:
    """In a servicer method: has ``action`` called, from another thread, if the caller goes before the block ends."""
    inside = True

    def ended() -> None:
        if inside:
            action()

    if _running.context is not None and not _running.context.add_callback(ended):
        action()  # gone already
    try:
        yield
    finally:
        inside = False


def servicer_method(method: Callable[[Any, Any], _T]) -> Callable[[Any, Any, grpc.ServicerContext], _T]:
    """Turns ``method(self, request)`` into a servicer method whose OpErrors reach the caller by name."""

    @functools.wraps(method)
    def wrapped(self: Any, request: Any, context: grpc.ServicerContext) -> _T:
        _running.context = context
        try:
            return method(self, request)
        except OpError as error:
            context.set_trailing_metadata(((_TASK, error.task), (_TYPE, str(wire_code(error)))))
            code = next(c for c in grpc.StatusCode if c.value[0] == error.code)
            context.abort(code, error.message)
            raise AssertionError("abort raises") from error

    return wrapped
