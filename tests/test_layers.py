"""Imports point one way: down the list of layers, from models to harness to runtime, never back."""

import ast
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Each layer imports only itself and those before it; names in one tuple are one layer. The protocol modules stand
# first: everybody may import them, and they import nothing of ours.
LAYERS: list[tuple[str, ...]] = [
    ("proto",),
    ("errors", "process_metrics", "detection"),
    ("tensor_spec",),
    ("cluster", "resolvers", "kubernetes", "slurm"),
    ("device_spec", "device"),
    ("graph",),
    ("plan",),
    ("execution",),
    ("transport",),
    ("server",),
    ("run_options", "session_config", "feeds", "session"),
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
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


def _layer_of(module: str, name: str | None) -> str | None:
    """The layer of runtime that an import of ours reaches; None for the package itself or another package."""
    parts = [*module.split("."), *([name] if name else [])]
    return parts[1] if parts[0] == "runtime" and len(parts) > 1 else None


def _public_names() -> set[str]:
    for node in ast.parse((ROOT / "runtime" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return set(ast.literal_eval(node.value))
    raise AssertionError("runtime/__init__.py assigns no __all__")


def test_every_module_of_runtime_has_a_layer() -> None:
    found = {path.relative_to(ROOT / "runtime").with_suffix("").parts[0] for path in _modules("runtime")}
    assert found - {"__init__"} <= set(RANK), "give it a place in LAYERS here and in the design"


def test_runtime_imports_point_down() -> None:
    wrong = []
    for path in _modules("runtime"):
        own = _name(path).split(".")[1:2]
        for place, module, name in _ours(path):
            layer = _layer_of(module, name)
            if module.split(".")[0] != "runtime":
                wrong.append(f"{place}: runtime must not import {module}")
            elif own and (layer is None or layer not in RANK):
                wrong.append(f"{place}: inside runtime name the module, not the package: {module} {name or ''}")
            elif own and layer is not None and RANK[layer] > RANK[own[0]]:
                wrong.append(f"{place}: {own[0]} is below {layer} and must not import it")
    assert wrong == []


def _private_uses(path: pathlib.Path, public: set[str]) -> Iterator[str]:
    """Places where a module of harness uses more than the names that `import runtime` gives."""
    tree, here = ast.parse(path.read_text()), path.relative_to(ROOT)
    for line, module, name in _imports(path, tree):
        root = module.split(".")[0]
        if root in OURS - {"harness", "runtime"}:
            yield f"{here}:{line}: harness must not import {module}"
        elif root == "runtime" and module != "runtime":
            yield f"{here}:{line}: {module}: only the names that `import runtime` gives"
        elif module == "runtime" and name is not None and name not in public:
            yield f"{here}:{line}: {name} is not in runtime.__all__"
    imports = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    aliases = {alias.asname or alias.name for alias in imports if alias.name == "runtime"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            if node.attr not in public:
                yield f"{here}:{node.lineno}: {node.attr} is not in runtime.__all__"


def test_harness_uses_runtime_by_its_public_names_only() -> None:
    public = _public_names()
    assert [use for path in _modules("harness") for use in _private_uses(path, public)] == []


def test_models_use_public_packages_only() -> None:
    allowed = {"harness", "runtime", "harness.tf1"}
    assert [
        f"{place}: {module}"
        for path in _modules("models")
        for place, module, _ in _ours(path)
        if module not in allowed and module.split(".")[0] != "models"
    ] == []


def test_the_checker_sees_every_kind_of_import(tmp_path: pathlib.Path) -> None:
    source = """
import runtime.session as s
from runtime import plan
def f():
    from . import errors
    from ..harness import launch
"""
    path = ROOT / "runtime" / "graph" / "imagined.py"
    found = {(module, name) for _, module, name in _imports(path, ast.parse(source))}
    assert found == {
        ("runtime.session", None),
        ("runtime", "plan"),
        ("runtime.graph", "errors"),
        ("runtime.harness", "launch"),
    }
    assert [_layer_of(module, name) for module, name in sorted(found, key=str)] == [
        "plan",
        "graph",
        "harness",
        "session",
    ]
