"""Why a task is not reached, in words that say what to look at: gRPC's own texts are about its inner parts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from runtime.errors import DeadlineExceededError, OpError

_NO_TASK = "what listens there is no Bellwether task: look at the address, and what else uses the port"
_WHY: Sequence[tuple[str, str]] = (
    (r"Connection refused", "connection refused: nobody listens there, it is not started or has died"),
    (
        r"[Dd]omain name not found|DNS resolution failed|errors resolving",
        "no such host: the name cannot be looked up",
    ),
    (r"parsing HTTP/2|SETTINGS frame|http1\.x|http2 header|Method not found", _NO_TASK),
    (r"No route to host|Network is unreachable", "no route to that host from here"),
    (r"SSL|TLS|[Cc]ertificate|[Hh]andshake", "the two do not agree on TLS: give all tasks the same certificates"),
    (r"timed? ?out|Timeout", "no answer: the host is down, or a firewall is between"),
)
"""What gRPC says (a pattern), and what that means to somebody who started the task. The first that is found counts."""


def why_not(error: OpError) -> str:
    """Why the task that a call was made to is not reached.

    Args:
        error: what the call raised. What the task itself has said, and what gRPC says that is not known here, is given
            as it is.
    """
    for pattern, meaning in _WHY:
        if re.search(pattern, error.message):
            return meaning
    if isinstance(error, DeadlineExceededError):
        return "no answer: it is frozen or busy, its host is down, or a firewall is between"
    return error.message
