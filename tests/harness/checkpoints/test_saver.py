"""The Saver against a session of its own: what is saved comes back, and what does not fit is told by name."""

import itertools
import json
import os
import pathlib
import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis.extra import numpy as hnp

import harness
import runtime as rt
from harness import exit_codes, tf1
from tests.examples import costly
from tests.harness.checkpoints.checkpoint_kit import plain_orbax

pytestmark = pytest.mark.disk

VALUES: dict[str, Any] = {
    "scalar": np.float32(1.5),
    "step": np.int64(2**40),
    "flag": np.bool_(True),
    "layer/w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "layer/w/slot": np.arange(24, dtype=np.float64).reshape(2, 3, 4),
    "half": np.array([1, 2.5, -3], ml_dtypes.bfloat16),
    "small": np.array([1, 2], ml_dtypes.float8_e4m3fn),
    "bytes": np.arange(5, dtype=np.uint8),
    "four": np.zeros((2, 1, 3, 2), np.int16),
    "complex": np.array([1 + 2j], np.complex64),
    "empty": np.zeros((0, 3), np.float32),
    "words": np.array([[b"a", b""], [b"\x00\xff", "\u00e4".encode()]], object),
}


@pytest.fixture
def graph() -> Iterator[rt.Graph]:
    with rt.Graph().as_default() as graph:
        yield graph


@pytest.fixture
def sess(graph: rt.Graph) -> Iterator[rt.Session]:
    with rt.Session("", graph) as sess:
        yield sess


def _variables(values: dict[str, Any]) -> dict[str, rt.Variable]:
    return {
        name: rt.Variable(value, name=name, dtype=np.asarray(value).dtype, trainable=False)
        for name, value in values.items()
    }


def _initialize(sess: rt.Session) -> None:
    sess.run(rt.global_variables_initializer())


def _assert_equal(found: Any, wanted: Any) -> None:
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.tolist() == wanted.tolist()


def _flip(path: pathlib.Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(bytes(data))


def _largest_file(directory: str) -> pathlib.Path:
    files = [p for p in pathlib.Path(directory).rglob("*") if p.is_file() and p.parent.name == "d"]
    return max(files, key=lambda p: p.stat().st_size)


# -- round trips -----------------------------------------------------------------------------------------------------


def test_every_dtype_and_shape_comes_back(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """Variables of every dtype and shape come back as they were saved."""
    variables = _variables(VALUES)
    _initialize(sess)
    saver = harness.Saver()
    path = saver.save(sess, tmp_path / "m", 7)
    assert path == f"{tmp_path}/m/7"
    for name, variable in variables.items():
        value = (
            np.full(variable.shape, b"x", object)
            if name == "words"
            else np.zeros(variable.shape, variable.dtype)
        )
        sess.run(variable.assign(value))
    saver.restore(sess, path)
    for name, variable in variables.items():
        _assert_equal(sess.run(variable), VALUES[name])
        _assert_equal(harness.load_variable(path, name), VALUES[name])


def test_plain_orbax_restores_full_arrays(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """Plain Orbax restores full arrays by name."""
    _variables(VALUES)
    _initialize(sess)
    harness.Saver().save(sess, tmp_path / "m", 7)
    step, found = plain_orbax(tmp_path / "m")
    assert step == 7
    assert found.keys() == VALUES.keys()
    for name in VALUES.keys() - {"words"}:
        _assert_equal(found[name], VALUES[name])


_SETS = st.dictionaries(
    st.from_regex(r"[a-z]{1,3}(/[a-z0-9]{1,3}){0,2}", fullmatch=True),
    st.builds(
        lambda dtype, shape, seed: np.random.RandomState(seed).randint(0, 2, shape).astype(dtype),
        st.sampled_from([np.float32, np.int64, ml_dtypes.bfloat16, np.bool_, np.uint8]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        st.integers(0, 2**31),
    ),
    min_size=1,
    max_size=5,
)


@costly(10)
@hypothesis.given(_SETS)
def test_any_set_of_variables_comes_back(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    """Any set of variables comes back bit by bit."""
    directory = tmp_path_factory.mktemp("any")
    with rt.Graph().as_default() as graph, rt.Session("", graph) as sess:
        variables = _variables(values)
        _initialize(sess)
        saver = harness.Saver()
        path = saver.save(sess, directory / "m", 0)
        for variable in variables.values():
            sess.run(variable.assign(np.zeros(variable.shape, variable.dtype)))
        saver.restore(sess, path)
        for name, variable in variables.items():
            assert np.asarray(sess.run(variable)).tobytes() == values[name].tobytes()


def test_slices_are_saved_as_one_array(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """Slices of a partitioned variable are saved as one array and restored into other slices."""
    table = np.arange(40, dtype=np.float32).reshape(10, 4)
    parts = []
    for i, (first, last) in enumerate([(0, 4), (4, 8), (8, 10)]):
        part = rt.Variable(table[first:last], name=f"table/part_{i}", trainable=False)
        _belongs(part, "table", table.shape, (first, 0))
        parts.append(part)
    _initialize(sess)
    path = harness.Saver().save(sess, tmp_path / "m", 1)
    _assert_equal(plain_orbax(tmp_path / "m")[1]["table"], table)
    with rt.Graph().as_default() as other, rt.Session("", other) as fresh:
        again = [
            rt.Variable(np.zeros((5, 4), np.float32), name=f"other/part_{i}", trainable=False)
            for i in range(2)
        ]
        for i, part in enumerate(again):
            _belongs(part, "table", table.shape, (5 * i, 0))
        harness.Saver().restore(fresh, path)
        _assert_equal(np.concatenate(fresh.run(again)), table)


def _belongs(part: rt.Variable, name: str, shape: tuple[int, ...], offset: tuple[int, ...]) -> None:
    part.save_slice_info = rt.lowlevel.ArraySlice(name, part.shape, part.dtype, shape, offset)


def test_moved_directory_restores(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """A directory of checkpoints can be moved and restored elsewhere."""
    variable = rt.Variable(np.float32(3), name="v")
    _initialize(sess)
    saver = harness.Saver()
    saver.save(sess, tmp_path / "here" / "m", 1)
    assert not [p for p in (tmp_path / "here").rglob("*.json") if str(tmp_path) in p.read_text()]
    shutil.move(tmp_path / "here", tmp_path / "there")
    sess.run(variable.assign(0.0))
    saver.restore(sess, harness.latest_checkpoint(str(tmp_path / "there")))
    assert sess.run(variable) == 3
    assert harness.latest_checkpoint(str(tmp_path / "here")) is None


def test_foreign_checkpoint_restores_by_map(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """A checkpoint of another program is restored with a map of names."""
    tree = {
        "params": {
            "dense": {"kernel": np.ones((2, 3), np.float32), "bias": np.full(3, 2.0, np.float32)}
        },
        "n": 4,
    }
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "theirs", tree)
    kernel = rt.Variable(np.zeros((2, 3), np.float32), name="w")
    bias = rt.Variable(np.zeros(3, np.float32), name="b")
    harness.Saver({"params/dense/kernel": kernel, "params/dense/bias": bias}).restore(
        sess, str(tmp_path / "theirs")
    )
    _assert_equal(sess.run(kernel), tree["params"]["dense"]["kernel"])
    _assert_equal(sess.run(bias), tree["params"]["dense"]["bias"])
    assert ("params/dense/bias", (3,)) in harness.list_variables(str(tmp_path / "theirs"))


def test_optax_checkpoint_restores_by_map(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """The parameters and optimizer state of an Optax loop are restored with a map of names."""
    dense = {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3, jnp.bfloat16)}
    params = {"dense": dense, "scale": [3.0, 4.0]}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    gradients = jax.tree.map(jnp.ones_like, params)
    state = optimizer.update(gradients, optimizer.init(params))[1]
    with ocp.CheckpointManager(tmp_path / "theirs") as manager:
        for step in (6, 7):
            tree = {"step": step, "params": params, "opt_state": state}
            manager.save(step, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
    newest = harness.latest_checkpoint(str(tmp_path))
    assert newest == f"{tmp_path}/theirs/7"
    shapes = dict(harness.list_variables(newest))
    assert shapes["params/scale/1"] == () and shapes["opt_state/1/0/mu/dense/kernel"] == (2, 3)
    kernel = rt.Variable(np.zeros((2, 3), np.float32), name="w")
    bias = rt.Variable(np.zeros(3, ml_dtypes.bfloat16), dtype=ml_dtypes.bfloat16, name="b")
    mu = rt.Variable(np.zeros((2, 3), np.float32), name="w/adam/mu")
    count = rt.Variable(0, dtype=np.int32, name="w/adam/count", trainable=False)
    names = {
        "params/dense/kernel": kernel,
        "params/dense/bias": bias,
        "opt_state/1/0/mu/dense/kernel": mu,
        "opt_state/1/0/count": count,
    }
    harness.Saver(names).restore(sess, newest)
    _assert_equal(sess.run(kernel), dense["kernel"])
    _assert_equal(sess.run(bias), dense["bias"])
    _assert_equal(sess.run(mu), state[1][0].mu["dense"]["kernel"])
    assert sess.run(count) == 1
    with rt.Graph().as_default() as other, rt.Session("", other) as fresh:
        mine = rt.Variable(np.zeros((2, 3), np.float32), name="mlp/kernel")
        rt.Variable(np.zeros(3, ml_dtypes.bfloat16), dtype=ml_dtypes.bfloat16, name="mlp/bias")
        tf1.train.init_from_checkpoint(str(tmp_path / "theirs"), {"params/dense/": "mlp/"})
        _initialize(fresh)
        _assert_equal(fresh.run(mine), dense["kernel"])


def test_orbax_metadata_holds_the_sequence(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """Orbax's metadata holds the order of saves."""
    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    parts = [rt.Variable(table[i : i + 2], name=f"table/part_{i}", trainable=False) for i in (0, 2)]
    harness.partitioned("table", parts)
    _initialize(sess)
    harness.Saver().save(sess, tmp_path / "m", 7)
    with ocp.CheckpointManager(tmp_path / "m") as manager:
        assert manager.metadata(7).custom_metadata["bellwether"]["sequence"] == 1


@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        ([], "needs parts"),
        ([()], "needs parts"),
        ([(2, 3), (2, 4)], r"first dimension only: .*float32\[2, 4\]"),
    ],
)
def test_misfitting_parts_are_refused(
    graph: rt.Graph, shapes: list[tuple[int, ...]], match: str
) -> None:
    """Parts that do not fit together are refused."""
    parts = [
        rt.Variable(np.zeros(shape, np.float32), name=f"part_{i}") for i, shape in enumerate(shapes)
    ]
    with pytest.raises(rt.InvalidArgumentError, match=match):
        harness.partitioned("table", parts)


# -- names, steps, retention -----------------------------------------------------------------------------------------


def test_step_names_the_checkpoint(
    sess: rt.Session, graph: rt.Graph, tmp_path: pathlib.Path
) -> None:
    """A checkpoint is named by the step that is given, or else by the global step."""
    step = rt.Variable(41, dtype=np.int64, name="global_step", trainable=False)
    graph.add_to_collection(rt.GraphKeys.GLOBAL_STEP, step)
    _initialize(sess)
    saver = harness.Saver()
    assert saver.save(sess, tmp_path / "a", step) == f"{tmp_path}/a/41"
    assert saver.save(sess, tmp_path / "b", "global_step:0") == f"{tmp_path}/b/41"
    assert saver.save(sess, tmp_path / "c") == f"{tmp_path}/c/41"
    assert saver.save(sess, tmp_path / "d", 5) == f"{tmp_path}/d/5"


def test_next_number_without_a_step(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """Without a step the next free number names the checkpoint."""
    rt.Variable(1.0, name="v")
    _initialize(sess)
    saver = harness.Saver()
    assert [os.path.basename(saver.save(sess, tmp_path / "m")) for _ in range(3)] == ["0", "1", "2"]


def test_retention_follows_saving_order(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """Retention goes by the order of saving, not by the step."""
    rt.Variable(1.0, name="v")
    _initialize(sess)
    saver = harness.Saver(max_to_keep=2)
    for step in (10, 20, 5, 6):  # somebody went back to step 4 and trains anew
        saver.save(sess, tmp_path / "m", step)
    assert [os.path.basename(p) for p in saver.last_checkpoints] == ["5", "6"]
    assert harness.latest_checkpoint(str(tmp_path)) == f"{tmp_path}/m/6"
    assert sorted(os.listdir(tmp_path / "m")) == ["5", "6"]


def test_retention_survives_a_restart(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """Retention counts the checkpoints of earlier Savers."""
    rt.Variable(1.0, name="v")
    _initialize(sess)
    for step in range(4):
        harness.Saver(max_to_keep=2).save(sess, tmp_path / "m", step)
    state = tf1.train.get_checkpoint_state(str(tmp_path))
    assert state is not None
    assert [os.path.basename(p) for p in state.all_model_checkpoint_paths] == ["2", "3"]
    assert state.model_checkpoint_path == state.all_model_checkpoint_paths[-1]


@pytest.mark.parametrize("keep", [None, 0])
def test_none_and_zero_keep_all(sess: rt.Session, tmp_path: pathlib.Path, keep: int | None) -> None:
    """max_to_keep of None or 0 keeps all checkpoints."""
    rt.Variable(1.0, name="v")
    _initialize(sess)
    saver = harness.Saver(max_to_keep=keep)
    for step in range(7):
        saver.save(sess, tmp_path / "m", step)
    assert len(saver.last_checkpoints) == 7


def test_periodic_checkpoints_are_kept(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """One checkpoint for each period is kept besides the last."""
    rt.Variable(1.0, name="v")
    _initialize(sess)
    hours = 0.5 / 3600
    began = {}
    for step in range(6):
        began[step] = time.monotonic()
        harness.Saver(max_to_keep=1, keep_checkpoint_every_n_hours=hours).save(
            sess, tmp_path / "m", step
        )
        # The test is one of time: the age of a checkpoint decides whether it is kept.
        time.sleep(0.3)
    kept = sorted(int(name) for name in os.listdir(tmp_path / "m"))
    assert kept[0] == 0 and kept[-1] == 5  # the last one is kept as the last
    for one, after in itertools.pairwise(kept):
        if after < 5:
            assert began[after + 1] - began[one] >= 0.5  # not sooner than asked for
        if after - one > 1:
            assert began[after - 1] - began[one + 1] < 0.5  # nor later


def test_same_step_replaces_the_old(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """A second save of a step replaces the first."""
    variable = rt.Variable(1.0, name="v")
    _initialize(sess)
    saver = harness.Saver()
    saver.save(sess, tmp_path / "m", 3)
    sess.run(variable.assign(2.0))
    path = saver.save(sess, tmp_path / "m", 3)
    assert harness.load_variable(path, "v") == 2
    assert os.listdir(tmp_path / "m") == ["3"]


def test_tf1_spelling_is_understood(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """TensorFlow's spelling of a checkpoint's path is understood."""
    variable = rt.Variable(1.0, name="v")
    _initialize(sess)
    saver = harness.Saver()
    saver.save(sess, tmp_path / "model.ckpt", 3)
    assert tf1.train.checkpoint_exists(f"{tmp_path}/model.ckpt-3")
    assert not tf1.train.checkpoint_exists(f"{tmp_path}/model.ckpt-4")
    sess.run(variable.assign(5.0))
    saver.restore(sess, f"{tmp_path}/model.ckpt-3")
    assert sess.run(variable) == 1


def test_recovered_checkpoints_are_listed(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """recover_last_checkpoints lists the checkpoints that exist."""
    rt.Variable(1.0, name="v")
    _initialize(sess)
    path = harness.Saver().save(sess, tmp_path / "m", 3)
    other = tf1.train.Saver()
    assert other.last_checkpoints == []
    other.recover_last_checkpoints([f"{tmp_path}/m/2", path])
    assert other.last_checkpoints == [path]


# -- what does not fit -----------------------------------------------------------------------------------------------


def test_uninitialized_variable_stops_a_save(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """A save of an uninitialized variable names the variable and leaves no files."""
    rt.Variable(1.0, name="never")
    with pytest.raises(rt.FailedPreconditionError, match="never"):
        harness.Saver().save(sess, tmp_path / "m", 1)
    assert not (tmp_path / "m").exists()


def test_all_misfits_are_listed_together(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """Everything that does not fit a restore is listed in one error, and no variable changes."""
    rt.Variable(np.zeros((2, 3), np.float32), name="a")
    rt.Variable(np.zeros(4, np.int32), dtype=np.int64, name="b")
    rt.Variable(np.zeros(1, np.float32), name="only_there")
    _initialize(sess)
    path = harness.Saver().save(sess, tmp_path / "m", 1)
    with rt.Graph().as_default() as other, rt.Session("", other) as fresh:
        kept = rt.Variable(np.zeros((3, 2), np.float32), name="a")
        rt.Variable(np.zeros(4, np.int32), name="b")
        rt.Variable(np.zeros(7, np.float32), name="only_here")
        _initialize(fresh)
        with pytest.raises(rt.InvalidArgumentError) as error:
            harness.Saver().restore(fresh, path)
        text = str(error.value)
        for part in ("a: ", "float32[3, 2]", "float32[2, 3]", "b: ", "int32[4]", "int64[4]"):
            assert part in text
        for part in ("only_here float32[7]", "only_there float32[1]", "partial=True"):
            assert part in text
        assert fresh.run(kept).shape == (3, 2)


def test_long_list_of_misfits_is_cut(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """Of many misfits the message has five of each kind, and the number of the others."""
    saved = _variables({f"saved_{i:02}": np.float32(i) for i in range(12)})
    _initialize(sess)
    path = harness.Saver(saved).save(sess, tmp_path / "model.ckpt", 1)
    with rt.Graph().as_default(), rt.Session() as session:
        other = _variables({f"other_{i:02}": np.float32(i) for i in range(7)})
        with pytest.raises(rt.NotFoundError) as found:
            harness.Saver(other).restore(session, path)
    text = str(found.value)
    assert re.findall(r"other_\d+", text) == [f"other_{i:02}" for i in range(5)]
    assert "float32[] and 2 more not found in checkpoint" in text
    assert len(re.findall(r"saved_\d+", text)) == 5 and "float32[] and 7 more." in text


def test_partial_restore_must_be_requested(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """A checkpoint that lacks a variable restores only with partial=True."""
    rt.Variable(1.0, name="a")
    _initialize(sess)
    path = harness.Saver().save(sess, tmp_path / "m", 1)
    with rt.Graph().as_default() as other, rt.Session("", other) as fresh:
        a, b = rt.Variable(0.0, name="a"), rt.Variable(9.0, name="b")
        _initialize(fresh)
        saver = harness.Saver()
        with pytest.raises(rt.NotFoundError, match="Key b .*not found in checkpoint") as caught:
            saver.restore(fresh, path)
        assert "Another model needs a log directory of its own." in str(caught.value)
        assert exit_codes.of_error(caught.value) is exit_codes.CONFIGURATION
        saver.restore(fresh, path, partial=True)
        assert fresh.run([a, b]) == [1, 9]


def test_missing_checkpoint_is_an_error(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """A missing checkpoint raises TensorFlow's errors, and latest_checkpoint returns None."""
    rt.Variable(1.0, name="v")
    saver = harness.Saver()
    with pytest.raises(ValueError, match="Can't load save_path when it is None"):
        saver.restore(sess, None)
    with pytest.raises(ValueError, match="not a valid checkpoint"):
        saver.restore(sess, str(tmp_path / "nothing"))
    assert harness.latest_checkpoint(str(tmp_path)) is None
    assert tf1.train.get_checkpoint_state(str(tmp_path / "nothing")) is None
    assert saver.restore_latest(sess, str(tmp_path)) is None
    with pytest.raises(ValueError, match="Couldn't find a checkpoint"):
        harness.load_checkpoint(str(tmp_path))


def test_saver_refuses_impossible_arguments(graph: rt.Graph, tmp_path: pathlib.Path) -> None:
    """A Saver refuses impossible arguments with TensorFlow's messages."""
    with pytest.raises(ValueError, match="No variables to save"):
        harness.Saver()
    v = rt.Variable(1.0, name="v")
    with pytest.raises(ValueError, match="restored with two names"):
        harness.Saver({"a": v, "b": v})
    with pytest.raises(ValueError, match="two variables have the same name"):
        harness.Saver({"a": [v, rt.Variable(1.0, name="w")]})
    with pytest.raises(TypeError, match="only variables can be saved"):
        harness.Saver([1])
    with pytest.raises(TypeError, match="must be a list or a dictionary"):
        harness.Saver(v)
    with pytest.raises(ValueError, match="transfer"):
        harness.Saver(transfer="pigeon")
    with rt.Session("", graph) as sess:
        _initialize(sess)
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match="is a file"):
            harness.Saver().save(sess, tmp_path / "file" / "m", 1)
        with pytest.raises(rt.InvalidArgumentError, match="negative"):
            harness.Saver().save(sess, tmp_path / "m", -1)


def test_empty_saver_does_nothing(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """A Saver with allow_empty and no variables saves and restores nothing."""
    saver = harness.Saver(allow_empty=True)
    assert saver.save(sess, tmp_path / "m", 1) is None
    saver.restore(sess, "anything")


# -- damage ----------------------------------------------------------------------------------------------------------


def _two_checkpoints(
    sess: rt.Session, directory: pathlib.Path
) -> tuple[harness.Saver, rt.Variable]:
    variable = rt.Variable(np.zeros(5000, np.float32), name="v")
    _initialize(sess)
    saver = harness.Saver()
    for step in (1, 2):
        sess.run(variable.assign(np.full(5000, step, np.float32)))
        saver.save(sess, directory / "m", step)
    return saver, variable


def test_flipped_bit_falls_back(
    sess: rt.Session, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A flipped bit is found by its checksum, and the checkpoint before is restored."""
    saver, variable = _two_checkpoints(sess, tmp_path)
    _flip(_largest_file(f"{tmp_path}/m/2"), 9000)
    with pytest.raises(rt.DataLossError, match=r"m/2 is damaged: .*checksum"):
        saver.restore(sess, f"{tmp_path}/m/2")
    sess.run(variable.assign(np.zeros(5000, np.float32)))
    assert saver.restore_latest(sess, str(tmp_path)) == f"{tmp_path}/m/1"
    assert sess.run(variable)[0] == 1
    assert "m/2 is damaged" in caplog.text


@pytest.mark.parametrize("what", ["shard", "manifest", "tree"])
def test_missing_file_falls_back(sess: rt.Session, tmp_path: pathlib.Path, what: str) -> None:
    """A checkpoint without one of its files is passed over for the checkpoint before."""
    saver, _ = _two_checkpoints(sess, tmp_path)
    newest = f"{tmp_path}/m/2"
    files = {
        "shard": _largest_file(newest),
        "manifest": pathlib.Path(newest, "bellwether.json"),
        "tree": pathlib.Path(newest, "default", "_METADATA"),
    }
    files[what].unlink()
    assert harness.latest_checkpoint(str(tmp_path)) == f"{tmp_path}/m/1"
    assert saver.restore_latest(sess, str(tmp_path)) == f"{tmp_path}/m/1"


def test_changed_manifest_is_found(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """A changed manifest is found to be damaged."""
    _two_checkpoints(sess, tmp_path)
    path = tmp_path / "m" / "2" / "bellwether.json"
    body = json.loads(path.read_text())
    body["manifest"]["step"] = 99
    path.write_text(json.dumps(body))
    with pytest.raises(rt.DataLossError, match="m/2 is damaged"):
        harness.load_checkpoint(f"{tmp_path}/m/2")
    assert harness.latest_checkpoint(str(tmp_path)) == f"{tmp_path}/m/1"


def test_all_damaged_is_an_error(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """A restore fails when all checkpoints are damaged."""
    saver, _ = _two_checkpoints(sess, tmp_path)
    for step in (1, 2):
        _largest_file(f"{tmp_path}/m/{step}").unlink()
    with pytest.raises(rt.DataLossError, match=r"all checkpoints .* are damaged"):
        saver.restore_latest(sess, str(tmp_path))


def test_damaged_step_is_replaced(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """A damaged step is replaced when training reaches the step again."""
    saver, variable = _two_checkpoints(sess, tmp_path)
    _largest_file(f"{tmp_path}/m/2").unlink()
    saver.restore_latest(sess, str(tmp_path))
    sess.run(variable.assign(np.full(5000, 2, np.float32)))
    saver.save(sess, tmp_path / "m", 2)
    assert saver.restore_latest(sess, str(tmp_path)) == f"{tmp_path}/m/2"


def test_leftovers_of_dead_chief_vanish(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """A save cleans away the leftovers of a dead chief and brings back the step that was being
    replaced.
    """
    _two_checkpoints(sess, tmp_path)
    again = tmp_path / "again"
    series = again / "m"
    shutil.copytree(tmp_path / "m" / "1", series / "1")
    # died before the new 2 was there
    shutil.copytree(tmp_path / "m" / "2", series / "replaced" / "2")
    shutil.copytree(tmp_path / "m" / "1", series / "removed" / "0")  # died while it removed 0
    for name in ("3.orbax-checkpoint-tmp", "3.orbax-checkpoint-tmp-synced"):
        (series / name / "default").mkdir(parents=True)
    harness.Saver().save(sess, series, 4)
    assert sorted(os.listdir(series)) == ["1", "2", "4"]


# -- background ------------------------------------------------------------------------------------------------------


def test_background_save_holds_first_values(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """A save in the background holds the values of its beginning."""
    variable = rt.Variable(np.ones(1 << 20, np.float32), name="v")
    _initialize(sess)
    handle = harness.Saver().save(sess, tmp_path / "m", 1, wait=False)
    for _ in range(20):
        sess.run(variable.assign_add(np.ones(1 << 20, np.float32)).op)
    path = handle.result(60)
    assert handle.done() and handle.exception() is None
    assert np.all(harness.load_variable(path, "v") == 1)
    assert sess.run(variable)[0] == 21


def test_waiting_saves_take_turns(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """Saves of two threads that both wait are made one after the other, each with a number of its own."""
    rt.Variable(np.zeros(100_000, np.float32))
    _initialize(sess)
    saver, both = harness.Saver(), threading.Barrier(2)

    def save(_: int) -> str:
        both.wait(60)
        return str(saver.save(sess, tmp_path / "m"))

    with ThreadPoolExecutor(2) as pool:
        paths = sorted(pool.map(save, range(2)))
    assert [os.path.basename(path) for path in paths] == ["0", "1"]
    assert sorted(os.listdir(tmp_path / "m")) == ["0", "1"] and not saver.failed


def test_overlapping_save_is_skipped(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """A save that is due while another runs is skipped and counted."""
    rt.Variable(np.ones(1 << 22, np.float32), name="v")
    _initialize(sess)
    saver = harness.Saver()
    handles = [saver.save(sess, tmp_path / "m", step, wait=False) for step in range(50)]
    saver.wait()
    assert handles[0] is not None
    assert saver.skipped == sum(h is None for h in handles) > 0
    assert len(saver.last_checkpoints) == min(5, 50 - saver.skipped)


def test_background_failure_surfaces(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """A failure in the background raises from its handle and the Saver, and training continues."""
    variable = rt.Variable(np.ones(1000, np.float32), name="v")
    _initialize(sess)
    saver = harness.Saver()
    good = saver.save(sess, tmp_path / "m", 1)
    # no directory can be made there
    os.symlink("/proc/self/nothing", tmp_path / "m" / "2.orbax-checkpoint-tmp")
    handle = saver.save(sess, tmp_path / "m", 2, wait=False)
    with pytest.raises(rt.OpError):
        handle.result(60)
    with pytest.raises(rt.OpError):
        saver.check_for_errors()
    assert saver.failed == 1
    sess.run(variable.assign_add(np.ones(1000, np.float32)).op)
    assert saver.last_checkpoints == [good]


def test_threads_end_with_the_saves(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """The threads of a save end with the save."""
    rt.Variable(1.0, name="v")
    _initialize(sess)
    before = set(threading.enumerate())
    saver = harness.Saver()
    for step in range(3):
        saver.save(sess, tmp_path / "m", step)
    started = set(threading.enumerate()) - before
    for thread in started:
        thread.join(60)
    assert [t.name for t in started if t.is_alive()] == []


# -- what else resumes -----------------------------------------------------------------------------------------------


def test_states_ride_in_the_checkpoint(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """The states of a trainer are saved with the variables and restored with them."""
    rt.Variable(1.0, name="v")
    _initialize(sess)
    state: dict[str, Any] = {
        "epoch": 3,
        "rng": np.arange(4, dtype=np.uint32),
        "name": "x",
        "b": b"\x00",
        "t": (1, [2]),
    }
    harness.checkpointable("data", lambda: state, lambda value: taken.append(value))
    taken: list[Any] = []
    try:
        saver = harness.Saver()
        path = saver.save(sess, tmp_path / "m", 1)
        state = {"epoch": 4}
        saver.restore_latest(sess, path)
        assert taken[0]["epoch"] == 3
        assert taken[0]["rng"].dtype == np.uint32 and taken[0]["rng"].tolist() == [0, 1, 2, 3]
        assert (taken[0]["name"], taken[0]["b"], taken[0]["t"]) == ("x", b"\x00", (1, [2]))
        assert harness.restore_states(path, "/job:worker/task:5") == []
    finally:
        harness.forget_checkpointable("data")


def test_unsavable_states_are_refused() -> None:
    """States that cannot be saved, and names with a space, are refused."""
    from harness.checkpoints.states import encode

    with pytest.raises(rt.InvalidArgumentError, match="holds a set"):
        encode({"x": {1, 2}})
    with pytest.raises(rt.InvalidArgumentError, match="empty or has a space"):
        harness.checkpointable("a b", lambda: 0, lambda value: None)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.from_regex(r"[a-z]+", fullmatch=True), inner)
        | st.tuples(inner)
    ),
    max_leaves=10,
)


@hypothesis.given(_JSON)
def test_any_state_comes_back(value: Any) -> None:
    """Any state comes back as it was."""
    from harness.checkpoints.states import decode, encode

    assert decode(json.loads(encode(value))) == value


# -- initial values --------------------------------------------------------------------------------------------------


def test_initial_values_come_from_checkpoint(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """init_from_checkpoint gives variables the values of a checkpoint, by a map of names."""
    rt.Variable(np.full(3, 7.0, np.float32), name="old/w")
    rt.Variable(np.full(2, 8.0, np.float32), name="old/b")
    rt.Variable(np.arange(4, dtype=np.float32), name="table")
    _initialize(sess)
    harness.Saver().save(sess, tmp_path / "m", 1)
    with rt.Graph().as_default() as other, rt.Session("", other) as fresh:
        w = rt.Variable(np.zeros(3, np.float32), name="new/w")
        b = rt.Variable(np.zeros(2, np.float32), name="new/b")
        parts = [rt.Variable(np.zeros(2, np.float32), name=f"part_{i}") for i in range(2)]
        rest = rt.Variable(np.float32(5), name="rest")
        tf1.train.init_from_checkpoint(str(tmp_path), {"old/": "new/", "table": parts})
        _initialize(fresh)
        found = fresh.run([w, b, *parts, rest])
        assert [f.tolist() for f in found] == [[7, 7, 7], [8, 8], [0, 1], [2, 3], 5]


def test_misfitting_initial_values_are_listed(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """Initial values that do not fit are listed in one error."""
    rt.Variable(np.zeros(3, np.float32), name="w")
    _initialize(sess)
    harness.Saver().save(sess, tmp_path / "m", 1)
    with rt.Graph().as_default():
        rt.Variable(np.zeros(4, np.int32), name="w")
        with pytest.raises(ValueError) as error:
            tf1.train.init_from_checkpoint(
                str(tmp_path), {"w": "w", "nothing": "w", "/": "nowhere/"}
            )
    for part in (
        "shape (3,)",
        "(4,)",
        "float32",
        "int32",
        "'nothing' is not in the checkpoint",
        "nowhere/",
    ):
        assert part in str(error.value)


# -- reading ---------------------------------------------------------------------------------------------------------


def test_reader_shows_names_and_shapes(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """A reader shows names, shapes and dtypes, and names a missing tensor."""
    _variables(VALUES)
    _initialize(sess)
    harness.Saver().save(sess, tmp_path / "m", 1)
    assert harness.load_checkpoint(str(tmp_path)).get_variable_to_shape_map()["layer/w"] == (3, 4)
    reader = tf1.train.NewCheckpointReader(str(tmp_path))
    assert reader.get_variable_to_dtype_map()["half"] == np.dtype(ml_dtypes.bfloat16)
    assert reader.has_tensor("scalar:0") and not reader.has_tensor("zz")
    with pytest.raises(rt.NotFoundError, match="Key zz not found"):
        reader.get_tensor("zz")
    assert "layer/w float32 [3, 4]" in reader.debug_string()
    assert harness.list_variables(str(tmp_path)) == sorted(
        (n, np.shape(v)) for n, v in VALUES.items()
    )


def test_iterator_yields_new_checkpoints(sess: rt.Session, tmp_path: pathlib.Path) -> None:
    """checkpoints_iterator yields each new checkpoint."""
    rt.Variable(1.0, name="v")
    _initialize(sess)
    saver = harness.Saver()
    seen = []
    saver.save(sess, tmp_path / "m", 0)
    for path in tf1.train.checkpoints_iterator(str(tmp_path), timeout=0.05):
        seen.append(os.path.basename(path))
        if len(seen) < 3:
            saver.save(sess, tmp_path / "m", len(seen))
    assert seen == ["0", "1", "2"]
