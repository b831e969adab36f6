"""Orders to the run records of a cluster.

All tasks that hold variables receive an order at the same time.
"""

import functools
import zlib
from collections.abc import Sequence
from concurrent import futures

from runtime import concurrency
from runtime.cluster.spec import ClusterSpec
from runtime.master import times
from runtime.master.tasks import LocalTask, RemoteTask, meet_tasks
from runtime.proto import run_record_pb2
from runtime.state.cancellation import Cancellation
from runtime.state.run_record import wait_secs
from runtime.trust.security import Security
from runtime.wire.dial import ChannelOptions

_Replies = dict[str, futures.Future[run_record_pb2.RunReply]]


def find_holders(tasks: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns the tasks that hold run records: all of job ps, or without ps the first task by name.

    Args:
        tasks: (name, address) of the client's tasks.
    """
    ps = [(name, address) for name, address in tasks if name.startswith("/job:ps/")]
    return ps or sorted(tasks)[:1]


def choose_receivers(
    order: run_record_pb2.RunOrder, tasks: Sequence[tuple[str, str]]
) -> Sequence[tuple[str, str]]:
    """Returns the receivers of an order: the tasks that hold run records, or for a wait of a worker one task.

    Each sender has its own receiver, so that no task keeps a thread for every worker. The leader
    alone waits at all tasks, since any task may have to leave.

    Args:
        order: the order with its sender.
        tasks: the result of ``find_holders``.
    """
    if order.WhichOneof("order") != "wait_stop" or order.HasField("leadership") or not tasks:
        return tasks
    # Python's own hash differs between processes, and a repeated order should reach the same task.
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
    """Sends an order to tasks at the same time. An absent task delays no other task.

    Args:
        order: the order.
        tasks: (name, address) of each task.
        cluster: the sender's view of the cluster, compared with the view of each task.
        answer_secs: seconds for a task beyond the order's own wait, and for the wait for an absent
            task.
        cancelled: ends the order from another thread; set at the end of the order.
        security: certificates or token of the sender, for other tasks.

    Returns:
        The replies by task; for ``wait_stop`` the replies at the time of the first.

    Raises:
        OpError: the failure of a task, after the last reply or failure. An order with a wait raises
            at once.
        CancelledError: ``cancelled`` was set.
    """
    deadline = concurrency.monotonic() + wait_secs(order) + answer_secs
    client = concurrency.random_id(63) | 1
    replies: _Replies = {}
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
            # An end of the order before this line has closed no task here. An end after this line
            # closes the task.
            cancelled.check(f"meeting {name}")
            return task.send_run_order(order, deadline)
        finally:
            task.close(client)

    def note_end(_: object) -> None:
        with ended:
            ended.notify_all()

    try:
        for name, address in tasks:
            replies[name] = concurrency.in_thread(
                functools.partial(send, name, address), f"run record of {name}"
            )
            replies[name].add_done_callback(note_end)
        with ended:
            cancelled.wait_for(ended, lambda: _is_over(order, replies), "an order to run records")
        for failure in _list_failed(replies):
            failure.result()
        return {name: reply.result() for name, reply in replies.items() if reply.done()}
    finally:
        # The orders under way end, on the tasks too.
        cancelled.set("it is over")
        for task in list(met):
            task.close(client)
        # A thread within a call must not meet the end of the interpreter.
        if wait_secs(order):
            futures.wait(replies.values(), times.ENDED_SECS)


def _is_over(order: run_record_pb2.RunOrder, replies: _Replies) -> bool:
    # One reply to ``wait_stop`` is a reason to stop. A failure ends a wait, since the wait could
    # last a minute.
    done = [reply.done() for reply in replies.values()]
    is_answered = order.WhichOneof("order") == "wait_stop" and any(done)
    return all(done) or is_answered or (wait_secs(order) > 0 and bool(_list_failed(replies)))


def _list_failed(replies: _Replies) -> list[futures.Future[run_record_pb2.RunReply]]:
    return [reply for reply in replies.values() if reply.done() and reply.exception()]
