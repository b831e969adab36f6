"""Cluster resolvers: TF_CONFIG and Slurm."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.cluster.gpus import visible_gpus
from runtime.cluster.resolvers import TFConfigClusterResolver
from runtime.cluster.slurm import (
    SlurmClusterResolver,
    expand_hostlist,
    expand_tasks_per_node,
)
from runtime.cluster.spec import ClusterSpec
from runtime.errors import InvalidArgumentError
from tests.kit.changes import SetVariables

CLUSTER = {"ps": ["p0:1"], "worker": ["w0:1", "w1:1"]}


@pytest.mark.parametrize("index", [1, "1"])
def test_tf_config_is_read_anew(set_variables: SetVariables, index: int | str) -> None:
    """TF_CONFIG is read for each question and gives the cluster, task and master."""
    resolver = TFConfigClusterResolver()
    task = {"type": "worker", "index": index}
    set_variables(TF_CONFIG=json.dumps({"cluster": CLUSTER, "task": task, "rpc_layer": "grpc"}))
    assert resolver.cluster_spec() == ClusterSpec(CLUSTER)
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
    assert resolver.master() == "grpc://w1:1"
    assert resolver.master("ps", 0) == "grpc://p0:1"
    # read on every question
    set_variables(TF_CONFIG=json.dumps({"cluster": CLUSTER, "session_master": "x:9"}))
    assert resolver.master() == "x:9"
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)


def test_small_tf_config_has_no_master(set_variables: SetVariables) -> None:
    """A missing or small TF_CONFIG is an empty cluster or one without a master."""
    resolver = TFConfigClusterResolver()
    set_variables(TF_CONFIG=None)
    assert not resolver.cluster_spec()
    assert (resolver.master(), resolver.task_type, resolver.task_id) == ("", None, None)
    set_variables(TF_CONFIG=json.dumps({"cluster": {"worker": ["w0:1"]}}))
    assert resolver.master() == ""


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ("{", json.JSONDecodeError, "TF_CONFIG is not JSON"),
        ("[1]", InvalidArgumentError, "must be a JSON object"),
        (
            json.dumps({"cluster": CLUSTER}),
            InvalidArgumentError,
            "No such job in cluster: None; add",
        ),
        (
            json.dumps({"cluster": CLUSTER, "task": {"type": "ps"}}),
            InvalidArgumentError,
            "No task index for job 'ps'",
        ),
        (
            json.dumps({"cluster": CLUSTER, "task": {"type": "ps", "index": "x"}}),
            InvalidArgumentError,
            "got 'x'",
        ),
        (
            json.dumps({"cluster": CLUSTER, "task": 3}),
            InvalidArgumentError,
            '"task" must be an object',
        ),
    ],
)
def test_bad_tf_config_names_the_fault(
    set_variables: SetVariables, config: str, error: type[Exception], text: str
) -> None:
    """A bad TF_CONFIG is refused with its fault."""
    set_variables(TF_CONFIG=config)
    with pytest.raises(error, match=text):
        TFConfigClusterResolver().master()


@pytest.fixture
def slurm(set_variables: SetVariables) -> SetVariables:
    """A step of 5 tasks on 3 nodes, seen from rank 3; returns the function that changes the step."""
    left = [name for name in os.environ if name.startswith("SLURM")]
    gpus = ("CUDA_VISIBLE_DEVICES", "XLA_CLIENT_MEM_FRACTION")
    # A variable that a resolver sets goes with the test if it was there before.
    set_variables(dict.fromkeys(gpus, ""))
    set_variables(dict.fromkeys([*left, *gpus]))
    set_variables(
        {
            "SLURM_PROCID": "3",
            "SLURM_STEP_NUM_TASKS": "5",
            "SLURM_STEP_NODELIST": "n[9-10],m3",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
            "SLURMD_NODENAME": "n10",
        }
    )
    return set_variables


def test_slurm_step_is_a_cluster(slurm: SetVariables) -> None:
    """A Slurm step is a cluster whose ranks follow the order of its nodes."""
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec() == ClusterSpec(
        {"worker": ["n9:8888", "n9:8889", "n10:8888", "n10:8889", "m3:8888"]}
    )
    assert (resolver.task_type, resolver.task_id) == ("worker", 3)
    assert resolver.master("worker", 4) == "grpc://m3:8888"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_slurm_jobs_take_ranks_by_name(slurm: SetVariables) -> None:
    """The jobs of a Slurm step take ranks in the order of their names, and the rest is spare."""
    resolver = SlurmClusterResolver({"worker": 3, "ps": 1}, port_base=100)
    assert resolver.cluster_spec() == ClusterSpec(
        {"ps": ["n9:100"], "worker": ["n9:101", "n10:100", "n10:101"]}
    )
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    slurm(SLURM_PROCID="4", SLURMD_NODENAME="m3")
    spare = SlurmClusterResolver({"worker": 3, "ps": 1})
    assert (spare.task_type, spare.task_id) == (None, None)


def test_slurm_shares_out_gpus(slurm: SetVariables) -> None:
    """The tasks of a Slurm node share its GPUs."""
    slurm(SLURM_GPUS_ON_NODE="4")
    resolver = SlurmClusterResolver()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    for _ in range(2):
        resolver.cluster_spec()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize(
    ("ps", "workers", "gpus", "want"),
    [
        (1, 2, 2, ["0", "1"]),
        (1, 4, 4, ["0", "1", "2", "3"]),
        (1, 3, 8, ["0,1", "2,3", "4,5"]),
        (2, 3, 2, ["0 0.45", "1 0.45", "0 0.45"]),
        (1, 3, 1, ["0 0.3", "0 0.3", "0 0.3"]),
    ],
)
def test_slurm_ps_takes_no_gpu(
    slurm: SetVariables, ps: int, workers: int, gpus: int, want: list[str]
) -> None:
    """The workers of a Slurm node share its GPUs, or the memory of fewer GPUs; a ps has no part."""
    found: list[str] = []
    for rank in range(ps + workers):
        slurm(dict.fromkeys(["CUDA_VISIBLE_DEVICES", "XLA_CLIENT_MEM_FRACTION"]))
        slurm(
            SLURM_PROCID=str(rank),
            SLURM_STEP_NUM_TASKS=str(ps + workers),
            SLURM_STEP_NODELIST="n1",
            SLURM_STEP_TASKS_PER_NODE=str(ps + workers),
            SLURMD_NODENAME="n1",
            SLURM_GPUS_ON_NODE=str(gpus),
        )
        SlurmClusterResolver({"ps": ps, "worker": workers}).cluster_spec()
        names = ("CUDA_VISIBLE_DEVICES", "XLA_CLIENT_MEM_FRACTION")
        found.append(" ".join(os.environ[name] for name in names if name in os.environ))
    assert found == [""] * ps + want


def test_slurm_keeps_memory_of_user(slurm: SetVariables) -> None:
    """A Slurm step sets no fraction of memory beside one of the user, as JAX would refuse both."""
    slurm(SLURM_GPUS_ON_NODE="1", XLA_PYTHON_CLIENT_MEM_FRACTION=".4", XLA_CLIENT_MEM_FRACTION=None)
    SlurmClusterResolver().cluster_spec()
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ


def test_crowded_slurm_gpu_is_refused(slurm: SetVariables) -> None:
    """More workers on a GPU of a Slurm node than its memory is enough for are one line, unless the user divides it."""
    variables = {"NTASKS": "19", "NODELIST": "n1", "TASKS_PER_NODE": "19", "NUM_TASKS": "19"}
    slurm({f"SLURM_STEP_{name}": value for name, value in variables.items()})
    slurm(SLURM_PROCID="0", SLURMD_NODENAME="n1", SLURM_GPUS_ON_NODE="1")
    with pytest.raises(
        InvalidArgumentError, match="^19 training tasks on one GPU, .*for 18: start"
    ):
        SlurmClusterResolver().cluster_spec()
    slurm(XLA_CLIENT_MEM_FRACTION=".04")
    SlurmClusterResolver().cluster_spec()


@pytest.fixture
def het(slurm: SetVariables) -> SetVariables:
    """A step over the groups of a heterogeneous job, as Slurm 22.05 tells of it: group 0 is on n9 and n2, 1 on n1."""
    slurm(
        {
            "SLURM_HET_SIZE": "2",
            "SLURM_PROCID": "4",
            "SLURMD_NODENAME": "n1",
            "SLURM_STEP_NUM_TASKS": "5",
            "SLURM_STEP_NODELIST": "n[1-2,9]",  # in the order of names, not of ranks
            "SLURM_STEP_TASKS_PER_NODE": "2,1,2",
            "SLURM_JOB_NODELIST_HET_GROUP_0": "n9,n2",
            "SLURM_TASKS_PER_NODE_HET_GROUP_0": "2,1",
            "SLURM_JOB_NODELIST_HET_GROUP_1": "n1",
            "SLURM_TASKS_PER_NODE_HET_GROUP_1": "2",
        }
    )
    return slurm


def test_slurm_groups_follow_each_other(het: SetVariables) -> None:
    """The groups of a heterogeneous Slurm job follow each other in rank."""
    resolver = SlurmClusterResolver({"ps": 3, "worker": 2}, port_base=100)
    want = {"ps": ["n9:100", "n9:101", "n2:100"], "worker": ["n1:100", "n1:101"]}
    assert resolver.cluster_spec() == ClusterSpec(want)
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)


def test_slurm_groups_may_share_a_node(het: SetVariables) -> None:
    """Two groups of a Slurm job on one node have different ports and GPUs."""
    het(SLURM_JOB_NODELIST_HET_GROUP_1="n2")
    het(SLURMD_NODENAME="n2")
    het(SLURM_GPUS_ON_NODE="4")
    cluster = SlurmClusterResolver({"ps": 3, "worker": 2}, port_base=100).cluster_spec()
    assert cluster.job_tasks("worker") == ["n2:101", "n2:102"]  # the ps there has 100
    # the second half of what its own group has there
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_slurm_gpus_stay_within_group(het: SetVariables) -> None:
    """The GPUs of a Slurm node are shared by the tasks of one group."""
    het(SLURM_TASKS_PER_NODE_HET_GROUP_0="12,1")
    het(SLURM_STEP_NUM_TASKS="15")
    het(SLURM_PROCID="13")
    het(SLURM_GPUS_ON_NODE="4")
    SlurmClusterResolver({"ps": 13, "worker": 2}).cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"  # however many ps crowd another node


def test_slurm_step_of_one_group(het: SetVariables) -> None:
    """A Slurm step of one group of a heterogeneous job is a cluster by itself."""
    step = {"STEP_NUM_TASKS": "2", "STEP_NODELIST": "n1", "STEP_TASKS_PER_NODE": "2", "PROCID": "1"}
    for name, value in step.items():
        het({f"SLURM_{name}": value})
    assert SlurmClusterResolver().cluster_spec() == ClusterSpec({"worker": ["n1:8888", "n1:8889"]})


def test_slurm_errors_name_the_fault(slurm: SetVariables) -> None:
    """A Slurm step that does not fit is refused with the reason."""
    with pytest.raises(RuntimeError, match="need 6 tasks, this Slurm step has 5"):
        SlurmClusterResolver({"worker": 6})
    slurm(SLURMD_NODENAME="n9")
    with pytest.raises(RuntimeError, match="rank 3 runs on n9, not on n10.*--distribution=block"):
        SlurmClusterResolver()
    slurm(SLURM_STEP_TASKS_PER_NODE="2(x2)")
    with pytest.raises(RuntimeError, match="has 2 nodes, SLURM_STEP_NODELIST 3"):
        SlurmClusterResolver()
    slurm(SLURM_PROCID=None)
    with pytest.raises(RuntimeError, match="SLURM_PROCID is not set"):
        SlurmClusterResolver()


@pytest.mark.parametrize(
    ("hostlist", "hosts"),
    [
        ("n1", "n1"),
        ("n[1-2],m5,o[03-04,6]", "n1 n2 m5 o03 o04 o6"),
        ("r[1-2]n[08-10].x", "r1n08.x r1n09.x r1n10.x r2n08.x r2n09.x r2n10.x"),
        ("gpu-[1,3],a-b", "gpu-1 gpu-3 a-b"),
    ],
)
def test_hostlist_expands(hostlist: str, hosts: str) -> None:
    """A Slurm list of hosts expands to every host in order."""
    assert expand_hostlist(hostlist) == hosts.split()


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 5)), min_size=1, max_size=5))
def test_tasks_per_node_expands(runs: list[tuple[int, int]]) -> None:
    """A Slurm list of tasks per node expands to one number for each node."""
    text = ",".join(f"{count}(x{times})" if times > 1 else f"{count}" for count, times in runs)
    assert expand_tasks_per_node(text) == [count for count, times in runs for _ in range(times)]


def test_bad_tasks_per_node_is_refused() -> None:
    """A Slurm list of tasks per node that cannot be read is refused."""
    with pytest.raises(RuntimeError, match=r"cannot read '2\(3\)'"):
        expand_tasks_per_node("2(3)")


@pytest.mark.parametrize(
    ("visible", "first", "want"),
    [
        (None, 2, "2,3"),
        ("4,5,6,7", 2, "6,7"),
        ("6,7", 2, "6,7"),
        ("GPU-a,GPU-b,GPU-c,GPU-d", 0, "GPU-a,GPU-b"),
    ],
)
def test_visible_gpus_are_shared_out(visible: str | None, first: int, want: str) -> None:
    """A task sees its share of the GPUs, whichever names they have."""
    assert visible_gpus(visible, first, count=2, on_node=4) == want
