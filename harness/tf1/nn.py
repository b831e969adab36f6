"""``tf.nn``: neural network functions."""

from __future__ import annotations

from typing import Any

from harness.tf1.conv import OPS as _CONV
from harness.tf1.missing import absent
from harness.tf1.nn_ops import OPS as _NN

NAMES: dict[str, Any] = _NN | _CONV
"""TensorFlow's name -> the function."""


def __getattr__(name: str) -> Any:
    if name in NAMES:
        return NAMES[name]
    if name.startswith("__"):
        raise AttributeError(name)
    raise absent("tf.nn", name)


def __dir__() -> list[str]:
    return sorted(NAMES)
