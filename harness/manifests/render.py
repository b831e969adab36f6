"""A request as the text of a launch file: the templates beside this module, filled in.

In a template ``{{name}}`` is a value. One alone on its line may have several lines, which are
indented as it is. A line that ends with ``#?name`` is there only where that value is true, one with
``#?!name`` only where it is not.
"""

import json
import pathlib
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence

from harness.launch.policy import CHIEF_JOB, EVALUATOR, PS, WORKER
from harness.manifests import times
from harness.manifests.request import NEVER_AGAIN, PORT, ClusterRequest

ENGINES = ("jobset", "tfjob", "statefulset", "slurm")
MAX_RESTARTS = 10
_TEMPLATES = pathlib.Path(__file__).with_name("templates")
_KINDS = {CHIEF_JOB: "Chief", PS: "PS", WORKER: "Worker", EVALUATOR: "Evaluator"}
"""Jobs as a TFJob calls them.

Its operator looks for a container "tensorflow" and a port "tfjob-port".
"""
_JOBSET_LABELS = {
    "JOBSET_NAME": "jobset-name",
    "REPLICATED_JOB_NAME": "replicatedjob-name",
    "JOB_INDEX": "job-index",
}
_POD_INDEX = "metadata.labels['apps.kubernetes.io/pod-index']"


def render(engine: str, request: ClusterRequest, arguments: Sequence[str] = ()) -> str:
    """Returns the launch file of a request.

    Args:
        engine: the engine.
        request: the cluster.
        arguments: command line of the request, for the head of the file.

    Raises:
        ValueError: the engine cannot start such a cluster; says why.
    """
    if engine == "slurm" and request.evaluators:
        raise ValueError("--evaluators: with slurm start one by hand, with --job_name=evaluator")
    values = request.values(engine) | {"max_restarts": MAX_RESTARTS, "never_again": NEVER_AGAIN}
    values["flags"] = shlex.join(arguments)
    values["heading"] = fill_template("heading.yaml", values)
    if engine == "slurm":
        values["command"] = shlex.join(
            [*request.command, f"--preempt_grace_secs={times.SAVE_SECS - 10}"]
        )
        values |= {
            "save_secs": times.SAVE_SECS,
            "groups": " --het-group=0,1" if request.gpus else "",
        }
        return fill_template("slurm.sh", values)
    values["volume"] = fill_template("volume.yaml", values)
    counts = _count_tasks(engine, request)
    assert sum(counts.values()) == request.ps + request.workers + request.evaluators
    values["jobs"] = "".join(
        _render_job(engine, request, job, values) for job, count in counts.items() if count
    )
    return fill_template(f"{engine}.yaml", values)


def fill_template(file: str, values: Mapping[str, object]) -> str:
    """Returns a template with its values in place; raises KeyError where one is missing."""
    lines = []
    for line in _TEMPLATES.joinpath(file).read_text().splitlines():
        line, _, condition = line.partition("  #?")
        if condition and bool(values[condition.lstrip("!")]) == condition.startswith("!"):
            continue
        # A value alone on its line may have several lines.
        place = re.fullmatch(r"( *)\{\{(\w+)\}\}", line)
        if place is None:
            lines.append(re.sub(r"\{\{(\w+)\}\}", lambda found: str(values[found[1]]), line))
        # A value without text leaves no line.
        elif text := str(values[place[2]]).rstrip("\n"):
            lines.append(textwrap.indent(text, place[1]))
    return "\n".join(lines) + "\n"


def _count_tasks(engine: str, request: ClusterRequest) -> dict[str, int]:
    """Returns how many tasks each job has; a TFJob has a job for its chief, unless workers come and go.

    With enableDynamicWorker the operator tells a Chief of no ps, so worker 0 is the chief.
    """
    chiefs = int(engine == "tfjob" and not request.elastic)
    return {
        CHIEF_JOB: chiefs,
        PS: request.ps,
        WORKER: request.workers - chiefs,
        EVALUATOR: request.evaluators,
    }


def _render_job(
    engine: str, request: ClusterRequest, job: str, values: Mapping[str, object]
) -> str:
    is_ps = job == PS
    environment = [
        _environment_line(name, value) for name, value in request.environment(job).items()
    ]
    if engine == "jobset":
        count = f"1x{request.workers}+" if request.elastic else request.workers
        environment += [_environment_line("BELLWETHER_JOBS", f"{PS}={request.ps},{WORKER}={count}")]
        labels = {
            name: f"metadata.labels['jobset.sigs.k8s.io/{label}']"
            for name, label in _JOBSET_LABELS.items()
        }
        environment += [_environment_line(name, path=path) for name, path in labels.items()]
    elif engine == "statefulset" and is_ps:
        environment.insert(0, _environment_line("TASK_INDEX", path=_POD_INDEX))
    own: dict[str, object] = {
        "job": job,
        "kind": _KINDS[job],
        "count": _count_tasks(engine, request)[job],
        "grows": request.elastic and job == WORKER,
        "grace_secs": times.PS_GRACE_SECS if is_ps else times.WORKER_GRACE_SECS,
        "pause_secs": times.PS_PAUSE_SECS,
        "container": "tensorflow" if engine == "tfjob" else "bellwether",
        "port": "tfjob-port" if engine == "tfjob" else "grpc",
        "command": "\n".join(
            f"- {json.dumps(argument)}" for argument in _job_arguments(engine, request, job)
        ),
        "environment": "\n".join(environment),
        "cores": f"{request.cores(job):g}",
        "mib": request.memory_mib(job),
        "image": request.ps_image if is_ps else request.image,
        "gpus": request.gpus_of(job),
        "serves": job != EVALUATOR,
        "is_ps": is_ps,
    }
    values = {**values, **own}
    values["pod"] = fill_template("pod.yaml", values)
    return fill_template(
        f"{engine}_{'ps' if is_ps and engine == 'statefulset' else 'job'}.yaml", values
    )


def _job_arguments(engine: str, request: ClusterRequest, job: str) -> list[str]:
    """Returns the command of the tasks of a job."""
    # The other engines describe the cluster in the environment.
    if engine != "statefulset":
        return request.arguments(engine)
    hosts = {
        name: ",".join(f"{request.name}-{name}-{i}.{request.name}:{PORT}" for i in range(count))
        for name, count in ((PS, request.ps), (WORKER, request.workers))
    }
    index = "$(TASK_INDEX)" if job == PS else "$(JOB_COMPLETION_INDEX)"
    flags = [
        *(f"--{name}_hosts={tasks}" for name, tasks in hosts.items()),
        f"--job_name={job}",
        f"--task_index={index}",
    ]
    return request.arguments("jobset", *flags)


def _environment_line(name: str, value: str = "", path: str = "") -> str:
    """Returns a line of ``env``: a variable with a value, or with that of a field of its pod."""
    if path:
        return f"- {{name: {name}, valueFrom: {{fieldRef: {{fieldPath: {json.dumps(path)}}}}}}}"
    return f"- {{name: {name}, value: {json.dumps(value)}}}"
