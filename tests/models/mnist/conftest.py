"""Fixtures of the tests of the MNIST example."""

from collections.abc import Callable, Iterator

import pytest
from absl import flags
from absl.testing import flagsaver

from models.mnist.config import RunConfig


@pytest.fixture
def parsed() -> Iterator[Callable[..., RunConfig]]:
    """A function that parses flags of the trainer into a config."""

    def parse(*arguments: str) -> RunConfig:
        flags.FLAGS(["trainer", *arguments])
        return RunConfig.from_flags()

    with flagsaver.flagsaver():
        yield parse
