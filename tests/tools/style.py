"""The figures of style, ``python -m tests.tools.style``: sizes, words and names of the product, its pages and tests.

``tests/test_style.py`` holds them below limits, so that a change that makes them worse is seen.
Only the standard library is used, and nothing of the project is imported, so a figure costs a
second.
"""

from __future__ import annotations

import argparse
import ast
import io
import pathlib
import re
import textwrap
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from tests.tools import house

PRONOUNS = frozenset(
    """
    it its this that these those who whom whose which what whoever whatever they them their one ones other others
    another somebody anybody nobody nothing everything everybody such itself
    """.split()
)
QUESTIONS = frozenset("what whether how who whom whose where which why when whoever".split())
"""Words that no docstring begins with."""

_CODE = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
_PRAGMA = re.compile(r"#\s*(type:|noqa|ruff|mypy|!|pragma|isort)")
# A thread of a group, whatever the name of the group: `self._threads.start`,
# `ThreadGroup("x").create`.
_STARTS = re.compile(
    r"(\bThread|ThreadPoolExecutor|(hreads\w*|group|ThreadGroup\(.*\))\.(start|create))$"
)
_EXAMPLE = re.compile(r">>>|```|^\s*Examples?:|::\s*$", re.MULTILINE)


@dataclass(frozen=True, order=True)
class Sized:
    """A function or class with its sizes, the one that counts first."""

    size: int
    other: int
    where: str


@dataclass
class Figures:
    """The figures of some files.

    Attributes:
        tokens: Names, operators and literals, without docstrings.
        code_lines: Lines with code, without docstrings.
        comments: Full-line comments.
        trailing: Comments behind code.
        functions: Tokens of the body, and branches, of each function.
        classes: Lines, and attributes set on self, of each class.
        named_functions: Functions without special names.
        one_word_functions: Those of them whose name has one word.
        one_word_classes: Names of classes that have one word.
        questions: Docstrings that begin with What, Whether, Who and the like.
        words: Words in docstrings.
        pronouns: Words in docstrings that are pronouns.
        examples: Docstrings with an example.
        asserts: Assertions.
        anys: Uses of ``Any``.
        threads: Places that start a thread.
    """

    tokens: int = 0
    code_lines: int = 0
    comments: int = 0
    trailing: int = 0
    functions: list[Sized] = field(default_factory=list)
    classes: list[Sized] = field(default_factory=list)
    named_functions: int = 0
    one_word_functions: int = 0
    one_word_classes: int = 0
    questions: list[str] = field(default_factory=list)
    words: int = 0
    pronouns: int = 0
    examples: int = 0
    asserts: int = 0
    anys: int = 0
    threads: int = 0

    def functions_over(self, tokens: int = -1, branches: int = -1) -> list[str]:
        """Returns the functions with more tokens, and more branches, than given."""
        return [f.where for f in sorted(self.functions) if f.size > tokens and f.other > branches]

    def classes_over(self, lines: int = -1, attributes: int = -1) -> list[str]:
        """Returns the classes with more lines, and more attributes, than given."""
        return [c.where for c in sorted(self.classes) if c.size > lines and c.other > attributes]

    def __str__(self) -> str:
        lines, tokens = max(1, self.code_lines) / 1000, max(1, self.tokens) / 1000
        named, classes = max(1, self.named_functions), max(1, len(self.classes))
        return (
            f"tokens {self.tokens:,}, code lines {self.code_lines:,}\n"
            f"functions {len(self.functions):,}: over 300 tokens "
            f"{len(self.functions_over(tokens=300))}, "
            f"over 400 {len(self.functions_over(tokens=400))}, over 15 branches "
            f"{len(self.functions_over(branches=15))}, of one word "
            f"{self.one_word_functions / named:.0%}\n"
            f"classes {classes:,}: over 350 lines {len(self.classes_over(lines=350))}, over 20 "
            "attributes "
            f"{len(self.classes_over(attributes=20))}, of one word "
            f"{self.one_word_classes / classes:.0%}\n"
            f"docstrings: {len(self.questions)} begin with What and the like, "
            f"{100 * self.pronouns / max(1, self.words):.1f} pronouns in 100 words, "
            f"{self.examples} have an example\n"
            f"comments per 1,000 code lines {self.comments / lines:.0f}, trailing "
            f"{self.trailing / lines:.0f}; "
            f"asserts per 1,000 tokens {self.asserts / tokens:.1f}; Any {self.anys}; "
            f"places that start a thread {self.threads}"
        )


def product(
    prefix: str = "", without: str = "", root: pathlib.Path = house.ROOT
) -> Iterator[pathlib.Path]:
    """Yields the files of the product below a prefix, without generated ones and those below another prefix."""
    for package in house.LAYERS.keys() | {"models"}:
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if (
                name.startswith(prefix)
                and not (without and name.startswith(without))
                and "_pb2" not in path.name
            ):
                yield path


def measure(paths: Iterable[pathlib.Path], root: pathlib.Path = house.ROOT) -> Figures:
    """Measures files."""
    figures = Figures()
    for path in paths:
        _add_file(figures, path.read_text(), path.relative_to(root).as_posix())
    return figures


def measure_text(source: str, name: str) -> Figures:
    """Measures the text of one file."""
    figures = Figures()
    _add_file(figures, source, name)
    return figures


def _tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    """Yields the tokens of a source; an f-string is one token, as it was before Python 3.12."""
    starts, ends = (getattr(tokenize, f"FSTRING_{end}", None) for end in ("START", "END"))
    depth, first = 0, None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == starts:
            first = token if not depth else first
            depth += 1
        elif token.type == ends:
            depth -= 1
            if not depth and first is not None:
                yield token._replace(type=tokenize.STRING, start=first.start)
        elif not depth:
            yield token


def _add_file(figures: Figures, source: str, name: str) -> None:
    code_lines: set[int] = set()
    for token in _tokens(source):
        if token.type in _CODE:
            code_lines.update(range(token.start[0], token.end[0] + 1))
            figures.tokens += 1
        elif token.type == tokenize.COMMENT and not _PRAGMA.match(token.string):
            if token.line[: token.start[1]].strip():
                figures.trailing += 1
            else:
                figures.comments += 1
    for node in ast.walk(ast.parse(source)):
        where = f"{name}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', 'module')}"
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
            text := ast.get_docstring(node)
        ):
            code_lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
            figures.tokens -= 1
            _add_docstring(figures, text, where)
        if isinstance(node, ast.FunctionDef):
            figures.functions.append(Sized(_body_tokens(source, node), _branches(node), where))
            figures.named_functions += not node.name.startswith("__")
            figures.one_word_functions += not node.name.startswith(
                "__"
            ) and "_" not in node.name.strip("_")
        elif isinstance(node, ast.ClassDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            figures.classes.append(Sized(lines, len(_attributes(node)), where))
            figures.one_word_classes += len(re.findall(r"[A-Z][a-z0-9]*", node.name)) < 2
        elif isinstance(node, ast.Assert):
            figures.asserts += 1
        elif isinstance(node, ast.Name):
            figures.anys += node.id == "Any"
        elif isinstance(node, ast.Call):
            figures.threads += bool(_STARTS.search(ast.unparse(node.func)))
    figures.code_lines += len(code_lines)


def _add_docstring(figures: Figures, text: str, where: str) -> None:
    words = [word.lower() for word in _words(_prose(text))]
    figures.words += len(words)
    figures.pronouns += sum(word in PRONOUNS for word in words)
    figures.examples += _EXAMPLE.search(text) is not None
    if words and words[0] in QUESTIONS:
        figures.questions.append(where)


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z']+", text)


def _prose(text: str) -> str:
    """Drops code, section heads and markup."""
    text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    text = re.sub(r"`[^`\n]*`", " x ", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = "\n".join(
        line for line in text.splitlines() if not re.match(r"\s*(\||#|>>>|    \S.*[=(]|<)", line)
    )
    return re.sub(
        r"^\s*(Args|Returns|Raises|Yields|Attributes|Examples?):\s*$", " ", text, flags=re.MULTILINE
    )


def _body_tokens(source: str, node: ast.FunctionDef) -> int:
    first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
    body = textwrap.dedent(
        "\n".join(source.splitlines()[first.lineno - 1 : node.end_lineno]) + "\n"
    )
    try:
        return sum(token.type in _CODE for token in _tokens(body))
    except (tokenize.TokenError, IndentationError):
        # The body stands on the line of its def, or a text in it is not indented.
        return 0


def _branches(node: ast.AST) -> int:
    total = 0
    for child in ast.walk(node):
        if isinstance(
            child, ast.If | ast.For | ast.While | ast.ExceptHandler | ast.match_case | ast.IfExp
        ):
            total += 1
        elif isinstance(child, ast.BoolOp):
            total += len(child.values) - 1
        elif isinstance(child, ast.comprehension):
            total += 1 + len(child.ifs)
    return total


def _attributes(node: ast.ClassDef) -> set[str]:
    return {
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute)
        and isinstance(child.ctx, ast.Store)
        and isinstance(child.value, ast.Name)
        and child.value.id == "self"
    }


GENERATED_PAGES = {"docs/tf1_names.md"}
"""Pages that a program writes."""


def pages(root: pathlib.Path = house.ROOT) -> dict[str, str]:
    """Returns the pages by name, without those that a program writes."""
    tops = [root / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    paths = [*tops, *sorted((root / "docs").rglob("*.md"))]
    names = {path.relative_to(root).as_posix(): path for path in paths}
    return {name: path.read_text() for name, path in names.items() if name not in GENERATED_PAGES}


def page_words(text: str) -> int:
    """Returns the number of words of a page."""
    return len(text.split())


def page_blocks(text: str) -> int:
    """Returns the number of code blocks of a page."""
    return len(re.findall(r"^ *```\w", text, re.MULTILINE))


_PRIVATE: Final = re.compile(
    r"(?<!\bself)(?<!\bcls)(?<=[a-z\])])\._(?!(?:replace|asdict|exit|getframe|cython)\b)[a-z]\w+"
)
"""A private attribute of an object but ``self``; the names that are left out are public ones of Python and gRPC."""


@dataclass
class TestFigures:
    """The figures of the tests.

    Attributes:
        words: Number of words in each test's name, by where it is.
        documented: Tests with a docstring.
        patches: Uses of monkeypatch.
        private: Uses of private attributes of other objects than ``self``.
    """

    __test__ = False

    words: dict[str, int] = field(default_factory=dict)
    documented: int = 0
    patches: int = 0
    private: int = 0


def measure_tests(root: pathlib.Path = house.ROOT) -> TestFigures:
    """Measures the tests."""
    figures = TestFigures()
    for path in sorted((root / "tests").rglob("*.py")):
        source, name = path.read_text(), path.relative_to(root).as_posix()
        figures.patches += len(re.findall(r"\bmonkeypatch\.", source))
        figures.private += len(_PRIVATE.findall(source))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                figures.words[f"{name}:{node.lineno} {node.name}"] = len(
                    [w for w in node.name.split("_")[1:] if w]
                )
                figures.documented += ast.get_docstring(node) is not None
    return figures


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--room", default="", help="only files whose path begins with this, such as runtime/wire"
    )
    parser.add_argument(
        "--worst", type=int, default=0, help="also the largest functions and classes"
    )
    options = parser.parse_args()
    shown = (
        {options.room: product(options.room)}
        if options.room
        else {
            "core (harness, runtime, models; without tf1)": product(without="harness/tf1"),
            "harness/tf1": product("harness/tf1"),
        }
    )
    for title, paths in shown.items():
        figures = measure(paths)
        print(f"{title}\n{textwrap.indent(str(figures), '    ')}")
        for label, rows in (
            ("functions, tokens and branches", figures.functions),
            ("classes, lines and attributes", figures.classes),
        ):
            for row in sorted(rows, reverse=True)[: options.worst]:
                print(f"    {label}: {row.size} {row.other} {row.where}")
    if not options.room:
        words = {name: page_words(text) for name, text in pages().items()}
        total, blocks = sum(words.values()), sum(map(page_blocks, pages().values()))
        print(
            f"pages: {total:,} words, {1000 * blocks / total:.1f} code blocks in 1,000, the longest "
            f"{max(words, key=words.__getitem__)}"
        )
        tests = measure_tests()
        mean = sum(tests.words.values()) / len(tests.words)
        print(
            f"tests: {len(tests.words):,}, {mean:.1f} words in a name, {tests.documented} with a "
            "docstring, "
            f"monkeypatch {tests.patches}, private attributes {tests.private}"
        )


if __name__ == "__main__":
    main()
