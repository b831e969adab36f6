"""The public names are exactly what the packages import for their users, and each says what it is."""

import ast
import importlib
import inspect
import pathlib
import typing
from collections.abc import Iterator

import google.protobuf.message
import pytest

import harness

ROOT = pathlib.Path(__file__).resolve().parent.parent
FACES = {
    "runtime": "runtime/__init__.py",
    "runtime.lowlevel": "runtime/lowlevel.py",
    "harness": "harness/__init__.pyi",
}
"""By package, the file that binds its names for its users."""


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those under `if` (TYPE_CHECKING) included, those in functions not."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from _statements(statement.body + statement.orelse)


def _bound_here(package: str) -> list[str]:
    """The names that a package binds for its users: what it imports from itself, and what it defines."""
    names: list[str] = []
    for node in _statements(ast.parse((ROOT / FACES[package]).read_text()).body):
        if isinstance(node, ast.ImportFrom) and (
            node.level or (node.module or "").split(".")[0] in FACES
        ):
            names += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [
                alias.asname
                for alias in node.names
                if alias.asname and alias.name.split(".")[0] == package
            ]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
    return [name for name in names if not name.startswith("_")]


@pytest.mark.parametrize("package", FACES)
def test_all_lists_bound_names(package: str) -> None:
    """`__all__` of a face lists exactly the names that the face binds."""
    module = importlib.import_module(package)
    public = [name for name in module.__all__ if not name.startswith("__")]
    bound = _bound_here(package)
    assert len(set(public)) == len(public)
    assert len(set(bound)) == len(bound)
    assert sorted(public) == sorted(bound)


@pytest.mark.parametrize("package", FACES)
def test_public_names_are_documented(package: str) -> None:
    """Every public name exists and is documented."""
    module = importlib.import_module(package)
    assert module.__doc__
    undocumented = []
    for name in module.__all__:
        value = getattr(module, name)
        if typing.get_origin(value) is not None:
            continue  # the name of a type, which its module documents
        if isinstance(value, type) and issubclass(value, google.protobuf.message.Message):
            continue  # its .proto documents it
        if (inspect.ismodule(value) or inspect.isclass(value) or callable(value)) and not (
            value.__doc__ or ""
        ).strip():
            undocumented.append(name)
    assert undocumented == []


def test_harness_matches_its_stub() -> None:
    """harness has the names of its stub file."""
    for node in ast.parse((ROOT / FACES["harness"]).read_text()).body:
        if isinstance(node, ast.ImportFrom):
            home = importlib.import_module(node.module or "")
            for alias in node.names:
                assert getattr(harness, alias.name) is getattr(home, alias.name)
    with pytest.raises(AttributeError, match="'harness' has no attribute 'Absent'"):
        _ = harness.Absent  # type: ignore[attr-defined]
