"""How the control plane reaches a task again."""

import socket
import time

import grpc
import pytest

from runtime.errors import CancelledError
from runtime.server import rpc

ATTEMPTS = 12


def test_a_call_over_a_channel_that_was_closed_is_cancelled() -> None:
    channel = rpc.open_channel("127.0.0.1:1")
    method = channel.unary_unary("/any/method")
    channel.close()
    with pytest.raises(CancelledError, match="closed"):
        rpc.call(method, b"", timeout=1, task="/job:ps/task:0")


def test_attempts_to_connect_again_come_fast_and_do_not_slow_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        with rpc.open_channel(f"127.0.0.1:{listener.getsockname()[1]}") as channel:
            call = channel.unary_unary("/any/method").future(b"", timeout=60, wait_for_ready=True)
            began = time.monotonic()
            for _ in range(ATTEMPTS):
                connection, _ = listener.accept()
                connection.close()  # a task that is about to be gone, or not there yet
            took = time.monotonic() - began
            call.cancel()
            with pytest.raises(grpc.FutureCancelledError):
                call.result()
    assert took < 15  # 1 to 2 s; with gRPC's own pauses it would be several minutes
