"""What the errors of JAX and XLA mean: the error type for each."""

from __future__ import annotations

from runtime.errors import InternalError, InvalidArgumentError, OpError, ResourceExhaustedError

_MOST = 500  # characters of XLA's text


def meaning(error: BaseException) -> type[OpError]:
    """The error type for what JAX, XLA or numpy has raised."""
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error):
        return ResourceExhaustedError
    return InvalidArgumentError if isinstance(error, TypeError | ValueError) else InternalError


def one_line(error: BaseException) -> str:
    """The text of an error in one line of bounded length; its type when it says nothing."""
    text = " ".join(str(error).split())[:_MOST] if isinstance(error, Exception) else ""
    return text or repr(error)
