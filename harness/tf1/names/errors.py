"""``tf.errors``: the runtime's errors, and the status codes by name."""

import runtime as rt
from harness.tf1.names.missing import namespace
from harness.tf1.names.table import add_names

_CODES = """
    OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS PERMISSION_DENIED RESOURCE_EXHAUSTED
    FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED INTERNAL UNAVAILABLE DATA_LOSS UNAUTHENTICATED
    """.split()
"""The names of the status codes, in the order of their numbers: 0, 1, 2."""

add_names("tf.errors", {name: code for code, name in enumerate(_CODES)})
# The class of an error is called after its code: OUT_OF_RANGE, OutOfRangeError.
_ERRORS = [f"{code.title().replace('_', '')}Error" for code in _CODES[1:]]
add_names("tf.errors", {name: getattr(rt, name) for name in ("OpError", *_ERRORS)})

__getattr__, __dir__ = namespace("tf.errors")
