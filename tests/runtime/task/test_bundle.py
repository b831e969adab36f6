"""A bundle: several stage calls of a step in one message, each checked, and none run twice."""

from typing import Any

import numpy as np
import pytest

import runtime as rt
from runtime.task.bundle import answer_bundle, describe_calls, open_reply
from runtime.wire.connection import Reply
from runtime.wire.handles import BUNDLE, FETCH
from tests.runtime.kit import TARGET, peer_of, servers

PS = "/job:ps/task:0"


def test_error_behind_effect_is_remembered() -> None:
    """A call that fails behind one with an effect makes a reply that is kept; before any effect it raises."""
    ran: list[str] = []

    def write() -> Reply:
        ran.append("write")
        return Reply([np.ones(1)], remember=True)

    def read() -> Reply:
        return Reply([np.zeros(1)])

    def fail() -> Reply:
        raise rt.FailedPreconditionError("no value", task=PS)

    assert [np.asarray(b).tolist() for b in answer_bundle([read, write]).buffers] == [[], [0], [1]]
    ran.clear()
    with pytest.raises(rt.FailedPreconditionError):
        answer_bundle([read, fail, write])
    assert ran == []
    reply = answer_bundle([write, fail])
    assert reply.remember
    with pytest.raises(rt.FailedPreconditionError, match="no value") as error:
        open_reply([np.asarray(buffer) for buffer in reply.buffers], "/job:ps/task:9")
    assert error.value.task == PS


def test_bundle_is_checked_as_its_calls() -> None:
    """A ps runs the calls of a bundle in their order, and no call of a bundle that does not fit."""
    with servers(sockets=True, ps=1, worker=1) as made, rt.Graph().as_default():
        with rt.device(PS):
            x = rt.placeholder(np.float32, [2], name="x")
            v = rt.Variable(np.zeros(2, np.float32), name="v")
            missing = rt.Variable(np.zeros(2, np.float32), name="missing")
            enqueue = rt.FIFOQueue(1, [np.float32], [[2]]).enqueue(x, name="enqueue")
        with rt.Session(made[TARGET].target) as session, rt.Session(made[TARGET].target) as other:
            session.run(v.initializer)
            fed = {x: np.ones(2, np.float32)}
            other.run(v.assign(x, name="others").op, {x: np.zeros(2, np.float32)})
            session.run(v.assign_add(x, name="add").op, fed)
            session.run(enqueue, fed)
            with pytest.raises(rt.FailedPreconditionError):
                session.run(missing)
            calls, *_ = made[PS].worker.registry.kept()
            handles = {
                name: handle for handle, c in calls.items() for name in c.call.stage.operations
            }
            peer = peer_of(session, PS)

            def send(*sent: tuple[int, list[Any]], rows: Any = None) -> list[Any]:
                described = describe_calls((handle, len(given)) for handle, given in sent)
                arrays = [described if rows is None else rows]
                lane = peer.acquire()
                try:
                    lane.send(BUNDLE, 7, [*arrays, *(a for _, g in sent for a in g)], dynamic=True)
                    return open_reply(lane.receive(None), PS)
                finally:
                    peer.release(lane)

            one, add, read = np.ones(2, np.float32), handles["add"], handles["missing"]
            with pytest.raises(rt.FailedPreconditionError, match="uninitialized value missing"):
                send((add, [one]), (read, []), (add, [one]))
            np.testing.assert_array_equal(session.run(v), [2, 2])
            assert send((add, [one]), (add, [one])) == []
            np.testing.assert_array_equal(session.run(v), [4, 4])
            for refused in (
                [(add, [np.ones(3, np.float32)])],
                [(add, [np.ones(2, np.float64)])],
                [(add, [])],
                [(add, [one, one])],
                [(handles["enqueue"], [one])],
            ):
                with pytest.raises(rt.InvalidArgumentError, match="travels in no bundle"):
                    send((add, [one]), *refused)
            for handle in (FETCH, BUNDLE, handles["others"]):
                with pytest.raises(rt.PermissionDeniedError, match="not one of this session's"):
                    send((add, [one]), (handle, []))
            for rows in (
                np.array(1),
                np.array([[add, 2]]),
                np.array([[add, 0]]),
                np.array([[1, -1]]),
            ):
                with pytest.raises(rt.InvalidArgumentError, match="of a bundle|a bundle has"):
                    send((add, [one]), rows=rows)
            np.testing.assert_array_equal(session.run(v), [4, 4])
