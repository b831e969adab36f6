"""``tf.python_io``: files of records."""

from __future__ import annotations

from harness.tf1.missing import namespace
from harness.tf1.records import OPS as NAMES

__getattr__, __dir__ = namespace("tf.python_io", NAMES)
