"""Which task of a launcher has which GPU of the host, by what stands in the files of a host with GPUs."""

import os
import pathlib
import subprocess
import sys

import pytest

from harness.launch.gpus import describe_shares, find_gpus, share_gpus
from harness.launch.policy import LaunchTask
from harness.launch.tasks import ClusterTopology, environment
from tests.kit.changes import SetVariables
from tests.kit.processes import ROOT

TOPOLOGY = ClusterTopology(("p:1",), ("w:1",))
FRACTION = "XLA_CLIENT_MEM_FRACTION"


def tasks(workers: int, evaluators: int = 0, chiefs: int = 0, first: int = 0) -> list[LaunchTask]:
    """The tasks of a launcher, in the order in which they start."""
    counts = {"chief": range(chiefs), "worker": range(first, first + workers)}
    counts |= {"ps": range(2), "evaluator": range(evaluators)}
    return [
        LaunchTask(job, i) for job in ("ps", "chief", "worker", "evaluator") for i in counts[job]
    ]


def visible(
    of: list[LaunchTask], found: str, each: int | None = None, **environ: str
) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES by task."""
    shares = share_gpus(of, environ, [*found], each)
    return {str(task): own["CUDA_VISIBLE_DEVICES"] for task, own in shares.items()}


@pytest.fixture
def host(tmp_path: pathlib.Path) -> pathlib.Path:
    """The root of a host with two GPUs."""
    for name in (
        "dev",
        "proc/driver/nvidia/gpus/0000:01:00.0",
        "proc/driver/nvidia/gpus/0000:02:00.0",
    ):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "dev/nvidiactl").touch()
    return tmp_path


def test_visible_gpus_are_found(host: pathlib.Path) -> None:
    """GPUs are those of CUDA_VISIBLE_DEVICES, else those of the driver; none where JAX_PLATFORMS names none."""
    assert find_gpus({}, host) == ["0", "1"]
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "4, GPU-5a,-1,6"}, host) == ["4", "GPU-5a"]
    assert find_gpus({"CUDA_VISIBLE_DEVICES": ""}, host) == []
    assert find_gpus({"JAX_PLATFORMS": "cpu"}, host) == []
    assert find_gpus({"JAX_PLATFORMS": "cuda,cpu"}, host) == ["0", "1"]


@pytest.mark.cluster
def test_nvidia_smi_is_asked_last(tmp_path: pathlib.Path, set_variables: SetVariables) -> None:
    """The launcher asks nvidia-smi where the driver has no files, and counts no GPU without a working nvidia-smi."""
    set_variables(PATH=str(tmp_path))
    assert find_gpus({}, tmp_path) == []
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA A100 (UUID: GPU-1)'\necho '  MIG 1g.5gb Device 0'\n"
    )
    smi.chmod(0o755)
    assert find_gpus({}, tmp_path) == ["0"]
    smi.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    assert find_gpus({}, tmp_path) == []


def test_training_tasks_divide_all_gpus() -> None:
    """Each training task has as many GPUs as every other, and an evaluator has one that is left."""
    assert visible(tasks(2), "01") == {"worker/0": "0", "worker/1": "1"}
    assert visible(tasks(2), "01234567") == {"worker/0": "0,1,2,3", "worker/1": "4,5,6,7"}
    assert visible(tasks(1, evaluators=1, chiefs=1), "012") == {
        "chief/0": "0",
        "worker/0": "1",
        "evaluator/0": "2",
    }
    assert visible(tasks(1, evaluators=1), "0") == {"worker/0": "0", "evaluator/0": ""}
    assert visible(tasks(2), "") == visible([LaunchTask("ps", 0)], "0") == {}


def test_crowded_gpus_are_shared_by_fraction() -> None:
    """Training tasks that are more than the GPUs share memory, unless the user divides it; an evaluator takes the CPU."""
    shares = share_gpus(tasks(3, evaluators=1), {}, ["0", "1"])
    assert [own["CUDA_VISIBLE_DEVICES"] for own in shares.values()] == ["0", "1", "0", ""]
    assert [own.get(FRACTION) for own in shares.values()] == ["0.45", "0.45", "0.45", None]
    assert shares[LaunchTask("evaluator", 0)]["JAX_PLATFORMS"] == "cpu"
    for workers in range(2, 19):
        (own,) = {own[FRACTION] for own in share_gpus(tasks(workers), {}, ["0"]).values()}
        assert 0.8 < float(own) * workers <= 0.9
    for name in (FRACTION, "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        for own in share_gpus(tasks(2), {name: "false"}, ["0"]).values():
            assert own == {"CUDA_VISIBLE_DEVICES": "0"}
    with pytest.raises(
        ValueError, match="^19 training tasks on one GPU, .*enough for 18: start fewer"
    ):
        share_gpus(tasks(37), {}, ["0", "1"])


def test_gpus_per_worker_counts_own_tasks() -> None:
    """--gpus_per_worker counts the training tasks of this launcher, whatever their index in the cluster."""
    assert visible(tasks(2, evaluators=2), "47012", 2) == {
        "worker/0": "4,7",
        "worker/1": "0,1",
        "evaluator/0": "2",
        "evaluator/1": "",
    }
    assert visible(tasks(2, first=4), "47", 1) == {"worker/4": "4", "worker/5": "7"}
    assert visible(tasks(2, first=4), "", 1) == {
        "worker/4": "0",
        "worker/5": "1",
    }  # of a maker that is not found
    for found in ("47", ""):
        with pytest.raises(
            ValueError, match="--gpus_per_worker=2: 2 training tasks need 4 GPUs, and there are"
        ):
            visible(tasks(2), found, 2, CUDA_VISIBLE_DEVICES=",".join(found))


def test_line_says_shares() -> None:
    """One line says which task has which GPU."""
    shares = share_gpus(tasks(2, evaluators=1), {}, ["7"])
    assert describe_shares(shares) == (
        "GPUs of this host: worker/0 has 7 (45% of its memory), worker/1 has 7 (45% of its memory), evaluator/0 has none"
    )


LAUNCH = [sys.executable, "-m", "harness.launch", "--ps=1", "--workers=2"]
SHOW = [
    "python",
    "-c",
    f"import os; print(*(os.environ.get(n) for n in ('CUDA_VISIBLE_DEVICES', 'JAX_PLATFORMS', '{FRACTION}')))",
]


def launch(*flags: str, **environ: str) -> tuple[int, list[str], list[str]]:
    """Starts workers that show what they see; gives the exit code, the workers' lines and the launcher's line."""
    base = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [*LAUNCH, *flags, "--", *SHOW], env=base | environ, cwd=ROOT, capture_output=True, text=True
    )
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("worker"))
    return done.returncode, lines, [line for line in done.stderr.splitlines() if "GPU" in line]


@pytest.mark.cluster
def test_launcher_divides_gpus() -> None:
    """The launcher gives its workers the GPUs of its own environment and says so; 0 for each shows all to all."""
    shared = launch("--ps=0", CUDA_VISIBLE_DEVICES="5")
    assert shared[:2] == (0, ["worker/0 | 5 None 0.45", "worker/1 | 5 None 0.45"])
    (line,) = shared[2]
    assert line.startswith(
        "launch   | GPUs of this host: worker/0 has 5 (45% of its memory), worker/1"
    )
    code, lines, said = launch("--ps=0", "--gpus_per_worker=0", CUDA_VISIBLE_DEVICES="5")
    assert (code, lines, said) == (0, ["worker/0 | 5 None None", "worker/1 | 5 None None"], [])


@pytest.mark.cluster
def test_too_few_gpus_are_one_line() -> None:
    """Too few GPUs for --gpus_per_worker are one line and the code of a wrong configuration."""
    assert launch("--gpus_per_worker=1", CUDA_VISIBLE_DEVICES="") == (
        2,
        [],
        ["launch: --gpus_per_worker=1: 2 training tasks need 2 GPUs, and there are 0"],
    )


def test_ps_has_no_gpu() -> None:
    """A ps has no GPU, whatever its launcher sees."""
    ps = environment(
        {"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cuda"}, TOPOLOGY, LaunchTask("ps", 0), 0
    )
    assert (ps["CUDA_VISIBLE_DEVICES"], ps["JAX_PLATFORMS"]) == ("", "cpu")
