"""The error types: every failure has a name, a gRPC status code and the task it came from.

The whole tree, with the status code of each type and the built-in exception it also is:

    OpError (Exception)
    |-- CancelledError            1  the step, session or stage was cancelled by somebody
    |   |-- HungUpError              its caller is dead, has given it up or was cut off
    |   `-- TakeoverError            the task goes on from its backup, without what was under way: begin it again
    |-- UnknownError              2  an exception that has no better name
    |-- InvalidArgumentError      3  ValueError: wrong feed, shape, dtype, name or flag
    |   `-- MissingFeedError         a placeholder without a value
    |-- DeadlineExceededError     4  TimeoutError: a time limit ran out
    |   `-- SnapshotError            the tasks could not be held still together for long enough
    |-- NotFoundError             5  LookupError: no such variable, checkpoint, session or task
    |-- AlreadyExistsError        6  the name is taken
    |-- PermissionDeniedError     7  PermissionError: known who you are, and it is not allowed
    |-- ResourceExhaustedError    8  out of memory, or over a configured limit; no variable has lost its value
    |   `-- DiskFullError            no room for what was to be written
    |-- FailedPreconditionError   9  uninitialised variable, closed session: do something first
    |   `-- UninitializedError       variables have no value yet
    |-- AbortedError             10  the task restarted, or an update that failed took values along; make a new session
    |-- OutOfRangeError          11  the end of the input
    |   `-- TaskLeftError            the task has left in order, as training is over
    |-- UnimplementedError       12  the task does not know this operation, method or version
    |-- InternalError            13  a broken invariant: a bug of ours
    |-- UnavailableError         14  ConnectionError: no contact with the task; try again
    |   `-- DiskAwayError            a file system does not answer: no task is lost
    |-- DataLossError            15  a file or frame is damaged
    `-- UnauthenticatedError     16  the token or certificate is missing or wrong

Subclasses cross from task to task as well as types do, so that no decision hangs on the text of a message.
Catching the built-in works too: `except ConnectionError` catches `UnavailableError`, and so on.
"""

from types import MappingProxyType
from typing import ClassVar, Final

OUT_OF_MEMORY: Final = "out of memory"
"""How the message of a computation begins that needed more memory than its task has."""


class OpError(Exception):
    """Base of all errors of the runtime.

    Attributes:
        code: gRPC status number (1 to 16), the same for all errors of one type and its subclasses.
        kind: tells the subclasses of one code apart; 0 is the type itself.
        message: what went wrong, without the task.
        task: where it went wrong, such as "/job:ps/task:0"; empty when it was here or nobody knows.
        session: id of the session whose tasks raised the error; 0 when no session did.
    """

    code: ClassVar[int] = 2
    kind: ClassVar[int] = 0
    session: int = 0

    def __init__(self, message: str = "", *, task: str = "") -> None:
        """Makes an error that reads "<task>: <message>"."""
        # One positional argument only: OSError, a base of some subclasses, reads two as (errno, strerror).
        # The rest lives in __dict__, which pickle and copy carry along.
        super().__init__(message)
        self.message = message
        self.task = task

    @property
    def out_of_memory(self) -> bool:
        """Whether a computation needed more memory than its task has.

        It is a `ResourceExhaustedError`, or an `AbortedError` where variables have lost their values with it.
        """
        return self.message.startswith(OUT_OF_MEMORY)

    def __str__(self) -> str:
        """The message, with the task in front when there is one."""
        return f"{self.task}: {self.message}" if self.task else self.message

    def __repr__(self) -> str:
        """The constructor call that makes this error."""
        where = f", task={self.task!r}" if self.task else ""
        return f"{type(self).__name__}({self.message!r}{where})"


class CancelledError(OpError):
    """The step, session or stage was cancelled."""

    code = 1


class HungUpError(CancelledError):
    """The caller of the wait is dead, has given it up or was cut off; one that was cut off makes the call again."""

    kind = 1


class ClosedSessionError(RuntimeError):
    """The use of a session after its end.

    Args:
        session: The number of the session.
    """

    def __init__(self, session: int) -> None:
        super().__init__("Attempted to use a closed Session.")
        self.session = session


class TakeoverError(CancelledError):
    """The task goes on from its backup, without what was under way when it died: begun again, it works."""

    kind = 2


class UnknownError(OpError):
    """An exception that has no better name."""

    code = 2


class InvalidArgumentError(OpError, ValueError):
    """A wrong feed, shape, dtype, name or flag."""

    code = 3


class MissingFeedError(InvalidArgumentError):
    """A placeholder that the step needs has no value."""

    kind = 1


class DeadlineExceededError(OpError, TimeoutError):
    """A time limit ran out before the work was done."""

    code = 4


class SnapshotError(DeadlineExceededError):
    """No consistent snapshot: the tasks could not be held still together for long enough."""

    kind = 1


class NotFoundError(OpError, LookupError):
    """No such variable, checkpoint, session or task."""

    code = 5


class AlreadyExistsError(OpError):
    """The name is taken."""

    code = 6


class PermissionDeniedError(OpError, PermissionError):
    """The peer is known, and is not allowed to do this."""

    code = 7


class ResourceExhaustedError(OpError):
    """Out of memory, or over a configured limit.

    Attributes:
        limit: name of the limit, on the task that has it (``runtime.limits``); empty when it was none of those.
    """

    code = 8
    limit = ""


class DiskFullError(ResourceExhaustedError):
    """There is no room for what was to be written; with some, it works."""

    kind = 1


class FailedPreconditionError(OpError):
    """The state is not ready for this: an uninitialised variable, a closed session."""

    code = 9


class UninitializedError(FailedPreconditionError):
    """Variables have no value yet."""

    kind = 1


class AbortedError(OpError):
    """The task restarted, or a failed update took values along: state is gone, and a new session is needed."""

    code = 10


class OutOfRangeError(OpError):
    """The end of the input: an exhausted, closed queue or data set."""

    code = 11


class TaskLeftError(OutOfRangeError):
    """The task has left in order, as training is over: nobody will answer there any more."""

    kind = 1


class UnimplementedError(OpError):
    """The task does not know this operation, method or version."""

    code = 12


class InternalError(OpError):
    """A broken invariant of the runtime."""

    code = 13


class UnavailableError(OpError, ConnectionError):
    """No contact with the task; trying again may help."""

    code = 14


class DiskAwayError(UnavailableError):
    """A file system does not answer now; no task is lost."""

    kind = 1


class DataLossError(OpError):
    """A file or frame is damaged beyond repair."""

    code = 15


class UnauthenticatedError(OpError):
    """The token or certificate is missing or wrong. Nothing changes that but another one, so nobody tries again."""

    code = 16


ERROR_TYPES: Final = MappingProxyType({error_type.code: error_type for error_type in OpError.__subclasses__()})
"""The type of each gRPC status number from 1 to 16."""
_KINDS: Final = {
    (kind.code, kind.kind): kind for error_type in ERROR_TYPES.values() for kind in error_type.__subclasses__()
}


def wire_code(error: OpError) -> int:
    """The number that tells the type of an error to another task; ``error_from_code`` reads it, and plain codes too."""
    return error.code | error.kind << 8


def error_from_code(code: int, message: str, task: str = "") -> OpError:
    """Makes the error that a gRPC status number stands for.

    Args:
        code: status number, or what ``wire_code`` gives. One that is not known (a newer peer's) gives an
            `UnknownError` that tells it; of an unknown kind, the type of its status number.
        message: what went wrong, without the task.
        task: where it went wrong, such as "/job:ps/task:0".

    Raises:
        ValueError: `code` is 0, which is success.
    """
    if code == 0:
        raise ValueError(f"status code 0 is success, not an error (message: {message!r})")
    base = code & 0xFF
    error_type: type[OpError] | None = _KINDS.get((base, code >> 8)) or ERROR_TYPES.get(base)
    if error_type is None:
        return UnknownError(f"{message} (status code {code})", task=task)
    return error_type(message, task=task)


def meaning(error: BaseException) -> type[OpError]:
    """The error type for what JAX, XLA or numpy has raised."""
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error):
        return ResourceExhaustedError
    # JAX_DEBUG_NANS and JAX_DEBUG_INFS make JAX raise it; of a compiled program it is an error of JAX's own.
    if isinstance(error, FloatingPointError) or type(error).__name__ == "InternalFloatingPointError":
        return InvalidArgumentError
    return InvalidArgumentError if isinstance(error, TypeError | ValueError) else InternalError


def one_line(what: BaseException | str, most: int = 500) -> str:
    """A text, or that of an error, in one line of at most so many characters; an error's type when it says nothing."""
    text = what if isinstance(what, str) else str(what) if isinstance(what, Exception) else ""
    return printable(" ".join(text.split())[:most]) or (what if isinstance(what, str) else repr(what))


def printable(text: str) -> str:
    """A text of others as a terminal may show it: what would move its cursor or change its colours is escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
