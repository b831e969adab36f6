"""The table of exit codes of the project's processes, which trainer, launcher and docs/launch.md read.

The launcher or engine that started a process reads from the code if the process is to be started
again. Within the project codes are plain. At its edge ``--exit_codes`` (`use`) chooses the codes
that an engine expects:

    sys.exit(exit_codes.code(exit_codes.LOST))      # 75; under TFJob 138, "start it again"
"""

import contextlib
import enum
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

from absl import flags, logging


class RetryRule(enum.Enum):
    """Rule for another start of a process that has ended with a code."""

    NEVER = "no"
    COUNTED = "yes, a few times"
    UNCOUNTED = "yes, as often as it happens"


@dataclass(frozen=True)
class ExitCode:
    """A row of the table: a way to end.

    Attributes:
        name: Name of the row, in words.
        meaning: Reason why a process ends with this code.
        retry: Rule for another start. `harness.launch` makes ``max_restarts`` starts that count.
        plain: Code within the project. ``FAILED`` and ``KILLED`` keep the code of the process; this
            is the usual one.
        tfjob: Code under Kubeflow's TFJob. Its ExitCode policy starts a task again after 130, 137,
            138 and 143, and fails the job after any other code.
        jobset: Code under JobSet, whose failure policy names codes.
        also: Codes of other programs with this meaning.
        errors: Names of the error types that end a process with this code; subclasses count, too.
    """

    name: str
    meaning: str
    retry: RetryRule
    plain: int
    tfjob: int
    jobset: int
    also: tuple[int, ...] = ()
    errors: tuple[str, ...] = ()


SCHEMES = ("plain", "tfjob", "jobset")

DONE = ExitCode("done", "it has done its part", RetryRule.NEVER, 0, 0, 0)
FAILED = ExitCode(
    "failed", "an error that has no better name", RetryRule.COUNTED, 1, 1, 1, errors=("OpError",)
)
CONFIGURATION = ExitCode(
    "configuration",
    "flags, environment or command are wrong, or the token is",
    RetryRule.NEVER,
    2,
    2,
    42,
    # Codes of shells: a program that cannot be run, and none of that name.
    also=(126, 127),
    errors=(
        "InvalidArgumentError",
        "UnauthenticatedError",
        "PermissionDeniedError",
        "UnimplementedError",
        # breakpoint() without a terminal
        "BdbQuit",
    ),
)
DATA = ExitCode(
    "data",
    "data or a checkpoint is missing or damaged",
    RetryRule.NEVER,
    65,
    2,
    42,
    errors=("DataLossError",),
)
LOST = ExitCode(
    "lost",
    "contact with the cluster is lost",
    RetryRule.COUNTED,
    75,
    138,
    138,
    errors=("UnavailableError", "AbortedError", "DeadlineExceededError", "CancelledError"),
)
BUG = ExitCode(
    "bug",
    "the program is wrong: a TypeError, NameError or the like before it has trained a step",
    RetryRule.NEVER,
    70,
    70,
    42,
    errors=(
        "ArithmeticError",
        "AssertionError",
        "AttributeError",
        "ImportError",
        "LookupError",
        "NameError",
        "NotImplementedError",
        "SyntaxError",
        "TypeError",
        "ValueError",
    ),
)
INTERRUPTED = ExitCode(
    "interrupted", "Ctrl-C, or SIGINT from elsewhere", RetryRule.COUNTED, 130, 130, 130
)
KILLED = ExitCode(
    "killed", "any other signal N has ended it: 128 + N", RetryRule.COUNTED, 137, 137, 137
)
PREEMPTED = ExitCode(
    "preempted", "SIGTERM: it was asked to make room", RetryRule.UNCOUNTED, 143, 143, 143
)

TABLE = (DONE, FAILED, CONFIGURATION, BUG, DATA, LOST, INTERRUPTED, KILLED, PREEMPTED)
assert len({name for row in TABLE for name in row.errors}) == sum(
    len(row.errors) for row in TABLE
), "two rows have one error"

_scheme = "plain"


def use(scheme: str) -> None:
    """Sets the scheme whose codes `code` returns in this process.

    Args:
        scheme: One of ``SCHEMES``.

    Raises:
        ValueError: There is no such scheme.
    """
    global _scheme
    if scheme not in SCHEMES:
        raise ValueError(f"no exit codes are called {scheme!r}: there are {', '.join(SCHEMES)}")
    _scheme = scheme


def code(row: ExitCode) -> int:
    """Returns the code of a row in the scheme of this process."""
    found: int = getattr(row, _scheme)
    return found


def of_code(plain: int) -> ExitCode:
    """Returns the row of a plain code, 0 to 255."""
    # KILLED stands for all signals without a row.
    for row in TABLE:
        if row is not KILLED and plain in (row.plain, *row.also):
            return row
    return KILLED if plain > 128 else FAILED


assert all(of_code(code) is row for row in TABLE for code in (row.plain, *row.also)), (
    "two rows have one code"
)


def translated(plain: int) -> int:
    """Returns a plain code in the scheme of this process; a code of a signal or of the user's program stays."""
    row = of_code(plain)
    return plain if row in (FAILED, KILLED) else code(row)


def of_error(error: BaseException, *, begun: bool = True) -> ExitCode:
    """Returns the row of an error that ends a process.

    Args:
        error: Error that was not caught.
        begun: True if the process has trained a step. A TypeError, say, may be the data's fault
            then.
    """
    # The nearest class counts, so a subclass may have a row of its own.
    for name in (kind.__name__ for kind in type(error).__mro__):
        for row in TABLE:
            if name in row.errors:
                return FAILED if row is BUG and begun else row
    return FAILED


def end_with(row: ExitCode, error: BaseException) -> None:
    """Sets the code with which the process ends, in place of Python's 1, if nothing catches an error.

    The traceback is still printed.

    Args:
        row: Row of the code.
        error: Error that is about to leave the program. After any other error the code is Python's.
    """
    show = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        show(kind, value, trace)
        if value is error:
            raise SystemExit(code(row))

    sys.excepthook = hook


def of_join(done: bool) -> int:
    """Returns the code with which a ps ends.

    Args:
        done: Value of ``Server.join``.
    """
    return code(DONE if done else PREEMPTED)


def show_line(line: str) -> None:
    """Logs a line, or prints the line on stderr where the program's log shows warnings only."""
    if logging.level_info():
        logging.info("%s", line)
    else:
        print(line, file=sys.stderr, flush=True)


def leave(row: ExitCode, message: str) -> NoReturn:
    """Ends the program with a message on stderr, and the code of a row.

    Args:
        row: Row of the code.
        message: Message for stderr.

    Raises:
        SystemExit: Always.
    """
    print(message, file=sys.stderr, flush=True)
    sys.exit(code(row))


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turns a Ctrl-C that leaves the block into ``SystemExit`` with the code of ``INTERRUPTED``, without a traceback.

    Code within the block, such as the block of a session, receives Python's KeyboardInterrupt.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(code(INTERRUPTED)) from None


def open_streams() -> None:
    """Opens /dev/null in place of a standard output or error that was closed at the start (``command >&-``).

    Python has None for a closed stream, and the next file or socket would get its number. So call
    this function before the program opens anything.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # The stream stays open as long as the program runs. Programs that this one starts
            # inherit the stream.
            stream = open(os.devnull, "w")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Ends a command in silence when its output is no longer read; also a decorator of a ``main``.

    After the reader has gone (``command | head -1``) the program ends by ``SystemExit``. The code
    is that of SIGPIPE, a signal that Python ignores.
    """
    open_streams()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        with open(os.devnull, "w") as nowhere:
            # Python flushes the rest of the output once more at its end, which must not fail again.
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None


def parse_flags(argv: Iterable[str], program: str = "", hint: str = " (see --help)") -> list[str]:
    """Returns the arguments that are no flags, the program's name first.

    A mistake ends the program with one line and the code of ``CONFIGURATION``; absl's own code
    would be 1.

        app.run(main, flags_parser=exit_codes.parse_flags)

    Args:
        argv: Command line.
        program: Begin of that line, such as the program's name and a colon.
        hint: End of that line.
    """
    try:
        rest: list[str] = flags.FLAGS(tuple(argv))
        return rest
    except SystemExit:
        # The text of --help was shown. absl's code would be that of a failure.
        sys.exit(DONE.plain)
    except flags.Error as error:
        leave(CONFIGURATION, f"{program}{_explain_error(error)}{hint}")


def _explain_error(error: flags.Error) -> str:
    """Returns the mistake of a command line in one line, with the replacement of a flag or value that is gone."""
    # The import stands here as a launcher does without JAX, unless its command line is wrong.
    from runtime.lowlevel import explain_flags

    message = " ".join(str(error).split())
    flag = (
        f"--{error.flagname}"
        if isinstance(error, flags.UnrecognizedFlagError)
        else message.partition(":")[0]
    )
    return explain_flags([flag.removeprefix("flag ")]) or message
