"""``tf.compat``: strings as bytes and as text, and the switches by which programs ask for TensorFlow 1."""

from __future__ import annotations

from harness.tf1.names.missing import namespace as _namespace
from harness.tf1.names.table import add_names as _add_names


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


def _keep_behaviour() -> None:
    """Keeps the behaviour of TensorFlow 1, which is the only one here."""


def _never() -> bool:
    """Returns False: programs make graphs, and a session runs them."""
    return False


# Programs for TensorFlow 2 begin with `tf.disable_v2_behavior()`, or with its parts.
_SWITCHES = """
    disable_control_flow_v2 disable_eager_execution disable_resource_variables disable_tensor_equality disable_v2_behavior
    disable_v2_tensorshape enable_resource_variables
    """.split()
_add_names("tf", dict.fromkeys(_SWITCHES, _keep_behaviour), "Others")
_ASKS = ("executing_eagerly", "executing_eagerly_outside_functions")
_add_names("tf", dict.fromkeys(_ASKS, _never), "Others")

__getattr__, _ = _namespace("tf.compat")
