"""Kernels of the user's own, which only a device of the session's process computes: ``jax.ffi`` and Pallas."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

import runtime as rt
from runtime.plan.exporting import own_program
from runtime.tensor_spec import TensorSpec
from tests.runtime.kit import TARGET, servers

SIZE = 8
SPEC = TensorSpec((SIZE, SIZE), np.dtype(np.float32))
MATRIX = np.eye(SIZE, dtype=np.float32) * 4


@pytest.fixture(autouse=True, scope="module")
def lapack() -> None:
    """Has jaxlib load LAPACK."""
    jnp.linalg.cholesky(np.eye(2, dtype=np.float32)).block_until_ready()


def factorize(a: jax.Array, *, side_effect: bool = False) -> jax.Array:
    """The Cholesky factor of a diagonal matrix, by a function of LAPACK that jaxlib registers."""
    results = jax.ShapeDtypeStruct(a.shape, a.dtype), jax.ShapeDtypeStruct((), np.int32)
    call = jax.ffi.ffi_call("lapack_spotrf_ffi", results, has_side_effect=side_effect)
    factor: jax.Array = call(a, uplo=np.uint8(ord("L")))[0]
    return factor


def halve(a: jax.Array) -> jax.Array:
    """Half of an array, by a Pallas kernel."""

    def kernel(source: Any, target: Any) -> None:
        target[...] = source[...] * 0.5

    halved: jax.Array = pallas.pallas_call(
        kernel, jax.ShapeDtypeStruct(a.shape, a.dtype), interpret=True
    )(a)
    return halved


def halve_in_place(a: jax.Array) -> jax.Array:
    """Half of an array, in memory that the function makes and changes."""
    memory = jax.new_ref(a)
    memory[...] *= 0.5
    return memory[...]


KERNELS = {
    "ffi": lambda a: factorize(a),
    "ffi with an effect": lambda a: factorize(a, side_effect=True),
    "pallas": halve,
    "mutable memory": halve_in_place,
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_worker_trains_by_own_kernel(kernel: Any) -> None:
    """A worker trains a variable of a ps by a kernel of the user's own, with the user's own gradient."""
    fn = jax.custom_vjp(kernel)
    fn.defvjp(lambda a: (kernel(a), None), lambda _, grad: (kernel(MATRIX) * grad,))
    with servers(sockets=True, ps=1, worker=1) as cluster:
        setter = rt.replica_device_setter(cluster=cluster[TARGET].cluster, worker_device=TARGET)
        with rt.device(setter):
            w = rt.Variable(MATRIX, name="w")
            loss = rt.call(lambda a: fn(a).sum(), w, name="loss")
            update = w.assign_sub(rt.gradients(loss, [w])[0])
        with rt.Session(cluster[TARGET].target) as session:
            session.run(w.initializer)
            assert session.run([loss, update.op])[0] == 2 * SIZE
            np.testing.assert_allclose(session.run(w), MATRIX / 2)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_own_kernel_stays_in_its_process(kernel: Any) -> None:
    """A kernel of the user's own is refused for a ps in one line, which names the operation and the cure."""
    with servers(sockets=True, ps=1, worker=1) as cluster:
        with rt.device("/job:ps/task:0"):
            made = rt.call(kernel, rt.constant(MATRIX), name="mine")
        with (
            rt.Session(cluster[TARGET].target) as session,
            pytest.raises(rt.InvalidArgumentError, match="mine") as caught,
        ):
            session.run(made)
    message = str(caught.value)
    assert "place them on a device of this process" in message
    assert "\n" not in message


def test_target_may_be_named_callback() -> None:
    """A function of the user's own is no Python callback, whatever its name."""

    def run(a: jax.Array, apply: Any = None) -> tuple[jax.Array]:
        return (jax.ffi.ffi_call("my_callback", jax.ShapeDtypeStruct(a.shape, a.dtype))(a),)

    assert b"my_callback" in own_program(run, [SPEC], "cpu").blob
