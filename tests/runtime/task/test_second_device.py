"""A worker that computes on a device of its own, here a second CPU device in place of an accelerator."""

import os
import subprocess
import sys

import pytest

from tests.kit.processes import ROOT

pytestmark = pytest.mark.cluster

TRAIN = """
import numpy as np, jax
import runtime as rt
from tests.runtime.kit import TARGET, servers

with servers(sockets=True, ps=1, worker=1) as cluster:
    setter = rt.replica_device_setter(cluster=cluster[TARGET].cluster, worker_device=TARGET + "/cpu:1")
    with rt.device(setter):
        w = rt.Variable(np.linspace(-1, 1, 300_000, dtype=np.float32), name="w")
        x = rt.placeholder(np.float32, [300_000], name="x")
        loss = rt.call(lambda w, x: ((w - x) ** 2).sum(), w, x, name="loss")
        train = w.assign_sub(0.25 * rt.gradients(loss, [w])[0])
    metadata = rt.RunMetadata()
    with rt.Session(cluster[TARGET].target) as session:
        session.run(w.initializer)
        expected = np.linspace(-1, 1, 300_000, dtype=np.float32)
        for step in range(5):
            batch = np.full(300_000, step, np.float32)
            found = session.run([loss, train.op], {x: batch})[0]
            np.testing.assert_allclose(found, np.sum((expected - batch) ** 2, dtype=np.float64), rtol=1e-4)
            expected -= np.float32(0.25) * 2 * (expected - batch)
        np.testing.assert_allclose(session.run(w), expected, rtol=1e-6)
        session.run([loss, train.op], {x: batch}, rt.RunOptions(trace_level=rt.RunOptions.FULL_TRACE), metadata)
ran = {d.device: [n.node_name for n in d.node_stats] for d in metadata.step_stats.dev_stats}
assert "loss" in ran["/job:worker/replica:0/task:0/device:CPU:1"], ran
"""


MESH = """
import numpy as np, jax
import runtime as rt

mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
split = jax.shard_map(lambda a: jax.lax.psum(a, "i"), mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P())
with rt.Session() as session:
    try:
        session.run(rt.call(lambda x: split(x * 1), np.ones(4, np.float32), name="split"))
        raise SystemExit("it ran")
    except rt.InvalidArgumentError as error:
        assert "split] cannot become a program" in str(error) and "one device" in str(error), error
"""


@pytest.mark.parametrize(
    "script", [TRAIN, MESH], ids=["training", "a program of both devices is refused"]
)
def test_stage_runs_on_second_device(script: str) -> None:
    """A stage runs on the second device of its task, and a program of both devices is refused."""
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=ROOT,
        timeout=100,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
