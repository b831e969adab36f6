"""ClusterSpec: the forms it takes, what it answers, its equality and its errors."""

import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.cluster.spec import ClusterSpec, TaskId, agree, difference, split_address
from runtime.errors import InvalidArgumentError
from runtime.proto import cluster_pb2

addresses = st.builds("{}:{}".format, st.sampled_from("abc"), st.integers(1, 3))
job_dicts = st.dictionaries(
    st.sampled_from(["ps", "worker", "chief", "evaluator"]),
    st.lists(addresses, max_size=3) | st.dictionaries(st.integers(0, 5), addresses, max_size=3),
)


@given(job_dicts)
def test_every_form_makes_same_spec(jobs: dict[str, Any]) -> None:
    """Every form of a cluster makes an equal spec with the same fingerprint."""
    spec = ClusterSpec(jobs)
    assert spec.jobs == list(jobs)
    assert bool(spec) == bool(jobs)
    message = cluster_pb2.ClusterDef.FromString(spec.as_cluster_def().SerializeToString())
    text_keys = {
        job: {str(i): spec.task_address(job, i) for i in spec.task_indices(job)} for job in jobs
    }
    for other in (
        ClusterSpec(spec),
        ClusterSpec(spec.as_dict()),
        ClusterSpec(message),
        ClusterSpec(text_keys),
        ClusterSpec(dict(reversed(jobs.items()))),
        eval(repr(spec), {"ClusterSpec": ClusterSpec}),
        pickle.loads(pickle.dumps(spec)),
    ):
        assert other == spec
        assert hash(other) == hash(spec)
        assert other.fingerprint() == spec.fingerprint()
        assert difference(spec, other) == ""


@given(job_dicts, job_dicts)
def test_equality_fingerprint_and_difference_agree(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Two specs are equal if their fingerprints are, and then their difference is empty."""
    left, right = ClusterSpec(a), ClusterSpec(b)
    assert (
        (left == right)
        == (left.fingerprint() == right.fingerprint())
        == (difference(left, right) == "")
    )


def test_sparse_job_keeps_its_indices() -> None:
    """A job with gaps keeps its task indices in every form."""
    spec = ClusterSpec({"worker": {3: "w3:1", 0: "w0:1"}, "ps": ("p0:1", "p1:1"), "chief": {}})
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [0, 3]
    assert spec.task_address("worker", 3) == "w3:1"
    assert spec.job_tasks("worker") == ["w0:1", None, None, "w3:1"]
    assert spec.job_tasks("chief") == []
    assert spec.as_dict() == {"worker": {0: "w0:1", 3: "w3:1"}, "ps": ["p0:1", "p1:1"], "chief": {}}
    assert [job.name for job in spec.as_cluster_def().job] == ["chief", "ps", "worker"]
    assert (
        repr(spec)
        == "ClusterSpec({'chief': {}, 'ps': ['p0:1', 'p1:1'], 'worker': {0: 'w0:1', 3: 'w3:1'}})"
    )
    assert list(spec.tasks().values()) == ["p0:1", "p1:1", "w0:1", "w3:1"]


def test_only_index_form_equals_dict() -> None:
    """A spec equals a plain dict only in the form of indices."""
    assert ClusterSpec({"j": ["h"]}) == {"j": {0: "h"}}
    assert ClusterSpec({"j": ["h"]}) != {"j": ["h"]}
    assert ClusterSpec({}) != 3


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (None, "dictionary mapping"),
        (["ps:1"], "dictionary mapping"),
        (3, "dictionary mapping"),
        ({"ps": "ps0:1"}, "must be a list or a dictionary"),
        ({"ps": [3]}, "Task address 3 of task 0 of job 'ps'"),
        ({1: ["a:1"]}, "Job name 1"),
        ({"ps": {"one": "a:1"}}, "Task index 'one'"),
        ({"ps": {1.0: "a:1"}}, "Task index 1.0"),
        ({"ps": {True: "a:1"}}, "Task index True"),
    ],
)
def test_wrong_types_are_refused(wrong: Any, text: str) -> None:
    """A cluster of wrong types is refused with the task or job."""
    with pytest.raises(TypeError, match=text):
        ClusterSpec(wrong)


def test_wrong_indices_are_refused() -> None:
    """A negative or repeated task index and a repeated job are refused."""
    with pytest.raises(InvalidArgumentError, match="-1 of job 'ps' must not be negative"):
        ClusterSpec({"ps": {-1: "a:1"}})
    twice: Any = {"ps": {0: "a:1", "0": "b:1"}}
    with pytest.raises(InvalidArgumentError, match="index twice"):
        ClusterSpec(twice)
    job = cluster_pb2.JobDef(name="ps", tasks={0: "a:1"})
    with pytest.raises(InvalidArgumentError, match="'ps' is given twice"):
        ClusterSpec(cluster_pb2.ClusterDef(job=[job, job]))


def test_unknown_names_tell_what_exists() -> None:
    """An unknown job or task is refused with the names that exist."""
    spec = ClusterSpec({"ps": ["a:1", "b:1"], "worker": {}})
    with pytest.raises(ValueError, match="No such job in cluster: 'chief'; its jobs: ps, worker$"):
        spec.num_tasks("chief")
    with pytest.raises(ValueError, match="No task with index 7 in job 'ps'; its tasks: 0, 1$"):
        spec.task_address("ps", 7)
    with pytest.raises(ValueError, match="its tasks: none$"):
        spec.task_address("worker", 0)


@pytest.mark.parametrize(
    ("jobs", "task"),
    [
        ({"worker": ["w:1"], "ps": {2: "p:1", 1: "p:2"}}, "/job:ps/task:1"),
        ({"worker": ["w:1"], "ps": {}}, "/job:worker/task:0"),
        ({"worker": ["w:1"], "chief": ["c:1"]}, "/job:chief/task:0"),
    ],
)
def test_default_task_ignores_order(jobs: dict[str, Any], task: str) -> None:
    """The default task does not depend on the order of the jobs."""
    assert str(ClusterSpec(jobs).default_task()) == task
    assert (
        ClusterSpec(dict(reversed(jobs.items()))).default_task() == ClusterSpec(jobs).default_task()
    )


def test_empty_cluster_has_no_default() -> None:
    """A cluster without tasks has no default task."""
    with pytest.raises(InvalidArgumentError, match="no tasks"):
        ClusterSpec({"ps": []}).default_task()


@pytest.mark.cluster
def test_fingerprint_is_equal_across_processes() -> None:
    """Another process makes the same fingerprint."""
    code = "import runtime as rt; print(rt.ClusterSpec({'worker': ['w:1'], 'ps': ['p:1']}).fingerprint())"
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert printed.strip() == ClusterSpec({"ps": {0: "p:1"}, "worker": ["w:1"]}).fingerprint()


def test_difference_in_words() -> None:
    """The difference of two specs is told in words, at most a few lines."""
    here = ClusterSpec({"ps": ["a:1", "c:1"], "worker": ["w:1"]})
    there = ClusterSpec({"ps": ["b:1", "c:1", "d:1"], "chief": ["x:1", "y:1"]})
    assert difference(here, there) == (
        "job chief: only there; "
        "task 0 of job ps: 'a:1' here, 'b:1' there; "
        "task 2 of job ps: no such task here, 'd:1' there; "
        "job worker: only here"
    )
    many = ClusterSpec({"ps": [f"p{i}:1" for i in range(100)]})
    assert difference(many, ClusterSpec({"ps": []})).endswith(
        "task 4 of job ps: 'p4:1' here, no such task there; and 95 more"
    )


def test_validate_accepts_real_clusters() -> None:
    """A cluster with real addresses is valid."""
    ClusterSpec(
        {"ps": ["10.0.0.1:2222", "[::1]:2222"], "worker": ["localhost:0", "localhost:0"]}
    ).validate()


@pytest.mark.parametrize(
    ("jobs", "text"),
    [
        ({"ps": ["h"]}, "task 0 of job ps: address 'h' has no port"),
        ({"ps": ["a:1", ":1"]}, "task 1 of job ps: address ':1' has no port or no host"),
        ({"ps": ["a:x"]}, "bad port 'x'"),
        ({"ps": ["a:65536"]}, "bad port '65536'"),
        ({"ps": ["a:"]}, "bad port ''"),
        ({"ps": ["grpc://a:1"]}, "without a scheme"),
        ({"ps": ["::1:1"]}, "write an IPv6 address as"),
        ({"ps": ["[::1]"]}, "has no port"),
        (
            {"ps": ["a:1", "b:1"], "worker": ["B:1"]},
            "task 0 of job worker and task 1 of job ps have the same address 'B:1'",
        ),
    ],
)
def test_validate_names_the_task(jobs: dict[str, Any], text: str) -> None:
    """An invalid address is refused with its task."""
    with pytest.raises(InvalidArgumentError) as caught:
        ClusterSpec(jobs).validate()
    assert text in str(caught.value)


@given(
    st.sampled_from(["localhost", "10.0.0.1", "ps-0.ns.svc"]) | st.ip_addresses(v=6).map(str),
    st.integers(0, 65535),
)
def test_split_address_inverts_joining(host: str, port: int) -> None:
    """Splitting an address returns the host and port of which the address was made."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    assert split_address(address) == (host, port)


def test_task_ids_read_as_devices() -> None:
    """Task ids sort by number and print as devices."""
    assert sorted([TaskId("worker", 0), TaskId("ps", 10), TaskId("ps", 9)])[0] == TaskId("ps", 9)
    assert f"{TaskId('worker', 3)}" == "/job:worker/task:3"


@pytest.mark.parametrize(
    ("there", "fits"),
    [
        ({"ps": ["p:1"], "worker": ["a:1", "b:1"]}, True),
        ({"ps": ["p:1"], "worker": ["a:1", "b:1", "c:1"]}, True),  # a worker was added
        ({"ps": ["p:1"], "worker": ["a:1"]}, True),
        ({"ps": ["p:1"], "worker": {0: "a:1", 5: "f:1"}}, True),
        ({"ps": ["p:1"], "worker": ["a:1", "x:1"]}, False),
        ({"ps": ["p:1", "q:1"], "worker": ["a:1", "b:1"]}, False),
        ({"worker": ["a:1", "b:1"]}, False),
        ({"ps": ["p:1"], "worker": ["a:1", "b:1"], "chief": ["c:1"]}, False),
    ],
)
def test_growing_workers_agree(there: dict[str, Any], fits: bool) -> None:
    """Two definitions agree if only the number of workers differs."""
    here = ClusterSpec({"ps": ["p:1"], "worker": ["a:1", "b:1"]})
    assert agree(here, ClusterSpec(there)) == agree(ClusterSpec(there), here) == fits


@pytest.mark.parametrize(
    ("alone", "fits"),
    [
        ({"ps": {1: "q:1"}}, True),
        ({"ps": {1: "x:1"}}, False),
        ({"ps": {2: "q:1"}}, False),
        ({"worker": ["a:1"]}, False),
    ],
)
def test_lone_ps_agrees_with_workers(alone: dict[str, Any], fits: bool) -> None:
    """The definition of a ps that knows only itself agrees with that of its workers."""
    worker = ClusterSpec({"ps": ["p:1", "q:1"], "worker": {7: "h:1"}})
    assert agree(worker, ClusterSpec(alone)) == agree(ClusterSpec(alone), worker) == fits


@pytest.mark.parametrize(
    ("jobs", "chief"),
    [
        ({"ps": ["p:1"], "worker": ["a:1", "b:1"]}, "/job:worker/task:0"),
        ({"ps": ["p:1"], "worker": ["a:1"], "chief": ["c:1"]}, "/job:chief/task:0"),
        ({"worker": ["a:1"], "master": ["c:1"]}, "/job:master/task:0"),
        ({"ps": ["p:1"], "worker": {3: "d:1"}}, "None"),
        ({"ps": ["p:1"]}, "None"),
    ],
)
def test_chief_follows_the_jobs(jobs: dict[str, Any], chief: str) -> None:
    """The chief is the chief or master job's first task, or else worker 0."""
    assert str(ClusterSpec(jobs).chief()) == chief
