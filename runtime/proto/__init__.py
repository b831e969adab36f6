"""Protocol messages, generated from protos/runtime/proto."""

from google import protobuf

_FLOOR = "7.35.1"
"""The protobuf that generated the messages, as in pyproject.toml: no older one reads them."""


def check_version(found: str) -> None:
    """Raises ImportError when protobuf ``found`` is too old for the messages; names the cure."""
    if tuple(map(int, found.split(".")[:3])) < tuple(map(int, _FLOOR.split("."))):
        raise ImportError(f"Bellwether needs protobuf {_FLOOR} or newer, and {found} is here: pip install 'protobuf>={_FLOOR}'")


check_version(protobuf.__version__)
