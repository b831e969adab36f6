"""Every file of configs/ is run or validated: each has its test here, and each test names it."""

import pathlib
import re
import subprocess

import pytest

pytestmark = pytest.mark.cluster

ROOT = pathlib.Path(__file__).resolve().parents[1]
TESTS = {
    "docker/Dockerfile": "tests/harness/manifests/test_docker.py",
    "kubernetes/mnist_jobset.yaml": "tests/harness/manifests/test_manifests.py",
    "kubernetes/mnist_statefulset.yaml": "tests/harness/manifests/test_manifests.py",
    "kubernetes/mnist_tfjob.yaml": "tests/harness/manifests/test_manifests.py",
    "mnist_async.flags": "tests/models/mnist/test_trainer_flags.py",
    "mnist_sync.flags": "tests/models/mnist/test_trainer_flags.py",
    "prometheus/grafana.json": "tests/harness/monitoring/test_dashboard.py",
    "prometheus/prometheus.yml": "tests/harness/monitoring/test_dashboard.py",
    "slurm.sbatch": "tests/harness/launch/test_slurm.py",
    "slurm_het.sbatch": "tests/harness/launch/test_slurm.py",
    "slurm_workers.sbatch": "tests/harness/launch/test_slurm.py",
}
"""By file of configs/, the module of tests that runs or validates it."""


def test_every_config_has_a_test() -> None:
    """Every file of configs has a test."""
    listed = subprocess.run(
        ["git", "ls-files", "configs"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = listed.stdout.split() or [
        str(p.relative_to(ROOT)) for p in (ROOT / "configs").rglob("*") if p.is_file()
    ]
    assert sorted(name.removeprefix("configs/") for name in files) == sorted(TESTS)


@pytest.mark.parametrize(("name", "test"), TESTS.items(), ids=TESTS)
def test_named_test_reads_the_config(name: str, test: str) -> None:
    """The test of a file of configs names that file."""
    text = (ROOT / test).read_text()
    made = re.findall(r"[\w.]*(?:\{\w+\}|\*)[\w.]*", text)
    patterns = [re.sub(r"\\\{\w+\\\}|\\\*", r"\\w*", re.escape(one)) for one in made if "." in one]
    own = name.rpartition("/")[2]
    assert own in text or any(re.fullmatch(pattern, own) for pattern in patterns)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.sbatch")), ids=lambda path: path.name
)
def test_batch_scripts_are_valid_bash(path: pathlib.Path) -> None:
    """The batch scripts of configs are valid bash."""
    subprocess.run(["bash", "-n", path], check=True)
