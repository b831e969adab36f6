"""Fixtures that change for one test what a user may change, too: environment variables, and the tables of times."""

from collections.abc import Callable, Mapping
from types import ModuleType

import pytest

SetVariables = Callable[..., None]
"""The type of ``set_variables``."""
SetTimes = Callable[..., None]
"""The type of ``set_times``."""


@pytest.fixture
def set_variables(monkeypatch: pytest.MonkeyPatch) -> SetVariables:
    """Returns a function that sets environment variables for the test; the value None removes a variable."""

    def change(table: Mapping[str, str | None] | None = None, /, **values: str | None) -> None:
        for name, value in {**(table or {}), **values}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return change


@pytest.fixture
def set_times(monkeypatch: pytest.MonkeyPatch) -> SetTimes:
    """Returns a function that changes times of a table, such as ``runtime.timeouts``, for the test."""

    def change(table: ModuleType, **secs: float) -> None:
        for name, value in secs.items():
            assert name.endswith("_SECS"), f"{name} is no time"
            monkeypatch.setattr(table, name, value)

    return change
