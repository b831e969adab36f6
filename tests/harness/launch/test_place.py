"""What the launcher of one task does with what Slurm tells it; on the real thing in test_slurm.py."""

import os
import pathlib
import subprocess
import sys

import pytest

from harness.launch.place import JOBS, LOWEST_PORT, TASKS, in_slurm, main
from harness.launch.ports import LOWEST
from tests.kit.changes import SetVariables

ROOT = pathlib.Path(__file__).resolve().parents[3]
STEP = {
    "SLURM_JOB_ID": "707",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURMD_NODENAME": "n1",
}
HET = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "707",
    "SLURM_JOB_ID_HET_GROUP_1": "708",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n2",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n1",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "2",
}


def step(set_variables: SetVariables, **changes: str | None) -> None:
    others = (name for name in os.environ if name.startswith("SLURM"))
    set_variables(dict.fromkeys([*others, "CUDA_VISIBLE_DEVICES"]))
    set_variables(STEP, **changes)


def test_slurm_step_places_a_task(set_variables: SetVariables) -> None:
    """The variables of a Slurm step give hosts, job, index, GPU, stop command and restart count."""
    step(
        set_variables,
        SLURM_PROCID="1",
        SLURM_LOCALID="1",
        SLURM_GPUS_ON_NODE="2",
        SLURM_RESTART_COUNT="2",
    )
    port = LOWEST_PORT + 707 % JOBS * TASKS
    place = in_slurm(1, 2)
    assert (place.ps_hosts, place.worker_hosts) == (
        (f"n1:{port}",),
        (f"n1:{port + 1}", f"n2:{port}"),
    )
    assert (place.job, place.index, place.number) == ("worker", 0, 1)
    assert place.stop == ("scancel", "--signal=TERM", "707.0")
    assert place.environ == {"CUDA_VISIBLE_DEVICES": "0,1"}  # the ps beside it takes none
    assert place.said == ""  # the first task says it for all
    set_variables(SLURM_PROCID="0")
    assert in_slurm(1, 2).said == "job 707 was requeued, this is restart 2"


def test_ports_are_below_ephemeral_ports() -> None:
    """The ports lie below those that the system hands out."""
    assert LOWEST <= LOWEST_PORT
    assert LOWEST_PORT + JOBS * TASKS <= 32768


def test_heterogeneous_step_stops_every_group(
    set_variables: SetVariables,
) -> None:
    """A step of a heterogeneous job is stopped in each of its groups."""
    step(set_variables, **HET, SLURM_PROCID="2", SLURM_LOCALID="1")
    place = in_slurm(1, 2)
    assert [hosts[0].partition(":")[0] for hosts in (place.ps_hosts, place.worker_hosts)] == [
        "n2",
        "n1",
    ]
    assert (place.job, place.index) == ("worker", 1)
    assert place.stop == ("scancel", "--signal=TERM", "707.0", "708.0")


def test_joining_step_adds_workers(
    set_variables: SetVariables,
) -> None:
    """The tasks of a step that joins a cluster are further workers."""
    step(set_variables, SLURM_PROCID="2", SLURMD_NODENAME="n2", SLURM_GPUS_ON_NODE="2")
    place = in_slurm(0, 3, ["a:1", "b:1"], 4, 23456)
    assert (place.job, place.index, place.number) == ("worker", 6, 0)
    assert (place.ps_hosts, place.worker_hosts) == (("a:1", "b:1"), ("",) * 6 + ("n2:23456",))
    assert place.environ == {"CUDA_VISIBLE_DEVICES": "0"} and place.stop[-1] == "707.0"
    with pytest.raises(
        RuntimeError, match="--workers=2 are 2 tasks, and this Slurm step has 3: give"
    ):
        in_slurm(0, 2, ["a:1"], 4, 23456)


@pytest.mark.parametrize(
    "name", ["SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"]
)
def test_missing_slurm_variable_is_named(
    set_variables: SetVariables, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A missing variable of Slurm is named in one line."""
    for asked in (
        '{"ps": 1, "workers": 2}',
        '{"ps": 0, "workers": 3, "ps_hosts": ["a:1"], "first": 4, "port": 23456}',
    ):
        step(set_variables, **{name: None})
        assert main([asked]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"launch: {name} is not set")


def test_common_problem_is_said_once(
    set_variables: SetVariables, capsys: pytest.CaptureFixture[str]
) -> None:
    """A problem that all tasks find is said by the first only, and a task's own problem by that
    task.
    """
    said = []
    for rank in ("0", "1", "2"):
        step(set_variables, SLURM_PROCID=rank)
        assert main(['{"ps": 2, "workers": 2}']) == 2
        said.append(capsys.readouterr().err)
    assert said[0].startswith(
        "launch: --ps=2 --workers=2 are 4 tasks, and this Slurm step has 3: give"
    )
    assert said[1:] == ["", ""]
    step(set_variables, SLURM_PROCID="2", SLURMD_NODENAME="n9")  # but this only one task may find
    assert main(['{"ps": 1, "workers": 2}']) == 2
    assert capsys.readouterr().err.startswith("launch: rank 2 runs on n9, not on n2")


@pytest.mark.chaos
def test_failed_task_leaves_reason_and_stops(
    tmp_path: pathlib.Path,
) -> None:
    """A task that fails for good writes the reason to the termination log and has the other tasks
    stopped.
    """
    scancel = tmp_path / "scancel"
    scancel.write_text('#!/bin/sh\necho "$@" >"$0.told"\n')
    scancel.chmod(0o755)
    one = {
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
    }
    log = tmp_path / "failed"
    command = [
        sys.executable,
        "-m",
        "harness.launch",
        "--per_task",
        "--ps=0",
        "--workers=1",
        "--exit_codes=jobset",
    ]
    task = "import os, sys; print(os.environ['BELLWETHER_PER_TASK'], *sys.argv[1:]); sys.exit(65)"
    done = subprocess.run(
        [*command, f"--termination_log={log}", "--", "python", "-c", task],
        cwd=ROOT,
        env={**os.environ, **STEP, **one, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 42, done.stderr
    port = LOWEST_PORT + 707 % JOBS * TASKS
    assert (
        done.stdout
        == f"worker/0 | 1 --ps_hosts= --worker_hosts=n1:{port} --job_name=worker --task_index=0\n"
    )
    assert (
        log.read_text()
        == "42 worker/0 exited with code 65 and failed for good (data: it would end so again)\n"
    )
    assert (tmp_path / "scancel.told").read_text() == "--signal=TERM 707.0\n"


@pytest.mark.chaos
def test_stop_follows_an_unwritable_log(
    tmp_path: pathlib.Path,
) -> None:
    """The other tasks are told to stop even where the termination log cannot be written."""
    scancel = tmp_path / "scancel"
    scancel.write_text('#!/bin/sh\necho "no such step" >&2\nexit 1\n')
    scancel.chmod(0o755)
    one = {
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
    }
    command = [sys.executable, "-m", "harness.launch", "--per_task", "--ps=0", "--workers=1"]
    done = subprocess.run(
        [
            *command,
            f"--termination_log={tmp_path}/none/failed",
            "--",
            "python",
            "-c",
            "raise SystemExit(65)",
        ],
        cwd=ROOT,
        env={**os.environ, **STEP, **one, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 65
    assert done.stderr.splitlines()[-2:] == [
        f"launch: --termination_log={tmp_path}/none/failed: No such file or directory",
        "launch: the other tasks are not told to stop: scancel --signal=TERM 707.0: no such step",
    ]
