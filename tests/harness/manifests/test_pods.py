"""The JobSets and TFJobs that `harness.manifests` prints, in pods of namespaces that follow the engines' rules."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from tests.kit import real_mnist

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
    tried = subprocess.run(
        [*_UNSHARE, "sh", "-ec", _TRY], capture_output=True, text=True, timeout=60
    )
    return f"namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""


NONE_HERE = real_mnist.NONE_HERE or why_no_pods()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(NONE_HERE), reason=NONE_HERE),
    pytest.mark.timeout(1800),
]
TRAINER = (
    *(
        "python",
        "-m",
        "models.mnist.trainer",
        "--flagfile=configs/mnist_async.flags",
        "--flagfile=/runs/further.flags",
    ),
    *("--epochs=0", "--save_model_secs=2", "--log_every_steps=200"),
)


@pytest.fixture
def node() -> Iterator[pathlib.Path]:
    """A directory that the user of the pods reaches, which tmp_path is not."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield pathlib.Path(path)


def play(
    engine: str, scenario: str, node: pathlib.Path, *options: str, trainer: tuple[str, ...] = ()
) -> str:
    """Prints the manifest of 1 ps, starts what it says, and gives what has happened."""
    command = (*TRAINER, f"--exit_codes={engine}", *trainer)
    asked = (
        f"--for={engine}",
        "--ps=1",
        *(options or ("--workers=2",)),
        "--name=mnist",
        "--",
        *command,
    )
    with open(node / "job.yaml", "w") as manifest:
        subprocess.run(
            [sys.executable, "-m", "harness.manifests", *asked],
            stdout=manifest,
            cwd=ROOT,
            check=True,
        )
    done = subprocess.run(
        [
            *_UNSHARE,
            sys.executable,
            "-m",
            "tests.harness.manifests.pods_program",
            scenario,
            str(node),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=1770,  # minutes on a quiet machine
    )
    print(done.stdout)  # shown when a test fails
    assert done.returncode == 0, done.stderr[-6000:]
    assert "are not kept" not in done.stdout, (
        "there is a place for compiled programs, and for their key"
    )
    return done.stdout


def rules(story: str) -> list[str]:
    return re.findall(r"^RULE \S+ (.*)$", story, re.MULTILINE)


def lives(story: str) -> list[str]:
    """The names of pods that were started; no address comes twice."""
    found: list[tuple[str, str]] = re.findall(r"^POD (\S+) (\S+)$", story, re.MULTILINE)
    assert len({address for _, address in found}) == len(found)
    return [name for name, _ in found]


def last_ends(story: str) -> dict[str, str]:
    return dict(re.findall(r"^END (\S+) (\d+)$", story, re.MULTILINE))


def test_mnist_trains_through_pod_deaths(
    node: pathlib.Path,
) -> None:
    """MNIST trains in pods that die and come back with another address."""
    story = play("jobset", "deaths", node)
    assert lives(story) == [
        *("mnist-ps-0-0", "mnist-worker-0-0", "mnist-worker-1-0"),
        *("mnist-ps-0-0", "mnist-worker-1-0", "mnist-worker-0-0", "mnist-worker-1-0"),
    ]
    assert rules(story) == ["ps RestartJob", *["worker RestartJobAndIgnoreMaxRestarts"] * 3]
    assert last_ends(story) == {
        "mnist-ps-0-0": "0",
        "mnist-worker-0-0": "0",
        "mnist-worker-1-0": "0",
    }
    assert "KILLED" not in story
    kept = node / "runs" / ".cache" / "bellwether" / "programs"
    assert list(kept.glob("*/*-cache")), "what a pod has compiled is there for the next"
    assert kept.stat().st_mode & 0o777 == 0o700


def test_missing_data_fails_at_once(node: pathlib.Path) -> None:
    """Missing data fails the job at once, without a second try."""
    story = play("jobset", "wrong-data", node)
    assert "KILLED" not in story and len(lives(story)) == 3


def test_evicted_pods_save_and_return(node: pathlib.Path) -> None:
    """Evicted pods save in time and are made again."""
    story = play("jobset", "evictions", node)
    assert rules(story)[:4] == ["disrupted Ignore"] * 4  # not counted
    assert "KILLED" not in story
    assert last_ends(story) == {
        "mnist-ps-0-0": "0",
        "mnist-worker-0-0": "0",
        "mnist-worker-1-0": "0",
    }


def test_probe_kills_only_the_frozen_ps(
    node: pathlib.Path,
) -> None:
    """A frozen ps is killed by its probe and made again, and no other pod is killed."""
    story = play("jobset", "frozen", node)
    assert re.findall(r"^(?:UNHEALTHY|KILLED) .*$", story, re.MULTILINE) == [
        "UNHEALTHY mnist-ps-0-0",
        "KILLED mnist-ps-0-0",
    ]
    assert rules(story) == ["ps RestartJob", *["worker RestartJobAndIgnoreMaxRestarts"] * 2]
    assert last_ends(story) == {
        "mnist-ps-0-0": "0",
        "mnist-worker-0-0": "0",
        "mnist-worker-1-0": "0",
    }


def test_scaled_jobset_trains_on(
    node: pathlib.Path,
) -> None:
    """A JobSet whose parallelism changes trains on with the workers that exist."""
    story = play("jobset", "scaled", node, "--workers=2", "--elastic", trainer=("--elastic",))
    assert sorted(set(lives(story))) == [
        "mnist-ps-0-0",
        *(f"mnist-worker-0-{index}" for index in range(4)),
    ]
    assert "KILLED" not in story and rules(story) == []


def test_tfjob_trains_through_deaths(node: pathlib.Path) -> None:
    """A TFJob with chief and evaluator trains through deaths, and no other pod waits for the
    evaluator.
    """
    story = play("tfjob", "tfjob", node, "--workers=3", "--evaluators=1")
    assert set(rules(story)) == {"ExitCode restart"} and "KILLED" not in story
    assert last_ends(story)["mnist-chief-0"] == "0"
    waits = [
        line for line in story.splitlines() if re.search("wait|await", line) and "evaluator" in line
    ]
    assert not [line for line in waits if not line.startswith("mnist-evaluator-0")], (
        "nobody waits for an evaluator"
    )


def test_permanent_exit_code_fails_tfjob(node: pathlib.Path) -> None:
    """A TFJob fails after an exit code that is permanent."""
    assert rules(play("tfjob", "tfjob-fails", node, "--workers=3"))[0] == "ExitCode fail"


def test_dynamic_tfjob_grows_and_shrinks(node: pathlib.Path) -> None:
    """A TFJob with dynamic workers grows and shrinks without a chief."""
    options = ("--workers=2", "--evaluators=1", "--elastic")
    story = play("tfjob", "tfjob-scaled", node, *options, trainer=("--elastic",))
    assert "mnist-chief-0" not in story, "the operator would tell it of no ps"
    assert "KILLED" not in story and last_ends(story)["mnist-worker-0"] == "0"
