"""Parameters and gradients in fewer bits on their way between a ps and a worker."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import runtime as rt
from runtime.lowlevel import DType

_COLLECTION = "bellwether/on_wire"


def on_wire(params: Any, dtype: DTypeLike = jnp.bfloat16) -> Any:
    """Prepares the parameters of a model to cross the wire in ``dtype``.

    Their gradients cross in ``dtype``, too. A ps rounds the values that it sends, and the worker
    computes in the dtype of the variable. The worker rounds gradients before the push, and the ps
    adds them in the dtype of the variable. So bfloat16 halves the bytes at 8 bits of precision, and
    the variables keep small updates. For asynchronous training.

        params = rt.variables(model.init(seed), name="mlp")
        loss = rt.call(model.loss_fn, harness.on_wire(params), images, labels)

    Args:
        params: pytree of variables. Variables that are not floating point, or already as narrow,
            stay as they are.
        dtype: floating point, narrower than the variables.

    Returns:
        The same structure with tensors of the variables' shapes and dtypes.

    Raises:
        InvalidArgumentError: ``dtype`` is not floating point.
    """
    narrow = jnp.dtype(dtype)
    if not jnp.issubdtype(narrow, np.floating):
        raise rt.InvalidArgumentError(
            f"on_wire: {narrow.name} is not floating point; use bfloat16 or float16"
        )
    return jax.tree.map(lambda variable: _travelling_value(variable, narrow), params)


def _travelling_value(variable: rt.Variable, narrow: DType) -> Any:
    own = variable.dtype
    if not jnp.issubdtype(own, np.floating) or own.itemsize <= narrow.itemsize:
        return variable
    name = variable.spec.name.rpartition("/")[2]
    # The ps rounds, so that the narrow value crosses the wire, whatever scopes the caller has
    # opened.
    with rt.device(None), rt.device(variable.device or None):
        sent = rt.call(lambda value: value.astype(narrow), variable, name=f"{name}_to_wire")
    received = rt.call(lambda value: value.astype(own), sent, name=f"{name}_from_wire")
    sent.graph.add_to_collection(_COLLECTION, (variable, received, narrow))
    return received


def gradients_of(loss: rt.Tensor, variables: Sequence[rt.Variable]) -> list[rt.Tensor | None]:
    """Computes ``runtime.gradients`` of variables, through the tensors that came over the wire."""
    # A loss may use a variable both directly and as a tensor that came over the wire: both parts
    # count.
    copies = {v: [received for of, received, _ in _wire_entries(v)] for v in variables}
    received = [tensor for tensors in copies.values() for tensor in tensors]
    if not received:
        found: list[rt.Tensor | None] = rt.gradients(loss, variables)
        return found
    direct = rt.gradients(loss, variables, stop_gradients=received)
    through = dict(zip(received, rt.gradients(loss, received), strict=True))
    parts = [[d, *(through[t] for t in copies[v])] for d, v in zip(direct, variables, strict=True)]
    return [_add_gradients([g for g in group if g is not None]) for group in parts]


def _add_gradients(parts: list[rt.Tensor]) -> rt.Tensor | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    total: rt.Tensor = rt.call(
        lambda *values: sum(values[1:], start=values[0]), *parts, name="total_gradient"
    )
    return total


def narrow_gradient(gradient: rt.Tensor, variable: rt.Variable) -> rt.Tensor:
    """Rounds a gradient on the worker if the variable's own value travels rounded."""
    for _, _, dtype in _wire_entries(variable):
        # The worker rounds, so that the narrow gradient crosses the wire.
        with rt.device(None), rt.device(gradient.device or None):
            rounded: rt.Tensor = rt.call(
                lambda value, dtype=dtype: value.astype(dtype), gradient, name="to_wire"
            )
            return rounded
    return gradient


def _wire_entries(variable: rt.Variable) -> list[tuple[rt.Variable, rt.Tensor, DType]]:
    return [entry for entry in variable.graph.get_collection(_COLLECTION) if entry[0] is variable]
