"""The distance between two computed places: ``(i + 1) * n`` and ``i * n`` are n apart, whatever i is.

XLA needs the size of a slice before the step, also where its place is computed in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

import runtime as rt
from harness.tf1.ops.lift import is_tensor
from harness.tf1.ops.static import is_default, static

_Form = Mapping[rt.Tensor | None, int]
"""A sum: tensor -> how often it counts; None -> what is added."""


class _NotAffineError(Exception):
    """A place is computed by something else than sums and multiples."""


def distance(start: rt.TensorLike, end: rt.TensorLike) -> int | None:
    """Returns ``end - start`` where the difference is the same in every step, else None."""
    apart = _add_forms(_find_form(end), _find_form(start), -1)
    varies = any(count for tensor, count in apart.items() if tensor is not None)
    return None if varies else apart.get(None, 0)


def _add_forms(one: _Form, other: _Form, times: int) -> _Form:
    return {t: one.get(t, 0) + times * other.get(t, 0) for t in (*one, *other)}


def _find_form(place: rt.TensorLike) -> _Form:
    if not is_tensor(place):
        return {None: int(np.asarray(place))}
    tensor = rt.as_tensor(place)
    op, body = tensor.op, tensor.op.body
    if hasattr(body, "value") and tensor.shape == ():
        return {None: int(static(tensor))}
    fn, tensors = getattr(body, "fn", None), (*op.inputs, *op.outputs)
    scalars = all(t.shape == () and t.dtype.kind in "iu" for t in tensors)
    if fn is None or hasattr(body, "variables") or not scalars or not op.inputs or is_default(op):
        return {tensor: 1}
    try:
        with jax.enable_x64(any(t.dtype.itemsize == 8 for t in tensors)):
            jaxpr = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct((), t.dtype) for t in op.inputs))
        return _evaluate_forms(jaxpr, [_find_form(t) for t in op.inputs])[tensor.index]
    # The place itself is the unknown then: it is still as far from itself plus a number.
    except _NotAffineError:
        return {tensor: 1}


def _evaluate_forms(jaxpr: ClosedJaxpr, arguments: Sequence[_Form]) -> list[_Form]:
    known = dict(zip(jaxpr.jaxpr.invars, arguments, strict=True))
    known |= {v: _literal_form(c) for v, c in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)}

    def of(variable: object) -> _Form:
        return _literal_form(variable.val) if isinstance(variable, Literal) else known[variable]

    for equation in jaxpr.jaxpr.eqns:
        results = _apply_primitive(
            equation.primitive.name, [of(v) for v in equation.invars], equation.params
        )
        known.update(zip(equation.outvars, results, strict=True))
    return [of(v) for v in jaxpr.jaxpr.outvars]


def _literal_form(value: object) -> _Form:
    array = np.asarray(value)
    if array.shape or array.dtype.kind not in "iu":
        raise _NotAffineError
    return {None: int(array)}


def _apply_primitive(
    primitive: str, values: Sequence[_Form], params: Mapping[str, object]
) -> list[_Form]:
    if primitive in ("convert_element_type", "copy"):
        return [values[0]]
    if primitive in ("add", "sub"):
        return [_add_forms(values[0], values[1], 1 if primitive == "add" else -1)]
    if primitive == "neg":
        return [_add_forms({}, values[0], -1)]
    if primitive == "mul":
        for one, other in (values, values[::-1]):
            # A product is a sum of multiples only where one factor is a number.
            if set(one) <= {None}:
                return [_add_forms({}, other, one.get(None, 0))]
    # A function that was compiled on its own stands as one equation.
    if isinstance(inner := params.get("jaxpr"), ClosedJaxpr):
        return _evaluate_forms(inner, values)
    raise _NotAffineError
