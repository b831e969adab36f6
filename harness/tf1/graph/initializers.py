"""Initial values for ``tf.get_variable``: objects that are called with a shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jax.typing import DTypeLike

import runtime as rt
from harness.tf1.ops import array_ops, random_ops
from harness.tf1.ops.dtypes import as_dtype, to_array
from harness.tf1.ops.lift import Public, constant

public = Public("tf", "Initial values")

_MODES = ("fan_in", "fan_out", "fan_avg")
_DISTRIBUTIONS = ("normal", "truncated_normal", "untruncated_normal", "uniform")
_LEFT_AFTER_THE_CUT = 0.87962566103423978
"""The standard deviation of a normal distribution of 1 that is cut off at two standard deviations."""


class Initializer:
    """The base of initializers: ``initializer(shape, dtype=tf.float32, partition_info=None)``."""

    dtype: DTypeLike = np.float32

    def __call__(
        self, shape: Sequence[int], dtype: DTypeLike | None = None, partition_info: object = None
    ) -> rt.Tensor:
        """Returns the initial value as a tensor of ``shape`` and ``dtype``."""
        wanted = as_dtype(self.dtype if dtype is None else dtype).dtype
        full_shape = getattr(partition_info, "full_shape", shape)
        return self._make_part(list(shape), list(full_shape), wanted)

    def _make_part(
        self, shape: list[int], full_shape: list[int], dtype: rt.lowlevel.DType
    ) -> rt.Tensor:
        return self._make(shape, dtype)

    def _make(self, shape: list[int], dtype: rt.lowlevel.DType) -> rt.Tensor:
        raise TypeError(f"{type(self).__name__} makes no values")


@public.add()
@dataclass
class zeros_initializer(Initializer):
    """All zeros."""

    dtype: DTypeLike = np.float32

    def _make(self, shape: list[int], dtype: rt.lowlevel.DType) -> rt.Tensor:
        return array_ops.zeros(shape, dtype)


@public.add()
@dataclass
class ones_initializer(Initializer):
    """All ones."""

    dtype: DTypeLike = np.float32

    def _make(self, shape: list[int], dtype: rt.lowlevel.DType) -> rt.Tensor:
        return array_ops.ones(shape, dtype)


@public.add()
@dataclass
class constant_initializer(Initializer):
    """A number everywhere, or an array or list that fills the shape row by row."""

    value: rt.TensorLike = 0
    dtype: DTypeLike = np.float32
    verify_shape: bool = False

    def _make(self, shape: list[int], dtype: rt.lowlevel.DType) -> rt.Tensor:
        value = to_array(self.value).astype(dtype)
        made: rt.Tensor = constant(value, dtype, shape, verify_shape=self.verify_shape)
        return made


@public.add()
@dataclass
class random_uniform_initializer(Initializer):
    """Uniform in [minval, maxval)."""

    minval: rt.TensorLike = 0
    maxval: rt.TensorLike | None = None
    seed: int | None = None
    dtype: DTypeLike = np.float32

    def _make(self, shape: list[int], dtype: rt.lowlevel.DType) -> rt.Tensor:
        return random_ops.random_uniform(shape, self.minval, self.maxval, dtype, self.seed)


@public.add()
@dataclass
class random_normal_initializer(Initializer):
    """Normal."""

    mean: rt.TensorLike = 0.0
    stddev: rt.TensorLike = 1.0
    seed: int | None = None
    dtype: DTypeLike = np.float32

    def _make(self, shape: list[int], dtype: rt.lowlevel.DType) -> rt.Tensor:
        return random_ops.random_normal(shape, self.mean, self.stddev, dtype, self.seed)


@public.add()
@dataclass
class truncated_normal_initializer(Initializer):
    """Normal within two standard deviations."""

    mean: rt.TensorLike = 0.0
    stddev: rt.TensorLike = 1.0
    seed: int | None = None
    dtype: DTypeLike = np.float32

    def _make(self, shape: list[int], dtype: rt.lowlevel.DType) -> rt.Tensor:
        return random_ops.truncated_normal(shape, self.mean, self.stddev, dtype, self.seed)


@public.add()
@dataclass
class variance_scaling_initializer(Initializer):
    """Keeps the scale of signals: variance ``scale / n`` with n the fan in, fan out or their mean."""

    scale: float = 1.0
    mode: str = "fan_in"
    distribution: str = "normal"
    seed: int | None = None
    dtype: DTypeLike = np.float32

    def __post_init__(self) -> None:
        wrong = ""
        if self.scale <= 0:
            wrong = f"scale={self.scale}, it must be positive"
        elif self.mode not in _MODES:
            wrong = f"mode={self.mode!r} is none of {_MODES}"
        elif self.distribution.lower() not in _DISTRIBUTIONS:
            wrong = f"distribution={self.distribution!r} is none of {_DISTRIBUTIONS}"
        if wrong:
            raise ValueError(f"variance_scaling_initializer: {wrong}")

    def _make_part(
        self, shape: list[int], full_shape: list[int], dtype: rt.lowlevel.DType
    ) -> rt.Tensor:
        fan_in, fan_out = fans(full_shape)
        n = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[self.mode]
        assert n >= 0 and self.scale > 0
        # A layer without inputs has a fan of 0.
        variance = self.scale / max(1.0, n)
        distribution = self.distribution.lower()
        if distribution == "uniform":
            # A uniform distribution in [-a, a) has the variance a * a / 3.
            limit = math.sqrt(3 * variance)
            return random_ops.random_uniform(shape, -limit, limit, dtype, self.seed)
        if distribution == "untruncated_normal":
            return random_ops.random_normal(shape, 0.0, math.sqrt(variance), dtype, self.seed)
        # TensorFlow's rule: "normal" is truncated too, with the wanted variance after the cut.
        deviation = math.sqrt(variance) / _LEFT_AFTER_THE_CUT
        return random_ops.truncated_normal(shape, 0.0, deviation, dtype, self.seed)


def _glorot(shown: str, distribution: str, doc: str) -> Callable[..., Initializer]:
    def glorot(seed: int | None = None, dtype: DTypeLike = np.float32) -> Initializer:
        return variance_scaling_initializer(1.0, "fan_avg", distribution, seed, dtype)

    public.define(shown, glorot, doc)
    return glorot


glorot_uniform_initializer = _glorot(
    "glorot_uniform_initializer",
    "uniform",
    "Xavier's uniform initializer: the default of ``get_variable`` for floating point.",
)
glorot_normal_initializer = _glorot(
    "glorot_normal_initializer", "normal", "Xavier's normal initializer."
)


@public.add()
@dataclass
class uniform_unit_scaling_initializer(Initializer):
    """Uniform, scaled by the square root of 3 over the size of the input.

    ``full_shape`` is that of the whole variable where this is one part of several (TensorFlow 0.x).
    """

    factor: float = 1.0
    seed: int | None = None
    dtype: DTypeLike = np.float32
    full_shape: Sequence[int] | None = None

    def _make(self, shape: list[int], dtype: rt.lowlevel.DType) -> rt.Tensor:
        limit = math.sqrt(3 / max(1.0, math.prod((self.full_shape or shape)[:-1]))) * self.factor
        return random_ops.random_uniform(shape, -limit, limit, dtype, self.seed)


def fans(shape: Sequence[int]) -> tuple[float, float]:
    """Returns the number of inputs and of outputs of a layer with weights of this shape, receptive field included."""
    if len(shape) < 2:
        n = float(shape[0]) if shape else 1.0
        return n, n
    # Each output of a convolution sees all inputs at every place of the filter.
    field = math.prod(shape[:-2])
    return float(field * shape[-2]), float(field * shape[-1])
