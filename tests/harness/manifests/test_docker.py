"""The image, as far as it can be tried without a container engine: its steps are run in a directory of their own."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from harness import exit_codes
from tests.kit.ports import free_ports
from tests.kit.processes import Program

pytestmark = pytest.mark.cluster

ROOT = pathlib.Path(__file__).resolve().parents[3]
USER = int(
    re.findall(r"runAsUser: (\d+)", (ROOT / "harness/manifests/templates/pod.yaml").read_text())[0]
)
"""The user of the pods, who is that of the image."""


def steps() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with their arguments; an ARG has its default."""
    lines = (ROOT / "configs/docker/Dockerfile").read_text()
    joined = re.sub(
        r"\\\n", " ", "\n".join(line for line in lines.splitlines() if not line.startswith("#"))
    )
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)", joined, re.MULTILINE))
    filled = re.sub(r"\$\{(\w+)\}", lambda name: defaults[name[1]], joined)
    return [
        (word, rest.strip())
        for word, _, rest in (line.partition(" ") for line in filled.splitlines())
        if word
    ]


def of(word: str) -> list[str]:
    return [rest for name, rest in steps() if name == word]


def test_copied_files_are_tracked() -> None:
    """Every file that the image copies is under version control."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for sources in (rest.split()[:-1] for rest in of("COPY")):
        for source in sources:
            assert any(name == source or name.startswith(f"{source}/") for name in tracked), source


def test_packages_are_pinned_by_lock() -> None:
    """The image installs the packages of the lock file, each with a pinned version."""
    assert "pip install -r requirements.lock" in of("RUN") and "pip install --no-deps --no-build-isolation ." in of("RUN")  # fmt: skip # noqa: E501
    lines = [
        line.removesuffix(" \\")
        for line in (ROOT / "requirements.lock").read_text().splitlines()
        if line[0] != " "
    ]
    assert lines and all(re.fullmatch(r"[a-z0-9-]+==[^=]+", line) for line in lines)
    assert any(line.startswith("setuptools==") for line in lines), (
        "the build has no isolation: it takes it from here"
    )
    assert not any("cuda" in line or line.startswith("nvidia") for line in lines), (
        "a ps has no CUDA"
    )


def test_worker_image_has_cuda() -> None:
    """An image for workers with a GPU takes the lock with CUDA, and asks the host for its driver."""
    text = (ROOT / "configs/docker/Dockerfile").read_text()
    assert of("ARG") == ["LOCK=requirements.lock"]
    (lock,) = re.findall(r"--build-arg LOCK=(\S+)", text)
    assert "jax-cuda12-plugin==" in (ROOT / lock).read_text()
    assert "docker run --init --gpus all" in text
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in of("ENV")[0].split()


def test_image_runs_without_root() -> None:
    """The image runs as the user of the manifests, after root has installed."""
    assert of("USER") == [f"{USER}:{USER}"] and any(f"--uid {USER}" in run for run in of("RUN"))
    names = [name for name, _ in steps()]
    assert names.index("USER") > max(n for n, name in enumerate(names) if name == "RUN"), (
        "root installs"
    )
    assert "PYTHONUNBUFFERED=1" in of("ENV")[0]


def test_image_has_compiled_files() -> None:
    """The image compiles its modules after the last copy of one, as tasks write no compiled files."""
    assert "PYTHONDONTWRITEBYTECODE=1" in of("ENV")[0]
    last_copy = max(n for n, (name, _) in enumerate(steps()) if name == "COPY")
    assert ("RUN", "python -m compileall -q .") in steps()[last_copy:]


@pytest.fixture
def place() -> Iterator[pathlib.Path]:
    """A directory that another user reaches, which tmp_path is not."""
    with tempfile.TemporaryDirectory() as path:
        yield pathlib.Path(path)


@pytest.mark.nightly
def test_command_serves_and_ends_by_sigterm(
    place: pathlib.Path,
) -> None:
    """The image's files and command serve as another user, and SIGTERM ends the command."""
    app, site, runs = place / "app", place / "site", place / "runs"
    for *sources, target in (rest.split() for rest in of("COPY")):
        for source in sources:
            here, there = ROOT / source, app / target / source
            if here.is_dir():
                shutil.copytree(
                    here,
                    app / target,
                    ignore=shutil.ignore_patterns("__pycache__"),
                    dirs_exist_ok=True,
                )
            else:
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(here, there)
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--no-build-isolation",
            "--target",
            str(site),
            ".",
        ],
        cwd=app,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    assert sorted(
        path.name for path in site.iterdir() if not path.name.startswith(("bellwether", "__"))
    ) == [
        "bin",
        "harness",
        "runtime",
    ]
    shutil.rmtree(app / "harness")  # those that were installed are run
    shutil.rmtree(app / "runtime")
    runs.mkdir()
    command = json.loads(of("CMD")[0])
    assert command[0] == "python", "a list, not a line of a shell"
    command = [sys.executable, *(argument.replace("/runs", str(runs)) for argument in command[1:])]
    (port,) = free_ports(1)
    hosts = [f"--ps_hosts=127.0.0.1:{port}", "--worker_hosts=127.0.0.1:1", "--job_name=ps"]
    env: dict[str, str | None] = {"PYTHONPATH": f"{site}:{app}", "HOME": str(place)}
    if os.geteuid() == 0:
        for path in (place, *place.rglob("*")):
            os.chown(path, USER, USER)
        command = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *command]
    with Program(*command, *hosts, cwd=app, env=env, cold=True) as program:
        program.expect("serves at")
        program.signal(signal.SIGTERM)
        assert program.wait() == exit_codes.PREEMPTED.plain, program.story()


_UNSHARE = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
_TRY = """
mount -t tmpfs tmpfs /mnt && mkdir /mnt/u /mnt/w /mnt/r
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/r && ip link set lo up
"""


@pytest.fixture
def chroots() -> None:
    """Skips the test where a copy of the file system cannot be made."""
    if os.geteuid():
        pytest.skip("only root can change the root directory")
    if missing := [name for name in ("unshare", "ip", "useradd") if shutil.which(name) is None]:
        pytest.skip(
            f"{', '.join(missing)} not installed: apt-get install iproute2 util-linux passwd"
        )
    tried = subprocess.run(
        [*_UNSHARE, "sh", "-ec", _TRY], capture_output=True, text=True, timeout=60
    )
    if tried.returncode:
        pytest.skip(f"namespaces cannot be made here: {tried.stderr.strip()}")


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("chroots")
def test_image_builds_and_runs_alone() -> None:
    """The image builds in a root directory of its own, and its command obeys SIGTERM as process 1."""
    done = subprocess.run(
        [*_UNSHARE, sys.executable, "-m", "tests.harness.manifests.docker_program"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=570,
    )
    story = (done.stdout + done.stderr)[-4000:]
    assert done.returncode == 0, story
    assert re.findall("^RUN (.*)$", done.stdout, re.MULTILINE) == of("RUN"), story
    assert re.search("ps/0.* serves at", done.stdout) and done.stdout.endswith(
        f"CODE {exit_codes.PREEMPTED.plain}\n"
    ), story
