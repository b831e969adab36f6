"""Nodes of a Ray cluster that die, and others that come: hosts are network namespaces."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
_UNSHARE = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
_TRY = """
mount -t tmpfs tmpfs /run && ip netns add far && ip link add name near type veth peer name eth0 netns far
ip link add br0 type bridge
"""


def why_no_nodes() -> str:
    """Why there are no nodes here, or an empty string."""
    if importlib.util.find_spec("ray") is None:
        return "needs PyPI's ray: make test-ray"
    if os.geteuid():
        return "only root can make hosts of namespaces"
    if missing := [name for name in ("unshare", "ip") if shutil.which(name) is None]:
        return f"{', '.join(missing)} not installed: apt-get install iproute2 util-linux"
    tried = subprocess.run(
        [*_UNSHARE, "sh", "-ec", _TRY], capture_output=True, text=True, timeout=60
    )
    return f"namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""


NONE_HERE = why_no_nodes()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(NONE_HERE), reason=NONE_HERE),
    pytest.mark.timeout(1800),
]


def test_tasks_move_from_dead_nodes(
    tmp_path: pathlib.Path,
) -> None:
    """A worker and a ps whose nodes lose their power continue on other nodes."""
    (tmp_path / "auth").write_text("0123456789abcdef" * 4)
    done = subprocess.run(
        [*_UNSHARE, sys.executable, "-m", "tests.harness.ray.nodes_program", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=1770,  # five nodes of Ray take minutes where there is other work
        env={**os.environ, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "auth"), "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0 and done.stdout.endswith("OK\n"), (done.stdout + done.stderr)[
        -6000:
    ]
