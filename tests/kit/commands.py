"""Commands of the project that run in the process of the test."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Ran:
    """The exit code of a command, and what the command wrote."""

    returncode: int
    stdout: str
    stderr: str


def run_main(
    main: Callable[[Sequence[str]], int],
    capsys: pytest.CaptureFixture[str],
    arguments: Sequence[object],
) -> Ran:
    """Runs the main function of a command with arguments."""
    capsys.readouterr()
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as error:
        code = int(error.code or 0)
    return Ran(code, *capsys.readouterr())
