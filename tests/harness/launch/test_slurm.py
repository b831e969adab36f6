"""The scripts of configs/ on a real Slurm of two hosts: training, deaths, the end of the time, a requeue, scancel."""

import datetime
import pathlib
import re
import sys
import time
from collections.abc import Iterator

import pytest

import harness
from harness import exit_codes
from tests.harness.launch.slurm_kit import Job, Slurm, until, why_no_slurm

NONE_HERE = why_no_slurm()
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(bool(NONE_HERE), reason=NONE_HERE),
    pytest.mark.timeout(600),
]

SCRIPT, HET_SCRIPT, WORKERS_SCRIPT = (
    f"configs/slurm{kind}.sbatch" for kind in ("", "_het", "_workers")
)
THREE_TASKS = ("--ntasks=3",)
ENDLESS = ("--train_steps=1000000000", "--log_every_steps=200", "--save_model_secs=2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    yield slurm
    slurm.close()


@pytest.fixture
def slurm(cluster: Slurm) -> Iterator[Slurm]:
    yield cluster
    cluster.end_jobs()


def _end_of_time(slurm: Slurm, number: str, started: str) -> None:
    """Sets the limit of a running job so that its --signal comes soon, and a minute before it is killed.

    Slurm's limits are whole minutes from the start. It looks at them every 30 s, and sends the
    signal as if it were 30 s later than it is.
    """
    ran = (datetime.datetime.now() - datetime.datetime.fromisoformat(started)).total_seconds()
    minutes = int(ran // 60) + (1 if ran % 60 < 25 else 2)
    slurm.run("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}")


def test_job_outlives_deaths_and_its_time(slurm: Slurm) -> None:
    """A job over two hosts outlives killed tasks, a drained host and its time limit, and continues
    after the requeue.
    """
    further = slurm.shared / "further.flags"  # that the job is started with, each time
    further.write_text("--epochs=1\n")
    job = slurm.submit(SCRIPT, *ENDLESS, f"--flagfile={further}", sbatch=THREE_TASKS, WORKERS="2")
    for name in ("ps/0", "worker/0", "worker/1"):
        job.task(name)
    assert (job.host("ps/0"), job.host("worker/1")) == ("n1", "n2")
    job.expect(r"^worker/1 .* step \d")

    job.task("worker/1").kill()
    job.expect("worker/1 was killed by SIGKILL; restart 1 of 3")
    job.expect("worker/1 .*this is start number 2 of this task")
    job.expect(r"^worker/1 .* step \d")

    job.expect(r"saved .*/[1-9]\d*$")
    job.task("ps/0").kill()
    job.expect("ps/0 .*was killed by SIGKILL; restart 1 of 3")
    job.expect("training goes on from step [1-9]")
    job.expect(r"^worker/1 .* step \d")

    slurm.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    job.expect(r"^worker/1 .* step \d")  # what runs on it goes on

    _end_of_time(slurm, job.number, job.fields()["StartTime"])
    job.expect("worker/0 .*SIGTERM: ending within")
    # others may have been under way
    saved = int(job.expect(r"worker/0 .*interrupted: step (\d+) is saved")[1])
    job.expect(f"requeueing job {job.number}")
    job.wait("PENDING")
    assert job.fields()["Restarts"] == "1"
    assert (
        int(pathlib.Path(harness.latest_checkpoint(job.directory / "model.ckpt") or "").name)
        == saved
    )
    authority = (job.directory / "certs" / "ca.pem").read_text()

    # Slurm lets two minutes pass before it starts a job again, in which the end of this start is
    # told to it.
    until(lambda: not slurm.processes("slurmstepd"), "the first start is over")
    further.write_text(f"--train_steps={saved + 300}\n")
    # The limit of the first start would end the next one as well.
    slurm.run("scontrol", "update", f"JobId={job.number}", "StartTime=now", "TimeLimit=60")
    until(
        lambda: re.search("Resources|DRAINED", job.fields()["Reason"]),
        "it waits for the drained host",
    )
    slurm.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    job.expect(f"job {job.number} was requeued, this is restart 1")
    assert int(job.expect(r"training goes on from step (\d+)")[1]) == saved
    accuracy = float(job.expect(r"Test-Accuracy: ([\d.]+)")[1])
    job.wait("COMPLETED")
    assert accuracy > 0.9
    assert job.fields()["ExitCode"] == "0:0"
    keys = list((job.directory / "certs").glob("*.key"))
    assert {key.stem for key in keys} == {"ca", "n1", "n2"} and {
        key.stat().st_mode & 0o777 for key in keys
    } == {0o600}
    assert (job.directory / "certs" / "ca.pem").read_text() != authority


@pytest.fixture
def own_slurm(tmp_path: pathlib.Path) -> Iterator[Slurm]:
    slurm = Slurm(tmp_path)
    yield slurm
    slurm.close()


@pytest.mark.nightly
def test_lost_host_requeues_the_job(
    own_slurm: Slurm,
) -> None:
    """A job that loses a host is requeued and continues from its checkpoint."""
    slurm = own_slurm
    slurm.notice_within(20)
    further = slurm.shared / "further.flags"
    further.write_text("--epochs=1\n")
    job = slurm.submit(SCRIPT, *ENDLESS, f"--flagfile={further}", sbatch=THREE_TASKS, WORKERS="2")
    job.expect(r"^worker/1 .* step \d")
    job.expect(r"saved .*/[1-9]\d*$")
    assert job.host("worker/1") == "n2"
    slurm.cut_power("n2")
    job.expect(r"^worker/0 .* step \d")  # until Slurm has noticed (SlurmdTimeout)
    job.expect("Node failure on n2")
    slurm.notice_within(300)  # the other host of a busy machine may be silent for 20 s
    job.wait("PENDING")
    assert job.fields()["Restarts"] == "1"
    until(lambda: not slurm.processes("models.mnist.trainer"), "every task is gone")
    # The script ends after its tasks. A new start of the job gets no step before that end.
    until(lambda: not slurm.processes(f"slurmstepd: [{job.number}."), "the script is gone")
    saved = int(pathlib.Path(harness.latest_checkpoint(job.directory / "model.ckpt") or "").name)
    further.write_text(f"--train_steps={saved + 300}\n")
    slurm.power("n2")
    slurm.resume()
    slurm.run("scontrol", "update", f"JobId={job.number}", "StartTime=now")
    job.expect(f"job {job.number} was requeued, this is restart 1")
    assert int(job.expect(r"training goes on from step (\d+)")[1]) == saved
    job.expect(r"Test-Accuracy: ([\d.]+)")
    job.wait("COMPLETED")


@pytest.mark.nightly
def test_heterogeneous_job_ends_by_scancel(slurm: Slurm, tmp_path: pathlib.Path) -> None:
    """A heterogeneous job has its ps on another host, and scancel ends all its tasks in time."""
    script = slurm.shared / "het.sbatch"  # as the file says: with one's own numbers
    text = (pathlib.Path(HET_SCRIPT)).read_text()
    text = text.replace("--mem-per-gpu=8G", "--mem-per-gpu=1G")
    script.write_text(text.replace("--ntasks=2", "--ntasks=1").replace("--ntasks=8", "--ntasks=2"))
    assert text.count("--ntasks=2") == text.count("--ntasks=8") == 1
    # The GPUs of this Slurm are files.
    job = slurm.submit(str(script), *ENDLESS, PS="1", WORKERS="2", BELLWETHER_REQUIRE_GPU="0")
    job.expect(r"^worker/1 .* step \d")
    assert job.host("ps/0") == "n2"
    # of both groups
    assert {path.stem for path in (job.directory / "certs").glob("n*.pem")} == {"n1", "n2"}
    assert [job.host(f"worker/{index}") for index in (0, 1)] == ["n1", "n1"]
    assert [job.task(f"worker/{index}").environ()["CUDA_VISIBLE_DEVICES"] for index in (0, 1)] == [
        "0",
        "1",
    ]
    assert job.task("ps/0").environ()["CUDA_VISIBLE_DEVICES"] == ""

    kill_wait = float(re.search(r"KillWait *= (\d+)", slurm.run("scontrol", "show", "config"))[1])  # type: ignore[index]
    began = time.monotonic()
    slurm.run("scancel", job.number)
    job.expect(r"worker/0 .*saved .*/\d+$")
    until(lambda: not slurm.processes("models.mnist.trainer"), "every task is gone")
    assert time.monotonic() - began < kill_wait
    job.wait("CANCELLED")
    assert "requeueing" not in job.output


@pytest.mark.nightly
def test_other_jobs_join_and_leave(slurm: Slurm) -> None:
    """Workers of another job and of another step join a run and leave it."""
    flags = ("--elastic", *ENDLESS)
    job = slurm.submit(SCRIPT, *flags, sbatch=("--ntasks=2",), WORKERS="1")
    ps = job.expect(r"^ps/0 .*/job:ps/task:0 serves at grpc://(\S+)")[1]
    job.expect(r"^worker/0 .* step \d")
    known = {"RUN": str(job.directory), "PS_HOSTS": ps}

    added = slurm.submit(WORKERS_SCRIPT, *flags, **known, FIRST="1")
    for index in (1, 2):
        added.task(f"worker/{index}")
    while len({line.split()[0] for line in added.output.splitlines() if " step " in line}) < 2:
        added.expect(r"^worker/[12] .* step \d")

    # A step within the allocation of the first job, on a host that has a certificate already.
    (job.directory / "step.sh").write_text(
        f"export BELLWETHER_SECURITY={job.directory}/certs\n"
        f"exec srun --jobid={job.number} --overlap --ntasks=1 {sys.executable} -m harness.launch "
        "--per_task "
        f"--ps_hosts={ps} --first_worker=3 --workers=1 -- python -m models.mnist.trainer "
        f"--flagfile=configs/mnist_async.flags --logdir={job.directory} {' '.join(flags)}\n"
    )
    slurm.run(
        "bash", "-c", f"bash {job.directory}/step.sh </dev/null >{job.directory}/step.out 2>&1 &"
    )
    step = Job(slurm, f"{job.number}.1", job.directory / "step")
    step.expect(r"^worker/3 .* step \d")

    # The same index once more, on the same host: refused, and not again and again.
    twice = slurm.submit(WORKERS_SCRIPT, *flags, sbatch=("--ntasks=1",), **known, FIRST="3")
    twice.expect("two tasks say that they are /job:worker/task:3")
    twice.wait("FAILED")
    assert twice.fields()["ExitCode"] == f"{exit_codes.CONFIGURATION.plain}:0"

    steps = slurm.run("squeue", "--steps", "--noheader", f"--jobs={job.number}", "--format=%i")
    (further_step,) = [
        found for found in steps.split() if not found.endswith((".0", ".batch", ".extern"))
    ]
    assert further_step, steps
    # it says that there is no such job, and obeys
    slurm.run("scancel", "--signal=TERM", further_step, check=False)
    step.expect("left the training run, which goes on without this task")
    slurm.run("scancel", added.number)
    for _ in (1, 2):
        added.expect("left the training run, which goes on without this task")
    added.wait("CANCELLED")
    job.expect(r"^worker/0 .* step \d")
    assert job.state() == "RUNNING" and not re.search("restart|Traceback", job.output)


@pytest.mark.nightly
def test_wrong_task_count_is_one_line(slurm: Slurm) -> None:
    """A number of tasks that does not fit the roles gives one clear line."""
    job = slurm.submit(SCRIPT, sbatch=THREE_TASKS, WORKERS="4")
    job.wait("FAILED")
    assert job.fields()["ExitCode"] == f"{exit_codes.CONFIGURATION.plain}:0"
    said = [line for line in job.output.splitlines() if not line.startswith("srun: ")]
    assert said == [
        "launch: --ps=1 --workers=4 are 5 tasks, and this Slurm step has 3: give sbatch "
        "--ntasks=5, or the launcher "
        "other numbers"
    ]


@pytest.mark.nightly
def test_fatal_failure_is_not_requeued(slurm: Slurm) -> None:
    """A failure for good ends the job with its code and without a requeue."""
    job = slurm.submit(SCRIPT, "--data_dir=nowhere", sbatch=THREE_TASKS, WORKERS="2")
    job.expect(
        r"worker/0 exited with code 65 and failed for good \(data: it would end so again\); "
        r"stopping everything"
    )
    job.wait("FAILED")
    assert job.fields()["ExitCode"] == f"{exit_codes.DATA.plain}:0"
    assert job.output.splitlines()[-1].startswith(
        "worker/0 exited with code 65 and failed for good"
    )
    assert "requeueing" not in job.output
