"""Each module of ``tf`` can be imported by its own name, wherever it lies."""

import importlib

import pytest

import harness.tf1 as tf


@pytest.mark.parametrize("name", sorted(tf.NAMESPACES))
def test_a_namespace_can_be_imported(name: str) -> None:
    assert importlib.import_module(f"harness.tf1.{name}") is getattr(tf, name)


def test_names_can_be_taken_from_a_namespace() -> None:
    from harness.tf1.contrib import slim
    from harness.tf1.nn import relu

    assert relu is tf.nn.relu and slim is tf.contrib.slim
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("harness.tf1.keras")
