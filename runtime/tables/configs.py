"""Configurations of tables that were written for Keras or TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import initializers
from jax.typing import DTypeLike

from runtime.errors import InvalidArgumentError
from runtime.tensor_spec import DType

Initializer = Callable[[jax.Array, Sequence[int], DType], jax.Array]
"""A function of key, shape and dtype, such as those of ``jax.nn.initializers``."""


class TableFields(NamedTuple):
    """The fields of a configuration; None stands for a field that is missing.

    Attributes:
        name: name of the table.
        rows: number of rows.
        dim: number of elements of a row.
        initializer: initializer, as the configuration has it.
        dtype: dtype of NumPy.
        combiner: combiner of bags.
    """

    name: str | None
    rows: int | None
    dim: int | None
    initializer: object
    dtype: DTypeLike | None
    combiner: str | None


def read_config(config: object) -> TableFields:
    """Returns the fields of a ``TableConfig``, or of the ``table`` of a ``FeatureConfig``.

    Examples:
        >>> import types
        >>> read_config(types.SimpleNamespace(name="films", vocabulary_size=9, dim=2))
        TableFields(name='films', rows=9, dim=2, initializer=None, dtype=None, combiner=None)
    """
    table = getattr(config, "table", config)
    return TableFields(
        getattr(table, "name", None),
        getattr(table, "vocabulary_size", None),
        getattr(table, "embedding_dim", None) or getattr(table, "dim", None),
        getattr(table, "initializer", None),
        # TensorFlow's dtypes know theirs of NumPy.
        getattr(getattr(table, "dtype", None), "as_numpy_dtype", None),
        getattr(table, "combiner", None),
    )


def convert_initializer(given: object, table: str, rows: int, dim: int) -> Initializer | None:
    """Returns an initializer for one of Keras or TensorFlow, which is known by its class and numbers.

    Args:
        given: an initializer with ``get_config``, Keras's name of one, or an initializer of JAX.
        table: name of the table, for errors.
        rows: number of rows.
        dim: number of elements of a row.

    Raises:
        InvalidArgumentError: The initializer has no equal here.
    """
    if given is None or (callable(given) and not hasattr(given, "get_config")):
        return given
    # Keras takes "glorot_uniform" for GlorotUniform().
    kind = "".join(part.capitalize() for part in given.split("_")) if isinstance(given, str) else ""
    kind = kind or type(given).__name__
    numbers = given.get_config() if hasattr(given, "get_config") else {}
    if kind in _PLAIN:
        return _PLAIN[kind](numbers)
    family = kind.removesuffix("Normal").removesuffix("Uniform")
    if family in _SCALED:
        drawn = "uniform" if kind.endswith("Uniform") else "truncated_normal"
        return _scale(*_SCALED[family], drawn, rows, dim)
    if kind == "VarianceScaling":
        wanted = {"scale": 1.0, "mode": "fan_in", "distribution": "truncated_normal"} | numbers
        return _scale(wanted["scale"], wanted["mode"], wanted["distribution"], rows, dim)
    raise InvalidArgumentError(
        f"table {table!r}: initializer {given!r} has no equal in jax.nn.initializers: "
        "give initializer="
    )


def _scale(scale: float, mode: str, drawn: str, rows: int, dim: int) -> Initializer:
    """Returns ``VarianceScaling`` of a whole table, which makes one row at a time."""
    fans = {"fan_in": rows, "fan_out": dim}
    assert rows and dim, "a table has rows"
    width = math.sqrt(scale / fans.get(mode, (rows + dim) / 2))
    if drawn == "uniform":
        return _uniform({"minval": -math.sqrt(3) * width, "maxval": math.sqrt(3) * width})
    if drawn == "untruncated_normal":
        return initializers.normal(width)
    # The standard deviation of a normal distribution that is cut at twice its own.
    return initializers.truncated_normal(width / 0.87962566103423978)


def _uniform(numbers: Mapping[str, float]) -> Initializer:
    low, high = numbers.get("minval", -0.05), numbers.get("maxval", 0.05)
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, low, high)


def _normal(numbers: Mapping[str, float]) -> Initializer:
    return _shift(initializers.normal(numbers.get("stddev", 0.05)), numbers)


def _truncated(numbers: Mapping[str, float]) -> Initializer:
    return _shift(initializers.truncated_normal(numbers.get("stddev", 0.05)), numbers)


def _shift(drawn: Initializer, numbers: Mapping[str, float]) -> Initializer:
    mean = numbers.get("mean", 0.0)
    return lambda key, shape, dtype: jnp.asarray(mean, dtype) + drawn(key, shape, dtype)


_PLAIN: Mapping[str, Callable[[Mapping[str, float]], Initializer]] = {
    "Zeros": lambda numbers: initializers.zeros,
    "Ones": lambda numbers: initializers.ones,
    "Constant": lambda numbers: initializers.constant(numbers.get("value", 0.0)),
    "Normal": _normal,
    "RandomNormal": _normal,
    "RandomUniform": _uniform,
    "TruncatedNormal": _truncated,
    "Uniform": _uniform,
}
_SCALED: Mapping[str, tuple[float, str]] = {
    "Glorot": (1.0, "fan_avg"),
    "He": (2.0, "fan_in"),
    "Lecun": (1.0, "fan_in"),
}
"""Scale and mode of the initializers that are ``VarianceScaling`` under another name."""
