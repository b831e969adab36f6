"""``tf.errors``: the runtime's errors, and the status codes by name."""

from harness.tf1.names.missing import namespace as _namespace
from runtime import AbortedError as AbortedError
from runtime import AlreadyExistsError as AlreadyExistsError
from runtime import CancelledError as CancelledError
from runtime import DataLossError as DataLossError
from runtime import DeadlineExceededError as DeadlineExceededError
from runtime import FailedPreconditionError as FailedPreconditionError
from runtime import InternalError as InternalError
from runtime import InvalidArgumentError as InvalidArgumentError
from runtime import NotFoundError as NotFoundError
from runtime import OpError as OpError
from runtime import OutOfRangeError as OutOfRangeError
from runtime import PermissionDeniedError as PermissionDeniedError
from runtime import ResourceExhaustedError as ResourceExhaustedError
from runtime import UnauthenticatedError as UnauthenticatedError
from runtime import UnavailableError as UnavailableError
from runtime import UnimplementedError as UnimplementedError
from runtime import UnknownError as UnknownError

OK = 0
CANCELLED = 1
UNKNOWN = 2
INVALID_ARGUMENT = 3
DEADLINE_EXCEEDED = 4
NOT_FOUND = 5
ALREADY_EXISTS = 6
PERMISSION_DENIED = 7
RESOURCE_EXHAUSTED = 8
FAILED_PRECONDITION = 9
ABORTED = 10
OUT_OF_RANGE = 11
UNIMPLEMENTED = 12
INTERNAL = 13
UNAVAILABLE = 14
DATA_LOSS = 15
UNAUTHENTICATED = 16

__getattr__, _ = _namespace("tf.errors")
