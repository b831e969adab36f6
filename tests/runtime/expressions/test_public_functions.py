"""JAX's public functions are made of the table of operations; those that are not stand here with their reasons."""

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
import pytest
from jax import lax

from runtime.expressions.writer import NotInTableError, write_expressions

MODULES = (jax.lax, jax.lax.linalg, jax.nn, jnp.fft, jnp.linalg, jax.scipy.linalg)

LEFT_OUT = {
    "it is between the devices of a mesh, and a stage runs on one device": """
        all_gather all_to_all axis_index axis_size pbroadcast pcast pmax pmean pmin ppermute precv psend
        pshuffle psum psum_scatter pswapaxes psum_scatter_done psum_scatter_start ragged_all_to_all
        with_sharding_constraint all_gather_invariant all_gather_reduced preduced unreduced_psum
        unreduced_psum_scatter pvary reduced_vary_cast
    """,
    "it computes with shapes and names, and makes no operation": """
        ConvGeneralDilatedDimensionNumbers PrecisionLike broadcast_shapes conv_dimension_numbers
        conv_general_permutations conv_general_shape_tuple conv_shape_tuple conv_transpose_shape_tuple dtype
        get_scaled_dot_general_config padtype_to_pads reduce_window_shape_tuple
    """,
    "it orders effects, of which a stage has none": "after_all create_token dce_sink",
    "it is cuDNN's, for some GPUs": "scaled_dot_general scaled_matmul",
    "no public function makes geqrf; qr and householder_product do": "qr_multiply",
}
REASONS = {name: reason for reason, names in LEFT_OUT.items() for name in names.split()}

A: Any = np.random.default_rng(0).uniform(0.1, 0.9, (4, 4)).astype(np.float32)
V, WHOLE, S = A[0], (A * 10).astype(np.int32), np.float32(0.3)
AT = np.array([[0], [2]], np.int32)
TRIED: tuple[tuple[Any, ...], ...] = (
    *((A,) * n for n in (1, 2, 3)),
    *((V,) * n for n in (1, 2)),
    *((WHOLE,) * n for n in (1, 2, 3)),
    *((A.astype(np.complex64),) * n for n in (1, 2)),
    *((A > 0.5,) * n for n in (1, 2)),
    *(
        (A > 0.5, A, A),
        (A, 0),
        (A, (0,)),
        (A, 1, 0),
        (S, A, S),
        (V, V, V, A),
        (A, V),
        (WHOLE, 3),
        (4,),
    ),
)
"""Arguments with which a function is tried that has no sample of its own."""

IMAGE, KERNEL = np.ones((1, 4, 8, 8), np.float32), np.ones((2, 4, 3, 3), np.float32)
GATHERED = lax.GatherDimensionNumbers((1,), (0,), (0,))
SCATTERED = lax.ScatterDimensionNumbers((1,), (0,), (0,))
DOT = (((1,), (0,)), ((), ()))
SAMPLES: dict[str, Callable[[], Any]] = {
    "argmax": lambda: lax.argmax(A, 0, np.int32),
    "argmin": lambda: lax.argmin(A, 0, np.int32),
    "associative_scan": lambda: lax.associative_scan(jnp.add, A),
    "bitcast_convert_type": lambda: lax.bitcast_convert_type(A, np.int32),
    "broadcast_in_dim": lambda: lax.broadcast_in_dim(V, (4, 4), (1,)),
    "broadcasted_iota": lambda: lax.broadcasted_iota(np.int32, (2, 3), 1),
    "cho_solve": lambda: jax.scipy.linalg.cho_solve((A, True), V),
    "composite": lambda: lax.composite(jnp.sin, "my.sin")(A),
    "cond": lambda: lax.cond(jnp.asarray(S) > 0, jnp.sin, jnp.cos, A),
    "conv": lambda: lax.conv(IMAGE, KERNEL, (1, 1), "SAME"),
    "conv_general_dilated": lambda: lax.conv_general_dilated(IMAGE, KERNEL, (1, 1), "SAME"),
    "conv_general_dilated_local": lambda: lax.conv_general_dilated_local(
        IMAGE, np.ones((2, 36, 6, 6), np.float32), (1, 1), "VALID", (3, 3)
    ),
    "conv_general_dilated_patches": lambda: lax.conv_general_dilated_patches(
        IMAGE, (3, 3), (1, 1), "SAME"
    ),
    "conv_transpose": lambda: lax.conv_transpose(
        IMAGE, KERNEL, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
    ),
    "conv_with_general_padding": lambda: lax.conv_with_general_padding(
        IMAGE, KERNEL, (1, 1), "SAME", None, None
    ),
    "convert_element_type": lambda: lax.convert_element_type(A, np.int32),
    "cross": lambda: jnp.linalg.cross(V[:3], V[1:]),
    "custom_linear_solve": lambda: lax.custom_linear_solve(
        lambda x: 2 * x, V, lambda _, b: b / 2, symmetric=True
    ),
    "custom_root": lambda: lax.custom_root(
        lambda x: x * x - 2, S, lambda f, x: x - f(x), lambda g, y: y / g(jnp.ones_like(y))
    ),
    "dft": lambda: jax.scipy.linalg.dft(4),
    "dot_general": lambda: lax.dot_general(A, A, DOT),
    "dynamic_slice": lambda: lax.dynamic_slice(A, (0, 1), (2, 2)),
    "dynamic_update_index_in_dim": lambda: lax.dynamic_update_index_in_dim(A, V, 0, 0),
    "dynamic_update_slice": lambda: lax.dynamic_update_slice(A, A[:2], (0, 0)),
    "dynamic_update_slice_in_dim": lambda: lax.dynamic_update_slice_in_dim(A, A[:2], 0, 0),
    "eigh_tridiagonal": lambda: jax.scipy.linalg.eigh_tridiagonal(V, V[1:], eigvals_only=True),
    "empty": lambda: lax.empty((3,), np.float32),
    "fft": lambda: lax.fft(A.astype(np.complex64), lax.FftType.FFT, (4,)),
    "fori_loop": lambda: lax.fori_loop(0, 3, lambda i, x: x + i, A),
    "full": lambda: lax.full((2,), S),
    "funm": lambda: jax.scipy.linalg.funm(A, jnp.exp),
    "gather": lambda: lax.gather(A, AT, GATHERED, (1, 4)),
    "index_take": lambda: lax.index_take(A, (AT[:, 0],), (0,)),
    "invhilbert": lambda: jax.scipy.linalg.invhilbert(4),
    "iota": lambda: lax.iota(np.int32, 3),
    "leslie": lambda: jax.scipy.linalg.leslie(V, V[1:]),
    "lu_pivots_to_permutation": lambda: lax.linalg.lu_pivots_to_permutation(WHOLE[0], 4),
    "lu_solve": lambda: jax.scipy.linalg.lu_solve((A, WHOLE[0]), V),
    "map": lambda: lax.map(jnp.sin, A),
    "multi_dot": lambda: jnp.linalg.multi_dot([A, A, A]),
    "ormqr": lambda: lax.linalg.ormqr(A, V, A),
    "pad": lambda: lax.pad(A, S, ((1, 1, 0), (0, 0, 0))),
    "platform_dependent": lambda: lax.platform_dependent(A, cpu=jnp.sin, cuda=jnp.cos),
    "ragged_dot": lambda: lax.ragged_dot(A, A[None], WHOLE[0, :1]),
    "ragged_dot_general": lambda: lax.ragged_dot_general(
        A, A[None], WHOLE[0, :1], lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
    ),
    "reduce": lambda: lax.reduce(A, S, lax.add, (0,)),
    "reduce_and": lambda: lax.reduce_and(A > 0, (0,)),
    "reduce_or": lambda: lax.reduce_or(A > 0, (0,)),
    "reduce_window": lambda: lax.reduce_window(A, S, lax.add, (2, 2), (1, 1), "SAME"),
    "reduce_xor": lambda: lax.reduce_xor(A > 0, (0,)),
    "rng_uniform": lambda: lax.rng_uniform(S, S + 1, (3,)),
    "scan": lambda: lax.scan(lambda s, x: (s + x, s), V, A),
    **{
        f"scatter{how}": lambda how=how: getattr(lax, f"scatter{how}")(A, AT, A[:2], SCATTERED)  # type: ignore[misc]
        for how in ("", "_add", "_max", "_min", "_mul", "_sub")
    },
    "scatter_apply": lambda: lax.scatter_apply(A, AT, jnp.sin, SCATTERED, update_shape=(2, 4)),
    "slice": lambda: lax.slice(A, (0, 0), (2, 2)),
    "slice_in_dim": lambda: lax.slice_in_dim(A, 0, 2),
    "split": lambda: lax.split(A, (1, 3)),
    "squeeze": lambda: lax.squeeze(A[None], (0,)),
    "switch": lambda: lax.switch(jnp.asarray(WHOLE[0, 0]), [jnp.sin, jnp.cos], A),
    "tensorinv": lambda: jnp.linalg.tensorinv(A.reshape(2, 2, 4)),
    "tile": lambda: lax.tile(A, (2, 1)),
    "transpose": lambda: lax.transpose(A, (1, 0)),
    "while_loop": lambda: lax.while_loop(lambda x: x.sum() < 40, lambda x: x * 2, A),
}


def functions() -> Iterator[tuple[ModuleType, str]]:
    for module in MODULES:
        for name, value in vars(module).items():
            if (
                not name.startswith("_")
                and callable(value)
                and not inspect.isclass(value)
                and name not in REASONS
            ):
                yield module, name


def traced(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """The jaxpr of a call whose arrays are arguments, and whose numbers and tuples are what they are."""
    arrays = [a for a in arguments if isinstance(a, np.ndarray | np.generic)]

    def call(*given: Any) -> Any:
        rest = iter(given)
        return jax.tree.leaves(
            function(
                *(next(rest) if isinstance(a, np.ndarray | np.generic) else a for a in arguments)
            )
        )

    with jax.enable_x64(True):
        return jax.make_jaxpr(call)(*arrays)


@pytest.mark.filterwarnings("ignore")
def test_public_functions_are_in_table() -> None:
    """The public functions of JAX are made of operations of the table."""
    without, missing = [], {}
    for module, name in functions():
        sample = SAMPLES.get(name)
        jaxpr = None if sample is None else traced(sample, ())
        for arguments in TRIED if sample is None else ():
            try:
                jaxpr = traced(getattr(module, name), arguments)
                break
            except Exception:
                continue
        if jaxpr is None:
            without.append(f"{module.__name__}.{name}")
            continue
        try:
            write_expressions(jaxpr)
        except NotInTableError as error:
            missing[f"{module.__name__}.{name}"] = str(error)
    assert not missing
    assert not without, "they have no sample"


def test_platform_branch_follows_the_task() -> None:
    """A branch by platform is the branch of the task's platform."""
    jaxpr = traced(lambda a: lax.platform_dependent(a, cpu=jnp.sin, cuda=jnp.cos), (A,))
    assert write_expressions(jaxpr) == write_expressions(traced(jnp.sin, (A,)))
    assert write_expressions(jaxpr, "cuda") == write_expressions(traced(jnp.cos, (A,)))
    with pytest.raises(NotInTableError, match="nothing is said of tpu"):
        write_expressions(jaxpr, "tpu")
