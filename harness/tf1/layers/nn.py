"""``tf.nn``: neural network functions, which the modules named here add to the table."""

from __future__ import annotations

from harness.tf1.layers import conv as _conv  # noqa: F401
from harness.tf1.layers import nn_ops as _nn_ops  # noqa: F401
from harness.tf1.layers import rnn as _rnn  # noqa: F401
from harness.tf1.layers import sampling as _sampling  # noqa: F401
from harness.tf1.layers import sparse_lookup as _sparse_lookup  # noqa: F401
from harness.tf1.names.missing import Namespace, namespace
from harness.tf1.names.table import add_names

add_names("tf.nn", {"rnn_cell": Namespace("tf.nn.rnn_cell")})

__getattr__, __dir__ = namespace("tf.nn")
