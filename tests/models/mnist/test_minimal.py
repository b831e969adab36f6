"""The README's program: it is models/mnist/minimal.py, short, and it trains as the README says that it is started."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
PROGRAM = (ROOT / "models" / "mnist" / "minimal.py").read_text()
README = (ROOT / "README.md").read_text()
REAL_MNIST = os.environ.get("MNIST_DIR") or str(ROOT.parent / "shared" / "mnist")


def test_the_readme_shows_the_whole_program() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert blocks == [PROGRAM]


def test_it_is_one_page() -> None:
    assert len(PROGRAM.splitlines()) < 80


def test_the_readme_starts_it_as_it_says_itself() -> None:
    (command,) = re.findall(r"^python -m harness\.launch .*$", PROGRAM, re.MULTILINE)
    assert command in README.replace(PROGRAM, "")


@pytest.mark.cluster
@pytest.mark.parametrize("source", ["mnist", "digits"])
def test_it_trains(tmp_path: pathlib.Path, source: str) -> None:
    if source == "mnist" and not os.path.isdir(REAL_MNIST):
        pytest.skip("no real MNIST: MNIST_DIR is unset and ../shared/mnist not there")
    nobody = "http://127.0.0.1:9"  # the discard port as a proxy: there is no network, so scikit-learn's digits stand in
    environment = {
        **os.environ,
        "MNIST_DIR": REAL_MNIST if source == "mnist" else "",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), nobody),
        "no_proxy": "localhost,127.0.0.1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    launch = [sys.executable, "-m", "harness.launch", "--ps=1", "--workers=2", "--"]
    program = [sys.executable, "-m", "models.mnist.minimal", f"--logdir={tmp_path / 'run'}"]
    run = subprocess.run(
        [*launch, *program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert "Traceback" not in run.stdout + run.stderr
    (accuracy,) = re.findall(r"Test-Accuracy: (0\.\d+|1\.0+)", run.stdout)
    assert float(accuracy) > 0.93
    assert ("NOT MNIST" in run.stdout) is (source == "digits")
    assert list((tmp_path / "run").glob("model.ckpt*")) and list((tmp_path / "run").glob("events.*"))
