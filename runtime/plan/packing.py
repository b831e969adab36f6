"""Packs: small arrays that travel between the host and an accelerator as one array.

JAX takes some 20 us for each array, however small the array is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp

from runtime.graph.graph import Tensor
from runtime.tensor_spec import AnyArray, TensorSpec

SMALL = 32_768
"""The most bytes of an array that travels in a pack.

From 64 KiB on, the copy into the pack takes as long as a copy of the array alone.
"""


class Pack(NamedTuple):
    """Small arrays of one dtype, which a stage on an accelerator shares with one stage of another task.

    Attributes:
        slot: slot of the whole array in the step's table of values.
        members: the tensors; in a plan their slots.
        specs: shape and dtype of each member.
    """

    slot: int
    members: tuple[Any, ...]
    specs: tuple[TensorSpec, ...]

    @property
    def spec(self) -> TensorSpec:
        """Returns the shape and dtype of the whole array."""
        return TensorSpec((sum(spec.size for spec in self.specs),), self.specs[0].dtype)

    def cut(self, whole: AnyArray) -> list[AnyArray]:
        """Returns the members of the whole array; views, if the array is numpy's."""
        parts, end = [], 0
        for spec in self.specs:
            start, end = end, end + spec.size
            parts.append(whole[start:end].reshape(spec.shape))
        return parts


Value: TypeAlias = Tensor | Pack
"""An input or an output of a stage."""


def cut_packs(inputs: Sequence[Value], arguments: Sequence[AnyArray]) -> dict[Value, AnyArray]:
    """Returns the inputs of a program, and the members of the packs among the inputs."""
    values = dict(zip(inputs, arguments, strict=True))
    for pack in inputs:
        if isinstance(pack, Pack):
            values.update(zip(pack.members, pack.cut(values[pack]), strict=True))
    return values


def join_packs(outputs: Sequence[Value], values: dict[Value, AnyArray]) -> list[AnyArray]:
    """Returns the outputs of a program, packs among them."""
    return [
        jnp.concatenate([jnp.ravel(values[m]) for m in output.members])
        if isinstance(output, Pack)
        else values[output]
        for output in outputs
    ]
