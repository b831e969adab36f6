"""The tensor channel: steady-state calls between tasks, framed raw tensors over TCP or a Unix socket."""

from runtime.tensor_spec import aligned_buffer
from runtime.transport.channel import Lane
from runtime.transport.codec import Layout, TensorBuffer, decode_dynamic, encode_dynamic
from runtime.transport.connection import Handler, Reply, current_lane
from runtime.transport.dial import ChannelOptions
from runtime.transport.endpoint import Endpoint, host_id
from runtime.transport.listener import ServerCounters, TensorServer
from runtime.transport.peer import Peer

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
