"""What programs for TensorFlow 1 are in the habit of doing, each found in a public one."""

import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from google.protobuf import text_format

import harness.tf1 as tf
from tests.harness.tf1.kit import evaluate
from tests.kit.processes import ROOT


def test_shape_may_be_one_number() -> None:
    """A shape may be one number."""
    assert tf.placeholder(tf.int32, shape=(100)).get_shape().as_list() == [100]


def test_device_function_sees_node_definition() -> None:
    """A device function sees the definition of an operation."""
    seen = []

    def assign(op: object) -> str:
        definition = op if isinstance(op, tf.NodeDef) else op.node_def  # type: ignore[attr-defined]
        seen.append((definition.op, definition.name))
        return "/cpu:0"

    with tf.Graph().as_default(), tf.device(assign):
        variable = tf.Variable(1.0, name="w")
    assert ("Variable", "w") in seen and variable.op.node_def.name == "w"
    assert tuple(variable.op.values()) == tuple(variable.op.outputs)


def test_tensor_averages_begin_at_zero() -> None:
    """The moving average of a tensor begins at zero."""
    with tf.Graph().as_default(), tf.Session() as sess:
        x = tf.placeholder(tf.float32, [2])
        average = tf.train.ExponentialMovingAverage(0.9)
        update = average.apply([x])
        sess.run(tf.global_variables_initializer())
        for _ in range(2):
            sess.run(update, {x: [1.0, 2.0]})
        np.testing.assert_allclose(sess.run(average.average(x)), [0.19, 0.38], rtol=1e-6)
        assert tf.moving_average_variables() == []
        with pytest.raises(ValueError, match="needs its shape"):
            average.apply([tf.placeholder(tf.float32, [None])])


def test_transposed_convolution_checks_the_batch() -> None:
    """A transposed convolution takes a batch of unknown size and checks the size in the step."""
    with tf.Graph().as_default(), tf.Session() as sess:
        x = tf.placeholder(tf.float32, [None, 4, 4, 2])
        y = tf.nn.conv2d_transpose(x, np.ones((2, 2, 5, 2), np.float32), [8, 8, 8, 5], [1, 2, 2, 1])
        assert y.get_shape().as_list() == [8, 8, 8, 5]
        again = tf.reshape(y, y.get_shape())
        np.testing.assert_array_equal(
            sess.run(again, {x: np.ones((8, 4, 4, 2))}), np.full((8, 8, 8, 5), 2)
        )
        with pytest.raises(tf.errors.InvalidArgumentError, match="for 8 images, value has 3"):
            sess.run(y, {x: np.ones((3, 4, 4, 2))})


def test_object_array_is_an_operand() -> None:
    """An array of Python numbers is an operand."""
    assert evaluate(lambda: tf.constant([5, 7]) - np.array([1, 2], dtype=object)).tolist() == [4, 5]


def test_slice_ends_may_be_shapes() -> None:
    """The ends of a slice may come from shapes, and not from values."""
    with tf.Graph().as_default(), tf.Session() as sess:
        x = tf.placeholder(tf.float32, [None])
        rows = tf.placeholder(tf.float32, [None, 3])
        half = x[: tf.size(x) // 2]
        last = rows[tf.shape(rows)[0] - 1 :, 1]
        variable = tf.Variable(np.arange(4.0, dtype=np.float32))
        sess.run(tf.global_variables_initializer())
        for size in (6, 9):
            given = {x: np.arange(size), rows: np.arange(3.0 * size).reshape(size, 3)}
            got, end, part = sess.run([half, last, variable[: tf.rank(rows)]], given)
            assert (
                got.tolist() == list(range(size // 2))
                and end.tolist() == [3.0 * size - 2]
                and part.tolist() == [0, 1]
            )
        place = tf.placeholder(tf.int32, [])
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match="the size of the result depends on a value.*tf.slice",
        ):
            x[place:]  # noqa: B018


def test_options_have_defaults_and_copies() -> None:
    """Options have defaults, can be copied, and refuse misspelt names."""
    config = tf.ConfigProto()
    assert config.gpu_options.allow_growth is False and config.gpu_options.visible_device_list == ""
    config.gpu_options.allow_growth = True
    other = tf.ConfigProto()
    other.CopyFrom(config)
    config.gpu_options.allow_growth = False
    assert other.gpu_options.allow_growth is True
    with pytest.raises(AttributeError, match="GPUOptions has no 'alow_growth'"):
        config.gpu_options.alow_growth  # noqa: B018
    assert tf.RunOptions(output_partition_graphs=True).trace_level == tf.RunOptions.NO_TRACE


def test_graphs_are_written_and_unfinalized(tmp_path: pathlib.Path) -> None:
    """A graph is written as text or bytes, and can be opened again for additions."""
    with tf.Graph().as_default() as graph:
        tf.constant(1.0, name="one")
        text = tf.train.write_graph(graph, str(tmp_path / "new"), "graph.pbtxt")
        binary = tf.train.write_graph(
            tf.get_default_graph().as_graph_def(), str(tmp_path), "graph.pb", as_text=False
        )
        with tf.Session() as sess:
            expected = sess.graph_def
        assert [node.name for node in expected.node] == ["one"]
        assert text_format.Parse(pathlib.Path(text).read_text(), tf.GraphDef()) == expected
        assert tf.GraphDef.FromString(pathlib.Path(binary).read_bytes()) == expected
        graph.finalize()
        graph._unsafe_unfinalize()
        tf.constant(2.0)


def test_get_local_variable_makes_local() -> None:
    """get_local_variable makes a local variable that is not trainable."""
    with tf.Graph().as_default():
        variable = tf.get_local_variable("count", [], tf.int32, initializer=tf.zeros_initializer())
        assert tf.local_variables() == [variable] and tf.trainable_variables() == []
        variable.set_shape([])
        assert variable._ref() is variable


@pytest.mark.cluster
def test_old_flag_internals_work() -> None:
    """Flags have the parsing method and the dictionary of TensorFlow before 1.5."""
    program = """
        import numpy as np
        import harness.tf1 as tf
        tf.app.flags.DEFINE_integer("steps", np.inf, "how many")
        tf.app.flags.DEFINE_integer("batch", 3, "how many at once")
        FLAGS = tf.app.flags.FLAGS
        FLAGS._parse_flags()
        print(FLAGS.steps, FLAGS.batch, FLAGS.__flags["batch"])
        """
    command = [sys.executable, "-c", textwrap.dedent(program), "--batch=5"]
    for extra, shown in (([], "inf 5 5"), (["--steps=7"], "7 5 5")):
        done = subprocess.run(
            [*command, *extra], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.stdout.strip() == shown, done.stderr
    wrong = subprocess.run(
        [*command, "--steps=x"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert wrong.returncode != 0 and "steps" in wrong.stderr
