"""The table of all names: ``python -m harness.tf1.tools.listing docs/tf1_names.md`` writes the table anew."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from google.protobuf.message import Message

import harness.tf1 as tf
import runtime as rt
from harness.tensorboard import summary as tensorboard_summary
from harness.tf1.names.missing import INSTEAD, THE_REST, Namespace
from harness.tf1.names.table import HEADINGS, TABLE
from harness.tf1.ops import dtypes

_SENTENCE = re.compile(r"(?:``.*?``|[^.:`]|[.:](?=\S))*")  # up to a stop that is not within code
BEGIN, END = "<!-- names: begin -->", "<!-- names: end -->"
"""Between these lines of the page stands what ``page`` gives."""


def page() -> str:
    """Returns the generated part of the page, in Markdown."""
    parts = []
    for heading in sorted(set(HEADINGS.values())):
        names = sorted(name for name, its in HEADINGS.items() if its == heading)
        parts.append(_make_table(heading, ((f"tf.{name}", TABLE["tf"][name]) for name in names)))
    parts.append("## Data types\n\n" + ", ".join(f"`tf.{n}`" for n in sorted(dtypes.DTYPES)) + "\n")
    shown: set[int] = set()
    for namespace, module in namespaces():
        rows = list(members(namespace, module))
        # A module in a module of contrib that only repeats others, such as slim.layers, has no
        # table.
        if namespace.count(".") < 2 or {id(value) for _, value in rows} - shown:
            parts.append(_make_table(f"tf.{namespace}", rows))
        shown.update(id(value) for _, value in rows)
    instead = INSTEAD | {f"{name}.*": what for name, what in THE_REST.items()}
    missing = "\n".join(f"| `{name}` | {advice} |" for name, advice in sorted(instead.items()))
    parts.append(f"## What is not there\n\n| name | instead |\n|---|---|\n{missing}\n")
    return "\n".join(part for part in parts if part)


def namespaces() -> Iterator[tuple[str, Any]]:
    """Yields the modules of ``tf``, each with its name, and the ones in them."""
    stack = [(name, getattr(tf, name)) for name in reversed(tf.NAMESPACES)]
    while stack:
        name, module = stack.pop()
        yield name, module
        inner = [(part, getattr(module, part)) for part in sorted(dir(module), reverse=True)]
        stack += [(f"{name}.{part}", m) for part, m in inner if isinstance(m, Namespace)]


def members(namespace: str, module: Any) -> Iterable[tuple[str, Any]]:
    """Yields the names of a module of ``tf`` in full, and what they are."""
    if "__dir__" in vars(module):
        names = sorted(dir(module))
    else:
        names = sorted(n for n in vars(module) if not n.startswith("_") and n not in _NOT_NAMES)
    for name in names:
        value = getattr(module, name)
        if inspect.ismodule(value):
            continue
        yield f"tf.{namespace}.{name}", value


_NOT_NAMES = {
    "annotations", "Any", "Callable", "Iterator", "FlagValues", "absl_app", "absl_flags", "rt",
}  # fmt: skip


def _make_table(title: str, rows: Iterable[tuple[str, Any]]) -> str:
    lines = "\n".join(
        f"| `{name}{signature(value)}` | {described(value)} |" for name, value in rows
    )
    if not lines:
        return ""
    return f"## {title}\n\n| name | what it is |\n|---|---|\n{lines}\n"


def signature(value: object) -> str:
    """Returns the arguments of a function or class with defaults: ``(x, name=None)``; nothing for a value."""
    if isinstance(value, type) and issubclass(value, Message):
        return "(...)"
    if not callable(value) or isinstance(value, dtypes.DType) or _find_elsewhere(value):
        return ""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    shown: list[str] = []
    for p in found.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not any(s.startswith("*") for s in shown):
            shown.append("*")
        prefix = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        shown.append(
            prefix + p.name + ("" if p.default is p.empty else f"={_show_default(p.default)}")
        )
    return f"({', '.join(shown)})".replace("|", "\\|")


def _show_default(value: object) -> str:
    if isinstance(value, np.dtype) or isinstance(value, type) and issubclass(value, np.generic):
        return repr(dtypes.as_dtype(value))
    if callable(value):
        return str(getattr(value, "__name__", "..."))
    text = repr(value)
    return "..." if " at 0x" in text else text


def described(value: object) -> str:
    """Returns the first sentence of what documents a function or class; the value itself for a constant."""
    if not callable(value):
        return f"`{value!r}`" if isinstance(value, int | str | type(None)) else type(value).__name__
    elsewhere = _find_elsewhere(value)
    if elsewhere:
        return f"`{elsewhere}`"
    if isinstance(value, type) and issubclass(value, Message):
        return f"the message `{value.DESCRIPTOR.full_name}`"
    first = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
    sentence = _SENTENCE.match(first)
    return (sentence[0] if sentence else first).replace("``", "`").replace("|", "\\|")


def _find_elsewhere(value: object) -> str:
    """Returns the place where a reader finds a name of the harness or the runtime."""
    module, name = str(getattr(value, "__module__", "")), getattr(value, "__name__", "")
    if module.startswith("harness.tf1") or not module.startswith(("harness", "runtime")):
        return ""
    # what users import, in which no other module of the harness may look
    face = importlib.import_module("harness")
    for package, short in ((face, "harness"), (tensorboard_summary, "harness.summary"), (rt, "rt")):
        if getattr(package, name, None) is value:
            return f"{short}.{name}"
    return f"{module}.{name}"


def main(argv: list[str]) -> None:
    """Writes the names into the page ``argv[1]``, between its two marks."""
    path = pathlib.Path(argv[1])
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{page()}{END}{after}")


if __name__ == "__main__":
    main(sys.argv)
