"""The README's program: it is models/mnist/minimal.py, short, and it trains as the README says that it is started."""

import contextlib
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from tests.kit import real_mnist
from tests.kit.ports import free_ports
from tests.kit.processes import Program

ROOT = pathlib.Path(__file__).resolve().parents[3]
PROGRAM = (ROOT / "models" / "mnist" / "minimal.py").read_text()
README = (ROOT / "README.md").read_text()


def test_readme_shows_the_program() -> None:
    """The README shows the whole program."""
    blocks = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert blocks == [PROGRAM]


def test_program_is_one_page() -> None:
    """The program and the README are short."""
    assert len(PROGRAM.splitlines()) < 80
    assert len(README.split()) < 1350


def test_readme_starts_the_program() -> None:
    """The README starts the program by the command in the program."""
    (command,) = re.findall(r"^python -m harness\.launch .*$", PROGRAM, re.MULTILINE)
    assert command in README.replace(PROGRAM, "")


def test_readme_names_existing_pages() -> None:
    """The README names pages and commands that exist."""
    links = re.findall(r"\]\(([^)]+)\)", README)
    pages = [link.partition("#")[0] for link in links]
    assert pages and [page for page in pages if not (ROOT / page).exists()] == []
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(re.findall(r"`(bellwether-\w+)`", README)) == set(scripts)


@pytest.mark.chaos
def test_readme_commands_run_on_hosts(tmp_path: pathlib.Path) -> None:
    """The README's commands for several hosts train the program."""
    commands = re.findall(r"^(?:ps|w)\d\$ +(python .*)$", README, re.MULTILINE)
    assert len(commands) == 3
    names = ["ps0:2222", "w0:2222", "w1:2222"]
    ports = dict(zip(names, free_ports(3), strict=True))
    for name, port in ports.items():
        commands = [command.replace(name, f"127.0.0.1:{port}") for command in commands]
    with contextlib.ExitStack() as stack:
        tasks = [
            stack.enter_context(Program(*command.split(), "--train_steps=20"))
            for command in commands
        ]
        for task in tasks:
            assert task.wait() == 0, task.story()
        tasks[1].expect("Test-Accuracy: ")


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("mnist", marks=pytest.mark.chaos),
        pytest.param("digits", marks=pytest.mark.nightly),
    ],
)
def test_minimal_program_trains(tmp_path: pathlib.Path, source: str) -> None:
    """The program trains to 93 %, on MNIST or without a network on the digits."""
    if source == "mnist" and real_mnist.NONE_HERE:
        pytest.skip(real_mnist.NONE_HERE)
    # the discard port as a proxy: there is no network, so scikit-learn's digits stand in
    nobody = "http://127.0.0.1:9"
    environment = {
        **os.environ,
        "MNIST_DIR": real_mnist.DIRECTORY if source == "mnist" else "",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        **dict.fromkeys(
            ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), nobody
        ),
        "no_proxy": "localhost,127.0.0.1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    launch = [sys.executable, "-m", "harness.launch", "--ps=1", "--workers=2", "--"]
    program = [sys.executable, "-m", "models.mnist.minimal", f"--logdir={tmp_path / 'run'}"]
    run = subprocess.run(
        [*launch, *program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert "Traceback" not in run.stdout + run.stderr
    (accuracy,) = re.findall(r"Test-Accuracy: (0\.\d+|1\.0+)", run.stdout)
    assert float(accuracy) > 0.93
    assert ("NOT MNIST" in run.stdout) is (source == "digits")
    assert list((tmp_path / "run").glob("model.ckpt*")) and list(
        (tmp_path / "run").glob("events.*")
    )
