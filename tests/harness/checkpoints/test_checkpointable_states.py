"""The states of a trainer that ride in a checkpoint come back as they were."""

import json
import pathlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import harness
import runtime as rt
from harness.checkpoints.manifest import read_manifest
from harness.checkpoints.states import decode, encode
from runtime.checkpoint.coordinator import CheckpointCoordinator


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


def _back(value: Any) -> Any:
    found = decode(json.loads(encode(value)))
    assert type(found) is type(value)
    return found


@pytest.mark.parametrize(
    "dtype",
    [
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int4",
        "float32",
        ">i8",
        "S3",
        "U2",
        "?",
        "c16",
        "M8[ns]",
        "V5",
    ],
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 2)])
def test_every_dtype_is_encoded_exactly(dtype: str, shape: tuple[int, ...]) -> None:
    """Arrays of every dtype and shape come back as they were."""
    array = np.ones(shape, np.uint8).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    assert _same(_back(array), array)


def test_jax_arrays_become_numpy() -> None:
    """JAX arrays are saved as NumPy arrays."""
    found = decode(
        json.loads(
            encode(
                {"key": jax.random.key_data(jax.random.key(3)), "half": jnp.ones(2, jnp.bfloat16)}
            )
        )
    )
    assert _same(found["key"], np.array([0, 3], np.uint32)) and found["half"].dtype == jnp.bfloat16


def test_hanging_state_holds_up_no_save(tmp_path: pathlib.Path) -> None:
    """A state function that does not return is left out of the checkpoint and holds up no save."""
    ended = threading.Event()
    with rt.local_cluster(ps=1, workers=1) as cluster, rt.Graph().as_default():
        with cluster.device():
            rt.Variable(0.0, name="v")
            saver = harness.Saver()
        with rt.Session(cluster.target) as session:
            session.run(rt.global_variables_initializer())
            harness.checkpointable("place", ended.wait, lambda value: None, task=session.task)
            try:
                manifest = read_manifest(
                    saver.save(session, str(tmp_path / "model.ckpt"), global_step=1)
                )
            finally:
                ended.set()
                harness.forget_checkpointable("place", task=session.task)
    assert manifest is not None and "place" not in manifest.states.get(session.task, {})


def test_records_keep_their_fields() -> None:
    """Structured arrays keep their fields."""
    array = np.array([(1, 2.5), (3, 4.5)], [("index", "<i4"), ("weight", "<f8", (2,))])
    found = _back(array)
    assert _same(found, array) and found["index"].tolist() == [1, 3]


@pytest.mark.parametrize("mark", ["__array__", "__tuple__", "__bytes__", "__dict__"])
def test_dictionaries_keep_any_key(mark: str) -> None:
    """Dictionaries come back even with keys that the encoding uses as marks."""
    state = {mark: [1, (2, b"x")], "other": {mark: "y"}, "plain": {"a": 1}}
    assert _same(_back(state), state)


def test_earlier_encoding_is_read() -> None:
    """States that earlier versions wrote are read."""
    assert _same(decode({"__array__": ["<f4", [1], "AACAPw=="]}), np.ones(1, np.float32))
    assert decode({"a": {"__tuple__": [1, {"__bytes__": "eA=="}]}}) == {"a": (1, b"x")}


def test_object_arrays_are_refused() -> None:
    """Arrays of Python objects are refused."""
    for array in (np.array([object()]), np.zeros(1, [("a", object)])):
        with pytest.raises(rt.InvalidArgumentError, match="array of objects"):
            encode(array)


def test_state_matches_the_variables_instant(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state is taken at the instant of the variables, not when the save began."""
    place, asked = [0], threading.Event()

    def get() -> int:
        asked.set()
        return place[0]

    begun = CheckpointCoordinator._pause

    def slow(coordinator: CheckpointCoordinator, *order: Any) -> None:
        asked.wait(1)
        place[0] = 7
        begun(coordinator, *order)

    with rt.local_cluster(ps=1, workers=1) as cluster, rt.Graph().as_default():
        with cluster.device():
            rt.Variable(0.0, name="v")
            saver = harness.Saver()
        with rt.Session(cluster.target) as session:
            session.run(rt.global_variables_initializer())
            harness.checkpointable("place", get, lambda value: None, task=session.task)
            monkeypatch.setattr(CheckpointCoordinator, "_pause", slow)
            manifest = read_manifest(
                saver.save(session, str(tmp_path / "model.ckpt"), global_step=1)
            )
            harness.forget_checkpointable("place", task=session.task)
    assert manifest is not None and manifest.states[session.task] == {"place": 7}


@pytest.mark.parametrize("goodbye", [False, True])
def test_finished_worker_leaves_its_states(tmp_path: pathlib.Path, goodbye: bool) -> None:
    """A worker that is done leaves its states to the last checkpoint."""
    other = "/job:worker/task:1"
    position = [0]
    with rt.local_cluster(ps=2, workers=2) as cluster, rt.Graph().as_default():
        with cluster.device():
            step = harness.get_or_create_global_step()
            train_op = step.assign_add(1)
        supervisor = harness.Supervisor(
            logdir=tmp_path, global_step=step, summary_op=None, save_model_secs=0
        )
        with supervisor.managed_session(cluster.target) as session:
            records = rt.lowlevel.RunRecords(cluster.servers["worker", 1].target)
            harness.checkpointable("data", lambda: position[0], position.append, task=other)
            records.join()
            session.run(train_op)
            supervisor.saver.save(session, supervisor.save_path, global_step=step)
            session.run(train_op)
            position[0] = 7
            records.done(leave=False, goodbye=goodbye)
            harness.forget_checkpointable("data", task=other)  # its process is gone
            cluster.servers["worker", 1].stop()
        checkpoint = harness.latest_checkpoint(tmp_path)
        assert checkpoint is not None and checkpoint.endswith("/2")
    harness.checkpointable("data", lambda: 0, position.append, task=other)
    try:
        assert harness.restore_states(checkpoint, other) == ["data"]
    finally:
        harness.forget_checkpointable("data", task=other)
    assert position == [7, 7]


def test_namesake_tasks_keep_their_states(tmp_path: pathlib.Path) -> None:
    """Two clusters of one process keep the states of tasks with one name apart."""
    places: dict[str, list[int]] = {}
    with rt.Server.create_local_server() as one, rt.Server.create_local_server() as two:
        for number, server in enumerate((one, two)):
            places[server.target] = [number]
            get, take = (lambda place=places[server.target]: place[0]), places[server.target].append
            harness.checkpointable("place", get, take, task=server.target)
        for number, server in enumerate((one, two)):
            with rt.Graph().as_default(), rt.Session(server.target) as session:
                session.run(rt.Variable(0.0, name="v").initializer)
                saver = harness.Saver()
                path = saver.save(
                    session, str(tmp_path / server.address / "model.ckpt"), global_step=1
                )
                manifest = read_manifest(path)
                assert manifest is not None and manifest.states[session.task] == {"place": number}
                saver.restore_latest(session, path)
        harness.forget_checkpointable("place", task=one.target)
        assert places == {one.target: [0, 0], two.target: [1, 1]}
        harness.forget_checkpointable("place", task=two.target)
