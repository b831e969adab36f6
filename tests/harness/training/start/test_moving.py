"""A ps that comes back behind the same name at another address: every reconnect of both planes resolves it anew."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.chaos

_TRY = (
    "ip link add name near type veth peer name far && ip addr add fd00:77::1/64 dev near nodad "
    "&& mount --bind /dev/null /etc/hosts"
)


def _possible() -> bool:
    try:
        return (
            subprocess.run(
                ["unshare", "-rnm", "sh", "-c", _TRY], capture_output=True, timeout=30
            ).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


@pytest.mark.nightly
@pytest.mark.skipif(
    not _possible(),
    reason="needs unshare and ip, and the right to make network and mount namespaces",
)
def test_moved_ps_is_found_by_name(tmp_path: pathlib.Path) -> None:
    """A ps that moves behind its name is found at every new address."""
    done = subprocess.run(
        [
            "unshare",
            "-rnm",
            sys.executable,
            "-m",
            "tests.harness.training.start.moving_program",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    story = done.stdout + done.stderr
    assert re.findall(r"MOVED (\d)", story) == ["1", "2", "3", "4"], story[-4000:]
    assert "CODES chief=0 ps=0" in story, story[-4000:]
