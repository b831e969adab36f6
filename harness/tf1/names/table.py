"""The one table of TensorFlow's names: ``TABLE["tf.nn"]["relu"]``.

The module that makes a function or class adds the name. ``harness.tf1``, ``tf.nn`` and the other
namespaces answer from the table, and the list in docs/tf1_names.md is made of it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TABLE: dict[str, dict[str, Any]] = {}
"""Namespace, such as "tf.nn" -> TensorFlow's name in it -> the function, class or value, or ``Later``."""

HEADINGS: dict[str, str] = {}
"""Name in ``tf`` -> the heading under which docs/tf1_names.md lists the name."""


@dataclass(frozen=True)
class Later:
    """An object that is imported at its first use: a worker does not import what the program does not need.

    Attributes:
        path: module and name, as in "harness.tf1.train.saver.Saver".
    """

    path: str


def add_names(namespace: str, names: Mapping[str, Any], heading: str = "") -> None:
    """Adds rows to the table, under a heading of docs/tf1_names.md where they are names of ``tf`` itself."""
    known = TABLE.setdefault(namespace, {})
    # Two functions of one name would hide each other; only a path gives way to its object.
    assert all(isinstance(known.get(n, Later(n)), Later) or known[n] is names[n] for n in names)
    known.update(names)
    if heading:
        HEADINGS.update(dict.fromkeys(names, heading))


def look_up(namespace: str, name: str) -> Any:
    """Returns the value of a name in the table. Raises KeyError for a name without a row."""
    found = TABLE[namespace][name]
    # The object takes the place of its path, so that the next use finds it at once.
    if isinstance(found, Later):
        found = TABLE[namespace][name] = pkgutil.resolve_name(found.path)
    return found
