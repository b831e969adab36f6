"""How a process of ours ends: one table of exit codes, which trainer, launcher and docs/launch.md read.

A code tells whoever started the process whether to start it again. Within the project codes are plain; at its edge they
may be those that an engine reads in its own way (`use`, ``--exit_codes``):

    sys.exit(exit_codes.code(exit_codes.LOST))      # 75; under TFJob 138, which it takes for "start it again"
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

from absl import flags


class Retry(enum.Enum):
    """Whether a process that has ended so is started again."""

    NEVER = "no"
    COUNTED = "yes, a few times"
    UNCOUNTED = "yes, as often as it happens"


@dataclass(frozen=True)
class ExitCode:
    """A row of the table: a way to end.

    Attributes:
        name: of the row, in words.
        meaning: when a process ends so.
        retry: whether to start it again; `harness.launch` does so ``max_restarts`` times where it counts.
        plain: the code. Of ``FAILED`` and ``KILLED``, which keep the code that they came with, the usual one.
        tfjob: under Kubeflow's TFJob, whose ExitCode policy takes 130, 137, 138 and 143 for "start it again" and
            others for "fail the job".
        jobset: under JobSet, whose failure policy names codes.
        also: codes of others with this meaning.
        errors: the error types, by name, after which a process ends so; their subclasses too.
    """

    name: str
    meaning: str
    retry: Retry
    plain: int
    tfjob: int
    jobset: int
    also: tuple[int, ...] = ()
    errors: tuple[str, ...] = ()


SCHEMES = ("plain", "tfjob", "jobset")

DONE = ExitCode("done", "it has done its part", Retry.NEVER, 0, 0, 0)
FAILED = ExitCode("failed", "an error that has no better name", Retry.COUNTED, 1, 1, 1, errors=("OpError",))
CONFIGURATION = ExitCode(
    "configuration",
    "flags, environment or command are wrong, or the token is",
    Retry.NEVER,
    *(2, 2, 42),
    also=(126, 127),  # of shells: a program that cannot be run, and none of that name
    errors=(
        *("InvalidArgumentError", "UnauthenticatedError", "PermissionDeniedError", "UnimplementedError"),
        "BdbQuit",  # breakpoint() without a terminal
    ),
)
DATA = ExitCode("data", "data or a checkpoint is missing or damaged", Retry.NEVER, 65, 2, 42, errors=("DataLossError",))
LOST = ExitCode(
    "lost",
    "contact with the cluster is lost",
    Retry.COUNTED,
    *(75, 138, 138),
    errors=("UnavailableError", "AbortedError", "DeadlineExceededError", "CancelledError"),
)
BUG = ExitCode(
    "bug",
    "the program is wrong: a TypeError, NameError or the like before it has trained a step",
    Retry.NEVER,
    *(70, 70, 42),
    errors=(
        *("ArithmeticError", "AssertionError", "AttributeError", "ImportError", "LookupError", "NameError"),
        *("NotImplementedError", "SyntaxError", "TypeError", "ValueError"),
    ),
)
INTERRUPTED = ExitCode("interrupted", "Ctrl-C, or SIGINT from elsewhere", Retry.COUNTED, 130, 130, 130)
KILLED = ExitCode("killed", "any other signal N has ended it: 128 + N", Retry.COUNTED, 137, 137, 137)
PREEMPTED = ExitCode("preempted", "SIGTERM: it was asked to make room", Retry.UNCOUNTED, 143, 143, 143)

TABLE = (DONE, FAILED, CONFIGURATION, BUG, DATA, LOST, INTERRUPTED, KILLED, PREEMPTED)

_scheme = "plain"


def use(scheme: str) -> None:
    """Makes `code` give the codes of an engine in this process.

    Raises:
        ValueError: there is no such scheme.
    """
    global _scheme
    if scheme not in SCHEMES:
        raise ValueError(f"no exit codes are called {scheme!r}: there are {', '.join(SCHEMES)}")
    _scheme = scheme


def code(row: ExitCode) -> int:
    """The code with which this process is to end so."""
    found: int = getattr(row, _scheme)
    return found


def of_code(plain: int) -> ExitCode:
    """The row of a plain code, 0 to 255."""
    for row in TABLE:
        if row is not KILLED and plain in (row.plain, *row.also):
            return row
    return KILLED if plain > 128 else FAILED


def translated(plain: int) -> int:
    """A plain code as `code` gives it: what is not ours (of a signal, or of the user's program) stays as it is."""
    row = of_code(plain)
    return plain if row in (FAILED, KILLED) else code(row)


def of_error(error: BaseException, *, begun: bool = True) -> ExitCode:
    """The row of an error that ends a process.

    Args:
        error: what nobody has caught.
        begun: whether the process has trained a step. What Python raises then may be the data's fault.
    """
    for name in (kind.__name__ for kind in type(error).__mro__):
        for row in TABLE:
            if name in row.errors:
                return FAILED if row is BUG and begun else row
    return FAILED


def end_with(row: ExitCode, error: BaseException) -> None:
    """Has the process end with the code of a row, in place of Python's 1, if nothing catches this very error.

    Its traceback is printed as ever.
    """
    show = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        show(kind, value, trace)
        if value is error:
            raise SystemExit(code(row))

    sys.excepthook = hook


def of_join(done: bool) -> int:
    """The code with which a ps ends, given what ``Server.join`` has returned."""
    return code(DONE if done else PREEMPTED)


def leave(row: ExitCode, message: str) -> NoReturn:
    """Ends the program with a message on stderr, and the code of a row.

    Raises:
        SystemExit: always.
    """
    print(message, file=sys.stderr, flush=True)
    sys.exit(code(row))


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """A block that Ctrl-C leaves by ``SystemExit``, with the code of ``INTERRUPTED``: without a traceback.

    What is within the block, such as the block of a session, sees Python's KeyboardInterrupt.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(code(INTERRUPTED)) from None


def open_streams() -> None:
    """Makes /dev/null of a standard output or error that was closed when the program started: ``command >&-``.

    Python has None in its place, and the next file or socket would get its number. Call it before anything is opened.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "w")  # noqa: SIM115  # it stays open as long as the program runs
            os.set_inheritable(stream.fileno(), True)  # what the program starts has standard streams, too
            setattr(sys, name, stream)


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """The block of a command that prints; also a decorator of its ``main``.

    Where nobody reads what it prints (``command | head -1``), the program ends without a word by ``SystemExit``. Its
    code is that of SIGPIPE, a signal that Python ignores.
    """
    open_streams()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # Python flushes what is left once more at the end
        raise SystemExit(128 + signal.SIGPIPE) from None


def parse_flags(argv: Iterable[str], program: str = "", hint: str = " (see --help)") -> list[str]:
    """The arguments that are no flags, the program's name first; for ``app.run(main, flags_parser=parse_flags)``.

    A mistake ends the program with one line, and the code of ``CONFIGURATION`` instead of absl's 1.

    Args:
        argv: the command line.
        program: how the line begins.
        hint: how the line ends.
    """
    try:
        rest: list[str] = flags.FLAGS(tuple(argv))
        return rest
    except SystemExit:  # --help has been shown: absl would call that a failure
        sys.exit(DONE.plain)
    except flags.Error as error:
        leave(CONFIGURATION, f"{program}{_explain_error(error)}{hint}")


def _explain_error(error: flags.Error) -> str:
    """Returns what is wrong with a command line, in one line: what to use instead of a flag or value that is gone."""
    from runtime.lowlevel import explain_flags  # here, as a launcher does without JAX unless its command line is wrong

    message = " ".join(str(error).split())
    flag = f"--{error.flagname}" if isinstance(error, flags.UnrecognizedFlagError) else message.partition(":")[0]
    return explain_flags([flag.removeprefix("flag ")]) or message
