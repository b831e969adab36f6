"""``tf.compat``: strings as bytes and as text."""

from __future__ import annotations

from harness.tf1.names.missing import namespace as _namespace


def as_bytes(bytes_or_text: str | bytes, encoding: str = "utf-8") -> bytes:
    """Returns ``bytes_or_text`` as bytes. Raises TypeError when it is neither."""
    if isinstance(bytes_or_text, str):
        return bytes_or_text.encode(encoding)
    if isinstance(bytes_or_text, bytes):
        return bytes_or_text
    raise TypeError(f"expected bytes or text, got {bytes_or_text!r}")


def as_text(bytes_or_text: str | bytes, encoding: str = "utf-8") -> str:
    """Returns ``bytes_or_text`` as text. Raises TypeError when it is neither."""
    return as_bytes(bytes_or_text, encoding).decode(encoding)


as_str = as_text

__getattr__, _ = _namespace("tf.compat")
