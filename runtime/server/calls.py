"""The table of all methods of the control plane: the order in ``roles.MAY``, the pool and the audit entry of each."""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from google.protobuf.message import Message

from runtime.proto import run_record_pb2, services_pb2, stage_pb2
from runtime.server.pools import CALLS, CHECKPOINT_ORDERS, ORDERS, REGISTRATIONS, WAITING
from runtime.state.run_record import MOST_STATE_BYTES, wait_secs
from runtime.trust import roles

CHIEFS_KERNELS = frozenset(("quorum/claim", "quorum/gather", "quorum/norm", "quorum/commit"))
"""Kernels by which a chief decides on a step.

The registration of a stage with such a kernel is the order "quorum".
"""
THIS_TASK = ""
"""Sender of a forwarded order. A master forwards orders in the name of its own task."""
OF_THE_SENDER = frozenset(("claim", "load", "open", "finish", "join", "rest", "done"))
"""Orders to a run record in the name of the sending task."""
AUDITED_CHECKPOINT_ORDERS: Final[Mapping[str, str]] = {
    "take": "",
    "write": "directory",
    "read": "directory",
    "receive": "",
    "commit": "",
}
AUDITED_RUN_ORDERS: Final[Mapping[str, str]] = {
    "claim": "",
    "load": "",
    "open": "logdir",
    "finish": "",
    "done": "",
}
"""Audited orders, with the field of the order's object; empty for an order without an object."""
_SHORT_ORDERS = frozenset(("confirm", "receive", "drop", "states", "changed"))

_Request: TypeAlias = Any
"""A message of the method."""
Entry: TypeAlias = tuple[str, str] | None
"""An action and its object for the audit log; None for a call without an entry."""


class CallRules(NamedTuple):
    """The rules for calls of one method, each a function of the request.

    Attributes:
        order: Name of the call in ``roles.MAY``.
        pool: Pool in which the call takes a place.
        entry: Entry of the call in the audit log.
        sender: Task for which the call speaks, THIS_TASK for the task's own master; None for a call
            of no task.
        most_bytes: Most bytes of a request; None for the limit ``request_bytes``.
    """

    order: Callable[[_Request], str]
    pool: Callable[[_Request], str] = lambda request: CALLS
    entry: Callable[[_Request], Entry] = lambda request: None
    sender: Callable[[_Request], str | None] = lambda request: None
    most_bytes: int | None = None


def _always_name(what: str) -> Callable[[_Request], str]:
    return lambda request: what


# A call to a master asks other tasks, and these may be asking this task. With a wait for a place in
# a pool, tasks could wait for each other forever. So a call of this pool gets a place at once or is
# refused.
_waits = _always_name(WAITING)
_session = _always_name("session")


def _order_rules(
    plane: str,
    audited: Mapping[str, str],
    pool: Callable[[_Request], str],
    sender: Callable[[_Request], str | None] = lambda request: None,
    most_bytes: int | None = None,
) -> CallRules:
    """Returns the rules for a method whose requests have an order each.

    Args:
        plane: First part of the names of the orders.
        audited: Audited orders, each with the field of its object.
        pool: Pool, as of ``CallRules``.
        sender: Sender, as of ``CallRules``.
        most_bytes: Most bytes, as of ``CallRules``.
    """

    def name(request: _Request) -> str:
        found = f"{plane}.{request.WhichOneof('order')}"
        # A newer client may know more orders. The task refuses these itself, with an error that
        # the client understands.
        return found if found in roles.MAY else "unknown"

    def entry(request: _Request) -> Entry:
        order = request.WhichOneof("order")
        if (field := audited.get(order)) is None:
            return None
        return f"{plane}.{order}", str(getattr(getattr(request, order), field)) if field else ""

    return CallRules(name, pool, entry, sender, most_bytes)


def _stage_order(*calls: stage_pb2.StageCallDef) -> str:
    # A kernel that runs on a condition has the prefix of `graph.op_kinds.WHEN`.
    kernels = (host.kernel.rpartition("when/")[2] for call in calls for host in call.stage.host)
    return "quorum" if any(kernel in CHIEFS_KERNELS for kernel in kernels) else "register"


def _program_entry(request: services_pb2.RegisterRequest) -> Entry:
    # A client sends a program without its bytes first. Only the bytes bring something new into this
    # process.
    program = request.call.stage.program
    return ("program", program.sha256.hex()) if program.blob else None


_SHORT_BYTES = 64 << 10
"""Most bytes of a request for figures."""
_CLUSTER_BYTES = 1 << 20
"""Most bytes of a ``Status`` call with a cluster: enough for 10,000 tasks."""
_RUN_BYTES = 2 * MOST_STATE_BYTES
"""Most bytes of an order to the run record: the states of a worker, and the names of all tasks."""

_CHECKPOINT = _order_rules(
    "checkpoint",
    AUDITED_CHECKPOINT_ORDERS,
    lambda r: ORDERS if r.WhichOneof("order") in _SHORT_ORDERS else CHECKPOINT_ORDERS,
)
_RUN = _order_rules(
    "run",
    AUDITED_RUN_ORDERS,
    # Some orders wait up to a minute for other tasks. Short orders must not stand in a queue behind
    # them.
    lambda r: WAITING if wait_secs(r) else ORDERS,
    lambda r: r.sender if r.WhichOneof("order") in OF_THE_SENDER else None,
    _RUN_BYTES,
)


def _forwarded_rules(of: CallRules) -> CallRules:
    """Returns the rules for a forwarded order: the rules of the order, with the master's own task as its sender."""
    return CallRules(
        lambda r: of.order(r.order),
        _waits,
        lambda r: of.entry(r.order),
        lambda r: None if of.sender(r.order) is None else THIS_TASK,
        of.most_bytes,
    )


METHODS: Final[Mapping[str, CallRules]] = {
    "/bellwether.WorkerService/Status": CallRules(
        # A status call with a cluster teaches this task addresses, which needs a right of its own.
        lambda r: "introduce" if r.HasField("cluster") else "status",
        most_bytes=_CLUSTER_BYTES,
    ),
    "/bellwether.WorkerService/Metrics": CallRules(
        _always_name("metrics"), most_bytes=_SHORT_BYTES
    ),
    "/bellwether.WorkerService/Register": CallRules(
        lambda r: _stage_order(r.call), _always_name(REGISTRATIONS), _program_entry
    ),
    "/bellwether.WorkerService/Unregister": CallRules(_always_name("unregister")),
    "/bellwether.WorkerService/Trace": CallRules(_always_name("trace"), most_bytes=_SHORT_BYTES),
    "/bellwether.WorkerService/Clear": CallRules(
        _always_name("clear"),
        _always_name(ORDERS),
        lambda r: ("clear", " ".join(r.containers) or "all"),
    ),
    "/bellwether.WorkerService/Checkpoint": _CHECKPOINT,
    "/bellwether.WorkerService/Run": _RUN,
    "/bellwether.MasterService/CreateSession": CallRules(
        _session, _waits, lambda r: ("session.open", "")
    ),
    "/bellwether.MasterService/RenewSession": CallRules(_session),
    "/bellwether.MasterService/CloseSession": CallRules(_session),
    "/bellwether.MasterService/RegisterPlan": CallRules(
        lambda r: _stage_order(*r.plan.stages), _waits
    ),
    "/bellwether.MasterService/RunStep": CallRules(_always_name("step"), _waits),
    "/bellwether.MasterService/ForwardCheckpoint": _forwarded_rules(_CHECKPOINT),
    "/bellwether.MasterService/ForwardBytes": CallRules(_always_name("checkpoint.bytes"), _waits),
    "/bellwether.MasterService/ForwardRunOrder": _forwarded_rules(_RUN),
    "/bellwether.MasterService/AdoptGenerations": CallRules(_session),
    "/bellwether.MasterService/Reset": CallRules(
        _always_name("clear"), _waits, lambda r: ("reset", "")
    ),
}
"""All methods of both services, by name.

Calls that answer at once take a place in the pool CALLS.
"""


def _orders_of(message: type[Message]) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.oneofs_by_name["order"].fields}


# A name with a mistake would leave an order out of a rule without a word.
assert METHODS.keys() == {
    f"/{service.full_name}/{method.name}"
    for service in services_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
assert AUDITED_CHECKPOINT_ORDERS.keys() | _SHORT_ORDERS <= _orders_of(services_pb2.CheckpointOrder)
assert AUDITED_RUN_ORDERS.keys() | OF_THE_SENDER <= _orders_of(run_record_pb2.RunOrder)
