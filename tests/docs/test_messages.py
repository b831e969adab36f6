"""The messages that docs/messages.md explains are those of the code."""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MESSAGES = re.findall(
    r"^\| `([^`]+)` \|", (ROOT / "docs" / "messages.md").read_text(), re.MULTILINE
)


def texts(path: pathlib.Path) -> Iterator[str]:
    """The strings of a module, put together where they are written in parts."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) else "\0" for part in node.values
            )


@pytest.fixture(scope="module")
def said() -> str:
    modules = [
        path
        for package in ("harness", "runtime")
        for path in sorted((ROOT / package).rglob("*.py"))
    ]
    return "\n".join(text for path in modules for text in texts(path))


def test_messages_are_listed_once() -> None:
    """The page lists more than twenty messages, each once."""
    assert len(MESSAGES) == len(set(MESSAGES)) > 20


@pytest.mark.parametrize("message", MESSAGES)
def test_message_is_in_code(message: str, said: str) -> None:
    """A message of the page is in the code."""
    assert message in said
