"""Somebody who has a server's address, its token and the published messages, and what becomes of their requests."""

import contextlib
import functools
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import numpy as np

import runtime as rt
from runtime.checkpoint.participant import NEEDS_SESSION
from runtime.master.tasks import RemoteTask
from runtime.proto import services_pb2 as pb
from runtime.proto import services_pb2_grpc, stage_pb2
from runtime.proto.run_record_pb2 import RunOrder
from runtime.rpc import rpc
from runtime.state.leadership import Leadership
from runtime.trust import security
from runtime.trust.security import find_token
from runtime.wire.dial import ChannelOptions

OWNER = 4711
ORDER = pb.CheckpointOrder


def key_of(server: rt.Server) -> bytes:
    """The token of a server of this process, as its user's other processes find it."""
    token = find_token(server.address, None, 60)
    assert token is not None
    return token.key


def challenge(channel: grpc.Channel) -> str:
    """The nonce that a server's process has drawn, of which a proof must be."""
    try:
        services_pb2_grpc.WorkerServiceStub(channel).Status(pb.StatusRequest(), timeout=60)
    except grpc.RpcError as error:
        told = dict(error.trailing_metadata())  # type: ignore[attr-defined]
        return str(told["bellwether-challenge"]).partition(".")[0]
    raise AssertionError("it asks for no token")


def shown(key: bytes, nonce: str, address: str, task: str = "") -> str:
    """Returns the proof of a client with a token, for the address it has dialled and the task it means."""
    about = security.about(security.dialled(address), task)
    return f"{nonce}.ours.{about}.{security.call_proof(key, b'client', nonce, 'ours', about)}"


class Stranger:
    """A session with a connection to a task's gRPC port, and the lead over it."""

    def __init__(self, server: rt.Server) -> None:
        self.channel = rpc.open_channel(server.address)
        self.worker = services_pb2_grpc.WorkerServiceStub(self.channel)
        self.master = services_pb2_grpc.MasterServiceStub(self.channel)
        self.incarnation = server.incarnation
        self.epoch = self.jobs = 0
        self.session = secrets.randbits(62) | 1
        self.tensors = functools.partial(
            RemoteTask, server.worker.task, server.address, self.session, ChannelOptions()
        )
        self._connected: RemoteTask | None = None

    def close_session(self) -> None:
        """Says goodbye on the tensor channel."""
        if self._connected is not None:
            self._connected.close(self.session)

    def close(self) -> None:
        """Ends all of it."""
        self.close_session()
        self.channel.close()

    def connect(self) -> None:
        """Opens a connection of the tensor channel, without which a session owns nothing on a task."""
        if self._connected is None:
            self._connected = self.tensors()
            self._connected.peer.release(self._connected.peer.acquire())

    def claim(self, epoch: int | None = None) -> None:
        """Leads from now on, as any chief does, under the next epoch or a given one."""
        if epoch is None:
            inspect = RunOrder(incarnation=self.incarnation, inspect=RunOrder.Inspect())
            # gRPC shares the memory of a server that was at this port before, and had stopped.
            epoch = self.worker.Run(inspect, timeout=60, wait_for_ready=True).leadership.epoch + 1
        leadership = Leadership(epoch, OWNER).to_proto()
        order = RunOrder(
            incarnation=self.incarnation, leadership=leadership, claim=RunOrder.Claim()
        )
        assert self.worker.Run(order, timeout=60).leadership == leadership
        self.epoch = epoch

    def order(self, *, epoch: int | None = None, **order: Any) -> pb.CheckpointReply:
        """What the task answers to an order, of which the name is the keyword."""
        leadership = Leadership(self.epoch if epoch is None else epoch, OWNER)
        if not NEEDS_SESSION.isdisjoint(order):
            self.connect()
        message = ORDER(leadership=leadership.to_proto(), session=self.session, **order)
        reply: pb.CheckpointReply = self.worker.Checkpoint(message, timeout=60)
        return reply

    def take(self, slices: Sequence[pb.SliceDef]) -> int:
        """Has the task take references, to be written; gives the job."""
        self.jobs += 1
        self.order(pause=ORDER.Pause(job=self.jobs, seconds=5.0))
        self.order(take=ORDER.Take(job=self.jobs, slices=slices))
        return self.jobs


@contextlib.contextmanager
def stranger(server: rt.Server) -> Iterator[Stranger]:
    """A stranger who leads."""
    made = Stranger(server)
    with contextlib.closing(made):
        made.claim()
        yield made


def slice_of(name: str, value: Any, **fields: Any) -> pb.SliceDef:
    """A whole variable as a slice."""
    array = np.asarray(value)
    dtype = "string" if array.dtype == object else array.dtype.name
    of_array = {"full_shape": array.shape, "offset": [0] * array.ndim, "chunk": array.shape}
    spec = stage_pb2.TensorSpecDef(shape=array.shape, dtype=dtype)
    return pb.SliceDef(key=name, name=name, spec=spec, device_type="CPU", **{**of_array, **fields})


@contextlib.contextmanager
def refused(code: grpc.StatusCode, *words: str) -> Iterator[None]:
    """The call in the block is refused with this code, in a line that has these words."""
    try:
        yield
    except grpc.RpcError as error:
        assert error.code() is code, (error.code(), error.details())
        assert all(word in (error.details() or "") for word in words), error.details()
        assert "\n" not in (error.details() or "")
    else:
        raise AssertionError("it was not refused")
