"""The names of TensorFlow that programs use, missing or here: ``python -m harness.tf1 --check FILES...``.

Nothing of a program is run. Its source is read, imports and aliases (``flags = tf.app.flags``) are
followed, and every name is looked up as ``python -m harness.tf1 program.py`` looks it up. What
comes after a name is not seen: arguments, and attributes of values.
"""

from __future__ import annotations

import ast
import importlib
import pathlib
import types
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from harness.tf1.tools import modules


class Known(NamedTuple):
    """The meaning of a name in a program."""

    name: str
    """In full, such as "tensorflow.contrib.slim"."""
    value: Any
    """A module of TensorFlow's, or something in one; None where it is missing."""
    missing: str = ""
    """What the program fails with where it uses the name; empty when it is here."""


@dataclass(frozen=True)
class Use:
    """A name of TensorFlow's where a program uses it.

    Attributes:
        line: in the file, from 1.
        name: in full, whatever it is called in the program: "tensorflow.contrib.slim.conv2d".
        missing: what the program would fail with there; empty when the name is here.
    """

    line: int
    name: str
    missing: str = ""


@dataclass(frozen=True)
class Program:
    """The names of TensorFlow in one file.

    Attributes:
        path: of the file.
        uses: in the order of the lines.
        python2: True for Python 2, which ``2to3`` converts.
        unread: why the file cannot be read; empty when it was.
    """

    path: pathlib.Path
    uses: tuple[Use, ...] = ()
    python2: bool = False
    unread: str = ""

    @property
    def names(self) -> set[str]:
        """The names of TensorFlow's that it uses."""
        return {use.name for use in self.uses}

    @property
    def missing(self) -> list[Use]:
        """The first use of each name that is not here."""
        first: dict[str, Use] = {}
        for use in self.uses:
            if use.missing:
                first.setdefault(use.name, use)
        return list(first.values())


def check(path: pathlib.Path) -> Program:
    """Looks up the names of TensorFlow's that a file uses."""
    try:
        tree, python2 = parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        return Program(path, unread=str(error))
    return Program(path, tuple(uses(tree)), python2)


# -- reading ---------------------------------------------------------------------------------------


def parse(source: bytes) -> tuple[ast.Module, bool]:
    """Parses a program; returns the tree, and True for Python 2.

    Raises:
        SyntaxError: of both versions, or the file is Python 2 and ``lib2to3`` is missing (from
            Python 3.13 on).
        ValueError: the file holds a zero byte.
    """
    with warnings.catch_warnings():
        # of escapes such as "\d" in the program, and of lib2to3's age
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source), False
        except SyntaxError:
            converted = _convert_python2(source.decode(errors="replace"))
            if converted is None:
                raise
            return ast.parse(converted), True


_FIXES = ("except", "exec", "ne", "numliterals", "paren", "print", "raise", "repr", "tuple_params")
"""Of ``2to3``: what is not Python 3's syntax. Names are not converted."""


def _convert_python2(source: str) -> str | None:
    """Converts Python 2 to Python 3; returns None where that fails."""
    try:
        refactor = importlib.import_module("lib2to3.refactor")
        parsing = importlib.import_module("lib2to3.pgen2.parse")
        tokenizing = importlib.import_module("lib2to3.pgen2.tokenize")
    except ModuleNotFoundError:
        return None
    tool = refactor.RefactoringTool([f"lib2to3.fixes.fix_{name}" for name in _FIXES])
    try:
        return str(tool.refactor_string(source.expandtabs(8) + "\n", "program"))
    except (parsing.ParseError, tokenizing.TokenError, IndentationError):
        return None


# -- what names stand for --------------------------------------------------------------------------


def uses(tree: ast.AST) -> list[Use]:
    """Yields the names of TensorFlow's in a program, in the order of its lines."""
    known = _follow_aliases(tree, dict(_find_imports(tree)))
    found = [use for node in _dotted_names(tree) if (use := _find_use(node, known)) is not None]
    return sorted(found, key=lambda use: use.line)


def _find_imports(tree: ast.AST) -> Iterator[tuple[str, Known]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                full = alias.name if alias.asname else alias.name.partition(".")[0]
                if modules.is_tensorflow(full):
                    yield alias.asname or full, Known(full, modules.Module(full))
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module
            and not node.level
            and modules.is_tensorflow(node.module)
        ):
            module = modules.Module(node.module)
            for alias in node.names:
                for name in dir(module) if alias.name == "*" else [alias.name]:
                    full = f"{node.module}.{name}"
                    there = name in dir(module)
                    yield (
                        alias.asname or name,
                        Known(full, getattr(module, name) if there else modules.Module(full)),
                    )


def _follow_aliases(tree: ast.AST, known: dict[str, Known]) -> dict[str, Known]:
    """Returns ``known`` and the names that stand for a module of TensorFlow's everywhere in the program."""
    stored = Counter(
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    )
    stored.update(node.arg for node in ast.walk(tree) if isinstance(node, ast.arg))
    assigned = [
        (target.id, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and stored[target.id] == 1
    ]
    while True:
        new = {
            name: found
            for name, value in assigned
            if name not in known
            and (found := _look_up_name(value, known))
            and isinstance(found.value, types.ModuleType)
        }
        if not new:
            return known
        known = known | new


def _dotted_names(tree: ast.AST) -> Iterator[ast.expr]:
    """Yields every name that is read, with its attributes: ``tf.train.Saver`` and not ``tf.train`` in it."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Attribute | ast.Name) and _name_parts(node):
            yield node
        else:
            stack.extend(ast.iter_child_nodes(node))


def _name_parts(node: ast.expr) -> list[str]:
    """Returns the parts of a dotted name; none for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    before = _name_parts(node.value) if isinstance(node, ast.Attribute) else []
    return [*before, node.attr] if before and isinstance(node, ast.Attribute) else []


def _find_use(node: ast.expr, known: Mapping[str, Known]) -> Use | None:
    """Returns the use of TensorFlow in an expression; None for other expressions and for modules that are here."""
    found = _look_up_name(node, known)
    if found is None or isinstance(found.value, types.ModuleType) and dir(found.value):
        return None
    empty = isinstance(found.value, modules.Module)
    return Use(
        node.lineno, found.name, str(modules.not_here(found.name)) if empty else found.missing
    )


def _look_up_name(node: ast.expr, known: Mapping[str, Known]) -> Known | None:
    """Returns the meaning of a dotted name, as far as it is TensorFlow's; None where it is not."""
    first, *rest = _name_parts(node) or [""]
    found = known.get(first)
    for part in rest:
        if found is None or not isinstance(found.value, types.ModuleType | type):
            break
        full = f"{found.name}.{part}"
        try:
            found = Known(full, getattr(found.value, part))
        except AttributeError as error:
            of_a_class = isinstance(found.value, type)
            found = Known(full, None, f"{full} is not in harness.tf1" if of_a_class else str(error))
    return found


# -- telling ---------------------------------------------------------------------------------------


def files(paths: Iterable[str]) -> list[pathlib.Path]:
    """Returns the files, and those below the directories that end in ``.py``, each once."""
    found: dict[pathlib.Path, None] = {}
    for path in map(pathlib.Path, paths):
        found |= dict.fromkeys(sorted(path.rglob("*.py")) if path.is_dir() else [path])
    return list(found)


def report(programs: Sequence[Program]) -> Iterator[str]:
    """Yields the report line by line: each file by itself, and all together where there are several."""
    for program in programs:
        if program.unread:
            yield f"{program.path}: cannot be read: {program.unread}"
            continue
        if program.uses:
            python2 = "; Python 2, which 2to3 converts" if program.python2 else ""
            yield f"{program.path}: {_count_text(program.missing, program.names)}{python2}"
        yield from (f"{program.path}:{use.line}: {use.missing}" for use in program.missing)
    with_names = [program for program in programs if program.names]
    if len(programs) == 1:
        if not with_names and not programs[0].unread:
            yield f"{programs[0].path}: nothing of TensorFlow's"
        return
    lacking = Counter(use.name for program in programs for use in program.missing)
    complete = sum(not program.missing for program in with_names)
    yield (
        f"all: {complete} of {len(with_names)} files that use TensorFlow are complete; "
        + _count_text(lacking, {name for program in with_names for name in program.names})
    )
    yield from (
        f"all: {name} is missing in {count} file{'s' * (count > 1)}"
        for name, count in lacking.most_common()
    )
    if unread := sum(bool(program.unread) for program in programs):
        yield f"all: {unread} files cannot be read"


def _count_text(missing: Collection[object], names: Collection[str]) -> str:
    return f"{len(names) - len(missing)} of {len(names)} names of TensorFlow's are here"


def main(paths: Sequence[str]) -> int:
    """Prints the report of files and directories; returns 1 where a name is missing, else 0."""
    programs = [check(path) for path in files(paths)]
    for line in report(programs):
        print(line)
    return int(any(program.missing or program.unread for program in programs))
