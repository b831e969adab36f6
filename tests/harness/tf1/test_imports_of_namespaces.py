"""Each module of ``tf`` can be imported by its own name, wherever it lies."""

import importlib

import pytest

import harness.tf1 as tf


@pytest.mark.parametrize("name", sorted(tf.NAMESPACES))
def test_namespace_can_be_imported(name: str) -> None:
    """A namespace can be imported by its module name."""
    assert importlib.import_module(f"harness.tf1.{name}") is getattr(tf, name)


def test_names_import_from_a_namespace() -> None:
    """Names can be imported from a namespace, and a missing namespace is no module."""
    from harness.tf1.contrib import slim
    from harness.tf1.nn import relu

    assert relu is tf.nn.relu and slim is tf.contrib.slim
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("harness.tf1.estimator")
