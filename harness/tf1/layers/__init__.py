"""``tf.layers``, and the building blocks of networks: losses, metrics, cells, samplers."""

from __future__ import annotations

from harness.tf1.layers.layers import OPS as NAMES
from harness.tf1.names.missing import namespace

__getattr__, __dir__ = namespace("tf.layers", NAMES)
