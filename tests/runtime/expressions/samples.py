"""JAX functions of one 4 x 4 array of float32, each under the names of the rows of the table that it is there for."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Fn = Callable[[Any], Any]
IMAGE: Any = np.linspace(0, 1, 8 * 8 * 4, dtype=np.float32).reshape(1, 8, 8, 4)
KERNEL: Any = np.linspace(-1, 1, 2 * 8 * 3 * 3, dtype=np.float32).reshape(2, 8, 3, 3)


def key() -> Any:
    return jax.random.key(0)


def whole(a: Any) -> Any:
    return (a * 100).astype(jnp.int32)


UNARY = """
    abs acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1
    floor is_finite lgamma log log1p logistic neg rsqrt sign sin sinh sqrt square tan tanh
""".split()
BINARY = "add atan2 div eq ge gt igamma igamma_grad_a igammac le lt max min mul ne nextafter pow rem sub".split()
OF_INTEGERS = """
    bitwise_and bitwise_or bitwise_xor shift_left shift_right_arithmetic shift_right_logical
""".split()
PRIMITIVE = {"bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_not": "not"}


def _with_two(fn: Any, a: Any) -> Any:
    return fn(a, a.T + 0.1)


def _with_integers(fn: Any, a: Any) -> Any:
    return fn(whole(a), whole(a.T) % 8)


def _both_ways(fn: Any, a: Any) -> Any:
    return fn(a, 0), fn(a, 1, reverse=True)


def _with_key(made: Any, a: Any) -> Any:
    return jax.random.normal(made, (2,)) + a[0, 0]


def _elementwise() -> dict[str, Fn]:
    made: dict[str, Fn] = {name: getattr(lax, name) for name in UNARY}
    made |= {name: partial(_with_two, getattr(lax, name)) for name in BINARY}
    made |= {
        PRIMITIVE.get(name, name): partial(_with_integers, getattr(lax, name))
        for name in OF_INTEGERS
    }
    return made | {
        "acosh": lambda a: lax.acosh(a + 1),
        "add_any": lambda a: jax.vjp(lambda x: (x * 2, jnp.sin(x)), a)[1]((a, a)),
        "clamp": lambda a: lax.clamp(jnp.float32(0.2), a, jnp.float32(0.8)),
        "clz": lambda a: lax.clz(whole(a)),
        "complex conj real imag": lambda a: [
            f(lax.conj(lax.complex(a, a.T)) ** 2) for f in (lax.real, lax.imag)
        ],
        "eq_to le_to lt_to": lambda a: [
            getattr(jax.extend.core.primitives, f"{f}_to_p").bind(a, a.T)
            for f in ("eq", "le", "lt")
        ],
        "log2 one_minus_square polynomial": lambda a: (
            [lax.log2(a), lax.one_minus_square(a), lax.polynomial(a, [a, 2.0, 3.0])]
            if hasattr(lax, "log2")
            else a
        ),
        "integer_pow": lambda a: a**3 + a**-2,
        "mulhi": lambda a: lax.mulhi(whole(a), whole(a) << 20) if hasattr(lax, "mulhi") else a,
        "not": lambda a: lax.bitwise_not(whole(a)),
        "optimization_barrier": lambda a: lax.optimization_barrier((a, a + 1)),
        "polygamma": lambda a: lax.polygamma(jnp.ones_like(a), a),
        "population_count": lambda a: lax.population_count(whole(a)),
        "regularized_incomplete_beta": lambda a: jax.scipy.special.betainc(a, a.T, a),
        "round": lambda a: [lax.round(a * 3, method) for method in lax.RoundingMethod],
        "select_n": lambda a: lax.select_n(a > 0.5, a, -a),
        "zeta": lambda a: lax.zeta(a + 1.5, a),
    }


def _reductions() -> dict[str, Fn]:
    pool = lambda a: lax.reduce_window(a, -jnp.inf, lax.max, (2, 2), (1, 2), "SAME")  # noqa: E731
    made: dict[str, Fn] = {
        f"reduce_{name}": partial(getattr(jnp, name), axis=0)
        for name in ("max", "min", "prod", "sum")
    }
    made |= {
        name: partial(_both_ways, getattr(lax, name))
        for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
    }
    return made | {
        "approx_top_k": lambda a: (lax.approx_max_k(a, 2), lax.approx_min_k(a, 2)),
        "argmax argmin": lambda a: (jnp.argmax(a, 1), jnp.argmin(a, 0)),
        "reduce": lambda a: lax.reduce(a, np.float32(1), lambda x, y: x * y + 1, (0,)),
        "reduce of two": lambda a: lax.reduce(
            (a, a.T),
            (np.float32(0), np.float32(1)),
            lambda x, y: (x[0] + y[0], x[1] * y[1] - x[0]),
            (1,),
        ),
        "reduce_and reduce_or reduce_xor": lambda a: [
            f(a > 0.3, (0,)) for f in (lax.reduce_and, lax.reduce_or, lax.reduce_xor)
        ],
        "reduce_window": lambda a: lax.reduce_window(
            a, np.float32(2), lambda x, y: x * y + 1, (2, 2), (1, 1), "VALID"
        ),
        "reduce_window_max": pool,
        "reduce_window_min": lambda a: lax.reduce_window(
            a, jnp.inf, lax.min, (2, 1), (1, 1), ((1, 0), (0, 0))
        ),
        "reduce_window_sum": lambda a: lax.reduce_window(
            a, 0.0, lax.add, (2, 2), (2, 2), "VALID", (2, 1), (1, 2)
        ),
        "select_and_gather_add": lambda a: jax.jvp(pool, (a,), (a.T,)),
        "select_and_scatter_add": jax.grad(lambda a: pool(a).sum()),
        "searchsorted": lambda a: jnp.searchsorted(a[0], a[1]),
        "sort": lambda a: (
            jnp.argsort(a, 0),
            jnp.sort(a, 1, descending=True),
            jnp.lexsort((a[0], a[1])),
        ),
        "top_k": lambda a: lax.top_k(a, 2),
    }


def _shapes() -> dict[str, Fn]:
    at = jnp.array([0, 3, 3], jnp.int32)
    return {
        "bitcast_convert_type": lambda a: lax.bitcast_convert_type(a, jnp.uint32),
        "broadcast_in_dim reshape squeeze": lambda a: (
            a[None, :, 0],
            a.reshape(2, 8),
            a.ravel(order="F"),
        ),
        "concatenate stack tile": lambda a: (
            jnp.concatenate([a, a.T]),
            jnp.stack([a, a]),
            jnp.tile(a, (2, 1)),
        ),
        "convert_element_type": lambda a: [
            a.astype(t) for t in ("bfloat16", "int8", "bool", "float16", "complex64")
        ],
        "narrow types": lambda a: [a.astype(t) for t in ("float8_e4m3fn", "int4", "uint4")],
        "dynamic_slice": lambda a: lax.dynamic_slice(
            a, (whole(a)[0, 0] % 3, jnp.int32(-1)), (2, 2)
        ),
        "dynamic_update_slice": lambda a: lax.dynamic_update_slice(
            a, a[:2, :2], (whole(a)[0, 0], jnp.int32(1))
        ),
        "empty": lambda a: lax.empty((3,), jnp.float32),
        "gather": lambda a: (
            a[at],
            a.at[at + 2].get(mode="fill", fill_value=7),
            a[at, at],
            jnp.take(a, at, 1),
        ),
        "gather of complex numbers": lambda a: (
            (a + 0j).at[at + 2].get(mode="fill", fill_value=2 - 5j)
        ),
        "gather of integers": lambda a: whole(a).at[at + 2].get(mode="fill"),
        "gather with batches": lambda a: jnp.take_along_axis(a, jnp.argsort(a, 1), 1),
        "iota": lambda a: lax.broadcasted_iota(jnp.int32, (2, 3), 1) + jnp.arange(3),
        "pad": lambda a: lax.pad(a, a[0, 0], ((1, -1, 2), (0, 2, 0))),
        "reduce_precision": lambda a: lax.reduce_precision(a, 5, 10),
        "rev": lambda a: a[::-1, ::-1],
        "scatter": lambda a: (a.at[at].set(2.0, mode="drop"), a.at[1:3, 2].set(0.0)),
        "scatter with a function": lambda a: a.at[jnp.array([0, 2])].apply(jnp.sin),
        "scatter-add": lambda a: (
            a.at[at].add(a[:3]),
            jax.ops.segment_sum(a, jnp.array([0, 1, 1, 0]), 2),
        ),
        "scatter-max": lambda a: a.at[at].max(0.5),
        "scatter-min": lambda a: a.at[at].min(0.5),
        "scatter-mul": lambda a: a.at[at, at].multiply(3.0),
        "scatter-sub": lambda a: a.at[at].subtract(a[1:]),
        "slice": lambda a: a[1:4:2, :3],
        "split": lambda a: jnp.split(a, (1, 3)),
        "transpose": lambda a: a.T,
        "unstack": lambda a: jnp.unstack(a),
        "resize": lambda a: jax.image.resize(a, (9, 9), "bicubic"),
    }


def _products() -> dict[str, Fn]:
    return {
        "conv_general_dilated": lambda a: lax.conv_general_dilated(
            IMAGE * a[0, 0],
            KERNEL.transpose(2, 3, 1, 0)[:, :, :4],
            (2, 1),
            ((1, 0), (2, 1)),
            (1, 2),
            (2, 1),
            ("NHWC", "HWIO", "NHWC"),
        ),
        "gradient of a convolution": jax.grad(
            lambda a: jnp.sum(
                lax.conv_general_dilated(
                    IMAGE,
                    a.reshape(2, 2, 4, 1),
                    (1, 1),
                    "SAME",
                    dimension_numbers=("NHWC", "HWIO", "NHWC"),
                )
                ** 2
            )
        ),
        "dot_general": lambda a: (
            a @ a,
            jnp.einsum("ij,kj->ik", a, a),
            a[None] @ a[None],
            jnp.dot(a[0], a[1]),
        ),
        "precision": lambda a: jnp.dot(
            a, a, precision="highest", preferred_element_type=jnp.float64
        ),
        "ragged_dot_general": lambda a: lax.ragged_dot(
            a, jnp.stack([a, a.T]), jnp.array([1, 3], jnp.int32)
        ),
        "scaled_dot": lambda a: lax.scaled_dot(a, a.T),
        "fft": lambda a: (jnp.fft.fft(a), jnp.fft.rfft2(a), jnp.fft.irfft(jnp.fft.rfft(a))),
        "attention": lambda a: jax.nn.dot_product_attention(*[a[None, :, None, :]] * 3),
        "linear system": lambda a: jax.scipy.sparse.linalg.cg(lambda x: a @ (a.T @ x) + x, a[0])[0],
    }


def _linear_algebra() -> dict[str, Fn]:
    linalg = lax.linalg
    return {
        "cholesky": lambda a: (
            jnp.linalg.cholesky(a @ a.T + jnp.eye(4)),
            jax.scipy.linalg.cho_factor(a @ a.T)[0],
        ),
        "cholesky_update": lambda a: linalg.cholesky_update(jnp.triu(a), a[0]),
        "determinants": lambda a: (
            jnp.linalg.det(a),
            jnp.linalg.slogdet(a),
            jnp.linalg.diagonal(a),
        ),
        "eig": lambda a: jnp.linalg.eig(a),
        "eigh": lambda a: (jnp.linalg.eigh(a + a.T), jnp.linalg.eigvalsh(a + 1j * a)),
        "gradients of decompositions": jax.grad(
            lambda a: jnp.linalg.cholesky(a @ a.T + jnp.eye(4)).sum() + jnp.linalg.svd(a)[1].sum()
        ),
        "hessenberg": lambda a: linalg.hessenberg(a),
        "householder_product": lambda a: linalg.householder_product(a, a[0]),
        "lu lu_pivots_to_permutation": lambda a: (
            linalg.lu(a),
            linalg.lu_pivots_to_permutation(linalg.lu(a)[1], 4),
            jnp.linalg.solve(a, a[0]),
        ),
        "lu of a batch": lambda a: jnp.linalg.solve(jnp.stack([a, a.T]), a),
        "ormqr": lambda a: linalg.ormqr(a, a[0], a, left=False, transpose=True),
        "qr": lambda a: (
            jnp.linalg.qr(a),
            jax.scipy.linalg.qr(a[:, :2], mode="economic", pivoting=True),
        ),
        "schur": lambda a: jax.scipy.linalg.schur(a),
        "svd": lambda a: (
            jnp.linalg.svd(a[:3]),
            jnp.linalg.svd(a, compute_uv=False),
            jnp.linalg.pinv(a),
        ),
        "symmetric_product": lambda a: linalg.symmetric_product(a, a, alpha=2.0, beta=0.5),
        "triangular_solve": lambda a: (
            jax.scipy.linalg.solve_triangular(a, a[0], lower=True),
            jax.scipy.linalg.solve_triangular(a, a, trans=1, unit_diagonal=True),
        ),
        "tridiagonal": lambda a: linalg.tridiagonal(a + a.T),
        "tridiagonal_solve": lambda a: linalg.tridiagonal_solve(a[0], a[1] + 3, a[2], a),
        "without elements": lambda a: (
            jnp.linalg.cholesky(a[:0, :0]),
            jnp.linalg.svd(a[:0]),
            jnp.linalg.qr(a[:, :0]),
        ),
        "not a number": lambda a: (
            jnp.linalg.eigh(a * np.nan),
            jnp.linalg.svd(a * np.nan),
            jnp.linalg.inv(a * np.inf),
        ),
    }


def _random() -> dict[str, Fn]:
    return {
        "random_seed random_bits random_split": lambda a: (
            jax.random.normal(jax.random.split(key())[0], (3,)) + a[0, 0]
        ),
        "random_fold_in random_wrap random_unwrap": lambda a: jax.random.uniform(
            jax.random.wrap_key_data(jax.random.key_data(jax.random.fold_in(key(), whole(a)[0, 0])))
        ),
        "random_gamma": lambda a: jax.random.gamma(key(), a),
        "keys that are mapped over": lambda a: jax.vmap(lambda k, x: jax.random.normal(k) + x)(
            jax.random.split(key(), 4), a
        ),
        "a key that was made outside": partial(_with_key, jax.random.key(3)),
        "threefry2x32": lambda a: jax.random.bits(jax.random.PRNGKey(0), (3,), "uint8"),
        "threefry2x32 itself": lambda a: jax.extend.random.threefry_2x32(
            jnp.array([1, 2], jnp.uint32), whole(a).astype(jnp.uint32)
        ),
        "rng_bit_generator": lambda a: lax.rng_bit_generator(jnp.ones(4, jnp.uint32), (3, 2)),
        "rbg": lambda a: jax.random.normal(jax.random.key(0, impl="rbg"), (3,)),
        "rng_uniform": lambda a: lax.rng_uniform(a[0, 0], a[0, 0], (3,)),
        "poisson": lambda a: jax.random.poisson(key(), a),
        "categorical": lambda a: jax.random.categorical(key(), a),
        "permutation": lambda a: jax.random.permutation(key(), a),
        "truncated normal": lambda a: jax.random.truncated_normal(key(), -1.0, 1.0, (4, 4)) + a,
        "binomial": lambda a: jax.random.binomial(key(), 10, a),
    }


def _control() -> dict[str, Fn]:
    return {
        "cond": lambda a: lax.cond(
            a[0, 0] > 0.5, lambda x: (jnp.sin(x), x), lambda x: (x, jnp.cos(x)), a
        ),
        "switch": lambda a: lax.switch(whole(a)[0, 0], [jnp.sin, jnp.cos, jnp.tan], a),
        "scan": lambda a: lax.scan(
            lambda s, x: (s + x * a[0], (s, x)), jnp.zeros(4, jnp.float32), a, reverse=True
        ),
        "scan that is unrolled": lambda a: lax.scan(
            lambda s, x: (s * x + 1, None), a[0], a, unroll=2
        ),
        "scan without anything": lambda a: lax.fori_loop(0, 3, lambda i, s: s * 0.5 + i, a),
        "associative scan": lambda a: lax.associative_scan(jnp.add, a),
        "while": lambda a: lax.while_loop(
            lambda s: s[0].sum() < 40, lambda s: (s[0] + a, s[1] + 1), (a, 0)
        ),
        "while that was mapped": jax.vmap(
            lambda x: lax.while_loop(lambda s: s.sum() < 9, lambda s: s * 2 + 1, x)
        ),
        "loops in branches in loops": lambda a: lax.fori_loop(
            0,
            3,
            lambda i, s: lax.cond(
                i > 1, lambda x: lax.fori_loop(0, i, lambda j, y: y + j, x), jnp.sin, s
            ),
            a,
        ),
        "gradient of a scan": jax.grad(
            lambda a: lax.scan(lambda s, x: (jnp.tanh(s + x), s), a[0], a)[1].sum()
        ),
        "calls": lambda a: jax.jit(lambda x: jax.jit(jnp.sin)(x) + jax.nn.relu(x) + jax.nn.gelu(x))(
            a
        ),
        "rematerialised": jax.grad(
            lambda a: jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(a))
        ),
        "custom derivatives": lambda a: jax.nn.softplus(a) + jax.nn.silu(a) + optax_like(a),
        "nothing that is used": lambda a: jnp.ones((4, 4)),
        "an argument": lambda a: (a, a),
        "large constants": lambda a: a[0, 0] * np.arange(5000.0) + np.zeros((100, 100)).sum(),
    }


@jax.custom_vjp
def optax_like(x: Any) -> Any:
    return jnp.where(x > 0.5, x, x * x)


optax_like.defvjp(lambda x: (optax_like(x), x), lambda x, g: (g * x,))

SAMPLES: dict[str, Fn] = {
    **_elementwise(),
    **_reductions(),
    **_shapes(),
    **_products(),
    **_linear_algebra(),
    **_random(),
    **_control(),
}
"""By name."""
