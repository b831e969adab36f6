"""The JobSet that `harness.manifests` prints, in pods of namespaces that follow JobSet's documented rules."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
_UNSHARE = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
_TRY = """
mount -t tmpfs tmpfs /mnt && mkdir /mnt/u /mnt/w /mnt/r
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/r
mount -t tmpfs tmpfs /run && ip netns add far && ip link add name near type veth peer name eth0 netns far
ip link add br0 type bridge
"""


def why_no_pods() -> str:
    """Why there are no pods here, or an empty string."""
    if os.geteuid():
        return "only root can make pods of namespaces"
    if missing := [name for name in ("unshare", "ip") if shutil.which(name) is None]:
        return f"{', '.join(missing)} not installed: apt-get install iproute2 util-linux"
    tried = subprocess.run([*_UNSHARE, "sh", "-ec", _TRY], capture_output=True, text=True, timeout=60)
    return f"namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""


NONE_HERE = why_no_pods()
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(NONE_HERE), reason=NONE_HERE), pytest.mark.timeout(600)]
COMMAND = (
    *("python", "-m", "models.mnist.trainer", "--flagfile=configs/mnist_async.flags", "--flagfile=/runs/further.flags"),
    *("--decay=none", "--epochs=0", "--save_model_secs=2", "--log_every_steps=200", "--exit_codes=jobset"),
)


@pytest.fixture
def node() -> Iterator[pathlib.Path]:
    """A directory that the user of the pods reaches, which tmp_path is not."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield pathlib.Path(path)


def play(scenario: str, node: pathlib.Path) -> str:
    """Prints the manifest, starts what it says, and gives what has happened."""
    asked = ("--for=jobset", "--ps=1", "--workers=2", "--name=mnist", "--", *COMMAND)
    with open(node / "job.yaml", "w") as manifest:
        subprocess.run([sys.executable, "-m", "harness.manifests", *asked], stdout=manifest, cwd=ROOT, check=True)
    done = subprocess.run(
        [*_UNSHARE, sys.executable, "-m", "tests.harness.manifests.pods_program", scenario, str(node)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=570,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def test_mnist_trains_in_pods_that_die_and_come_back_with_another_address(node: pathlib.Path) -> None:
    story = play("deaths", node)
    lives = re.findall(r"^POD (\S+) (\S+)$", story, re.MULTILINE)
    assert [name for name, _ in lives] == [
        *("mnist-ps-0-0", "mnist-worker-0-0", "mnist-worker-1-0"),
        *("mnist-ps-0-0", "mnist-worker-1-0", "mnist-worker-0-0", "mnist-worker-1-0"),
    ]
    assert len({address for _, address in lives}) == len(lives)
    assert re.findall(r"^RULE \S+ (.*)$", story, re.MULTILINE) == [
        "ps RestartJob",
        *["worker RestartJobAndIgnoreMaxRestarts"] * 3,
    ]
    ends = dict(re.findall(r"^END (\S+) (\d+)$", story, re.MULTILINE))  # the last of each
    assert ends == {"mnist-ps-0-0": "0", "mnist-worker-0-0": "0", "mnist-worker-1-0": "0"}
    assert "KILLED" not in story


def test_data_that_is_missing_fails_the_job_at_once(node: pathlib.Path) -> None:
    story = play("wrong-data", node)
    assert "KILLED" not in story and len(re.findall("^POD ", story, re.MULTILINE)) == 3
