"""``tf.python_io``: files of records."""

from __future__ import annotations

from harness.tf1.inputs import records as _records  # noqa: F401 - adds the names to the table
from harness.tf1.names.missing import namespace

__getattr__, __dir__ = namespace("tf.python_io")
