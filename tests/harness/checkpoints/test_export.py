"""Parameters outside of their cluster: as a pytree, and from there as files of other libraries."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import harness
import runtime as rt

pytestmark = pytest.mark.cluster

TREE = {
    "Dense_0": {
        "kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
        "bias": np.float32([1, 2, 3]),
    },
    "scale": np.float32(2.0),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    logdir = tmp_path_factory.mktemp("run")
    with rt.Graph().as_default(), rt.Session() as session:
        rt.variables(TREE, name="net")
        rt.Variable(np.zeros(4, np.float32), name="other")
        session.run(rt.global_variables_initializer())
        harness.Saver().save(session, logdir / "model.ckpt", 7)
    return logdir


def equal(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_load_pytree_returns_the_given_structure(checkpoint: pathlib.Path) -> None:
    """load_pytree returns a tree of the structure of its argument."""
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), TREE)
    for like in (TREE, abstract):
        equal(harness.load_pytree(checkpoint, like, name="net"), TREE)
    equal(harness.load_pytree(checkpoint / "model.ckpt" / "7", TREE, "net"), TREE)


def test_misfits_of_load_pytree_are_listed(checkpoint: pathlib.Path) -> None:
    """Names and shapes that do not fit are listed, and a missing checkpoint is an error."""
    with pytest.raises(
        rt.NotFoundError, match="has no Dense_0/bias, Dense_0/kernel, scale; it has .*give the name"
    ):
        harness.load_pytree(checkpoint, TREE)
    wider = {"Dense_0": {"kernel": np.zeros((2, 4)), "bias": np.zeros(4)}, "scale": np.float32(0)}
    with pytest.raises(
        rt.InvalidArgumentError, match=r"net/Dense_0/bias is \[3\] there and \[4\] in like; net/D"
    ):
        harness.load_pytree(checkpoint, wider, "net")
    with pytest.raises(ValueError, match="Couldn't find a checkpoint"):
        harness.load_pytree(checkpoint / "none", TREE)


def test_other_libraries_write_the_tree(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Orbax and jax.export write what load_pytree returns, by the recipes of the page on
    checkpoints.
    """
    params = harness.load_pytree(checkpoint, TREE, name="net")
    with ocp.StandardCheckpointer() as plain:
        plain.save(tmp_path / "params", params)
        plain.wait_until_finished()
        equal(plain.restore(tmp_path / "params"), TREE)
    exported = jax.export.export(jax.jit(lambda x: x @ params["Dense_0"]["kernel"]))(
        jax.ShapeDtypeStruct((1, 2), jnp.float32)
    )
    (tmp_path / "model.jax").write_bytes(exported.serialize())
    served = jax.export.deserialize(bytearray((tmp_path / "model.jax").read_bytes()))
    np.testing.assert_allclose(served.call(np.ones((1, 2), np.float32)), [[3.0, 5.0, 7.0]])


def test_safetensors_keep_the_names(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A safetensors file keeps the names and values of a checkpoint."""
    safetensors = pytest.importorskip("safetensors.numpy")
    reader = harness.load_checkpoint(str(checkpoint))
    safetensors.save_file(
        {name: reader.get_tensor(name) for name in reader.arrays}, tmp_path / "model.safetensors"
    )
    found = safetensors.load_file(tmp_path / "model.safetensors")
    assert sorted(found) == ["net/Dense_0/bias", "net/Dense_0/kernel", "net/scale", "other"]
    np.testing.assert_array_equal(found["net/Dense_0/kernel"], TREE["Dense_0"]["kernel"])  # type: ignore[index, call-overload]
    assert found["net/scale"].shape == ()
