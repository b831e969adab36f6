"""The error types: every failure has a name, a gRPC status code and the task of its origin.

The whole tree, with the status code of each type and its built-in base:

    OpError (Exception)
    |-- CancelledError            1  the step, session or stage was cancelled
    |   |-- HungUpError              its caller is dead, has given up or was cut off
    |   `-- TakeoverError            the task recovers from its backup, without calls under way: call again
    |-- UnknownError              2  an exception without a better name
    |-- InvalidArgumentError      3  ValueError: wrong feed, shape, dtype, name or flag
    |   `-- MissingFeedError         a placeholder without a value
    |-- DeadlineExceededError     4  TimeoutError: a time limit ran out
    |   `-- SnapshotError            the tasks could not be held still together for long enough
    |-- NotFoundError             5  LookupError: no such variable, checkpoint, session or task
    |-- AlreadyExistsError        6  the name is taken
    |-- PermissionDeniedError     7  PermissionError: the caller is known, and is not allowed to do this
    |-- ResourceExhaustedError    8  out of memory, or over a configured limit; no variable has lost its value
    |   `-- DiskFullError            no room for a file
    |-- FailedPreconditionError   9  uninitialised variable, closed session
    |   `-- UninitializedError       variables have no value yet
    |-- AbortedError             10  the task restarted, or a failed update lost values; make a new session
    |-- OutOfRangeError          11  the end of the input
    |   `-- TaskLeftError            the task has left in order, as training is over
    |-- UnimplementedError       12  the task does not know this operation, method or version
    |-- InternalError            13  a broken invariant: a bug of ours
    |-- UnavailableError         14  ConnectionError: no contact with the task; try again
    |   `-- DiskAwayError            a file system does not answer: no task is lost
    |-- DataLossError            15  a file or frame is damaged
    `-- UnauthenticatedError     16  the token or certificate is missing or wrong

Subclasses cross from task to task like types, so that no decision depends on the text of a message.
Catching the built-in works too: `except ConnectionError` catches `UnavailableError`, and so on.
"""

from types import MappingProxyType
from typing import ClassVar

OUT_OF_MEMORY = "out of memory"
"""The begin of the message of a computation that needed more memory than its task has."""


class OpError(Exception):
    """Base of all errors of the runtime.

    Attributes:
        code: gRPC status number (1 to 16), the same for all errors of one type and its subclasses.
        kind: number of the subclass among those of one code; 0 for the type itself.
        message: the failure in words, without the task.
        task: the task of the failure, such as "/job:ps/task:0"; empty if here or unknown.
        session: id of the session whose tasks raised the error; 0 without a session.
    """

    code: ClassVar[int] = 2
    kind: ClassVar[int] = 0
    session: int = 0

    def __init__(self, message: str = "", *, task: str = "") -> None:
        """Makes an error whose text is "<task>: <message>"."""
        # One positional argument only: OSError, a base of some subclasses, reads two as (errno,
        # strerror). Further values live in __dict__, which pickle and copy preserve.
        super().__init__(message)
        self.message = message
        self.task = task

    @property
    def out_of_memory(self) -> bool:
        """True if a computation needed more memory than its task has.

        The error is a `ResourceExhaustedError`, or an `AbortedError` if variables have lost their
        values too.
        """
        return self.message.startswith(OUT_OF_MEMORY)

    def __str__(self) -> str:
        """Returns the message behind the task."""
        return f"{self.task}: {self.message}" if self.task else self.message

    def __repr__(self) -> str:
        """Returns the constructor call of this error."""
        where = f", task={self.task!r}" if self.task else ""
        return f"{type(self).__name__}({self.message!r}{where})"


class CancelledError(OpError):
    """The step, session or stage was cancelled."""

    code = 1


class HungUpError(CancelledError):
    """The caller of a wait is dead, has given up or was cut off.

    A caller that was cut off calls again.
    """

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
    """The task recovers from its backup, without the calls under way at its death.

    A new call succeeds.
    """

    kind = 2


class UnknownError(OpError):
    """An exception without a better name."""

    code = 2


class InvalidArgumentError(OpError, ValueError):
    """A wrong feed, shape, dtype, name or flag."""

    code = 3


class MissingFeedError(InvalidArgumentError):
    """A placeholder of the step has no value."""

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
        limit: name of the task's limit (``runtime.limits``); empty for other reasons.
    """

    code = 8
    limit = ""


class DiskFullError(ResourceExhaustedError):
    """There is no room for a file; with some, it works."""

    kind = 1


class FailedPreconditionError(OpError):
    """The state is not ready for the call: an uninitialised variable, a closed session."""

    code = 9


class UninitializedError(FailedPreconditionError):
    """Variables have no value yet."""

    kind = 1


class AbortedError(OpError):
    """The task restarted, or a failed update lost values.

    State is gone, and a new session is needed.
    """

    code = 10


class OutOfRangeError(OpError):
    """The end of the input: an exhausted, closed queue or data set."""

    code = 11


class TaskLeftError(OutOfRangeError):
    """The task has left in order at the end of training. No later call will succeed there."""

    kind = 1


class UnimplementedError(OpError):
    """The task does not know this operation, method or version."""

    code = 12


class InternalError(OpError):
    """A broken invariant of the runtime."""

    code = 13


class UnavailableError(OpError, ConnectionError):
    """No contact with the task. A later call may succeed."""

    code = 14


class DiskAwayError(UnavailableError):
    """A file system does not answer. No task is lost."""

    kind = 1


class DataLossError(OpError):
    """A file or frame is damaged beyond repair."""

    code = 15


class UnauthenticatedError(OpError):
    """The token or certificate is missing or wrong.

    Callers do not try again with the same credential.
    """

    code = 16


ERROR_TYPES = MappingProxyType(
    {error_type.code: error_type for error_type in OpError.__subclasses__()}
)
"""The type of each gRPC status number from 1 to 16."""
assert ERROR_TYPES.keys() == {*range(1, 17)}, "a status number has no type"
_KINDS = {
    (kind.code, kind.kind): kind
    for error_type in ERROR_TYPES.values()
    for kind in error_type.__subclasses__()
}
assert len(_KINDS) == sum(len(t.__subclasses__()) for t in ERROR_TYPES.values()), (
    "two types have one number"
)


def wire_code(error: OpError) -> int:
    """Returns the number of an error's type for another task.

    ``error_from_code`` reads the number.
    """
    return error.code | error.kind << 8


def error_from_code(code: int, message: str, task: str = "") -> OpError:
    """Makes the error of a gRPC status number.

    Args:
        code: Status number, or a result of ``wire_code``. An unknown number of a newer peer becomes
            an `UnknownError` with the number. An unknown kind becomes the type of its status
            number.
        message: The failure in words, without the task.
        task: The task of the failure, such as "/job:ps/task:0".

    Raises:
        ValueError: `code` is 0, which means success.
    """
    if code == 0:
        raise ValueError(f"status code 0 is success, not an error (message: {message!r})")
    base = code & 0xFF
    error_type: type[OpError] | None = _KINDS.get((base, code >> 8)) or ERROR_TYPES.get(base)
    if error_type is None:
        return UnknownError(f"{message} (status code {code})", task=task)
    return error_type(message, task=task)


def meaning(error: BaseException) -> type[OpError]:
    """Returns the error type for an exception of JAX, XLA or numpy."""
    if (
        isinstance(error, MemoryError)
        or "RESOURCE_EXHAUSTED" in str(error)
        or "Out of memory" in str(error)
    ):
        return ResourceExhaustedError
    # JAX_DEBUG_NANS and JAX_DEBUG_INFS raise FloatingPointError, and in a compiled program an
    # internal class of JAX.
    if (
        isinstance(error, FloatingPointError)
        or type(error).__name__ == "InternalFloatingPointError"
    ):
        return InvalidArgumentError
    return InvalidArgumentError if isinstance(error, TypeError | ValueError) else InternalError


def one_line(what: BaseException | str, most: int = 500) -> str:
    """Returns a text, or the text of an error, in one line. An error without a text is its type.

    Args:
        what: a text or an error.
        most: largest number of characters.
    """
    # The text of an interrupt or an exit is empty or a number, so the type says more.
    text = str(what) if isinstance(what, str | Exception) else ""
    return printable(" ".join(text.split())[:most]) or (
        what if isinstance(what, str) else repr(what)
    )


def printable(text: str) -> str:
    """Returns a text for a terminal, with escapes for characters that would move the cursor or change colours."""
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    )
