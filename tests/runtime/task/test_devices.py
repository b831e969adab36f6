"""Who takes which device, with a second client of JAX's CPU in the place of an accelerator's.

JAX keeps the two apart as it keeps CUDA and the CPU apart: the stand-in comes first, has the default device, and is only
there if ``jax_platforms`` allows.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from harness import exit_codes
from tests.kit.processes import ROOT

pytestmark = pytest.mark.cluster

STAND_IN = """
import sys
import jax, numpy as np
import runtime as rt
from jax.extend.backend import backends, register_backend_factory
from jaxlib import xla_client

register_backend_factory("stand_in", xla_client.make_cpu_client, priority=500)

def clients(devices):
    return {device.client for device in devices}
"""


def run(script: str, platforms: str | None = None, **env: str) -> tuple[int, list[str]]:
    """Runs a script in a fresh process; gives its exit code and what it has said on stderr."""
    base = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", STAND_IN + script],
        env=base
        | {"PYTHONPATH": str(ROOT)}
        | ({"JAX_PLATFORMS": platforms} if platforms else {})
        | env,
        cwd=ROOT,
        timeout=100,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr.splitlines()


def test_ps_starts_no_accelerator() -> None:
    """A ps whose server comes first keeps JAX off accelerators, whatever JAX_PLATFORMS says."""
    for platforms in (None, "stand_in"):
        code, said = run(
            """
with rt.Server({"ps": ["localhost:0"]}, "ps", 0) as server:
    assert [*backends()] == ["cpu"], backends()
    assert clients(server.worker.devices.values()) == {backends()["cpu"]}
""",
            platforms,
        )
        assert code == 0, said
        assert not any("JAX has started" in line for line in said)


def test_late_ps_computes_on_cpu() -> None:
    """A ps whose program has started JAX before computes on the CPU all the same, and says the cure."""
    code, said = run(
        """
first = jax.random.key(0)
stand_in = backends()["stand_in"]
assert clients(first.devices()) == {stand_in}
before = len(stand_in.live_arrays()), len(stand_in.live_executables())
with rt.Server({"ps": ["localhost:0"]}, "ps", 0) as server, rt.Session(server.target) as session:
    w = rt.Variable(np.ones(300_000, np.float32), name="w")
    session.run(w.initializer)
    session.run(w.assign_add(np.ones(300_000, np.float32)).op)
    assert session.run(w).sum() == 600_000
    value = server.worker.store.slot("", "w").value
    assert clients(value.devices()) == {backends()["cpu"]}, value.devices()
    assert (len(stand_in.live_arrays()), len(stand_in.live_executables())) == before
"""
    )
    assert code == 0, said
    (line,) = [line for line in said if "JAX has started" in line]
    assert "call join_cluster or make the Server before JAX computes" in line
    assert "JAX_PLATFORMS=cpu" in line


def test_local_cluster_leaves_accelerators_to_workers() -> None:
    """In a cluster of one process the workers have the accelerators and the ps the CPU, without a warning."""
    code, said = run(
        """
with rt.local_cluster(ps=1, workers=1) as cluster:
    devices = {job: clients(s.worker.devices.values()) for (job, _), s in cluster.servers.items()}
    both = backends()
    assert devices == {"ps": {both["cpu"]}, "worker": {both["stand_in"], both["cpu"]}}, devices
"""
    )
    assert code == 0, said
    assert not any("JAX has started" in line for line in said)


def test_worker_after_ps_has_accelerators(tmp_path: pathlib.Path) -> None:
    """A worker whose server is made after that of a ps has the accelerators, and the ps the CPU."""
    (tmp_path / "jax_plugins").mkdir()
    code, said = run(
        """
from tests.kit.ports import free_ports

jobs = {job: [f"localhost:{port}"] for job, port in zip(("ps", "worker"), free_ports(2))}
early = rt.Server({"ps": ["localhost:0"]}, "ps", 0)
with early, rt.Graph().as_default(), rt.Session(early.target) as first:
    count = rt.Variable(0, dtype="int64", name="count")
    w = rt.Variable(np.ones(300_000, np.float32), name="w")
    by = rt.placeholder("int64", [], name="by")
    more = [w.assign_add(w), count.assign_add(by)]
    first.run([w.initializer, count.initializer])
    first.run(more, {by: np.int64(1)})
    assert [*backends()] == ["cpu"], backends()
    cpu = clients(early.worker.devices.values())
    with rt.Server(jobs, "ps", 0) as ps, rt.Server(jobs, "worker", 0) as worker:
        assert {*backends()} == {"stand_in", "cpu"}, backends()
        assert clients(worker.worker.devices.values()) == {*backends().values()}
        assert clients(ps.worker.devices.values()) == cpu
        with rt.Graph().as_default(), rt.Session(worker.target) as session:
            with rt.device("/job:ps/task:0"):
                v = rt.Variable(np.ones(300_000, np.float32), name="v")
            session.run(v.initializer)
            session.run(v.assign_add(rt.call(lambda a: a * 3, v)))
            assert session.run(v).sum() == 4 * 300_000
        assert clients(ps.worker.store.slot("", "v").value.devices()) == cpu
        assert backends()["stand_in"].live_executables()
    first.run(more, {by: np.int64(1)})
    assert (first.run(count), first.run(w).sum()) == (2, 4 * 300_000)
    assert clients(early.worker.store.slot("", "w").value.devices()) == cpu
""",
        PYTHONPATH=f"{ROOT}:{tmp_path}",
    )
    assert code == 0, said
    assert not any("JAX has started" in line for line in said)


WORKER = """
import harness

with harness.join_cluster() as me, rt.Session(me.target) as session:
    assert session.run(rt.constant(2.0) * 3) == 6
    both = clients(me.server.worker.devices.values()) == {*backends().values()}
    print([*backends()], both, file=sys.stderr)
"""


def test_platforms_without_cpu_receive_one() -> None:
    """A worker with JAX_PLATFORMS of an accelerator alone gets the CPU too."""
    code, said = run(WORKER, "stand_in")
    assert (code, said[-1]) == (0, "['stand_in', 'cpu'] True")


@pytest.mark.parametrize(
    ("platforms", "before", "text"),
    [
        (
            "stand_in",
            "jax.random.key(0)",
            "JAX has started without the CPU, which a task needs: set JAX_PLATFORMS=stand_in,cpu, or",
        ),
        (
            "cuda",
            "",
            "JAX_PLATFORMS=cuda, and JAX has no such device: ",
        ),
        (
            "rocm",
            "",
            "JAX cannot start: Unable to initialize backend 'rocm': Backend 'rocm' is not in",
        ),
    ],
)
def test_missing_platform_is_one_line(platforms: str, before: str, text: str) -> None:
    """A platform of JAX_PLATFORMS that is not there ends the program with one line that has the cure."""
    code, said = run(f"{before}\n{WORKER}", platforms)
    assert code == exit_codes.CONFIGURATION.plain, said
    assert said[-1].startswith(text) and not any("Traceback" in line for line in said), said


def test_broken_plugin_is_one_line(tmp_path: pathlib.Path) -> None:
    """A plugin of JAX that cannot start, such as one of another version, is one line."""
    plugin = tmp_path / "jax_plugins" / "broken"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(
        "def initialize():\n    raise RuntimeError('CUDA 11 is too old\\nand more')\n"
    )
    code, said = run(WORKER, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert code == 0 and not any("Traceback" in line for line in said), said
    assert len([line for line in said if line.endswith("initialize(): CUDA 11 is too old")]) == 1, (
        said
    )
