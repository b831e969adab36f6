"""Fixtures of the tests of training."""

from collections.abc import Iterator

import pytest

import runtime as rt


@pytest.fixture
def graph() -> Iterator[rt.Graph]:
    """A graph of the test's own, which is the default graph."""
    with rt.Graph().as_default() as made:
        yield made


@pytest.fixture
def target() -> Iterator[str]:
    """The address of a server of the test's own."""
    with rt.Server.create_local_server() as server:
        yield server.target
