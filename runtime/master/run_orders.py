"""Orders to the run records of a cluster: to all tasks that hold variables, at the same time."""

from __future__ import annotations

import functools
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures

from runtime.cluster.spec import ClusterSpec
from runtime.master.tasks import RemoteTask, join
from runtime.proto import run_record_pb2
from runtime.state.cancellation import Cancellation
from runtime.state.run_record import wait_secs
from runtime.transport.dial import ChannelOptions


def holders(tasks: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The tasks whose run records count: all of job ps; where there is none, the first by name.

    Args:
        tasks: (name, address) of those that a client may touch.
    """
    ps = [(name, address) for name, address in tasks if name.startswith("/job:ps/")]
    return ps or sorted(tasks)[:1]


def send_run_order(
    order: run_record_pb2.RunOrder,
    tasks: Sequence[tuple[str, str]],
    *,
    cluster: ClusterSpec,
    sender: str,
    answer_secs: float,
    cancelled: Cancellation,
) -> dict[str, run_record_pb2.RunReply]:
    """Has tasks carry out an order, all at the same time: one that is not there keeps it from no other.

    Args:
        order: the order.
        tasks: (name, address) of each.
        cluster: the sender's view of the cluster, compared with everybody's.
        sender: name of the task that orders.
        answer_secs: how long a task may take beyond what the order waits for on purpose; one that is not there is
            waited for so long.
        cancelled: ends the waiting, from another thread. An order that waits is over as soon as one of the tasks fails.

    Returns:
        The replies by task.

    Raises:
        OpError: the first failure of a task, when all have replied or failed; where the order waits, at once.
    """
    deadline = time.monotonic() + wait_secs(order) + answer_secs
    ask = functools.partial(_ask, order, cluster, sender, answer_secs, deadline, cancelled)
    if len(tasks) == 1:
        return {name: ask(name, address) for name, address in tasks}
    try:
        replies = {name: _in_thread(functools.partial(ask, name, address), name) for name, address in tasks}
        ended, _ = futures.wait(replies.values(), return_when=futures.FIRST_EXCEPTION)
        failed = [reply for reply in replies.values() if reply in ended and reply.exception()]
        if failed and wait_secs(order):
            cancelled.set("another task has failed")
        futures.wait(replies.values())
    except BaseException:
        cancelled.set("the caller was interrupted")
        raise
    for first in failed:
        first.result()
    return {name: reply.result() for name, reply in replies.items()}


def _in_thread(ask: Callable[[], run_record_pb2.RunReply], task: str) -> futures.Future[run_record_pb2.RunReply]:
    """Asks one task on a thread of its own, which keeps no process alive that wants to end."""
    reply: futures.Future[run_record_pb2.RunReply] = futures.Future()

    def run() -> None:
        try:
            reply.set_result(ask())
        except BaseException as error:
            reply.set_exception(error)

    threading.Thread(target=run, name=f"run record of {task}", daemon=True).start()
    return reply


def _ask(
    order: run_record_pb2.RunOrder,
    cluster: ClusterSpec,
    sender: str,
    answer_secs: float,
    deadline: float,
    cancelled: Cancellation,
    name: str,
    address: str,
) -> run_record_pb2.RunReply:
    client = secrets.randbits(63) | 1
    task = join(
        [(name, address)],
        cluster=cluster,
        sender=sender,
        client=client,
        options=ChannelOptions(reconnect_secs=answer_secs),
        timeout=answer_secs,
        cancelled=cancelled,
    )[name]
    try:
        return task.send_run_order(order, deadline, cancelled)
    finally:
        if isinstance(task, RemoteTask):
            task.close(client)
