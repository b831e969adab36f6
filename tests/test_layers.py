"""Imports point one way: from models to harness to runtime, down the rooms of each, and never in a circle."""

import ast
import functools
import pathlib
from collections.abc import Iterator

import pytest

from tests.tools import house

OURS = {"harness", "runtime", "models", "benchmarks", "tests", "protos"}
FACES = ("runtime", "runtime.lowlevel", "runtime.concurrency")
"""The modules of runtime that harness may use, each by the names in its ``__all__``, or by those that it defines."""


def _imports(tree: ast.AST) -> Iterator[tuple[int, str, str | None]]:
    """Line, module and name of every absolute import: `import a.b` gives (a.b, None), `from a.b import c` (a.b, c)."""
    for node in house.statements(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield node.lineno, node.module, alias.name


@functools.cache
def _public(face: str, root: pathlib.Path = house.ROOT) -> set[str]:
    body = house.tree(house.modules("runtime", root)[face]).body
    assigned = {
        target.id: node.value
        for node in body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if "__all__" in assigned:
        return set(ast.literal_eval(assigned["__all__"]))
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return {name for name in defined | assigned.keys() if not name.startswith("_")}


def _used_of_runtime(tree: ast.AST) -> Iterator[tuple[int, str, str | None]]:
    """Line, module and name of everything of runtime that a module uses, by imports and as attributes of the faces."""
    known = {"runtime": "runtime"}  # by dotted name in this module
    for line, module, name in _imports(tree):
        if module.split(".")[0] == "runtime":
            yield line, module, name
    for node in house.statements(tree):
        if isinstance(node, ast.Import):
            known |= {
                alias.asname: alias.name
                for alias in node.names
                if alias.asname and alias.name in FACES
            }
        elif isinstance(node, ast.ImportFrom) and node.module == "runtime":
            known |= {
                a.asname or a.name: f"runtime.{a.name}"
                for a in node.names
                if f"runtime.{a.name}" in FACES
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            value, rest = node.value, ""
            if isinstance(value, ast.Attribute):
                value, rest = value.value, value.attr
            if isinstance(value, ast.Name) and value.id in known:
                face = ".".join(filter(None, (known[value.id], rest)))
                if face in FACES:
                    yield node.lineno, face, node.attr


def _beyond_the_faces(tree: ast.AST) -> list[str]:
    return [
        f"{line}: {module}{'.' if name else ''}{name or ''} is in no face of runtime"
        for line, module, name in _used_of_runtime(tree)
        if f"{module}.{name}" not in FACES
        and (module not in FACES or (name is not None and name not in _public(module)))
    ]


@pytest.mark.parametrize("package", house.LAYERS)
def test_every_room_has_a_layer(package: str) -> None:
    """Every room of a package stands in the table of layers."""
    found = {house.room(package, name) for name in house.modules(package)} - {""}
    assert found == {name for layer in house.LAYERS[package] for name in layer} - {""}, (
        "LAYERS in tests/tools/house.py"
    )


@pytest.mark.parametrize("package", house.LAYERS)
def test_imports_point_down(package: str) -> None:
    """Imports point down the layers."""
    assert house.arrows_up(package) == []


@pytest.mark.parametrize("package", house.LAYERS)
def test_imports_form_no_circle(package: str) -> None:
    """No module imports itself by way of other modules."""
    assert house.circles(package) == []


def test_layers_find_wrong_imports(tmp_path: pathlib.Path) -> None:
    """The check finds a circle and an import upwards."""
    for name, text in {
        "graph/__init__": "",
        "graph/a": "from runtime.graph import b",
        "graph/b": "def f():\n    from .a import g",
        "plan/__init__": "",
        "graph/c": "from runtime.plan import __init__\nimport runtime.plan",
    }.items():
        path = tmp_path / "runtime" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert house.circles("runtime", tmp_path) == [["runtime.graph.a", "runtime.graph.b"]]
    assert any("graph is not above plan" in line for line in house.arrows_up("runtime", tmp_path))


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("runtime", {"runtime"}),
        ("harness", {"runtime", "harness"}),
        ("models", {"runtime", "harness", "models"}),
    ],
)
def test_packages_import_lower_packages(package: str, allowed: set[str]) -> None:
    """A package imports only the packages below."""
    assert [
        f"{name}:{line}: {module}"
        for name, path in house.modules(package).items()
        for line, module, _ in _imports(house.tree(path))
        if module.split(".")[0] in OURS - allowed
    ] == []


def test_harness_uses_runtime_faces() -> None:
    """harness uses runtime by its three faces only."""
    assert [
        f"{name}:{wrong}"
        for name, path in house.modules("harness").items()
        for wrong in _beyond_the_faces(house.tree(path))
    ] == []


def test_faces_share_no_name() -> None:
    """The two faces of runtime have no name in common."""
    assert _public("runtime") & _public("runtime.lowlevel") == set()


def test_models_use_public_packages_only() -> None:
    """The models use public packages only."""
    allowed = {"harness", "runtime", "harness.tf1"}
    assert [
        f"{name}:{line}: {module}"
        for name, path in house.modules("models").items()
        for line, module, _ in _imports(house.tree(path))
        if module.split(".")[0] in {"harness", "runtime"} and module not in allowed
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        "import runtime.session as s",
        "from runtime.plan import plan",
        "from runtime import plan",
        "from runtime.lowlevel import Session",
        "import runtime as rt\nrt.Quorum",
        "import runtime as rt\nrt.lowlevel.Session",
        "from runtime import lowlevel as low\nlow.Session",
        "import runtime.lowlevel\nruntime.lowlevel.Session",
        "def f():\n    from runtime.session import session",
    ],
)
def test_use_beyond_faces_is_found(source: str) -> None:
    """The check finds a use of runtime beyond its faces."""
    assert len(_beyond_the_faces(ast.parse(source))) == 1


def test_use_of_faces_is_allowed() -> None:
    """The check allows the uses of both faces."""
    source = "import runtime as rt\nfrom runtime.lowlevel import storage\nrt.lowlevel.Quorum\nrt.Session.run\n"
    assert _beyond_the_faces(ast.parse(source)) == []


CLOCKS = {"threading", "time", "random", "secrets"}
"""Modules that only ``runtime.concurrency`` may import; the launcher starts before the runtime is imported."""


@pytest.mark.parametrize("package", ["runtime", "harness"])
def test_threads_and_clocks_have_one_home(package: str) -> None:
    """Locks, threads, clocks and random numbers come from `runtime.concurrency`."""
    assert [
        f"{name}:{line}: {module}"
        for name, path in house.modules(package).items()
        if name != "runtime.concurrency" and house.room(package, name) != "launch"
        for line, module, _ in _imports(house.tree(path))
        if module in CLOCKS
    ] == []


@pytest.mark.parametrize("package", ["runtime", "harness"])
def test_each_thread_has_an_owner(package: str) -> None:
    """Threads are made by a `ThreadGroup`, and never by the classes of the standard library."""
    assert [
        f"{name}:{node.lineno}"
        for name, path in house.modules(package).items()
        if name != "runtime.concurrency" and house.room(package, name) != "launch"
        for node in ast.walk(house.tree(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(
            ("concurrency.Thread", "ThreadPoolExecutor", "threading.Thread")
        )
    ] == []
