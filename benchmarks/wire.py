"""How fast tensors travel between two processes: the tensor channel over TCP and Unix sockets, against gRPC.

Each call carries a tensor of one size and gets 4 bytes back. Prints the median and the 90th percentile of the round
trip and the bytes per second one way; `--json` prints the same as one JSON object. Run from the checkout:

    python -m benchmarks.wire --ways=tcp,unix,grpc --sizes=4,318000,4194304,67108864
"""

import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent import futures
from multiprocessing.connection import Connection
from typing import Any

import grpc
import numpy as np
from absl import app, flags

from runtime.tensor_spec import TensorSpec
from runtime.transport import ChannelOptions, Endpoint, Layout, Peer, Reply, TensorBuffer, TensorServer

_WAYS = flags.DEFINE_list("ways", ["tcp", "unix", "grpc"], "What to measure: tcp, unix, grpc.")
_SIZES = flags.DEFINE_list("sizes", ["4", "318000", str(4 << 20), str(64 << 20)], "Bytes that each call carries.")
_SECONDS = flags.DEFINE_float("seconds", 1.0, "Time for each measurement, in seconds.", lower_bound=0.01)
_JSON = flags.DEFINE_bool("json", False, "Print JSON instead of a table.")

_REPLY = Layout([TensorSpec((), np.dtype(np.int32))])
_METHOD = "/bellwether.benchmark/Call"
_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_MIN_CALLS = 5


class Sink:
    """Takes a tensor of as many bytes as the handle says, and replies with a number."""

    def __init__(self) -> None:
        self._layouts: dict[int, Layout] = {}
        self._answer = Reply([np.array(7, np.int32)])

    def input_layout(self, handle: int) -> Layout:
        """The layout of uint8[handle]."""
        layout = self._layouts.get(handle)
        if layout is None:
            layout = self._layouts[handle] = Layout([TensorSpec((handle,), np.dtype(np.uint8))])
        return layout

    def call(self, handle: int, client: int, step: int, inputs: list[Any]) -> Reply:
        """Replies with 4 bytes."""
        return self._answer


def _serve(pipe: Connection) -> None:
    server = TensorServer(Sink(), host="127.0.0.1", key=None, incarnation=1)
    server.start()
    method = grpc.unary_unary_rpc_method_handler(lambda request, context: b"1234")
    control = grpc.server(futures.ThreadPoolExecutor(2), options=_UNLIMITED)
    control.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bellwether.benchmark", {"Call": method}),))
    port = control.add_insecure_port("127.0.0.1:0")
    control.start()
    pipe.send((server.endpoint("127.0.0.1"), port))
    pipe.recv()
    control.stop(0).wait()
    server.stop()


def measure(call: Callable[[], object], nbytes: int, seconds: float) -> dict[str, float]:
    """Times a call.

    Args:
        call: one round trip.
        nbytes: what it carries one way.
        seconds: how long to go on, after one call that is not counted.

    Returns:
        calls, median_us, p90_us and gb_per_s (of the median).
    """
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < _MIN_CALLS or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    median = statistics.median(times)
    p90 = sorted(times)[len(times) * 9 // 10]
    return {"calls": len(times), "median_us": median * 1e6, "p90_us": p90 * 1e6, "gb_per_s": nbytes / median / 1e9}


def run(ways: list[str], sizes: list[int], seconds: float) -> list[dict[str, Any]]:
    """Measures every way with every size against a second process.

    Returns:
        One row for each: way, bytes and what `measure` gives.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    rows = []
    try:
        endpoint, grpc_port = ours.recv()
        for way in ways:
            for size in sizes:
                data = np.zeros(size, np.uint8)
                times = _measure_way(way, endpoint, grpc_port, data, seconds)
                rows.append({"way": way, "bytes": size, **times})
    finally:
        ours.send(None)
        process.join(10)
    return rows


def _measure_way(way: str, endpoint: Endpoint, grpc_port: int, data: Any, seconds: float) -> dict[str, float]:
    if way == "grpc":
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}", options=_UNLIMITED) as channel:
            method = channel.unary_unary(_METHOD, None, None)
            return measure(lambda: np.frombuffer(method(data.tobytes()), np.int32), data.nbytes, seconds)
    client_id = int.from_bytes(os.urandom(8), "little")
    options = ChannelOptions(prefer_unix=way == "unix")
    peer = Peer("/job:ps/task:0", lambda timeout: endpoint, client_id, lambda timeout: None, options=options)
    try:
        lane = peer.acquire()
        if lane.is_unix != (way == "unix"):
            raise app.UsageError(f"cannot measure {way} here")
        out = TensorBuffer(_REPLY)
        return measure(lambda: lane.call(data.nbytes, 1, [data], _REPLY, out=out), data.nbytes, seconds)
    finally:
        peer.close()


def main(argv: list[str]) -> None:
    """Measures and prints."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    rows = run(_WAYS.value, [int(size) for size in _SIZES.value], _SECONDS.value)
    if _JSON.value:
        json.dump({"unit": "one call with its reply of 4 bytes", "cpus": os.cpu_count(), "rows": rows}, sys.stdout)
        print()
        return
    print(f"{'way':6}{'bytes':>12}{'calls':>9}{'median us':>12}{'p90 us':>12}{'GB/s':>9}")
    for row in rows:
        print("{way:6}{bytes:12d}{calls:9d}{median_us:12.1f}{p90_us:12.1f}{gb_per_s:9.3f}".format(**row))


if __name__ == "__main__":
    app.run(main)
