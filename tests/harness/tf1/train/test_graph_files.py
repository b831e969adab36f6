"""Graphs as messages with values, beside TensorFlow 2.21's compat.v1, and checkpoints by the names of graph files."""

import pathlib

import numpy as np
import pytest

import harness.tf1 as tf


def nodes(graph_def: object) -> dict[str, tuple[str, list[str], list[float]]]:
    """The kind, inputs and value of each node."""
    return {
        node.name: (
            node.op,
            list(node.input),
            np.frombuffer(node.attr["value"].tensor.tensor_content, np.float32).tolist(),
        )
        for node in graph_def.node
    }


def test_variables_become_constants() -> None:
    """The nodes of an output, with variables as constants, are those that TensorFlow gives."""
    with tf.Graph().as_default() as graph, tf.Session() as session:
        x = tf.placeholder(tf.float32, [None, 2], name="x")
        w = tf.Variable(np.float32([[1, 2], [3, 4]]), name="w")
        b = tf.Variable(np.float32([5, 6]), name="b")
        tf.Variable(np.float32([7]), name="other")
        tf.add(tf.matmul(x, w, name="mul"), b, name="y")
        tf.assign_add(w, w, name="train")
        session.run(tf.global_variables_initializer())
        message = graph.as_graph_def()
        convert = tf.graph_util.convert_variables_to_constants
        frozen = convert(session, message, ["y"])
        kept = convert(session, message, ["y"], variable_names_blacklist=["b"])
        only = convert(session, message, ["y"], variable_names_whitelist=["b"])
        with pytest.raises(AssertionError, match="no is not in graph"):
            tf.graph_util.extract_sub_graph(message, ["no"])
        with pytest.raises(TypeError, match="must be an iterable of strings"):
            tf.graph_util.extract_sub_graph(message, "y")
    # The nodes of TensorFlow 2.21, whose tf.add is "AddV2" and whose variables are "VariableV2".
    constant_w = ("Const", [], [1.0, 2.0, 3.0, 4.0])
    constant_b = ("Const", [], [5.0, 6.0])
    wanted = {
        "x": ("Placeholder", [], []),
        "w": constant_w,
        "w/read": ("Identity", ["w"], []),
        "b": constant_b,
        "b/read": ("Identity", ["b"], []),
        "mul": ("MatMul", ["x", "w/read"], []),
        "y": ("Add", ["mul", "b/read"], []),
    }
    variable = ("Variable", [], [])
    assert nodes(frozen) == wanted
    assert nodes(kept) == wanted | {"b": variable}
    assert nodes(only) == wanted | {"w": variable}
    assert nodes(message)["w"] == variable


def test_meta_graph_names_a_checkpoint(tmp_path: pathlib.Path) -> None:
    """The name of a graph file gives a Saver of the graph that the program has built."""
    with tf.Graph().as_default(), tf.Session() as session:
        v = tf.Variable(3.0, name="v")
        session.run(v.initializer)
        path = tf.train.Saver().save(session, str(tmp_path / "model.ckpt"), global_step=7)
    with tf.Graph().as_default(), tf.Session() as session:
        with pytest.raises(ValueError, match="build the model first"):
            tf.train.import_meta_graph(f"{path}.meta")
        v = tf.Variable(0.0, name="v")
        tf.train.import_meta_graph(f"{path}.meta").restore(session, path)
        assert session.run(v) == 3.0
        saver = tf.train.import_meta_graph(f"{tmp_path}/model.ckpt-7.meta", clear_devices=True)
        assert isinstance(saver, tf.train.Saver)
        with pytest.raises(OSError, match=r"File .*-8\.meta does not exist"):
            tf.train.import_meta_graph(f"{tmp_path}/model.ckpt-8.meta")
