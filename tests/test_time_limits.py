"""Times stand in one table for each room, and docs/time_limits.md lists those that users may know."""

import importlib
import pathlib
import re

import pytest

from runtime import SessionConfig, timeouts
from runtime.wire.dial import ChannelOptions
from tests.tools import house

GUIDE = (pathlib.Path(__file__).resolve().parent.parent / "docs" / "time_limits.md").read_text()
ROWS = re.findall(r"^\|[^|]*\| ([\d.]+) \| `([\w.]+)\.([A-Z_]+)`", GUIDE, re.MULTILINE)
TABLES = ("times", "timeouts")
"""The modules that hold times: one of each room, and one of each package."""
KINDS = ("periods", "patience", "limits")
COSTS = ("harness.manifests.sizing",)
"""Modules whose times are measured costs in a formula: nothing waits for so long."""


@pytest.mark.parametrize(("secs", "module", "name"), ROWS, ids=[name for _, _, name in ROWS])
def test_documented_default_is_the_codes(secs: str, module: str, name: str) -> None:
    """A documented time limit has the code's default."""
    assert getattr(importlib.import_module(module), name) == float(secs)


def test_each_time_limit_has_one_row() -> None:
    """Each time limit has one row."""
    names = [f"{module}.{name}" for _, module, name in ROWS]
    assert sorted(names) == sorted(set(names))


def loose_times(name: str, text: str) -> list[str]:
    """Returns the constant times of a module that stand outside of a table of times."""
    if name.rpartition(".")[2] in TABLES or name in COSTS:
        return []
    # A flag has the name of its number.
    return re.findall(r"^ *(\w*[A-Z]_SECS)(?:: .*)? = (?!flags)", text, re.MULTILINE)


def untidy_lines(text: str) -> list[str]:
    """Returns the faults of a table: a section out of order, and a constant without section or docstring."""
    sections, faults, previous = [""], [], ""
    for line in text.splitlines():
        if section := re.fullmatch(r"# -- (\w+) -+", line):
            sections.append(section[1])
        elif re.match(r"\w+_SECS\b", line) and not sections[-1]:
            faults.append(line)
        if re.match(r"\w+_SECS\b", previous) and not line.startswith('"""'):
            faults.append(previous)
        previous = line
    if sections[1:] != [kind for kind in KINDS if kind in sections]:
        faults.append(f"sections {sections[1:]}")
    return faults


@pytest.mark.parametrize("package", house.PACKAGES)
def test_times_stand_in_tables(package: str) -> None:
    """A constant time stands in the table of its room."""
    loose = {
        name: found
        for name, path in house.modules(package).items()
        if (found := loose_times(name, path.read_text()))
    }
    assert loose == {}
    assert loose_times("harness.room", "_A_SECS: Final = 1.0\nB_SECS = 2") == ["_A_SECS", "B_SECS"]


@pytest.mark.parametrize("package", house.PACKAGES)
def test_tables_have_three_kinds(package: str) -> None:
    """A table of times has periods, patience and limits, in this order, each with its sentence."""
    tables = [p for n, p in house.modules(package).items() if n.rpartition(".")[2] in TABLES]
    assert len(tables) > 5
    assert {
        str(path): faults for path in tables if (faults := untidy_lines(path.read_text()))
    } == {}
    assert len(untidy_lines("A_SECS = 1.0\n# -- limits ---\n# -- periods ---")) == 3


def test_detection_defaults_are_documented() -> None:
    """Every default of failure detection is documented."""
    documented = {name for _, module, name in ROWS if module == "runtime.timeouts"}
    assert documented == {name for name in vars(timeouts) if name.endswith("_SECS")}


def test_options_use_the_defaults() -> None:
    """The options have the documented defaults."""
    assert (
        SessionConfig().reconnect_secs == ChannelOptions().reconnect_secs == timeouts.RECONNECT_SECS
    )
    assert ChannelOptions().heartbeat_secs == timeouts.HEARTBEAT_SECS
    assert ChannelOptions().heartbeat_timeout_secs == timeouts.HEARTBEAT_TIMEOUT_SECS
