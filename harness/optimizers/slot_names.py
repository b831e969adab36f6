"""Names of optimizer slots, from the leaves of an optax state."""

import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax


def slot_name(state: optax.OptState, path: Sequence[object]) -> str:
    """Returns ``adam/mu`` for the leaf at ``path`` of an optax state: the kind of state, then the field."""
    kind, fields = "", []
    for key in path:
        if hasattr(state, "_fields"):
            kind = _state_kind(type(state).__name__)
        if isinstance(key, jax.tree_util.GetAttrKey):
            state = getattr(state, key.name)
            fields.append(key.name)
        elif isinstance(key, jax.tree_util.SequenceKey):
            state = state[key.idx]
        elif isinstance(key, jax.tree_util.DictKey):
            state = state[key.key]
            fields.append(str(key.key))
    # The last field alone: fields before it belong to wrappers.
    return "/".join(part for part in (kind, *fields[-1:]) if part) or "state"


def _state_kind(name: str) -> str:
    """Converts the name of a state's class: ``ScaleByAdamState`` -> ``adam``, ``TraceState`` -> ``trace``."""
    bare = re.sub(r"^(ScaleBy|Scale)(?=[A-Z])|State$", "", name)
    return re.sub(r"(?<!^)(?=[A-Z])", "_", bare).lower() or "state"


def is_key(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Returns True for random keys."""
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
