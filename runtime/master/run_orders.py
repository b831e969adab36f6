"""Orders to the run records of a cluster: to all tasks that hold variables, at the same time."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from concurrent import futures

from runtime import concurrency
from runtime.cluster.spec import ClusterSpec
from runtime.master.tasks import LocalTask, RemoteTask, meet_tasks
from runtime.proto import run_record_pb2
from runtime.state.cancellation import Cancellation
from runtime.state.run_record import wait_secs
from runtime.trust.security import Security
from runtime.wire.dial import ChannelOptions

_ENDED_SECS = 1.0
"""How long the threads of an order that waits may take to notice that it is over."""


def find_holders(tasks: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns the tasks whose run records count: all of job ps, or without ps the first task by name.

    Args:
        tasks: (name, address) of those that a client may touch.
    """
    ps = [(name, address) for name, address in tasks if name.startswith("/job:ps/")]
    return ps or sorted(tasks)[:1]


def choose_receivers(order: run_record_pb2.RunOrder, tasks: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """Returns the receivers of an order: all ``find_holders``, or one for an order that every task has waiting.

    Each sender has its own, so that no task keeps the threads of all. Only who leads asks all: any may have to go.
    """
    if order.WhichOneof("order") != "wait_stop" or order.HasField("leadership") or not tasks:
        return tasks
    return [tasks[zlib.crc32(order.sender.encode()) % len(tasks)]]


def send_run_order(
    order: run_record_pb2.RunOrder,
    tasks: Sequence[tuple[str, str]],
    *,
    cluster: ClusterSpec,
    answer_secs: float,
    cancelled: Cancellation,
    security: Security | None = None,
) -> dict[str, run_record_pb2.RunReply]:
    """Has tasks carry out an order at the same time: a task that is absent delays no other.

    Args:
        order: the order.
        tasks: (name, address) of each.
        cluster: the sender's view of the cluster, compared with everybody's.
        answer_secs: how long a task may take beyond what the order waits for on purpose; one that is not there is
            waited for so long.
        cancelled: ends it, from another thread; set when it is over.
        security: what the sender was given to talk to other tasks.

    Returns:
        The replies by task; to ``wait_stop`` those that have come when the first has.

    Raises:
        OpError: the failure of a task, when all have replied or failed; where the order waits, at once.
        CancelledError: ``cancelled`` was set.
    """
    deadline = concurrency.monotonic() + wait_secs(order) + answer_secs
    client = concurrency.random_id(63) | 1
    replies: dict[str, futures.Future[run_record_pb2.RunReply]] = {}
    met: list[RemoteTask] = []
    ended = concurrency.Condition()

    def send(name: str, address: str) -> run_record_pb2.RunReply:
        task = meet_tasks(
            [(name, address)],
            cluster=cluster,
            sender=order.sender,
            client=client,
            options=ChannelOptions(reconnect_secs=answer_secs),
            timeout=answer_secs,
            cancelled=cancelled,
            security=security,
        )[name]
        if isinstance(task, LocalTask):
            return task.send_run_order(order, cancelled)
        met.append(task)
        try:
            cancelled.check(f"meeting {name}")  # what ends the exchange from now on finds the task
            return task.send_run_order(order, deadline)
        finally:
            task.close(client)

    def note_end(_: object) -> None:
        with ended:
            ended.notify_all()

    def failed() -> list[futures.Future[run_record_pb2.RunReply]]:
        return [reply for reply in replies.values() if reply.done() and reply.exception()]

    first = order.WhichOneof("order") == "wait_stop"

    def over() -> bool:
        done = [reply.done() for reply in replies.values()]
        return all(done) or (first and any(done)) or (wait_secs(order) > 0 and bool(failed()))

    try:
        for name, address in tasks:
            replies[name] = concurrency.in_thread(functools.partial(send, name, address), f"run record of {name}")
            replies[name].add_done_callback(note_end)
        with ended:
            cancelled.wait_for(ended, over, "an order to run records")
        for failure in failed():
            failure.result()
        return {name: reply.result() for name, reply in replies.items() if reply.done()}
    finally:
        # The orders under way end, on the tasks too.
        cancelled.set("it is over")
        for task in list(met):
            task.close(client)
        # A thread within a call must not meet the end of the interpreter.
        if wait_secs(order):
            futures.wait(replies.values(), _ENDED_SECS)
