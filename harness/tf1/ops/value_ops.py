"""Tensors from values: identity, conversion, placeholders."""

from __future__ import annotations

from jax.typing import DTypeLike

import runtime as rt
from harness.tf1.ops.dtypes import as_dtype
from harness.tf1.ops.lift import Public, constant, holds_tensors, is_tensor, operand
from harness.tf1.ops.shapes import ShapeLike, TensorShape
from harness.tf1.ops.static import known_unless_fed, static_number

public = Public("tf", "Tensors")


@public.add()
def identity(input: rt.TensorLike, name: str | None = None) -> rt.Tensor:
    """Returns the same value on the current device."""
    return rt.identity(convert_to_tensor(input), name)


@public.add()
def convert_to_tensor(
    value: rt.TensorLike,
    dtype: DTypeLike | None = None,
    name: str | None = None,
    as_ref: bool = False,
    preferred_dtype: DTypeLike | None = None,
) -> rt.Tensor:
    """Converts ``value`` to a tensor. Raises ValueError for a tensor of another dtype."""
    if holds_tensors(value):
        value = operand(value)
    if not is_tensor(value):
        made: rt.Tensor = constant(value, dtype, name=name or "Const")
        return made
    tensor = rt.as_tensor(value)
    if dtype is not None and tensor.dtype != as_dtype(dtype).dtype:
        raise ValueError(
            f"{tensor.name!r} is {tensor.dtype.name}, not {as_dtype(dtype).name}: use tf.cast"
        )
    return tensor


@public.add()
def placeholder(
    dtype: DTypeLike, shape: ShapeLike | None = None, name: str | None = None
) -> rt.Tensor:
    """Makes a tensor to feed; see ``rt.placeholder``.

    A shape may hold None. Fed values are cut to fit the dtype.
    """
    sizes = None if shape is None else static_number(shape, "the shape")
    sizes = [sizes] if isinstance(sizes, int) else sizes
    # TensorFlow casts what is fed, fractions to integers too; rt refuses that by default.
    return rt.placeholder(as_dtype(dtype).dtype, sizes, name, casting="unsafe")


@public.add()
def placeholder_with_default(
    input: rt.TensorLike, shape: ShapeLike, name: str | None = None
) -> rt.Tensor:
    """Makes a tensor that may be fed, and is ``input`` when it is not."""
    tensor = known_unless_fed(rt.identity(constant(input), name or "PlaceholderWithDefault"))
    sizes = TensorShape(static_number(shape, "the shape"))
    sizes.assert_is_compatible_with(tensor.shape)
    tensor.shape = None if sizes.dims is None else tuple(sizes.as_list())
    return tensor


public.update({"constant": constant})
