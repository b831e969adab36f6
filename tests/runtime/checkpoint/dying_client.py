"""A client in a process of its own that stands still in the middle of a save or restore, until it is killed.

python -m tests.runtime.checkpoint.dying_client CLUSTER_JSON chief|script DIRECTORY ORDER

A chief has a task of its own and leads; a script has its session at the ps. ORDER is the order that
the client does not send any more: `commit`, `write`, or `bytes` for the first byte range of a
restore.
"""

import json
import sys
import threading
from typing import Any

import numpy as np

import harness
import runtime as rt
from runtime.checkpoint import streaming
from runtime.checkpoint.coordinator import CheckpointCoordinator
from runtime.lowlevel import RunRecords

SIZE = 1 << 20


def stand_still(*_: Any, **__: Any) -> Any:
    """Says so, and waits for the end."""
    print("in the middle", flush=True)
    threading.Event().wait()


def without(name: str) -> None:
    """Has the client stand still before it sends an order."""
    if name == "bytes":
        streaming.send = stand_still
        return
    request = CheckpointCoordinator._request

    def wrapped(self: CheckpointCoordinator, task: str, order: Any, *rest: Any) -> Any:
        return (
            stand_still()
            if order.WhichOneof("order") == name
            else request(self, task, order, *rest)
        )

    CheckpointCoordinator._request = wrapped  # type: ignore[method-assign]


def main() -> None:
    """Saves or restores, as far as the arguments say."""
    cluster, kind, directory, order = json.loads(sys.argv[1]), *sys.argv[2:]
    saver = harness.Saver([variable()], transfer="stream" if order == "bytes" else "shared")
    server = rt.Server(cluster, "worker", 0) if kind == "chief" else None
    target = f"grpc://{cluster['ps'][0]}" if server is None else server.target
    with rt.Session(
        target, config=rt.SessionConfig(device_filters=("/job:ps",), start_timeout_secs=60)
    ) as session:
        if server is not None:
            session.authority.lead_with(RunRecords(target, is_chief=True).claim())
        without(order)
        if order == "write":
            saver.save(session, f"{directory}/other", 2)
        else:
            saver.restore(session, f"{directory}/m/1")


def variable() -> rt.Variable:
    """The variable of the ps."""
    with rt.device("/job:ps/task:0"):
        return rt.Variable(np.zeros(SIZE, np.float32), name="w")


if __name__ == "__main__":
    main()
