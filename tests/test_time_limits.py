"""The time limits that docs/time_limits.md lists are those of the code."""

import importlib
import pathlib
import re

import pytest

from runtime import SessionConfig, timeouts
from runtime.wire.dial import ChannelOptions

GUIDE = (pathlib.Path(__file__).resolve().parent.parent / "docs" / "time_limits.md").read_text()
ROWS = re.findall(r"^\|[^|]*\| ([\d.]+) \| `([\w.]+)\.([A-Z_]+)`", GUIDE, re.MULTILINE)


@pytest.mark.parametrize(("secs", "module", "name"), ROWS, ids=[name for _, _, name in ROWS])
def test_documented_default_is_the_codes(secs: str, module: str, name: str) -> None:
    """A documented time limit has the code's default."""
    assert getattr(importlib.import_module(module), name) == float(secs)


def test_each_time_limit_has_one_row() -> None:
    """Each time limit has one row."""
    names = [f"{module}.{name}" for _, module, name in ROWS]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(
    "module",
    [f"harness.training.start.{name}" for name in ("session_manager", "session_start", "policy")],
)
def test_start_limits_are_documented(module: str) -> None:
    """The public time limits of the start are documented."""
    found = {
        name
        for name in vars(importlib.import_module(module))
        if re.fullmatch(r"[A-Z]\w*_SECS", name)
    }
    assert found <= {name for _, _, name in ROWS}


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
