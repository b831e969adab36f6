"""``tf.layers``, and the building blocks of networks: losses, metrics, cells, samplers."""

from __future__ import annotations

from harness.tf1.layers import layers as _layers  # noqa: F401 - adds the names to the table
from harness.tf1.names.missing import namespace

__getattr__, __dir__ = namespace("tf.layers")
