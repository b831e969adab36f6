"""Importing harness.tf1 leaves the classes of the runtime as they are."""

import subprocess
import sys

import pytest

PROGRAM = """
import importlib, inspect, pkgutil
import runtime, runtime.lowlevel

for module in pkgutil.walk_packages(runtime.__path__, "runtime."):
    importlib.import_module(module.name)

def subclasses(kind):
    for sub in type.__subclasses__(kind):
        yield sub
        yield from subclasses(sub)

def attributes():
    found = {kind for kind in subclasses(object) if str(kind.__module__).partition(".")[0] == "runtime"}
    return {(kind, name): value for kind in found for name, value in vars(kind).items() if not name.startswith("_abc_")}

before = attributes()
assert len(before) > 3000, len(before)
import harness.tf1 as tf
for namespace in tf.NAMESPACES:
    dir(getattr(tf, namespace))
after = attributes()
changed = [key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)]
print(sorted(f"{kind.__module__}.{kind.__qualname__}.{name}" for kind, name in changed))
"""


@pytest.mark.cluster
def test_import_changes_no_class_of_runtime() -> None:
    """Every attribute of every class of `runtime` is the same object before and after the import."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def test_runtime_graphs_keep_their_own_methods() -> None:
    """A tensor of the runtime's own graph has no method of TensorFlow's, and a tensor of tf.Graph
    has.
    """
    import harness.tf1 as tf
    import runtime as rt

    with rt.Graph().as_default() as plain:
        assert not hasattr(rt.constant(1.0), "get_shape") and not hasattr(rt.no_op(), "node_def")
    with tf.Graph().as_default() as graph:
        assert (
            rt.constant([1.0]).get_shape().as_list() == [1] and rt.no_op("n").node_def.name == "n"
        )
        assert rt.Variable(1.0).get_shape().ndims == 0 and rt.constant(1.0).consumers() == []
    assert isinstance(plain, tf.Graph) and isinstance(tf.get_default_graph(), type(graph))
