"""Device names, nested scopes and replica_device_setter."""

import importlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.cluster.spec import ClusterSpec
from runtime.errors import InvalidArgumentError
from runtime.graph.placement import DeviceSpec

rd = importlib.import_module("runtime.graph.placement")

numbers = st.none() | st.integers(0, 99)
jobs = st.none() | st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True)
types = st.sampled_from(["CPU", "gpu", "TPU", "XLA_CPU"])
specs = st.builds(DeviceSpec, jobs, numbers, numbers) | st.builds(
    DeviceSpec, jobs, numbers, numbers, types, numbers
)


@dataclass
class Output:
    """What byte_size_load_fn reads of a tensor."""

    shape: tuple[int | None, ...] | None
    dtype: Any


@dataclass
class Op:
    """What device functions read of an operation."""

    type: str
    name: str = "op"
    device: str = ""
    outputs: tuple[Output, ...] = ()


def placed(type_: str = "Add", device: str = "", outputs: tuple[Output, ...] = ()) -> str:
    return rd.current_device(Op(type_, device=device, outputs=outputs))


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("", ""),
        ("/job:ps", "/job:ps"),
        ("/job:worker/replica:0/task:1/device:GPU:0", "/job:worker/replica:0/task:1/gpu:0"),
        ("/job:w/replica:2/task:0/device:CPU:*", "/job:w/replica:2/task:0/cpu:*"),
        ("/cpu:0", "/cpu:0"),
        ("cpu:0", "/cpu:0"),
        ("/GPU", "/gpu:*"),
        ("/device:GPU:1", "/gpu:1"),
        ("/device:tpu", "/tpu:*"),
        ("/device:XLA_CPU:3/job:a", "/job:a/device:XLA_CPU:3"),
        ("/job:*/task:*", ""),
    ],
)
def test_every_spelling_is_read(name: str, short: str) -> None:
    """Every spelling of a device becomes its short name."""
    assert DeviceSpec.parse(name).to_string() == short


@given(specs)
def test_names_can_be_read_back(spec: DeviceSpec) -> None:
    """The name of a device spec reads as the same spec."""
    assert DeviceSpec.parse(spec.to_string()) == spec


@given(specs, specs, specs)
def test_inner_spec_wins_in_merge(a: DeviceSpec, b: DeviceSpec, c: DeviceSpec) -> None:
    """A merge of device specs is associative, and the inner part wins."""
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(a) == a.merge(DeviceSpec()) == DeviceSpec().merge(a) == a
    for part in ("job", "replica", "task", "device_type", "device_index"):
        inner = getattr(b, part)
        assert getattr(a.merge(b), part) == (getattr(a, part) if inner is None else inner)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("/job:ps/tusk:1", "cannot read 'tusk:1'"),
        ("/job", "cannot read 'job'"),
        ("/job:a:b", "cannot read 'job:a:b'"),
        ("/task:x", "needs a number"),
        ("/task:-1", "needs a number"),
        ("/cpu:0:1", "cannot read 'cpu:0:1'"),
        ("/device:GPU:x", "needs a number"),
        ("/device:9", "bad device type '9'"),
        ("/job:a b", "bad job 'a b'"),
        ("/cpu:0/gpu:0", "twice"),
        ("/job:a/job:b", "twice"),
    ],
)
def test_bad_name_shows_its_part(name: str, text: str) -> None:
    """A bad device name is refused with the part and the whole name."""
    with pytest.raises(InvalidArgumentError) as caught:
        DeviceSpec.parse(name)
    assert text in str(caught.value)
    assert repr(name) in str(caught.value)


def test_bad_parts_are_refused() -> None:
    """A device spec refuses a negative task and an index without a type."""
    with pytest.raises(InvalidArgumentError, match="task -1"):
        DeviceSpec(task=-1)
    with pytest.raises(InvalidArgumentError, match="needs a device type"):
        DeviceSpec(device_index=0)


def test_nested_scopes_merge_and_end() -> None:
    """Nested device scopes merge, and end with their blocks."""
    assert placed() == ""
    with rd.device("/job:worker/task:1"):
        with rd.device(DeviceSpec(device_type="cpu", device_index=0)):
            assert placed() == "/job:worker/task:1/cpu:0"
            assert placed(device="/job:ps/gpu:1") == "/job:ps/task:1/gpu:1"
            with rd.device("/job:ps/replica:0/task:0"):
                assert placed() == "/job:ps/replica:0/task:0/cpu:0"
            with rd.device(None):
                assert placed() == ""
                with rd.device("/gpu:0"):
                    assert placed() == "/gpu:0"
            with rd.device(None):
                assert placed() == ""
        assert placed() == "/job:worker/task:1"
    assert placed() == ""


@given(st.lists(specs, max_size=4), specs)
def test_scopes_are_a_merge(scopes: list[DeviceSpec], asked: DeviceSpec) -> None:
    """Nested device scopes place an operation as the merge of their specs does."""
    want = DeviceSpec()

    def check(rest: list[DeviceSpec], merged: DeviceSpec) -> None:
        if not rest:
            assert (
                placed(device=asked.to_string())
                == merged.merge(DeviceSpec.parse(asked.to_string())).to_string()
            )
            return
        with rd.device(rest[0]):
            check(rest[1:], merged.merge(rest[0]))

    check(scopes, want)


def test_scope_ends_with_an_exception() -> None:
    """A device scope ends when an exception leaves its block."""
    with pytest.raises(KeyError), rd.device("/job:ps"):
        raise KeyError
    assert placed() == ""


def test_scopes_are_per_thread() -> None:
    """A device scope holds for its own thread only."""
    seen = []
    with rd.device("/job:ps"):
        thread = threading.Thread(target=lambda: seen.append(placed()))
        thread.start()
        thread.join(60)
    assert seen == [""]


def test_device_functions_see_inner_device() -> None:
    """A device function sees the device of the inner scopes and may replace it."""
    seen = []

    def matmul_on_gpu(op: rd.OpInfo) -> str | None:
        seen.append((op.type, op.name, op.device))
        return "/gpu:0" if op.type == "MatMul" else None

    with rd.device("/job:worker"), rd.device(matmul_on_gpu), rd.device("/task:3"):
        assert placed("MatMul") == "/job:worker/gpu:0"
        assert placed("Add") == "/job:worker/task:3"
        assert placed("Add", device="/cpu:0") == "/job:worker/task:3/cpu:0"
    assert seen == [
        ("MatMul", "op", "/task:3"),
        ("Add", "op", "/task:3"),
        ("Add", "op", "/task:3/cpu:0"),
    ]


def test_operation_itself_stays_untouched() -> None:
    """The operation that a device function sees keeps its own device."""
    op = Op("Add", device="/cpu:0")
    with rd.device("/job:worker"), rd.device(lambda op: DeviceSpec(job="ps")):
        assert rd.current_device(op) == "/job:ps"
    assert op.device == "/cpu:0"


def test_wrong_scopes_are_refused() -> None:
    """A device scope refuses other types and bad names, and a function's bad answer."""
    wrong: Any = 3
    with pytest.raises(TypeError, match="not int"), rd.device(wrong):
        pass
    with pytest.raises(InvalidArgumentError, match="tusk"), rd.device("/tusk:0"):
        pass
    answer: Callable[[Any], Any] = lambda op: 3  # noqa: E731
    with rd.device(answer), pytest.raises(TypeError, match="returned 3 for 'op'"):
        placed()


@pytest.mark.parametrize(
    "cluster",
    [
        {"ps": ["a:1", "b:1"], "worker": ["c:1"]},
        ClusterSpec({"ps": ["a:1", "b:1"]}),
        ClusterSpec({"ps": ["a:1", "b:1"]}).as_cluster_def(),
        None,
    ],
)
def test_variables_go_round_the_ps(cluster: Any) -> None:
    """The setter places variables on the ps in turn and other operations on the worker."""
    with rd.device(
        rd.replica_device_setter(ps_tasks=2, worker_device="/job:worker/task:7", cluster=cluster)
    ):
        assert [placed("Variable") for _ in range(3)] == [
            "/job:ps/task:0",
            "/job:ps/task:1",
            "/job:ps/task:0",
        ]
        assert placed("Call") == "/job:worker/task:7"
        assert placed("ConditionalAccumulator") == "/job:ps/task:1"


def test_inner_devices_are_merged() -> None:
    """An inner device is merged with what the setter chooses, unless it names another job or task."""
    with rd.device(rd.replica_device_setter(ps_tasks=2)):
        with rd.device("/cpu:0"):
            assert placed("Variable") == "/job:ps/task:0/cpu:0"
            assert placed("Call") == "/job:worker/cpu:0"
        with rd.device("/job:other"):
            assert placed("Variable") == "/job:other"
        with rd.device("/job:ps"):
            assert placed("Variable") == "/job:ps/task:1"
        with rd.device("/job:ps/task:1"):
            assert placed("Variable") == "/job:ps/task:1"
            assert placed("Call") == "/job:ps/task:1"


def test_outer_scopes_complete_the_setter() -> None:
    """An outer scope completes the device that the setter chooses."""
    with rd.device("/gpu:0"), rd.device(rd.replica_device_setter(ps_tasks=1)):
        assert placed("Variable") == "/job:ps/task:0/gpu:0"


def test_merge_devices_false_keeps_any_device(caplog: pytest.LogCaptureFixture) -> None:
    """A setter with merge_devices=False warns and leaves any operation with a device alone."""
    with caplog.at_level(logging.WARNING):
        setter = rd.replica_device_setter(ps_tasks=2, merge_devices=False)
    assert "deprecated" in caplog.text
    with rd.device(setter):
        assert placed("Variable") == "/job:ps/task:0"
        for explicit in ("/job:ps", "/cpu:0", "/job:other/task:3"):
            with rd.device(explicit):
                assert placed("Variable") == placed("Call") == explicit


def test_ps_device_takes_any_form() -> None:
    """The setter's ps_device and worker_device may be partial or empty."""
    with rd.device(
        rd.replica_device_setter(ps_tasks=2, ps_device="/job:ps/cpu:0", worker_device=None)
    ):
        assert placed("Variable") == "/job:ps/task:0/cpu:0"
        assert placed("Call") == ""
    with rd.device(rd.replica_device_setter(ps_tasks=2, ps_device="/cpu:0", worker_device="")):
        assert placed("Variable") == "/cpu:0"
    with rd.device(rd.replica_device_setter(ps_tasks=2, ps_device="")):
        assert placed("Variable") == "/job:worker"


def test_ps_ops_replaces_the_list() -> None:
    """The setter's ps_ops replaces the list of types, and the strategy sees only those."""
    asked = []

    def strategy(op: rd.OpInfo) -> int:
        asked.append(op.type)
        return 5

    with rd.device(rd.replica_device_setter(ps_tasks=9, ps_ops=["Add"], ps_strategy=strategy)):
        assert placed("Add") == "/job:ps/task:5"
        assert placed("Variable") == "/job:worker"
        with rd.device("/job:other"):
            assert placed("Add") == "/job:other"
    assert asked == ["Add"]


def test_setter_needs_parameter_servers() -> None:
    """Without parameter servers there is no setter."""
    assert rd.replica_device_setter() is None
    assert rd.replica_device_setter(ps_tasks=3, cluster={"worker": ["a:1"]}) is None
    assert rd.replica_device_setter(cluster={"ps": []}) is None
    assert rd.replica_device_setter(cluster={"ps": ["a:1"]}, ps_device="/job:other") is None
    assert rd.replica_device_setter(cluster={"other": ["a:1"]}, ps_device="/job:other") is not None


def test_setter_refuses_wrong_types() -> None:
    """The setter refuses a strategy that is not callable and a cluster of another type."""
    wrong: Any = 3
    with pytest.raises(TypeError, match="ps_strategy must be callable"):
        rd.replica_device_setter(ps_tasks=1, ps_strategy=wrong)
    with pytest.raises(TypeError, match="dictionary mapping"):
        rd.replica_device_setter(cluster=wrong)


def test_sparse_ps_count_from_zero() -> None:
    """The setter numbers the tasks of a sparse job from zero."""
    with rd.device(rd.replica_device_setter(cluster={"ps": {3: "a:1"}})):
        assert placed("Variable") == "/job:ps/task:0"
