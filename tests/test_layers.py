"""Imports point one way: from models to harness to runtime, and in each down its floors (``tests/tools/house.py``)."""

import ast
import pathlib
from collections.abc import Iterator

import pytest

from tests.tools import house

ROOT = house.ROOT
OURS = {"harness", "runtime", "models", "benchmarks", "tests", "protos"}


def _modules(folder: str) -> list[pathlib.Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def _name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: pathlib.Path, tree: ast.AST) -> Iterator[tuple[int, str, str | None]]:
    """Line, module and name of every import, also inside functions and under TYPE_CHECKING; relative ones resolved.

    `import a.b` gives (a.b, None), `from a.b import c` gives (a.b, c).
    """
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            for alias in node.names:
                yield node.lineno, module, alias.name


def _ours(path: pathlib.Path) -> Iterator[tuple[str, str, str | None]]:
    """Place, module and name of every import of something in this repository."""
    for line, module, name in _imports(path, ast.parse(path.read_text())):
        if module.split(".")[0] in OURS:
            yield f"{path.relative_to(ROOT)}:{line}", module, name


def _public_names() -> set[str]:
    for node in ast.parse((ROOT / "runtime" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return set(ast.literal_eval(node.value))
    raise AssertionError("runtime/__init__.py assigns no __all__")


@pytest.mark.parametrize("package", house.LAYERS)
def test_every_room_has_a_floor(package: str) -> None:
    floors = [name for layer in house.LAYERS[package] for name in layer]
    assert {house.room(name) for name in house.modules(package)} - {""} == set(floors), "give it a place in LAYERS"
    assert len(floors) == len(set(floors))


@pytest.mark.parametrize("package", house.LAYERS)
def test_no_import_points_up(package: str) -> None:
    assert house.arrows_up(package) == []


@pytest.mark.parametrize("package", house.LAYERS)
def test_no_module_imports_itself_over_others(package: str) -> None:
    assert house.circles(package) == []


@pytest.mark.parametrize("path", _modules("runtime"), ids=_name)
def test_runtime_imports_nothing_else_of_ours(path: pathlib.Path) -> None:
    assert [f"{place}: {module}" for place, module, _ in _ours(path) if module.split(".")[0] != "runtime"] == []


@pytest.mark.parametrize("path", _modules("harness"), ids=_name)
def test_harness_uses_runtime_by_its_public_names_only(path: pathlib.Path) -> None:
    tree = ast.parse(path.read_text())
    wrong, aliases = [], set()
    for line, module, name in _imports(path, tree):
        root = module.split(".")[0]
        if root in OURS - {"harness", "runtime"}:
            wrong.append(f"line {line}: harness must not import {module}")
        elif root == "runtime" and module != "runtime":
            wrong.append(f"line {line}: {module}: only the names that `import runtime` gives")
        elif module == "runtime" and name is not None and name not in _public_names():
            wrong.append(f"line {line}: {name} is not in runtime.__all__")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name == "runtime"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            if node.attr not in _public_names():
                wrong.append(f"line {node.lineno}: {node.attr} is not in runtime.__all__")
    assert wrong == []


@pytest.mark.parametrize("path", _modules("models"), ids=_name)
def test_models_use_public_packages_only(path: pathlib.Path) -> None:
    allowed = {"harness", "runtime", "harness.tf1"}
    assert [
        f"{place}: {module}"
        for place, module, _ in _ours(path)
        if module not in allowed and module.split(".")[0] != "models"
    ] == []


def test_the_checker_sees_every_kind_of_import() -> None:
    source = """
import runtime.session as s
from runtime import plan
def f():
    from . import errors
    from ..harness import launch
"""
    path = ROOT / "runtime" / "graph" / "imagined.py"
    assert {(module, name) for _, module, name in _imports(path, ast.parse(source))} == {
        ("runtime.session", None),
        ("runtime", "plan"),
        ("runtime.graph", "errors"),
        ("runtime.harness", "launch"),
    }


_TREE = {
    "harness/__init__.py": "from harness.training.supervisor import Supervisor\n",
    "harness/coordinator.py": "",
    "harness/checkpoints/__init__.py": "",
    "harness/checkpoints/saver.py": "from harness.coordinator import Coordinator\n",
    "harness/checkpoints/reader.py": "from harness.checkpoints import saver\n",
    "harness/training/__init__.py": "",
    "harness/training/supervisor.py": "from harness.checkpoints.saver import Saver\nfrom . import lifecycle\n",
    "harness/training/lifecycle.py": "import harness.checkpoints.reader\n",
}
"""A small house that is in order: file -> source."""


def _build(root: pathlib.Path, changed: str = "", added: str = "") -> pathlib.Path:
    """Writes the small house, with ``added`` at the end of the file ``changed``."""
    for name, source in _TREE.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source + added * (name == changed))
    return root


def test_a_house_in_order_passes(tmp_path: pathlib.Path) -> None:
    assert house.arrows_up("harness", _build(tmp_path)) == []
    assert house.circles("harness", tmp_path) == []


@pytest.mark.parametrize(
    "import_",
    [
        "import harness.training.supervisor",
        "from harness.training import supervisor",
        "from harness.training.supervisor import Supervisor",
        "from ..training import supervisor",
        "def late():\n    from harness.training.supervisor import Supervisor",
        "if TYPE_CHECKING:\n    from harness.training.supervisor import Supervisor",
    ],
)
def test_an_arrow_up_and_its_circle_are_found(tmp_path: pathlib.Path, import_: str) -> None:
    _build(tmp_path, "harness/checkpoints/saver.py", import_ + "\n")
    (up,) = house.arrows_up("harness", tmp_path)
    assert up.startswith("harness.checkpoints.saver:") and up.endswith("imports harness.training.supervisor")
    (circle,) = house.circles("harness", tmp_path)
    assert {"harness.checkpoints.saver", "harness.training.supervisor"} <= set(circle)


def test_a_circle_within_a_room_is_found(tmp_path: pathlib.Path) -> None:
    _build(tmp_path, "harness/training/lifecycle.py", "from harness.training.supervisor import Supervisor\n")
    assert house.arrows_up("harness", tmp_path) == []
    assert house.circles("harness", tmp_path) == [["harness.training.lifecycle", "harness.training.supervisor"]]


@pytest.mark.parametrize("import_", ["import harness", "from harness import Supervisor", "from .. import Supervisor"])
def test_the_face_is_not_for_its_own_modules(tmp_path: pathlib.Path, import_: str) -> None:
    _build(tmp_path, "harness/training/lifecycle.py", import_ + "\n")
    (wrong,) = house.arrows_up("harness", tmp_path)
    assert "inside harness name the module, not the package" in wrong
