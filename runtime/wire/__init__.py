"""The tensor channel: steady-state calls between tasks, framed raw tensors over TCP or a Unix socket."""

from runtime.tensor_spec import aligned_buffer
from runtime.wire.channel import Lane
from runtime.wire.codec import Layout, TensorBuffer, decode_dynamic, encode_dynamic
from runtime.wire.connection import Handler, Reply, current_lane
from runtime.wire.dial import ChannelOptions
from runtime.wire.endpoint import Endpoint, host_id
from runtime.wire.listener import ServerCounters, TensorServer
from runtime.wire.peer import Peer

__all__ = [
    "ChannelOptions",
    "Endpoint",
    "Handler",
    "Lane",
    "Layout",
    "Peer",
    "Reply",
    "ServerCounters",
    "TensorBuffer",
    "TensorServer",
    "aligned_buffer",
    "current_lane",
    "decode_dynamic",
    "encode_dynamic",
    "host_id",
]
