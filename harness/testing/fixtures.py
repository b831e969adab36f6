"""pytest fixtures: import them into a test module or conftest.py; needs pytest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.testing import leaks


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """Fails a test that leaves a thread, process, socket or file behind."""
    with leaks.no_leaks():
        yield
