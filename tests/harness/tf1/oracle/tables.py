"""All cases and programs."""

from __future__ import annotations

from tests.harness.tf1.oracle import arithmetic, arrays, flow, metrics, networks, programs
from tests.harness.tf1.oracle.case import Case

CASES: dict[str, Case] = {}
"""By name."""
for _table in (arithmetic.CASES, arrays.CASES, networks.CASES):
    if set(CASES) & set(_table):
        raise ValueError(f"two cases are called {sorted(set(CASES) & set(_table))}")
    CASES |= _table

PROGRAMS = programs.CASES | flow.CASES | metrics.CASES
"""By name."""
