"""What happens to the pods of a manifest: one scenario, in namespaces of its own.

unshare --mount --net --pid --fork --kill-child --mount-proc python -m
tests.harness.manifests.pods_program SCENARIO DIR

DIR has the manifest, job.yaml; ``runs`` in it becomes the volume of run directories, with further
flags of the trainer in further.flags. Prints what ``pods``, ``jobset_rules`` and ``tfjob_rules``
say of it.
"""

import pathlib
import sys
import threading

import yaml

import harness
from tests.harness.manifests.jobset_rules import JobSet
from tests.harness.manifests.pods import expect, expect_all, make_node
from tests.harness.manifests.tfjob_rules import TFJob

DOMAIN = "cluster.example"


class Runs:
    """The volume of run directories, as the scenario sees it."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self.flags("--train_steps=1000000000")

    def flags(self, *flags: str) -> None:
        """Further flags of the trainer, for tasks that start from now on."""
        (self._directory / "further.flags").write_text("".join(f"{flag}\n" for flag in flags))

    def saved_step(self) -> int:
        """Of the newest checkpoint."""
        return int(
            pathlib.Path(
                harness.latest_checkpoint(self._directory / "mnist" / "model.ckpt") or ""
            ).name
        )

    def end_soon(self) -> None:
        """Has training end some way after the newest checkpoint, for tasks that start from now on."""
        self.flags(f"--train_steps={self.saved_step() + 500}")


def deaths(jobset: JobSet, runs: Runs) -> None:
    """A ps and then both workers die and come back elsewhere; MNIST is trained to its end."""
    expect("READY mnist-ps-0-0")
    expect("POD mnist-worker-0-0")  # not before
    expect(r"mnist-worker-1-0 \| .*step \d")
    expect(r"mnist-worker-0-0 \| .*saved .*/[1-9]\d*$")
    pods = jobset.node.pods
    workers = [pods["worker", index, "0"].process.pid for index in "01"]
    jobset.node.kill("ps", "0", "0")
    expect(r"mnist-worker-0-0 \| .*training goes on from step [1-9]")
    expect(r"mnist-worker-1-0 \| .*step \d")
    assert [pods["worker", index, "0"].process.pid for index in "01"] == workers, (
        "nobody restarts the others"
    )
    jobset.node.kill("worker", "1", "0")
    expect(r"mnist-worker-1-0 \| .*step \d")
    runs.end_soon()
    jobset.node.kill("worker", "0", "0")
    jobset.node.kill("worker", "1", "0")
    expect(r"Test-Accuracy: 0\.[89]")
    expect("JOBSET Completed")


def wrong_data(jobset: JobSet, runs: Runs) -> None:
    """What would come again fails the job at once."""
    expect("END mnist-worker-[01]-0 42")
    expect("RULE .* never-again FailJobSet")
    expect("JOBSET Failed")


def evictions(jobset: JobSet, runs: Runs) -> None:
    """A worker that starts, a worker, the chief and the ps are evicted, one after the other; each is made anew."""
    expect("POD mnist-worker-1-0")
    jobset.node.evict("worker", "1", "0")  # before it has a handler of SIGTERM
    expect("END mnist-worker-1-0 143")
    expect("RULE mnist-worker-1-0 disrupted Ignore")
    expect(r"mnist-worker-1-0 \| .*step \d")
    jobset.node.evict("worker", "1", "0")
    expect("END mnist-worker-1-0 143")
    expect("RULE mnist-worker-1-0 disrupted Ignore")
    expect(r"mnist-worker-1-0 \| .*step \d")
    saved = runs.saved_step()
    jobset.node.evict("worker", "0", "0")
    expect("END mnist-worker-0-0 143")
    assert runs.saved_step() > saved, "it has saved what was trained since"
    expect(r"mnist-worker-0-0 \| .*going on from global step \d+")
    expect(r"mnist-worker-0-0 \| .*step \d")
    saved = runs.saved_step()
    jobset.node.evict("ps", "0", "0")
    expect(r"mnist-ps-0-0 \| .*SIGTERM: serving on for 35 s at most")
    expect("END mnist-ps-0-0 143")
    expect("RULE mnist-ps-0-0 disrupted Ignore")
    assert int(expect(r"mnist-worker-0-0 \| .*training goes on from step (\d+)")[1]) >= saved
    expect(r"mnist-worker-1-0 \| .*step \d")
    runs.end_soon()
    jobset.node.kill("worker", "0", "0")
    jobset.node.kill("worker", "1", "0")
    expect(r"Test-Accuracy: 0\.[89]")
    expect("JOBSET Completed")


def frozen(jobset: JobSet, runs: Runs) -> None:
    """A ps that hangs, closing nothing, is killed by its liveness probe; it is made anew, and training goes on."""
    expect_all(*(rf"mnist-worker-{index}-0 \| .*step \d" for index in (0, 1)))
    expect(r"mnist-worker-0-0 \| .*saved .*/[1-9]\d*$")
    jobset.node.pods["ps", "0", "0"].main.suspend()
    expect("UNHEALTHY mnist-ps-0-0")
    expect("KILLED mnist-ps-0-0")  # it does not hear SIGTERM
    expect("END mnist-ps-0-0 137")
    expect("RULE mnist-ps-0-0 ps RestartJob")
    runs.end_soon()
    expect(r"mnist-worker-0-0 \| .*training goes on from step [1-9]")
    expect(r"mnist-worker-1-0 \| .*step \d")
    jobset.node.kill("worker", "0", "0")
    jobset.node.kill("worker", "1", "0")
    expect(r"Test-Accuracy: 0\.[89]")
    expect("JOBSET Completed")


def scaled(jobset: JobSet, runs: Runs) -> None:
    """parallelism and completions 2 -> 4 -> 2: two workers join, and leave; the ps and the others are left alone."""
    expect_all(*(rf"mnist-worker-0-{index} \| .*step \d" for index in (0, 1)))
    before = {key: pod.address for key, pod in jobset.node.pods.items()}
    jobset.scale("worker", 4)
    expect_all(*(rf"mnist-worker-0-{index} \| .*step \d" for index in (2, 3)))
    jobset.scale("worker", 2)
    left = r"left the training run, which goes on without this task"
    expect_all(
        *(rf"mnist-worker-0-{index} \| .*{left}" for index in (2, 3)),
        *(f"END mnist-worker-0-{i} 143" for i in (2, 3)),
    )
    expect_all(*(rf"mnist-worker-0-{index} \| .*step \d" for index in (0, 1)))
    assert {key: pod.address for key, pod in jobset.node.pods.items()} == before
    runs.end_soon()
    jobset.node.kill("worker", "0", "0")
    jobset.node.kill("worker", "0", "1")
    expect(r"Test-Accuracy: 0\.[89]")
    expect("JOBSET Completed")


def tfjob(job: TFJob, runs: Runs) -> None:
    """Chief, ps, workers and an evaluator: each dies or is told to go once, and training ends with the chief's."""
    expect_all(
        r"mnist-worker-0 \| .*step \d",
        r"mnist-worker-1 \| .*step \d",
        r"mnist-evaluator-0 \| .*step \d",
    )
    job.node.kill("worker", "1")  # 137
    expect(r"mnist-worker-1 \| .*step \d")
    job.node.pods["worker", "0"].main.terminate()  # not by the API server: its code decides
    expect("END mnist-worker-0 143")
    expect("RULE mnist-worker-0 ExitCode restart")
    expect(r"mnist-worker-0 \| .*step \d")
    job.node.kill("evaluator", "0")
    saved = runs.saved_step()
    job.node.evict("ps", "0")
    expect("END mnist-ps-0 143")
    assert int(expect(r"mnist-chief-0 \| .*training goes on from step (\d+)")[1]) >= saved
    expect(r"mnist-worker-1 \| .*step \d")
    runs.end_soon()
    job.node.evict("chief", "0")
    expect("END mnist-chief-0 143")
    for index in "01":
        job.node.kill("worker", index)
    expect(r"Test-Accuracy: 0\.[89]")
    expect("TFJOB Succeeded")


def tfjob_fails(job: TFJob, runs: Runs) -> None:
    """What would come again ends with 2, which is permanent for a TFJob."""
    expect(r"END mnist-(chief|worker)-[01] 2$")
    expect("RULE mnist-(chief|worker)-[01] ExitCode fail")
    expect("TFJOB Failed")


def tfjob_scaled(job: TFJob, runs: Runs) -> None:
    """enableDynamicWorker, and the replicas of Worker 2 -> 4 -> 2."""
    expect_all(*(rf"mnist-worker-{index} \| .*step \d" for index in (0, 1)))
    before = {key: pod.address for key, pod in job.node.pods.items()}
    job.scale("worker", 4)
    expect_all(*(rf"mnist-worker-{index} \| .*step \d" for index in (2, 3)))
    job.scale("worker", 2)
    left = r"left the training run, which goes on without this task"
    expect_all(
        *(rf"mnist-worker-{index} \| .*{left}" for index in (2, 3)),
        *(f"END mnist-worker-{i} 143" for i in (2, 3)),
    )
    expect_all(*(rf"mnist-worker-{index} \| .*step \d" for index in (0, 1)))
    assert {key: pod.address for key, pod in job.node.pods.items()} == before
    runs.end_soon()
    for index in "01":
        job.node.kill("worker", index)
    expect(r"Test-Accuracy: 0\.[89]")
    expect("TFJOB Succeeded")


JOBSETS = {
    "deaths": deaths,
    "wrong-data": wrong_data,
    "evictions": evictions,
    "frozen": frozen,
    "scaled": scaled,
}
TFJOBS = {"tfjob": tfjob, "tfjob-fails": tfjob_fails, "tfjob-scaled": tfjob_scaled}


def main(scenario: str, where: str) -> None:
    directory = pathlib.Path(where)
    objects = yaml.safe_load_all((directory / "job.yaml").read_text())
    manifest = next(made for made in objects if made["kind"] in ("JobSet", "TFJob"))
    make_node(directory, 1000)
    runs = Runs(directory / "runs")
    if scenario in ("wrong-data", "tfjob-fails"):
        runs.flags("--data_dir=/nowhere")
    if scenario in JOBSETS:
        jobset = JobSet(manifest, haste=10 if scenario == "frozen" else 1)
        controller = threading.Thread(target=jobset.control, daemon=True)
        controller.start()
        JOBSETS[scenario](jobset, runs)
    else:
        job = TFJob(manifest, DOMAIN)
        controller = threading.Thread(target=job.control, daemon=True)
        controller.start()
        TFJOBS[scenario](job, runs)
    controller.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
