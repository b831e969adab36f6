"""A chief in a process of its own that stands still in the middle of a stream: `save` or `restore`, then is killed.

python -m tests.harness.checkpoints.stream_chief CLUSTER_JSON DIRECTORY save|restore
"""

import json
import sys
import threading
from typing import Any

import harness
import runtime as rt
from harness.checkpoints import names
from runtime.checkpoint import streaming
from tests.harness.checkpoints import checkpoint_kit as ckit

SIZE = 6 << 20
BEFORE = 3


def stand_still(name: str) -> None:
    """Has the stream stand still after a few pieces, and tells of it."""
    original = getattr(streaming.ChannelStream, name)
    seen: list[int] = []

    def wrapped(self: streaming.ChannelStream, *arguments: Any) -> Any:
        result = original(self, *arguments)
        seen.append(1)
        if len(seen) == BEFORE:
            print("in the middle", flush=True)
            threading.Event().wait()
        return result

    setattr(streaming.ChannelStream, name, wrapped)


def main() -> None:
    """Saves once, then does what the arguments say."""
    cluster, directory, what = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
    graph, variables = ckit.make_graph({"a": ckit.filled(1, SIZE), "b": ckit.filled(2, SIZE)})
    streaming.BLOCK_BYTES = streaming.READ_BYTES = streaming.CHUNK_BYTES = (
        names.STREAM_CHUNK_BYTES
    ) = 1 << 20
    with (
        rt.Server(cluster, "worker", 0) as server,
        graph.as_default(),
        ckit.session(server, graph) as sess,
    ):
        ckit.initialize(sess, list(variables.values()))
        saver = harness.Saver(transfer="stream")
        path = saver.save(sess, directory, 1)
        stand_still("pull" if what == "save" else "push")
        if what == "save":
            saver.save(sess, directory, 2)
        else:
            saver.restore(sess, path)


if __name__ == "__main__":
    main()
