"""Packets that are lost between two network namespaces: the kernel's own network, TLS, no proxy in between."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from harness import certs
from tests.harness.training.start.namespaces_program import HERE, THERE

pytestmark = pytest.mark.chaos

_TRY = "ip link add name near type veth peer name far && tc qdisc add dev near root tbf rate 8bit burst 10 latency 1ms"


def _possible() -> bool:
    try:
        return (
            subprocess.run(
                ["unshare", "-rn", "sh", "-c", _TRY], capture_output=True, timeout=30
            ).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


@pytest.mark.skipif(
    not _possible(), reason="needs unshare, ip and tc, and the right to make network namespaces"
)
def test_lost_packets_keep_additions_exact(tmp_path: pathlib.Path) -> None:
    """Lost packets lose and double no addition."""
    assert certs.main([f"--out={tmp_path / 'certs'}", f"--hosts={HERE},{THERE}"]) == 0
    done = subprocess.run(
        [
            "unshare",
            "-rn",
            sys.executable,
            "-m",
            "tests.harness.training.start.namespaces_program",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "BELLWETHER_SECURITY": str(tmp_path / "certs")},
    )
    story = done.stdout + done.stderr
    assert re.search(r"CODES ps:0=0 ps:1=0 worker:0=0 worker:1=0", story), story[-4000:]
    sums = re.search(r"SUMS (.*)", story)
    assert sums and len(set(sums[1].split())) == 1, story[-4000:]
    assert re.search(
        r"worker:1 .*No answer from /job:ps/task:\d at \S+ for", story.partition("\nHEALED\n")[0]
    )
    assert re.search(r"worker:1 .*answers again", story.partition("\nHEALED\n")[2])
    assert not re.search(r"recovering|lost contact", story)
