"""Arguments of the commands that show things: a mistake is one line and exit code 2."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

USAGE_ERROR = 2


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line.

    Args:
        program: such as "harness.status".
        text: what ``--help`` says.
    """

    def __init__(self, program: str, text: str) -> None:
        super().__init__(
            prog=f"python -m {program}",
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._program = program

    def error(self, message: str) -> NoReturn:
        """Ends the program."""
        print(f"{self._program}: {' '.join(message.split())} (see --help)", file=sys.stderr)
        raise SystemExit(USAGE_ERROR)
