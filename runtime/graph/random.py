"""Randomness: keys for every step, reproducible from the seeds of the graph and the operation."""

import functools
import zlib

import jax
import numpy as np

from runtime.graph.graph import Tensor, get_default_graph
from runtime.graph.op_kinds import ArrayFn, RandomKey, StepId
from runtime.tensor_spec import AnyArray

_STEP_ID = "step_id"


def step_id() -> Tensor:
    """Returns the tensor of the step's own id, uint32[4] (``op_kinds.StepId``)."""
    graph = get_default_graph()
    # All keys of a graph share the operation, and so the id of the step.
    found = graph.get_collection(_STEP_ID)
    if found:
        tensor: Tensor = found[0]
        return tensor
    # The first key may be made within any scope, and the shared operation must not stay there.
    with graph.name_scope(None), graph.control_dependencies(None), graph.device(None):
        op = graph.add_operation(
            "StepId", StepId(), outputs=[((4,), np.dtype(np.uint32))], name=_STEP_ID
        )
    graph.add_to_collection(_STEP_ID, op.outputs[0])
    return op.outputs[0]


def set_random_seed(seed: int | None) -> None:
    """Sets the graph-level seed.

    Every run of the program then draws the same numbers step by step.
    """
    get_default_graph().seed = seed


def random_key(seed: int | None = None, name: str = "random_key") -> Tensor:
    """Makes a JAX random key that is new in every step.

    With the seed of the graph or of the operation, the n-th step of any session draws the same
    numbers. Without a seed every session draws its own numbers.

    Args:
        seed: Seed of this operation.
        name: Operation name. Without ``seed`` the name distinguishes the operations of one graph.

    Returns:
        The raw data of a typed key (``jax.random.key``) of JAX's default implementation
        (``jax_default_prng_impl``): uint32[2] as a rule.

    Examples:
        >>> import jax
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     drawn = rt.call(jax.random.normal, rt.random_key(seed=1), (3,))
        ...     session.run(drawn).tolist() == session.run(drawn).tolist()
        False
    """
    graph = get_default_graph()
    label = graph.unique_name(name)
    impl = str(jax.config.jax_default_prng_impl)  # type: ignore[attr-defined]
    # The number of words depends on the implementation of keys.
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl))).shape
    fixed = seed is not None or graph.seed is not None
    # The hash of the name is equal in every process, unlike Python's own hash of strings.
    own = zlib.crc32(label.encode()) if seed is None else seed
    # A seed may be negative or large, and a key takes words of 32 bits.
    seeds = (graph.seed or 0) & 0xFFFFFFFF, own & 0xFFFFFFFF
    # Without a seed the nonce of the session joins, so that two sessions draw different numbers.
    make = _make_key(impl, (2, 3) if fixed else (0, 1, 2, 3))
    body = RandomKey(lambda step: make(np.array(seeds, np.uint32), step), make, seeds)
    outputs = [(words, np.dtype(np.uint32))]
    return graph.add_operation("RandomKey", body, [step_id()], outputs, name=f"{label}/").outputs[0]


@functools.cache
def _make_key(impl: str, words: tuple[int, ...]) -> ArrayFn:
    """Makes a key of the operation's seeds and of the words of the step's id."""

    def make_key(seeds: AnyArray, step: AnyArray) -> tuple[jax.Array]:
        key = jax.random.fold_in(jax.random.key(seeds[0], impl=impl), seeds[1])
        for word in words:
            key = jax.random.fold_in(key, step[word])
        return (jax.random.key_data(key),)

    # Without the loop, keys of this implementation that are made together would differ from those
    # made alone.
    return jax.custom_batching.sequential_vmap(make_key) if impl == "unsafe_rbg" else make_key
