"""Parts that the tests of checkpoints share: a small cluster, variables on it, and plain Orbax in its own process."""

import contextlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import runtime as rt
from runtime.server.server import Server
from tests.kit.processes import Program
from tests.runtime import kit

PLAIN = """
import json, sys
import numpy as np, orbax.checkpoint as ocp
manager = ocp.CheckpointManager(sys.argv[1])
step = manager.latest_step() if len(sys.argv) < 3 else int(sys.argv[2])
found = {}
for name, value in manager.restore(step).items():
    value = np.asarray(value)
    found[name] = [str(value.dtype), list(value.shape), value.tobytes().hex()]
assert not [m for m in sys.modules if m.split(".")[0] in ("runtime", "harness")]
print(json.dumps([step, found]))
"""


def plain_orbax(
    directory: pathlib.Path | str, step: int | None = None
) -> tuple[int, dict[str, np.ndarray]]:
    """What a process that knows only Orbax restores: (step, arrays by name)."""
    import ml_dtypes

    arguments = [str(directory), *([] if step is None else [str(step)])]
    output = subprocess.run(
        [sys.executable, "-c", PLAIN, *arguments],
        check=True,
        capture_output=True,
        text=True,
        cwd=pathlib.Path(directory),
    ).stdout
    restored, found = json.loads(output.splitlines()[-1])
    arrays = {}
    for name, (dtype, shape, data) in found.items():
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        arrays[name] = np.frombuffer(bytes.fromhex(data), kind).reshape(shape)
    return restored, arrays


@contextlib.contextmanager
def cluster(ps: int, *, processes: bool = False) -> Iterator[tuple[Server, list[Program]]]:
    """A worker and so many ps, which it reaches over sockets; the ps are processes of their own when asked for."""
    if not processes:
        with kit.servers(sockets=True, ps=ps, worker=1) as made:
            yield made[kit.TARGET], []
        return
    addresses = kit.addresses(ps=ps, worker=1)
    with kit.processes(addresses, *[("ps", i) for i in range(ps)]) as tasks:
        with rt.Server(addresses, "worker", 0) as server:
            yield server, tasks


@contextlib.contextmanager
def session(server: Server, graph: rt.Graph) -> Iterator[rt.Session]:
    """A session on a server; fails rather than waits when a task does not come up."""
    with rt.Session(
        server.target, graph, rt.SessionConfig(start_timeout_secs=100, operation_timeout_secs=60)
    ) as sess:
        yield sess


def make_graph(
    values: Mapping[str, Any], placed: Mapping[str, int] | None = None
) -> tuple[rt.Graph, dict[str, rt.Variable]]:
    """A graph with variables of these initial values, each on the ps that ``placed`` says (0 by default)."""
    graph = rt.Graph()
    variables = {}
    with graph.as_default():
        for name, value in values.items():
            with rt.device(f"/job:ps/task:{(placed or {}).get(name, 0)}"):
                variables[name] = rt.Variable(
                    value, dtype=np.asarray(value).dtype, name=name, trainable=False
                )
    return graph, variables


def initialize(sess: rt.Session, variables: Sequence[rt.Variable]) -> None:
    """Gives variables their initial values."""
    with sess.graph.as_default():
        sess.run(rt.variables_initializer(list(variables)))


def filled(value: int, size: int) -> np.ndarray:
    """So many bytes of one value."""
    return np.full(size, value, np.uint8)
