"""The reason why a task is not reached, in words for its user.

gRPC's own texts are about its inner parts.
"""

import re
from collections.abc import Sequence

from runtime.errors import DeadlineExceededError, OpError

_NO_TASK = (
    "what listens there is no Bellwether task: look at the address, and what else uses the port"
)
_WHY: Sequence[tuple[str, str]] = (
    (
        r"Connection refused",
        "connection refused: nobody listens there, it is not started or has died",
    ),
    (
        r"[Dd]omain name not found|DNS resolution failed|errors resolving",
        "no such host: the name cannot be looked up",
    ),
    (r"parsing HTTP/2|SETTINGS frame|http1\.x|http2 header|Method not found", _NO_TASK),
    (r"No route to host|Network is unreachable", "no route to that host from here"),
    (
        r"SSL|TLS|[Cc]ertificate|[Hh]andshake",
        "the two do not agree on TLS: give all tasks the same certificates",
    ),
    (r"timed? ?out|Timeout", "no answer: the host is down, or a firewall is between"),
)
"""Patterns of gRPC's texts, and their meaning for the person who started the task.

The first match counts.
"""


def why_not(error: OpError) -> str:
    """Returns the reason why a called task is not reached.

    Args:
        error: Error of the call. A text of the task itself, or an unknown text of gRPC, is returned
            unchanged.

    Examples:
        >>> from runtime.errors import UnavailableError
        >>> why_not(UnavailableError("connect: No route to host"))
        'no route to that host from here'
    """
    for pattern, meaning in _WHY:
        if re.search(pattern, error.message):
            return meaning
    if isinstance(error, DeadlineExceededError):
        return "no answer: it is frozen or busy, its host is down, or a firewall is between"
    return error.message
