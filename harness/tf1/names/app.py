"""``tf.app``: runs a program's main function with its flags parsed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from absl import app as absl_app

from harness.tf1.names import flags
from harness.tf1.names.missing import namespace as _namespace


def run(main: Callable[[list[str]], Any] | None = None, argv: list[str] | None = None) -> None:
    """Calls ``absl.app.run``, which parses the flags, calls ``main(argv)`` and exits with the result."""
    # TensorFlow calls the function ``main`` of the program that was started.
    chosen = main or sys.modules["__main__"].main
    # Other flags are the program's own affair, as in TensorFlow.
    absl_app.run(chosen, argv, flags_parser=flags.parse)


__getattr__, _ = _namespace("tf.app")
