"""Launch files: they fit the engines' schemas, the sizes are those of the formulas, and every task finds its place."""

import dataclasses
import importlib
import json
import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from absl import flags
from absl.testing import flagsaver

from harness.manifests.render import ENGINES, render
from harness.manifests.request import ClusterRequest
from harness.manifests.sizing import (
    CUDA_BYTES,
    GPU_PROCESS_BYTES,
    HEADROOM,
    MIB,
    SHARED_BYTES,
    JobWorkload,
    sizes,
)
from models.mnist.config import RunConfig
from tests.harness.manifests import schema
from tests.kit.changes import SetVariables

pytestmark = pytest.mark.cluster

ROOT = pathlib.Path(__file__).resolve().parents[3]
REQUESTS = {
    "small": ClusterRequest(1, 1, 1e6),
    "large": ClusterRequest(
        2,
        8,
        400e6,
        name="large",
        gpus=1,
        evaluators=1,
        image="registry.example/b:1",
        ps_image="registry.example/ps:1",
    ),
    "elastic": ClusterRequest(2, 4, 1e6, elastic=True),
    "own command": ClusterRequest(4, 64, 1e9, command=("python", "-m", "mine"), exit_codes=False),
}


def objects(engine: str, asked: ClusterRequest) -> list[Any]:
    return list(yaml.safe_load_all(render(engine, asked)))


def of_kind(kind: str, engine: str, asked: ClusterRequest) -> Any:
    return next(made for made in objects(engine, asked) if made["kind"] == kind)


# -- the engines' own schemas --------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize(("engine", "kind"), [("jobset", "JobSet"), ("tfjob", "TFJob")])
def test_resource_fits_its_definition(engine: str, kind: str, asked: ClusterRequest) -> None:
    """A JobSet or TFJob fits the definition of its engine."""
    told = schema.load(engine)
    made = of_kind(kind, engine, asked)
    assert (
        made["apiVersion"] == f"{told['group']}/{told['version']}" and made["kind"] == told["kind"]
    )
    assert list(schema.problems(made, told["schema"])) == []


@pytest.mark.parametrize("asked", REQUESTS.values(), ids=REQUESTS)
def test_statefulset_and_job_fit_schema(asked: ClusterRequest) -> None:
    """The pods of a StatefulSet and a Job fit the schema of Kubernetes."""
    jobs = schema.load("jobset")["schema"]["properties"]["spec"]["properties"]["replicatedJobs"][
        "items"
    ]
    job = jobs["properties"]["template"]["properties"]["spec"]
    made = {o["kind"]: o for o in objects("statefulset", asked)}
    assert list(schema.problems(made["Job"]["spec"], job)) == []
    template = job["properties"]["template"]
    assert (
        list(
            schema.problems(
                made["StatefulSet"]["spec"]["template"]["spec"], template["properties"]["spec"]
            )
        )
        == []
    )


def test_schema_check_finds_mistakes() -> None:
    """The schema check finds unknown, missing and mistyped fields."""
    told = schema.load("jobset")["schema"]
    good = of_kind("JobSet", "jobset", REQUESTS["small"])

    def problem(change: Any) -> str:
        made = json.loads(json.dumps(good))
        change(made["spec"])
        return "; ".join(schema.problems(made, told))

    container = "s['replicatedJobs'][0]['template']['spec']['template']['spec']['containers'][0]"
    for text, said in [
        ("s.update(replicatedJob=[])", ".spec.replicatedJob is not known"),
        ("s['failurePolicy'].update(maxRestarts='ten')", "'ten' is no integer"),
        ("s['failurePolicy']['rules'][0].update(action='RestartWorld')", "is none of"),
        ("s['failurePolicy']['rules'][0].pop('action')", "action is missing"),
        (f"{container}['readinessProbe']['grpc'].pop('port')", "port is missing"),
        (f"{container}['resources']['limits'].update(memory='much')", "does not fit"),
    ]:
        exec(f"def change(s): {text}", scope := {})
        assert said in problem(scope["change"]), text


@pytest.mark.parametrize("asked", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("engine", ["jobset", "tfjob", "statefulset"])
def test_python_client_knows_every_field(engine: str, asked: ClusterRequest) -> None:
    """The models of the Python client, which drop unknown fields, keep every field."""
    kubernetes = pytest.importorskip("kubernetes", reason="needs PyPI's kubernetes")
    api = kubernetes.client.ApiClient()

    def known(made: Any, model: str) -> None:
        read = api.deserialize(json.dumps(made), model, "application/json")
        assert api.sanitize_for_serialization(read) == made

    for made in objects(engine, asked):
        if made["kind"] == "JobSet":
            for job in made["spec"]["replicatedJobs"]:
                known(job["template"], "V1JobTemplateSpec")
        elif made["kind"] == "TFJob":
            for replicas in made["spec"]["tfReplicaSpecs"].values():
                known(replicas["template"], "V1PodTemplateSpec")
        else:
            known(made, f"V1{made['kind']}")


# -- what they say -------------------------------------------------------------------------------------------------


def pods(engine: str, asked: ClusterRequest) -> Iterator[tuple[str, Any]]:
    """Job and pod of each template of a JobSet or a TFJob."""
    if engine == "jobset":
        for job in of_kind("JobSet", engine, asked)["spec"]["replicatedJobs"]:
            yield job["name"], job["template"]["spec"]["template"]["spec"]
    else:
        for kind, replicas in of_kind("TFJob", engine, asked)["spec"]["tfReplicaSpecs"].items():
            yield kind.lower(), replicas["template"]["spec"]


def environment(container: Any, **fields: str) -> dict[str, str]:
    """The environment of a container, with the fields of its pod that it asks for."""
    return {e["name"]: e["value"] if "value" in e else fields[e["valueFrom"]["fieldRef"]["fieldPath"]] for e in container["env"] if "value" in e or e["valueFrom"]["fieldRef"]["fieldPath"] in fields}  # fmt: skip # noqa: E501


@pytest.fixture
def clean(set_variables: SetVariables) -> Iterator[SetVariables]:
    with flagsaver.flagsaver():
        yield set_variables


def config(command: list[str], environ: dict[str, str], set_variables: SetVariables) -> RunConfig:
    """What the trainer makes of the command of a pod."""
    set_variables(environ)
    assert command[:3] == ["python", "-m", "models.mnist.trainer"]
    given = [os.path.expandvars(a.replace("$(", "${").replace(")", "}")) for a in command[3:]]
    if "exit_codes" not in flags.FLAGS:
        given = [a for a in given if not a.startswith("--exit_codes=")]
    with flagsaver.flagsaver():
        flags.FLAGS(["trainer", *given])
        return RunConfig.from_flags()


def test_jobset_pods_find_their_place(clean: SetVariables) -> None:
    """Every pod of a JobSet finds its job, index and address by the labels of JobSet."""
    asked = REQUESTS["large"]
    network = of_kind("JobSet", "jobset", asked)["spec"]["network"]
    seen = []
    for job in of_kind("JobSet", "jobset", asked)["spec"]["replicatedJobs"]:
        for index in range(job["replicas"]):
            pod = job["template"]["spec"]["template"]["spec"]
            labels = {
                "jobset-name": "large",
                "replicatedjob-name": job["name"],
                "job-index": str(index),
            }
            fields = {f"metadata.labels['jobset.sigs.k8s.io/{k}']": v for k, v in labels.items()}
            environ = environment(pod["containers"][0], **fields) | {"JOB_COMPLETION_INDEX": "0"}
            found = config(pod["containers"][0]["command"], environ, clean)
            assert found.problem() is None and (found.me.job, found.me.index) == (
                job["name"],
                index,
            )
            name = f"large-{job['name']}-{index}-0.{network['subdomain']}:2222"
            if job["name"] != "evaluator":
                assert found.me.cluster.task_address(job["name"], index) == name
            seen.append(found.me.is_chief)
    assert seen.count(True) == 1


def test_tfjob_pods_find_their_place(clean: SetVariables) -> None:
    """Every pod of a TFJob finds its job and index by the TF_CONFIG of the operator."""
    asked = REQUESTS["large"]
    counts = {
        k.lower(): r["replicas"]
        for k, r in of_kind("TFJob", "tfjob", asked)["spec"]["tfReplicaSpecs"].items()
    }
    assert counts == {"chief": 1, "ps": 2, "worker": 7, "evaluator": 1}
    cluster = {
        role: [f"large-{role}-{i}.default.svc:2222" for i in range(n)]
        for role, n in counts.items()
        if role != "evaluator"
    }
    chiefs = 0
    for role, pod in pods("tfjob", asked):
        (container,) = pod["containers"]
        assert (container["name"], container["ports"][0]["name"]) == ("tensorflow", "tfjob-port")
        for index in range(counts[role]):
            told = {
                "cluster": cluster,
                "task": {"type": role, "index": index},
                "environment": "cloud",
            }
            found = config(container["command"], {"TF_CONFIG": json.dumps(told)}, clean)
            assert found.problem() is None and (found.me.job, found.me.index) == (role, index)
            assert found.workers == 8
            chiefs += found.me.is_chief
    assert chiefs == 1


def test_dynamic_tfjob_pods_find_place(
    clean: SetVariables,
) -> None:
    """Every pod of a TFJob with dynamic workers finds its place in the operator's sparse cluster."""
    asked = dataclasses.replace(REQUESTS["elastic"], evaluators=1)
    made = of_kind("TFJob", "tfjob", asked)["spec"]
    assert made["enableDynamicWorker"] and {
        k: r["replicas"] for k, r in made["tfReplicaSpecs"].items()
    } == {**{"PS": 2, "Worker": 4, "Evaluator": 1}}
    ps = [f"bellwether-ps-{i}.default.svc:2222" for i in range(2)]
    chiefs = 0
    for role, pod in pods("tfjob", asked):
        for index in range(
            made["tfReplicaSpecs"][{"ps": "PS"}.get(role, role.capitalize())]["replicas"]
        ):
            own = {str(index): f"bellwether-worker-{index}.default.svc:2222"}
            sparse = {
                "ps": {"worker": {}, "ps": ps[index : index + 1]},
                "worker": {"worker": own, "ps": ps},
                "evaluator": {"worker": {}, "ps": []},
            }[role]
            told = {"sparseCluster": sparse, "task": {"type": role, "index": index}}
            found = config(pod["containers"][0]["command"], {"TF_CONFIG": json.dumps(told)}, clean)
            assert (
                found.problem() is None
                and (found.me.job, found.me.index) == (role, index)
                and found.elastic
            )
            chiefs += found.me.is_chief
    assert chiefs == 1


def test_statefulset_pods_find_their_place(clean: SetVariables) -> None:
    """Every pod of a StatefulSet and a Job finds its place by its index."""
    asked = REQUESTS["large"]
    made = objects("statefulset", asked)
    service = of_kind("Service", "statefulset", asked)["metadata"]["name"]
    for o in made:
        if o["kind"] not in ("StatefulSet", "Job"):
            continue
        pod = o["spec"]["template"]["spec"]
        assert pod["subdomain"] == service
        job = "ps" if o["kind"] == "StatefulSet" else o["metadata"]["name"].removeprefix("large-")
        for index in range(o["spec"].get("replicas", o["spec"].get("completions"))):
            environ = environment(
                pod["containers"][0],
                **{"metadata.labels['apps.kubernetes.io/pod-index']": str(index)},
            )
            found = config(
                pod["containers"][0]["command"],
                environ | {"JOB_COMPLETION_INDEX": str(index)},
                clean,
            )
            assert found.problem() is None and (found.me.job, found.me.index) == (job, index)
            if job != "evaluator":
                assert (
                    found.me.cluster.task_address(job, index)
                    == f"{o['metadata']['name']}-{index}.{service}:2222"
                )


def test_batch_script_is_valid_bash() -> None:
    """The batch script for Slurm is valid bash with the numbers that were asked for."""
    text = render("slurm", dataclasses.replace(REQUESTS["large"], evaluators=0, gpus=0))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "#SBATCH --ntasks=10\n" in text and "--ps=2 --workers=8" in text
    assert "gpu" not in text.lower() and "hetjob" not in text


def test_slurm_gives_gpus_to_workers() -> None:
    """A batch script with GPUs has two groups: first the ps, then the workers with the GPUs."""
    asked = dataclasses.replace(REQUESTS["large"], evaluators=0)
    text = render("slurm", asked)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    ps, workers = text.partition("set -eu")[0].split("#SBATCH hetjob\n")
    assert "--ntasks=2\n" in ps and "gpu" not in ps.partition("#SBATCH")[2]
    assert "--ntasks=8\n" in workers and "--gpus-per-task=1\n" in workers
    cores = int(asked.cores("worker"))
    assert f"--mem-per-cpu={asked.memory_mib('worker') // cores}M" in workers
    assert "srun --het-group=0,1 python" in text and "BELLWETHER_REQUIRE_GPU=1" in text


@pytest.mark.parametrize("engine", ["jobset", "tfjob"])
def test_only_trainers_have_gpus(engine: str) -> None:
    """The pods that train ask for GPUs, memory for CUDA and shared memory; ps and evaluators do not."""
    asked = REQUESTS["large"]
    without = dict(pods(engine, dataclasses.replace(asked, gpus=0)))
    seen = set()
    for job, pod in pods(engine, asked):
        (container,) = pod["containers"]
        before = without[job]["containers"][0]
        assert container["image"] == ("registry.example/ps:1" if job == "ps" else asked.image)
        if job in ("ps", "evaluator"):
            # CUDA's libraries are read on CPUs too.
            assert memory(container) - memory(before) >= CUDA_BYTES / MIB
            container["resources"] = before["resources"]
            assert pod == without[job]
            continue
        seen.add(job)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert {"name": "BELLWETHER_REQUIRE_GPU", "value": "1"} in container["env"]
        assert {"name": "shared", "mountPath": "/dev/shm"} in container["volumeMounts"]
        (shared,) = (volume for volume in pod["volumes"] if volume["name"] == "shared")
        assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{SHARED_BYTES // MIB}Mi"}
        more = memory(container) - memory(before)
        # Beside the estimate of CUDA there is room for /dev/shm and for staged copies.
        assert more >= (GPU_PROCESS_BYTES + SHARED_BYTES + 2 * asked.model_bytes) / MIB
    assert seen == ({"worker"} if engine == "jobset" else {"chief", "worker"})


def memory(container: Any) -> int:
    """The memory of a container, in MiB."""
    return int(container["resources"]["limits"]["memory"].removesuffix("Mi"))


def test_heading_repeats_the_command() -> None:
    """The head of a launch file has the whole command that has printed the file."""
    given = "--for=jobset --ps=2 --gpus=1 --evaluators=1 -- python 'my program.py' --rate=1"
    done = subprocess.run(
        [sys.executable, "-m", "harness.manifests", *shlex.split(given)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert f"made by `python -m harness.manifests {given}`." in done.stdout


# -- the tool ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["jobset", "tfjob", "statefulset"])
def test_example_manifests_are_current(engine: str) -> None:
    """The manifests in configs are what the tool prints."""
    path = ROOT / "configs" / "kubernetes" / f"mnist_{engine}.yaml"
    arguments = [
        f"--for={engine}",
        "--name=mnist",
        "--ps=1",
        "--workers=2",
        "--evaluators=1",
        "--step_ms=1",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "harness.manifests", *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout == path.read_text(), (
        f"python -m harness.manifests {' '.join(arguments)} > {path}"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--for=nomad"], "nomad"),
        ([], "--for"),
        (["--for=jobset", "--ps=0"], "ps"),
        (["--for=jobset", "--name=Not a name"], "give a DNS label"),
        (["--for=slurm", "--evaluators=1"], "start one by hand"),
    ],
)
def test_senseless_arguments_are_refused(arguments: list[str], said: str) -> None:
    """Arguments that make no sense are refused without a traceback and without output."""
    done = subprocess.run(
        [sys.executable, "-m", "harness.manifests", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert (
        done.returncode
        and said in done.stderr
        and "Traceback" not in done.stderr
        and not done.stdout
    )


def test_tool_starts_without_jax() -> None:
    """The manifest tool starts without JAX."""
    code = "import sys, harness.manifests.__main__; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("engine", ENGINES)
def test_own_command_gets_no_example_flags(engine: str) -> None:
    """A user's own command receives no flags of the example."""
    text = render(engine, REQUESTS["own command"])
    assert "mine" in text and "models.mnist" not in text and "--exit_codes" not in text


# -- the sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "formula", "measured"), [(0.0, 5858, 6042), (1.0, 7910, 8988)])
def test_ps_memory_covers_the_measured(slots: float, formula: int, measured: int) -> None:
    """The memory of a ps covers what was measured for 1 GiB of parameters and two workers."""
    found = sizes(JobWorkload(1, 2, 1024 * MIB, slots)).ps_bytes / MIB
    assert found == pytest.approx(formula * HEADROOM, rel=0.002) and found > measured


def test_ps_memory_follows_the_sizes() -> None:
    """The memory of a ps grows with the workers and shrinks with the number of ps."""
    one = sizes(JobWorkload(1, 8, 1e9)).ps_bytes
    assert sizes(JobWorkload(1, 9, 1e9)).ps_bytes - one == pytest.approx(1e9 * HEADROOM, abs=2)
    assert sizes(JobWorkload(2, 8, 1e9)).ps_bytes < one


@pytest.mark.parametrize(
    ("job", "steps", "busiest"),
    # rows of docs/scaling.md, where queues are counted too: these are the limits that they stay
    # below
    [
        (
            JobWorkload(20, 64, 100e6, compute_secs=0.05, network_bytes_per_s=25e9 / 8),
            390,
            "ps core",
        ),
        (JobWorkload(8, 40, 100e6, compute_secs=0.05), 60, "ps network"),
        (JobWorkload(8, 1, 100e6, compute_secs=0.05), 4, "workers"),
    ],
)
def test_busiest_place_limits_steps(job: JobWorkload, steps: float, busiest: str) -> None:
    """The steps per second are limited by the busiest place."""
    found = sizes(job)
    assert found.busiest == busiest
    assert steps <= found.steps_per_s <= 2 * steps


@pytest.mark.parametrize("wrong", [(0, 1, 1.0), (1, 0, 1.0), (1, 1, -1.0), (1, 1, float("nan"))])
def test_senseless_workload_is_refused(wrong: tuple[int, int, float]) -> None:
    """A workload that makes no sense is refused."""
    with pytest.raises(ValueError):
        JobWorkload(*wrong)


def test_sizing_agrees_with_scaling_model() -> None:
    """The formula of sizes stays within half of the benchmark's queueing model and above it."""
    model = importlib.import_module("benchmarks.scaling_model")
    from harness.manifests import sizing

    assert model.NETWORK_EFFICIENCY == sizing.NETWORK_EFFICIENCY
    costs = model.Costs(sizing.PS_STEP_SECS, sizing.PS_BYTE_SECS, 0.0, 0.0)
    for job in (
        JobWorkload(8, 16, 100e6, compute_secs=0.05),
        JobWorkload(20, 64, 100e6, compute_secs=0.05),
    ):
        rate = job.network_bytes_per_s * sizing.NETWORK_EFFICIENCY
        queueing = model.forecast(
            model.Job(job.model_bytes, job.workers, job.compute_secs, rate), job.ps, costs
        )
        assert queueing.steps_per_s <= sizes(job).steps_per_s * 1.001
        assert queueing.steps_per_s >= 0.5 * sizes(job).steps_per_s
