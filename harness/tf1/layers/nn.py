"""``tf.nn``: neural network functions."""

from __future__ import annotations

from typing import Any

from harness.tf1.layers.conv import OPS as _CONV
from harness.tf1.layers.nn_ops import OPS as _NN
from harness.tf1.layers.rnn import OPS as _RNN
from harness.tf1.layers.rnn_cells import OPS as _CELLS
from harness.tf1.layers.sampling import OPS as _SAMPLING
from harness.tf1.names.missing import Namespace, namespace

NAMES: dict[str, Any] = _NN | _CONV | _RNN | _SAMPLING | {"rnn_cell": Namespace("tf.nn.rnn_cell", _CELLS)}
"""TensorFlow's name -> the function."""

__getattr__, __dir__ = namespace("tf.nn", NAMES)
