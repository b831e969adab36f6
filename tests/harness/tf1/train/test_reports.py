"""Reports of models: contrib.slim.model_analyzer and the configuration of TensorBoard's projector.

Texts and files are those of tensorflow/contrib/slim/python/slim/model_analyzer.py and
contrib/tensorboard/plugins/projector of r1.15; the proto is read by TensorBoard's own class.
"""

import logging
import pathlib

import numpy as np
import pytest

import harness.tf1 as tf

projector = tf.contrib.tensorboard.plugins.projector


def test_variables_are_counted(capsys: pytest.CaptureFixture) -> None:
    """The analyzer counts elements and bytes, and prints a line for each variable."""
    with tf.Graph().as_default():
        tf.Variable(np.zeros((2, 3), np.float32), name="w")
        tf.Variable(np.float64(1), name="step")
        analyze = tf.contrib.slim.model_analyzer.analyze_vars
        assert analyze(tf.global_variables()) == (7, 32)
        assert capsys.readouterr().out == ""
        analyze(tf.global_variables(), print_info=True)
    assert capsys.readouterr().out.splitlines() == [
        "---------",
        "Variables: name (type shape) [size]",
        "---------",
        "w:0 (float32 2x3) [6, bytes: 24]",
        "step:0 (float64 ) [1, bytes: 8]",
        "Total size of variables: 7",
        "Total bytes of variables: 32",
    ]


def test_operations_are_counted(capsys: pytest.CaptureFixture) -> None:
    """The analyzer counts the elements of all tensors of known size."""
    with tf.Graph().as_default() as graph:
        x = tf.placeholder(tf.float32, [None, 3], name="x")
        tf.add(tf.constant(np.ones((2, 3), np.float32), name="c"), 1.0, name="sum")
        tf.identity(x, name="same")
        assert tf.contrib.slim.model_analyzer.analyze_ops(graph, print_info=True) == 12
    lines = capsys.readouterr().out.splitlines()
    assert "x \t-> (float32 ?x3) [0]" in lines and "sum \t-> (float32 2x3) [6]" in lines


def test_projector_shows_values(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """TensorBoard reads the configuration and the values that a session had."""
    config = projector.ProjectorConfig()
    embedding = config.embeddings.add()
    embedding.tensor_name, embedding.metadata_path = "words/table:0", "words.tsv"
    embedding.sprite.image_path = "sprite.png"
    embedding.sprite.single_image_dim.extend([28, 28])
    with tf.Graph().as_default(), tf.summary.FileWriter(str(tmp_path)) as writer:
        with tf.variable_scope("words"):
            table = tf.get_variable("table", initializer=np.float32([[1, 2.5], [3, 4]]))
        with caplog.at_level(logging.WARNING):
            projector.visualize_embeddings(writer, config)
        assert "outside of a session the values of words/table:0" in caplog.text
        with tf.Session() as session:
            session.run(table.initializer)
            projector.visualize_embeddings(writer, config)
    text = (tmp_path / "projector_config.pbtxt").read_text()
    np.testing.assert_array_equal(
        np.loadtxt(tmp_path / "words_table.tsv", delimiter="\t"), [[1, 2.5], [3, 4]]
    )
    config_pb2 = pytest.importorskip("tensorboard.plugins.projector.projector_config_pb2")
    from google.protobuf import text_format

    read = text_format.Parse(text, config_pb2.ProjectorConfig())
    (found,) = read.embeddings
    assert (found.tensor_name, found.metadata_path) == ("words/table:0", "words.tsv")
    assert found.tensor_path == "words_table.tsv" and [*found.sprite.single_image_dim] == [28, 28]
    assert read.SerializeToString() == config.SerializeToString()
