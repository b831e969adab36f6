"""TF_CONFIG as the TFJob operator writes it, and the environment of a JobSet's pods."""

import json
from typing import Any

import pytest

from runtime.cluster.jobset import JobSetClusterResolver
from runtime.cluster.resolvers import TFConfigClusterResolver
from runtime.cluster.spec import TaskId, agree
from runtime.errors import InvalidArgumentError
from tests.kit.changes import SetVariables

pytestmark = pytest.mark.unit


def tf_config(set_variables: SetVariables, **config: Any) -> TFConfigClusterResolver:
    set_variables(TF_CONFIG=json.dumps(config))
    return TFConfigClusterResolver()


def of_operator(domain: str = "", **replicas: int) -> dict[str, list[str]]:
    """Addresses as the operator composes them: job, role, index, namespace and, where it is set, the cluster domain."""
    return {
        role: [f"mnist-{role}-{i}.ml.svc{domain}:2222" for i in range(count)]
        for role, count in replicas.items()
    }


def test_tfjob_with_chief_and_evaluator(set_variables: SetVariables) -> None:
    """A TFJob's pods with a chief and an evaluator know their cluster and task."""
    # CUSTOM_CLUSTER_DOMAIN=cluster.example
    jobs = of_operator(".cluster.example", chief=1, ps=2, worker=2)
    for role, index in [("chief", 0), ("ps", 1), ("worker", 1), ("evaluator", 0)]:
        resolver = tf_config(
            set_variables, cluster=jobs, task={"type": role, "index": index}, environment="cloud"
        )
        cluster, task = resolver.checked()
        assert task == TaskId(role, index) and str(cluster.chief()) == "/job:chief/task:0"
        assert cluster.task_address("ps", 1) == "mnist-ps-1.ml.svc.cluster.example:2222"
        cluster.validate()
    inside = tf_config(
        set_variables,
        cluster={**jobs, **of_operator(evaluator=1)},
        task={"type": "evaluator", "index": 0},
    )
    assert inside.checked()[1] == TaskId("evaluator", 0)


def test_tfjob_with_dynamic_workers(set_variables: SetVariables) -> None:
    """A TFJob's pods with dynamic workers know the ps and themselves."""
    ps = of_operator(ps=2)["ps"]
    told = []
    for sparse, role, index in [
        ({"worker": {"5": "mnist-worker-5.ml.svc:2222"}, "ps": ps}, "worker", 5),
        ({"worker": {}, "ps": ps[1:]}, "ps", 1),
        ({"worker": {}, "ps": ps[:1]}, "ps", 0),
    ]:
        resolver = tf_config(
            set_variables, sparseCluster=sparse, task={"type": role, "index": index}
        )
        cluster, task = resolver.checked()
        assert task == TaskId(role, index)
        told.append(cluster)
    worker, one, zero = told
    assert worker.as_dict() == {"worker": {5: "mnist-worker-5.ml.svc:2222"}, "ps": ps}
    assert one.as_dict() == {"ps": {1: ps[1]}} and zero.as_dict() == {"ps": [ps[0]]}
    assert agree(worker, one) and agree(zero, worker)
    resolver = tf_config(
        set_variables,
        sparseCluster={"worker": {}, "ps": []},
        task={"type": "evaluator", "index": 0},
    )
    assert resolver.checked()[1] == TaskId("evaluator", 0)


JOBS = {"ps": ["p:1"], "worker": ["a:1", "b:1"]}


def of(role: str, index: Any, cluster: Any = JOBS) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "TF_CONFIG is not set"),
        ("{", "TF_CONFIG is not JSON: Expecting property name"),
        ("[]", "TF_CONFIG must be a JSON object"),
        ("3", "TF_CONFIG must be a JSON object"),
        (json.dumps({"cluster": JOBS}), 'TF_CONFIG has no "task"'),
        (json.dumps({"cluster": JOBS, "task": {"type": "worker"}}), 'TF_CONFIG has no "task"'),
        (of("worker", "x"), "task index must be an integer, got 'x'"),
        (of("worker", 2), "task index 2 is out of range; the tasks of worker: 0, 1"),
        (of("worker", -1), "task index -1 is out of range"),
        (of("boss", 0), "unknown role 'boss'; the jobs of the cluster: ps, worker"),
        (of("ps", 0, {"ps": "p:1"}), "TF_CONFIG: The tasks of job 'ps'"),
        (of("ps", 0, [1]), "TF_CONFIG: cluster must be a dictionary"),
        (
            json.dumps({"sparseCluster": [1], "task": {"type": "ps", "index": 0}}),
            '"sparseCluster" must be an object',
        ),
        (
            '{"cluster": {"worker": {"1": "a:1", "1": "b:1"}}, "task": {"type": "worker", "index": 1}}',
            "'1' twice",
        ),
        (of("worker", 1, {"worker": {"1": "a:1", "01": "b:1"}}), "task index twice"),
    ],
)
def test_bad_tf_config_is_one_line(set_variables: SetVariables, text: str, said: str) -> None:
    """A bad TF_CONFIG is refused in one line that names the variable."""
    set_variables(TF_CONFIG=text)
    with pytest.raises(InvalidArgumentError) as caught:
        TFConfigClusterResolver().checked()
    assert (
        said in caught.value.message
        and "TF_CONFIG" in caught.value.message
        and "\n" not in caught.value.message
    )


POD = {
    "JOBSET_NAME": "mnist",
    "REPLICATED_JOB_NAME": "worker",
    "JOB_INDEX": "1",
    "JOB_COMPLETION_INDEX": "0",
    "BELLWETHER_JOBS": "ps=2,worker=8",
}


def pod(set_variables: SetVariables, **environment: str | None) -> JobSetClusterResolver:
    absent = dict.fromkeys(("JOBSET_SUBDOMAIN", "BELLWETHER_PORT"))
    set_variables({**absent, **POD, **environment})
    return JobSetClusterResolver()


def test_jobset_pod_knows_its_task(set_variables: SetVariables) -> None:
    """A JobSet's pod knows the cluster and its task."""
    resolver = pod(set_variables)
    cluster, task = resolver.checked()
    assert task == TaskId("worker", 1) == TaskId(resolver.task_type or "", resolver.task_id or 0)
    assert cluster.num_tasks("ps") == 2 and cluster.num_tasks("worker") == 8
    assert cluster.task_address("ps", 1) == "mnist-ps-1-0.mnist:2222"
    assert resolver.master("ps", 0) == "grpc://mnist-ps-0-0.mnist:2222"
    cluster.validate()


def test_jobset_with_several_pods_a_job(set_variables: SetVariables) -> None:
    """A JobSet's pod counts the pods of the child jobs before its own."""
    several = {
        "BELLWETHER_JOBS": "ps=1, worker=2x4",
        "JOB_COMPLETION_INDEX": "3",
        "JOBSET_SUBDOMAIN": "net",
    }
    cluster, task = pod(set_variables, BELLWETHER_PORT="9", **several).checked()
    assert task == TaskId("worker", 7)
    assert cluster.task_address("worker", 7) == "mnist-worker-1-3.net:9"


def test_added_jobset_pod_knows_itself(set_variables: SetVariables) -> None:
    """A pod that was added to a JobSet knows the first workers and itself."""
    grows = {"BELLWETHER_JOBS": "ps=2,worker=1x4+", "JOB_INDEX": "0"}
    before = pod(set_variables, **grows).checked()[0]
    assert before.task_indices("worker") == [0, 1, 2, 3]
    cluster, task = pod(set_variables, **grows, JOB_COMPLETION_INDEX="6").checked()
    assert task == TaskId("worker", 6) and cluster.task_indices("worker") == [0, 1, 2, 3, 6]
    assert cluster.task_address("worker", 6) == "mnist-worker-0-6.mnist:2222" and agree(
        cluster, before
    )


def test_jobset_evaluator_is_no_task(
    set_variables: SetVariables,
) -> None:
    """An evaluator of a JobSet is no task of the cluster."""
    cluster, task = pod(set_variables, REPLICATED_JOB_NAME="evaluator", JOB_INDEX="0").checked()
    assert task == TaskId("evaluator", 0) and cluster.jobs == ["ps", "worker"]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"JOBSET_NAME": None}, "JOBSET_NAME is not set"),
        ({"REPLICATED_JOB_NAME": None}, "REPLICATED_JOB_NAME is not set"),
        ({"JOB_INDEX": None}, "JOB_INDEX is not set"),
        ({"BELLWETHER_JOBS": None}, "BELLWETHER_JOBS is not set"),
        ({"JOB_INDEX": "one"}, "JOB_INDEX must be a number, got 'one'"),
        ({"BELLWETHER_PORT": "-1"}, "BELLWETHER_PORT must be a number"),
        ({"BELLWETHER_JOBS": "ps:2"}, "BELLWETHER_JOBS: cannot read 'ps:2'"),
        ({"BELLWETHER_JOBS": "ps=2,worker=8,ps=1"}, "BELLWETHER_JOBS has job 'ps' twice"),
        (
            {"BELLWETHER_JOBS": "ps=2,worker=4+"},
            "'worker=4+' can grow only with one child job: write worker=1x4+",
        ),
        ({"JOB_INDEX": "8"}, "JOB_INDEX=8, JOB_COMPLETION_INDEX=0: out of range"),
        ({"JOB_COMPLETION_INDEX": "1"}, "JOB_COMPLETION_INDEX=1: out of range"),
        (
            {"REPLICATED_JOB_NAME": "boss"},
            "unknown role 'boss'; the jobs of the cluster: ps, worker",
        ),
    ],
)
def test_bad_environment_is_one_line(
    set_variables: SetVariables, environment: dict[str, str | None], said: str
) -> None:
    """A bad variable of a JobSet's pod is refused in one line that names it."""
    with pytest.raises(InvalidArgumentError) as caught:
        pod(set_variables, **environment).checked()
    assert said in caught.value.message and "\n" not in caught.value.message
