"""The house in figures: ``python -m tests.tools.house``.

Rooms, floors, circles, retired words, lines, ``Any``s.

A room is a folder of a package, or one of its modules at the top. Each room may import those before
it in its list of layers; no module may import itself over others, however the import is written.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

LAYERS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "runtime": (
        ("proto",),
        ("collector", "concurrency", "errors", "timeouts"),
        ("retired",),
        ("limits",),
        ("tensor_spec",),
        ("cluster", "expressions"),
        ("graph",),
        ("plan",),
        ("observe",),
        ("state",),
        ("trust",),
        ("wire",),
        ("rpc",),
        ("checkpoint",),
        ("task",),
        ("kernels", "backup"),
        ("tables",),
        ("master",),
        ("server",),
        ("session",),
        ("lowlevel",),
    ),
    "harness": (
        ("exit_codes", "tracebacks", "timeouts"),
        ("coordinator",),
        ("command_line",),
        ("launch",),
        ("tensorboard",),
        ("monitoring",),
        ("checkpoints",),
        ("training",),
        ("optimizers",),
        ("data",),
        ("status", "inspect_checkpoint", "certs", "manifests", "ray"),
        ("tf1", "bellwether"),
    ),
    "harness.tf1": (
        ("names",),
        ("ops",),
        ("graph",),
        ("inputs", "layers", "loops"),
        ("train",),
        ("",),
        ("tools",),
        ("__main__",),
    ),
}
"""By package, its rooms from the ground up; rooms on one floor do not import each other.

"" is the package's face.
"""

PACKAGES = [package for package in LAYERS if "." not in package]
"""The packages that lie in no other one."""

RETIRED_MODULES = frozenset(
    """
    allow background bodies clocks cores cut decisions detection figures guarded held leftovers lifted memory mirror
    mirroring mirrors narrow opening patience pieces private purge ready series shards speaker tunnel turns unchanged
    zarr
    """.split()
)
"""Names that modules had before the field's own names took their place."""

RETIRED_CLASSES = frozenset(
    """
    Clocks Crowd Cut Guarded GuardedUpdate Held HeldKey Mirror Mirrors Patience Piece Pieces Placed Reborn RemoteArray
    SavedVariable SaveSliceInfo Say Shards ShardFile Speaker Stored Told Turns
    """.split()
)
"""Names that classes had before; see the vocabulary in docs/glossary.md."""


@dataclass(frozen=True)
class Import:
    """An import of one module of ours by another.

    Attributes:
        importer: the importing module.
        imported: the imported module.
        line: where.
    """

    importer: str
    imported: str
    line: int


def folder(package: str, root: pathlib.Path = ROOT) -> pathlib.Path:
    """Returns the folder of a package."""
    return root.joinpath(*package.split("."))


def modules(package: str, root: pathlib.Path = ROOT) -> dict[str, pathlib.Path]:
    """The modules of a package by name; a package's own name stands for its ``__init__``."""
    found = {}
    for path in sorted(folder(package, root).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
    """What a file says; read once, as each check looks at them all."""
    return ast.parse(path.read_text())


def statements(module: ast.AST) -> Iterator[ast.AST]:
    """All statements of a module, the nested ones too, without their expressions: a tenth of ``ast.walk``'s nodes."""
    left = [module]
    while left:
        statement = left.pop()
        yield statement
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            left.extend(getattr(statement, part, ()))


@functools.cache
def imports(package: str, root: pathlib.Path = ROOT) -> list[Import]:
    """All imports within a package: also those in functions, under TYPE_CHECKING, and relative ones."""
    known = modules(package, root)
    found = []
    for name, path in known.items():
        within = path.relative_to(root).parent.parts
        for node in statements(tree(path)):
            for imported in _imported(node, within, known):
                if imported != name:
                    found.append(Import(name, imported, node.lineno))  # type: ignore[attr-defined]
    return found


def _imported(
    node: ast.AST, within: tuple[str, ...], known: Mapping[str, pathlib.Path]
) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
    elif isinstance(node, ast.ImportFrom):
        base = within[: len(within) - node.level + 1] if node.level else ()
        module = ".".join((*base, *([node.module] if node.module else [])))
        for alias in node.names:
            if f"{module}.{alias.name}" in known:
                yield f"{module}.{alias.name}"
            elif module in known:
                yield module


def room(package: str, module: str) -> str:
    """Returns the room of a module of ``package``; "" for the face of the package."""
    return module[len(package) + 1 :].partition(".")[0]


def arrows_up(package: str, root: pathlib.Path = ROOT) -> list[str]:
    """Imports from a room to one that is not below it, in words."""
    floor = {name: number for number, names in enumerate(LAYERS[package]) for name in names}
    wrong = []
    for i in imports(package, root):
        own, other = room(package, i.importer), room(package, i.imported)
        if not own:  # the face of the package
            continue
        if other not in floor:
            wrong.append(
                f"{i.importer}:{i.line}: inside {package} name the module, not the package: "
                f"{i.imported}"
            )
        elif own != other and floor[other] >= floor[own]:
            wrong.append(
                f"{i.importer}:{i.line}: {own} is not above {other}, and imports {i.imported}"
            )
    return wrong


def circles(package: str, root: pathlib.Path = ROOT) -> list[list[str]]:
    """Groups of modules that import each other in a circle, faces of packages apart."""
    below: dict[str, set[str]] = {}
    faces = {name for name, path in modules(package, root).items() if path.name == "__init__.py"}
    for i in imports(package, root):
        if i.importer not in faces and i.imported not in faces:
            below.setdefault(i.importer, set()).add(i.imported)
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:  # Tarjan, "Depth-first search and linear graph algorithms", 1972
        order[name] = lowest[name] = len(order)
        path.append(name)
        for other in sorted(below.get(name, ())):
            if other not in order:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in path:
                lowest[name] = min(lowest[name], order[other])
        if lowest[name] == order[name]:
            at = path.index(name)
            group = sorted(path[at:])
            del path[at:]
            if len(group) > 1:
                found.append(group)

    for name in sorted(below):
        if name not in order:
            visit(name)
    return found


def retired(root: pathlib.Path = ROOT) -> list[str]:
    """Modules and public classes whose name is a retired word."""
    found = [
        name
        for package in PACKAGES
        for name in modules(package, root)
        if name.split(".")[-1] in RETIRED_MODULES
    ]
    classes = class_names(root).items()
    return found + [
        f"{module}.{name}" for name, where in classes if name in RETIRED_CLASSES for module in where
    ]


def doubles(root: pathlib.Path = ROOT) -> dict[str, list[str]]:
    """Names of public classes that several modules define, with these modules."""
    return {name: where for name, where in class_names(root).items() if len(where) > 1}


def class_names(root: pathlib.Path = ROOT) -> dict[str, list[str]]:
    """Public classes by name, with the modules that define one so; ``harness.tf1`` has TensorFlow's names."""
    found: dict[str, list[str]] = {}
    for package in PACKAGES:
        for name, path in modules(package, root).items():
            if name.startswith(("harness.tf1", "runtime.proto")):
                continue
            for node in tree(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found.setdefault(node.name, []).append(name)
    return found


def lines(*folders: str, root: pathlib.Path = ROOT) -> int:
    """Lines of Python below folders, generated ones apart."""
    paths = (path for folder in folders for path in (root / folder).rglob("*.py"))
    return sum(len(path.read_text().splitlines()) for path in paths if "_pb2" not in path.name)


def anys(root: pathlib.Path = ROOT) -> int:
    """How often ``Any`` is written in the packages, imports apart."""
    total = 0
    for package in PACKAGES:
        for path in modules(package, root).values():
            if "_pb2" not in path.name:
                text = re.sub(r"^from typing import .*$", "", path.read_text(), flags=re.MULTILINE)
                total += len(re.findall(r"\bAny\b", text))
    return total


def main() -> int:
    """Prints the figures; 1 when something points the wrong way."""
    wrong = 0
    for package in LAYERS:
        rooms: dict[str, int] = {}
        for name in modules(package):
            rooms[room(package, name)] = rooms.get(room(package, name), 0) + 1
        top = [p for p in folder(package).glob("*.py") if p.name != "__init__.py"]
        print(f"{package}: {sum(rooms.values())} modules, {len(top)} at the top")
        for layer in LAYERS[package]:
            print("   ", "  ".join(f"{name} {rooms.get(name, 0)}" for name in layer))
        up, round_ = arrows_up(package), circles(package)
        print(f"    arrows up {len(up)}, circles {len(round_)}")
        for line in [*up, *(f"circle: {', '.join(group)}" for group in round_)]:
            print("   ", line)
        wrong += len(up) + len(round_)
    print(f"retired words {retired()}")
    print(f"classes of one name {doubles()}")
    product = lines("harness", "runtime", "models") - lines("harness/tf1")
    print(
        f"lines: product {product}, tf1 {lines('harness/tf1')}, tests {lines('tests')}; Any "
        f"{anys()}"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
