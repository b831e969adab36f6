"""Command lines of the tools: a mistake is one line that names the flag, and the exit code "configuration"."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from harness import exit_codes
from runtime.lowlevel import explain_flags


class ToolParser(argparse.ArgumentParser):
    """The parser of a tool's arguments.

        options = Parser("harness.status", "Shows what the tasks do.").parse_args()

    Args:
        program: Module of the tool, such as "harness.status".
        text: Text of ``--help``.
    """

    def __init__(self, program: str, text: str) -> None:
        super().__init__(
            prog=f"python -m {program}",
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._program = program

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parses as argparse does, but names a misspelt flag before a missing flag."""
        known = [flag for action in self._actions for flag in action.option_strings]
        for word in sys.argv[1:] if args is None else args:
            if word == "--":
                break
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in known:
                meant = difflib.get_close_matches(flag, known, 1)
                unknown = f"there is no flag {flag}" + (
                    f"; did you mean {meant[0]}?" if meant else ""
                )
                self.error(explain_flags([word]) or unknown)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Ends the program with one line and the exit code "configuration"."""
        print(f"{self._program}: {' '.join(message.split())} (see --help)", file=sys.stderr)
        raise SystemExit(exit_codes.CONFIGURATION.plain)
