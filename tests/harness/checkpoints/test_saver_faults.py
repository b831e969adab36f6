"""Chiefs that die in a restore or freeze in a save, models that move to other ps, and what each ps reads."""

import json
import os
import pathlib
import threading
from collections.abc import Sequence

import numpy as np
import optax
import pytest

import harness
import runtime as rt
from tests.harness.checkpoints import checkpoint_kit as ckit
from tests.kit.processes import Program
from tests.runtime import kit

pytestmark = pytest.mark.chaos

SIZE = 1 << 18
GRAPH = f"""
import json, os, signal, sys
import numpy as np
import harness, runtime as rt

cluster, series = json.loads(sys.argv[1]), sys.argv[2]
names = ("a", "b")
variables = []
for i, name in enumerate(names):
    with rt.device(f"/job:ps/task:{{i}}"):
        variables.append(rt.Variable(np.zeros({SIZE}, np.float32), name=name, trainable=False))
saver = harness.Saver()
server = rt.Server(cluster, "worker", 0).__enter__()
sess = rt.Session(server.target, config=rt.SessionConfig(start_timeout_secs=100))
"""
RESTORE = (
    GRAPH
    + """
print("OPEN", flush=True)
sys.stdin.readline()
print("RESTORING", flush=True)
saver.restore(sess, series + "/1")
print("RESTORED", flush=True)
"""
)
SAVE = (
    GRAPH
    + """
from harness.checkpoints import orbax

def pause(directory, *, files):  # as if the process were frozen when all is on the disk but the name
    sync_tree(directory, files=files)
    print("WRITTEN", flush=True)
    sys.stdin.readline()

sync_tree, orbax.durability.sync_tree = orbax.durability.sync_tree, pause
sess.authority.lead_with(rt.lowlevel.RunRecords(server.target, is_chief=True).claim())
try:
    saver.save(sess, series, 2)
except rt.AbortedError as error:
    print("REFUSED", error, flush=True)
"""
)


def _graph() -> tuple[rt.Graph, dict[str, rt.Variable]]:
    return ckit.make_graph(
        {"a": np.full(SIZE, 1, np.float32), "b": np.full(SIZE, 2, np.float32)}, {"b": 1}
    )


def _uninitialized(sess: rt.Session, names: Sequence[str]) -> list[str]:
    missing = []
    for name in names:
        try:
            sess.run(f"{name}:0")
        except rt.FailedPreconditionError:
            missing.append(name)
    return missing


def test_chief_death_in_restore_initializes_nothing(
    tmp_path: pathlib.Path,
) -> None:
    """A chief that dies during a restore leaves every ps uninitialized."""
    graph, v = _graph()
    addresses = kit.addresses(ps=2, worker=2)
    mine = rt.SessionConfig(start_timeout_secs=100, device_filters=("/job:ps",))
    names = [("ps", 0), ("ps", 1)]
    with rt.Server(addresses, "worker", 1) as server, graph.as_default():
        with kit.processes(addresses, *names), rt.Session(server.target, graph, mine) as sess:
            ckit.initialize(sess, list(v.values()))
            harness.Saver().save(sess, tmp_path / "m", 1)
        with (
            kit.processes(addresses, *names) as tasks,
            rt.Session(server.target, graph, mine) as sess,
        ):
            assert _uninitialized(sess, "ab") == ["a", "b"]
            with Program(
                "python", "-c", RESTORE, json.dumps(addresses), str(tmp_path / "m")
            ) as chief:
                try:
                    chief.expect("OPEN")
                    tasks[1].freeze()  # one ps reads its part, the other one does not
                    chief.enter("")
                    chief.expect("RESTORING")
                    # the other has read meanwhile; the test holds whether it has or not
                    threading.Event().wait(1.0)
                finally:
                    chief.kill()
                    tasks[1].thaw()
            assert _uninitialized(sess, "ab") == ["a", "b"]
            assert harness.Saver().restore_latest(sess, str(tmp_path)) == f"{tmp_path}/m/1"
            assert [x[0] for x in sess.run([v["a"], v["b"]])] == [1, 2]


def test_frozen_chief_publishes_nothing(tmp_path: pathlib.Path) -> None:
    """A frozen chief that wakes up after its replacement makes no checkpoint visible."""
    graph, v = _graph()
    addresses = kit.addresses(ps=2, worker=2)
    mine = rt.SessionConfig(start_timeout_secs=100, device_filters=("/job:ps",))
    with rt.Server(addresses, "worker", 1) as server, graph.as_default():
        with (
            kit.processes(addresses, ("ps", 0), ("ps", 1)),
            rt.Session(server.target, graph, mine) as sess,
        ):
            ckit.initialize(sess, list(v.values()))
            # whether the new chief saves, and so cleans, before the old one wakes up
            for cleans in (False, True):
                series = tmp_path / f"m{cleans}"
                with (
                    Program("python", "-c", SAVE, json.dumps(addresses), str(series)) as old,
                    rt.Session(server.target, graph, mine) as new,
                ):
                    old.expect("WRITTEN")
                    new.authority.lead_with(
                        rt.lowlevel.RunRecords(server.target, mine, is_chief=True).claim()
                    )
                    if cleans:
                        harness.Saver().save(new, series, 1)
                    old.enter("")
                    old.expect("REFUSED.*has taken the lead")
                    old.wait(60)
                    found = harness.latest_checkpoint(str(series))
                    assert found == (f"{series}/1" if cleans else None)
                    harness.Saver().save(new, series, 3)
                    assert sorted(p.name for p in series.iterdir()) == (
                        ["1", "3"] if cleans else ["3"]
                    )


def _bytes_read(task: Program) -> int:
    lines = pathlib.Path(f"/proc/{task.pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/io").exists(), reason="needs Linux's counts of bytes read"
)
def test_ps_reads_only_its_part(tmp_path: pathlib.Path) -> None:
    """Each ps reads little more than its part of a checkpoint."""
    rows = 24 << 10
    table = np.arange(rows * 512, dtype=np.float32).reshape(rows, 512)  # 48 MiB
    path = ""
    for cuts in ([rows // 3], [rows // 3, 2 * rows // 3]):  # written by two ps, restored by three
        graph, _ = ckit.make_graph({})
        ps = len(cuts) + 1
        with ckit.cluster(ps, processes=True) as (server, tasks), graph.as_default():
            parts = []
            for i, (first, last) in enumerate(zip([0, *cuts], [*cuts, rows], strict=True)):
                with rt.device(f"/job:ps/task:{i}"):
                    initial = (
                        table[first:last] if not path else np.zeros((last - first, 512), np.float32)
                    )
                    parts.append(rt.Variable(initial, name=f"part_{i}", trainable=False))
            harness.partitioned("table", parts)
            with ckit.session(server, graph) as sess:
                saver = harness.Saver()
                if not path:
                    ckit.initialize(sess, parts)
                    path = saver.save(sess, tmp_path / "m", 1)
                    continue
                before = [_bytes_read(t) for t in tasks]
                # else each reads a share of all files to sum them, too
                saver.restore(sess, path, verify=False)
                read = [_bytes_read(t) - b for t, b in zip(tasks, before, strict=True)]
                assert np.array_equal(np.concatenate(sess.run(parts)), table)
                for part, count in zip(parts, read, strict=True):
                    size = part.shape[0] * 512 * 4
                    # tensorstore's files are 8 MiB
                    assert size <= count < 1.5 * size + (8 << 20), (read, size)


def test_training_moves_between_ps_counts(tmp_path: pathlib.Path) -> None:
    """Training continues exactly over other numbers of ps, with the slots of Adam."""
    initial = np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4)
    moves = [1, 2, 3, 1]
    each = 3

    def build(ps: int) -> tuple[list[rt.Variable], rt.Variable, rt.Operation, rt.Variable]:
        parts = []
        for i, piece in enumerate(np.split(initial, ps)):
            with rt.device(f"/job:ps/task:{i}"):
                parts.append(rt.Variable(piece, name=f"table/part_{i}"))
        harness.partitioned("table", parts)
        with rt.device(f"/job:ps/task:{ps - 1}"):
            bias = rt.Variable(np.ones(4, np.float32), name="bias")
            step = harness.get_or_create_global_step()
        whole = rt.call(lambda pieces: np.float32(1) * _concatenated(pieces), parts)
        loss = rt.numpy.sum((rt.numpy.tanh(whole) + bias) ** 2)
        return (
            parts,
            bias,
            harness.Optimizer(optax.adam(0.1)).minimize(loss, global_step=step),
            step,
        )

    def state(
        sess: rt.Session, parts: list[rt.Variable], bias: rt.Variable
    ) -> tuple[np.ndarray, np.ndarray]:
        return np.concatenate(sess.run(parts)), sess.run(bias)

    with (
        rt.Graph().as_default() as graph,
        ckit.cluster(1) as (server, _),
        ckit.session(server, graph) as sess,
    ):
        parts, bias, train, _ = build(1)
        sess.run(rt.global_variables_initializer())
        for _ in range(each * len(moves)):
            sess.run(train)
        wanted = state(sess, parts, bias)
    path = ""
    for ps in moves:
        with (
            rt.Graph().as_default() as graph,
            ckit.cluster(ps) as (server, _),
            ckit.session(server, graph) as sess,
        ):
            parts, bias, train, step = build(ps)
            saver = harness.Saver()
            if path:
                saver.restore(sess, path)
            else:
                sess.run(rt.global_variables_initializer())
            for _ in range(each):
                sess.run(train)
            path = saver.save(sess, tmp_path / "m", step)
            found = state(sess, parts, bias)
    assert os.path.basename(path) == str(each * len(moves))
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    shapes = dict(harness.list_variables(path))
    assert {n: s for n, s in shapes.items() if n.startswith("table")} == {
        "table": (6, 4),
        "table/adam/count": (),
        "table/adam/mu": (6, 4),
        "table/adam/nu": (6, 4),
    }
    _, arrays = ckit.plain_orbax(tmp_path / "m", each * len(moves))
    assert np.array_equal(arrays["table"], found[0]) and arrays["table/adam/count"] == each * len(
        moves
    )


def _concatenated(pieces: object) -> object:
    import jax.numpy as jnp

    return jnp.concatenate(pieces)  # type: ignore[arg-type]
