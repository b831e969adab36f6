"""The table of exit codes: that it is one, that engines read it as it says, and that programs end by it."""

import bdb
import builtins
import os
import pathlib
import re
import subprocess
import sys

import pytest

import runtime as rt
from harness import exit_codes
from harness.exit_codes import TABLE, RetryRule

ROOT = pathlib.Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "launch.md").read_text()
# What Kubeflow's TFJob does with a container's exit code under restartPolicy: ExitCode. All others
# fail the job, too.
TFJOB_RETRIES = {130, 137, 138, 143}


@pytest.fixture(autouse=True)
def plain_again() -> object:
    yield
    exit_codes.use("plain")


def test_code_has_one_meaning() -> None:
    """No exit code and no error stands for two rows."""
    codes = [code for row in TABLE for code in (row.plain, *row.also)]
    assert len(set(codes)) == len(codes)
    errors = [name for row in TABLE for name in row.errors]
    assert len(set(errors)) == len(errors)
    for row in TABLE:
        for code in (row.plain, *row.also):
            assert exit_codes.of_code(code) is row
    assert exit_codes.of_code(139) is exit_codes.KILLED  # SIGSEGV
    assert exit_codes.of_code(7) is exit_codes.FAILED


def test_engines_agree_with_the_launcher() -> None:
    """An engine starts a task again exactly where the launcher would."""
    for row in TABLE:
        if row in (exit_codes.FAILED, exit_codes.KILLED):  # they keep the code that they came with
            continue
        retried = row.retry is not RetryRule.NEVER
        assert (row.tfjob in TFJOB_RETRIES) == retried, row.name
        assert (row.jobset == 42) == (not retried and row is not exit_codes.DONE), row.name


@pytest.mark.parametrize("scheme", exit_codes.SCHEMES)
def test_codes_follow_the_scheme(scheme: str) -> None:
    """Codes follow the chosen scheme, and other codes stay."""
    exit_codes.use(scheme)
    for row in TABLE:
        assert exit_codes.code(row) == getattr(row, scheme)
        assert exit_codes.translated(row.plain) == getattr(row, scheme)
    assert [exit_codes.translated(code) for code in (7, 139)] == [7, 139]
    with pytest.raises(ValueError, match="no exit codes are called 'k8s': there are plain, tfjob"):
        exit_codes.use("k8s")


def test_errors_find_their_row() -> None:
    """The errors of the table exist, and their subclasses find the row."""
    for row in TABLE:
        for name in row.errors:
            (kind,) = {
                getattr(place, name)
                for place in (rt, rt.lowlevel, builtins, bdb)
                if hasattr(place, name)
            }
            for error in (kind("x"), type("Sub", (kind,), {})("x")):
                assert exit_codes.of_error(error, begun=False) is row
                assert exit_codes.of_error(error) is (
                    exit_codes.FAILED if row is exit_codes.BUG else row
                )
    for error in (rt.NotFoundError("x"), OSError("x"), RuntimeError("x"), MemoryError()):
        assert exit_codes.of_error(error, begun=False) is exit_codes.FAILED


def test_guide_has_the_table() -> None:
    """The guide has the table of the code."""
    for row in TABLE:
        plain = ", ".join(map(str, (row.plain, *row.also)))
        cells = row.name, row.meaning, row.retry.value, plain, row.tfjob, row.jobset
        assert f"| {' | '.join(map(str, cells))} |\n" in GUIDE
    told = re.search(r"^\| the end .*\n\|[-|]+\n((?:\|.*\n)+)", GUIDE, re.MULTILINE)
    assert told is not None and len(told[1].splitlines()) == len(TABLE)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--job_name=evaluater"], 2, "--job_name given without --ps_hosts"),
        # too early for --exit_codes
        (["--task_index=-1", "--exit_codes=jobset"], 2, "flag --task_index=-1"),
        (["left over"], 2, "no arguments but flags are taken"),
        (["--ps_hosts=a:1"], 2, "--ps_hosts given without --job_name"),
        (["--ps_hosts=a:1", "--exit_codes=jobset"], 42, "--ps_hosts given without --job_name"),
        (
            ["--ps_hosts=a:1", "--worker_hosts=no-such-host.invalid:1", "--job_name=worker"],
            2,
            "no-such-host.invalid cannot be listened on",
        ),
        (["--data_dir=nowhere"], 65, "--data_dir=nowhere has neither"),
        (["--data_dir=nowhere", "--exit_codes=tfjob"], 2, "--data_dir=nowhere has neither"),
    ],
)
def test_trainer_ends_with_its_code(flags: list[str], code: int, said: str) -> None:
    """The trainer ends with one line and the code of the mistake."""
    command = [sys.executable, "-m", "models.mnist.trainer", "--logdir=", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    *_, last = done.stderr.splitlines()
    assert (done.returncode, said in last) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("ends", "scheme", "code"),
    [("sys.exit(75)", "tfjob", 138), ("sys.exit(75)", "plain", 75), ("sys.exit(9)", "jobset", 9)],
)
def test_launcher_translates_the_code(ends: str, scheme: str, code: int) -> None:
    """The launcher ends with a code that the engine understands."""
    command = [sys.executable, "-m", "harness.launch", "--ps=0", "--workers=1", "--max_restarts=0"]
    done = subprocess.run(
        [*command, f"--exit_codes={scheme}", "--", "python", "-c", f"import sys; {ends}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            {},
            "launch: SLURM_PROCID is not set: --per_task runs in a Slurm step, start it with srun",
        ),
        (
            {"SLURM_PROCID": "1", "SLURM_JOB_ID": "7"},
            "launch: SLURM_STEP_ID is not set, although SLURM_PROCID is",
        ),
    ],
)
def test_missing_engine_variable_is_named(environ: dict[str, str], said: str) -> None:
    """A missing variable of the engine gives one line."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run(
        [sys.executable, "-m", "harness.launch", "--per_task", "--exit_codes=jobset", "--", "true"],
        cwd=ROOT,
        env={**clean, **environ},
        capture_output=True,
        text=True,
    )
    assert done.returncode == exit_codes.CONFIGURATION.jobset
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith(said)
