"""The namespace: types and shapes, options, flags, files, and names that are not there."""

import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import harness.tf1 as tf
import runtime as rt


def test_dtypes_equal_numpys() -> None:
    """A dtype equals NumPy's and has TensorFlow's properties."""
    assert (
        tf.float32 == np.float32 and np.dtype(np.float32) == tf.float32 and tf.float32 != tf.float64
    )
    assert tf.placeholder(tf.int64, []).dtype in (tf.int32, tf.int64)
    assert {tf.float32: 1}[np.dtype(np.float32)] == 1
    assert (
        tf.as_dtype("double") is tf.float64
        and tf.as_dtype(np.int8) is tf.int8
        and tf.as_dtype(str) is tf.string
    )
    assert (tf.float16.is_floating, tf.int8.is_integer, tf.uint8.is_unsigned, tf.bool.is_bool) == (
        True,
    ) * 4
    assert tf.complex64.real_dtype is tf.float32 and tf.float32.base_dtype is tf.float32
    assert (tf.int8.min, tf.int8.max, tf.float32.size, tf.bfloat16.name) == (
        -128,
        127,
        4,
        "bfloat16",
    )
    assert np.zeros(2, tf.int32).dtype == np.int32 and tf.float32.as_numpy_dtype is np.float32
    assert tf.string != tf.int8 and repr(tf.int32) == "tf.int32"
    with pytest.raises(TypeError, match="not a data type"):
        tf.as_dtype("float31")


def test_shapes_behave_as_tensorflows() -> None:
    """Shapes behave as TensorFlow's, with unknown dimensions."""
    x = tf.placeholder(tf.float32, [None, 4])
    shape = x.get_shape()
    assert (
        shape.as_list() == [None, 4]
        and shape.ndims == 2
        and len(shape) == 2
        and str(shape) == "(?, 4)"
    )
    assert (
        shape[1].value == 4 and int(shape[1]) == 4 and shape[0].value is None and shape[1] * 2 == 8
    )
    assert (
        shape[1:].as_list() == [4] and not shape.is_fully_defined() and shape.num_elements() is None
    )
    assert shape.is_compatible_with([3, 4]) and not shape.is_compatible_with([3, 5])
    assert shape.merge_with([3, None]) == [3, 4] and shape.concatenate([2]).as_list() == [
        None,
        4,
        2,
    ]
    assert np.zeros(tf.TensorShape([2, 3]).as_list()).shape == (2, 3) and range(shape[1]) == range(
        4
    )
    x.set_shape([7, None])
    assert x.get_shape() == tf.TensorShape([7, 4])
    with pytest.raises(ValueError, match=r"shapes \(7, 4\) and \(8, 4\) are incompatible"):
        x.set_shape([8, 4])
    unknown = tf.placeholder(tf.float32).get_shape()
    assert unknown.ndims is None and unknown.is_compatible_with([1]) and not unknown
    with pytest.raises(ValueError, match="rank"):
        unknown.as_list()


def test_config_proto_is_session_config() -> None:
    """A ConfigProto is set field by field and is a SessionConfig."""
    config = tf.ConfigProto(
        allow_soft_placement=True, gpu_options=tf.GPUOptions(per_process_gpu_memory_fraction=0.5)
    )
    config.log_device_placement = True
    config.gpu_options.allow_growth = True
    config.device_filters.append("/job:ps")
    config.device_filters.extend(["/job:worker/task:1"])
    config.operation_timeout_in_ms = 2500
    config.graph_options.optimizer_options.opt_level = tf.OptimizerOptions.L0
    assert (
        isinstance(config, rt.SessionConfig)
        and config.operation_timeout_secs == config.start_timeout_secs == 2.5
    )
    assert tuple(config.device_filters) == ("/job:ps", "/job:worker/task:1")
    with pytest.raises(ValueError, match="isolate_session_state"):
        tf.ConfigProto(isolate_session_state=True)
    with pytest.raises(TypeError, match="no_such_option"):
        tf.ConfigProto(no_such_option=1)
    with (
        tf.Graph().as_default(),
        tf.Session(config=tf.ConfigProto(allow_soft_placement=True)) as sess,
    ):
        with tf.device("/gpu:7"):
            assert sess.run(tf.constant(3) + 1) == 4
        assert isinstance(sess, tf.Session) and isinstance(rt.Session(graph=tf.Graph()), tf.Session)
    with pytest.raises(TypeError, match="pass options as config="):
        tf.Session(tf.ConfigProto())


def test_control_flow_helpers_work() -> None:
    """Dependencies, groups, collections and assertions work as in TensorFlow."""
    with tf.Graph().as_default() as graph:
        v = tf.Variable(1.0)
        with tf.control_dependencies([v.assign_add(1.0)]):
            after = tf.identity(v.read_value())
        pair = tf.tuple([after, None, tf.constant(3)])
        both = tf.group(after, tf.no_op("nothing"), name="both")
        with tf.name_scope("outer"), tf.op_scope([v], None, "inner"):
            assert tf.constant(1).name == "outer/inner/Const:0"
        with tf.device("/cpu:0"), tf.colocate_with(v):
            assert tf.constant(1).device == ""
        tf.add_to_collection("mine", v)
        tf.get_collection_ref("mine").append(both)
        assert (
            tf.get_collection("mine") == [v, both]
            and graph is tf.get_default_graph()
            and pair[1] is None
        )
        ok = tf.assert_equal([1, 2], [1, 2])
        wrong = tf.assert_less(tf.constant([1, 5]), 3, message="too large:")
        low = tf.assert_positive([1.0, 0.0])
        finite = tf.check_numerics(tf.constant([1.0, np.inf]), "loss")
        falls = tf.Assert(tf.constant(False), ["because", tf.constant(7)])
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            assert sess.run([pair[0], pair[2]]) == [2.0, 3]
            sess.run([both, ok])
            for op, text in (
                (wrong, "too large: x < y does not hold"),
                (low, "x > 0 does not hold"),
                (finite, "loss: not finite"),
                (falls, r"assertion failed: \[because\]\[7\]"),
            ):
                with pytest.raises(tf.errors.InvalidArgumentError, match=text):
                    sess.run(op)


def test_print_shows_and_keeps_gradient(capfd: pytest.CaptureFixture) -> None:
    """Print shows values and keeps the gradient."""
    with tf.Graph().as_default():
        x = tf.constant([1.0, 2.0])
        shown = tf.Print(x, [x, "twice"], "values: ", summarize=1)
        (gradient,) = tf.gradients(tf.reduce_sum(shown * shown), [x])
        with tf.Session() as sess:
            assert sess.run(gradient).tolist() == [2, 4]
    assert "values: [1.0...][twice]" in capfd.readouterr().err


def test_gradients_take_lists() -> None:
    """gradients takes lists, weights and stopped tensors."""
    with tf.Graph().as_default():
        x, y = tf.constant(3.0), tf.constant(4.0)
        stopped = tf.stop_gradient(x) * x
        grads = tf.gradients(
            [x * y, stopped], [x, y, tf.constant(1.0)], grad_ys=[tf.constant(2.0), tf.constant(1.0)]
        )
        alone = tf.gradients(x * x, x, stop_gradients=[y], name="alone")
        assert grads[2] is None and alone[0].op.name.startswith("alone/")
        with tf.Session() as sess:
            assert sess.run([grads[0], grads[1], alone[0]]) == [11.0, 6.0, 6.0]


def test_missing_names_say_a_replacement() -> None:
    """A missing name says what to use instead."""
    with pytest.raises(AttributeError, match="tf.hessians is not in harness.tf1: .*jax.hessian"):
        tf.hessians  # noqa: B018
    with pytest.raises(
        AttributeError, match="tf.train.batch_join is not in harness.tf1: tf.train.batch and"
    ):
        tf.train.batch_join  # noqa: B018
    with pytest.raises(AttributeError, match="tf.nn.raw_rnn is not in harness.tf1: .*jax.lax.scan"):
        tf.nn.raw_rnn  # noqa: B018
    with pytest.raises(
        AttributeError,
        match="tf.no_such_thing is not in harness.tf1; docs/tf1_names.md lists what is",
    ):
        tf.no_such_thing  # noqa: B018
    assert (
        not hasattr(tf, "estimator")
        and hasattr(tf, "matmul")
        and "matmul" in dir(tf)
        and "relu" in dir(tf.nn)
    )


def test_missing_names_do_not_exist() -> None:
    """No name in the table of missing names exists."""
    from harness.tf1.names.missing import INSTEAD

    for name in INSTEAD:
        *namespaces, last = name.split(".")[1:]
        holder = tf
        for namespace in namespaces:
            # a module that is not there at all, such as tf.debug
            holder = getattr(holder, namespace, None)
        assert not hasattr(holder, last), name


def test_gfile_functions_work(tmp_path: pathlib.Path) -> None:
    """The functions of tf.gfile read, copy, list and remove files."""
    base = str(tmp_path / "a" / "b")
    tf.gfile.MakeDirs(base)
    tf.gfile.MakeDirs(base)
    with tf.gfile.GFile(f"{base}/one", "w") as f:
        f.write("text")
    tf.gfile.Copy(f"{base}/one", f"{base}/two")
    tf.gfile.Rename(f"{base}/two", f"{base}/three")
    assert (
        tf.gfile.Exists(base)
        and tf.gfile.IsDirectory(base)
        and not tf.gfile.IsDirectory(f"{base}/one")
    )
    assert tf.gfile.ListDirectory(base) == ["one", "three"] and tf.gfile.Glob(f"{base}/o*") == [
        f"{base}/one"
    ]
    with tf.gfile.FastGFile(f"{base}/three") as f:
        assert f.read() == "text"
    assert tf.gfile.Stat(f"{base}/one").st_size == 4
    assert [names for _, _, names in tf.gfile.Walk(base)] == [["one", "three"]]
    with pytest.raises(tf.errors.AlreadyExistsError, match="overwrite=True"):
        tf.gfile.Copy(f"{base}/one", f"{base}/three")
    tf.gfile.Remove(f"{base}/one")
    for broken in (
        tf.gfile.Remove,
        tf.gfile.Open,
        tf.gfile.Stat,
        tf.gfile.ListDirectory,
        tf.gfile.DeleteRecursively,
    ):
        with pytest.raises(tf.errors.NotFoundError, match="no such file"):
            broken(f"{base}/one")
    tf.gfile.DeleteRecursively(str(tmp_path / "a"))
    assert not tf.gfile.Exists(base)


def _run(tmp_path: pathlib.Path, program: str, *args: str) -> subprocess.CompletedProcess:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program))
    root = str(pathlib.Path(tf.__file__).resolve().parents[2])
    import os

    env = {**os.environ, "PYTHONPATH": root}
    return subprocess.run(
        [sys.executable, str(path), *args], env=env, capture_output=True, text=True, timeout=60
    )


@pytest.mark.cluster
def test_flags_parse_at_first_use(tmp_path: pathlib.Path) -> None:
    """Flags are parsed at their first use, and main's result is the exit code."""
    program = """
        import harness.tf1 as tf

        flags = tf.app.flags
        flags.DEFINE_string("ps_hosts", "", "where the parameter servers are")
        flags.DEFINE_integer("task_index", default_value=0, docstring="which task")
        tf.app.flags.DEFINE_boolean("sync", False, "wait for all")
        FLAGS = tf.app.flags.FLAGS
        print(FLAGS.ps_hosts.split(","))

        def main(rest):
            print(FLAGS.task_index, FLAGS.sync, rest[1:])
            return 3

        if __name__ == "__main__":
            tf.app.run()
        """
    done = _run(
        tmp_path, program, "--ps_hosts=a:1,b:2", "--task_index=1", "--sync", "--other=5", "word"
    )
    assert done.stdout.splitlines() == ["['a:1', 'b:2']", "1 True ['--other=5', 'word']"], (
        done.stderr
    )
    assert done.returncode == 3


def test_logging_has_tensorflows_names(caplog: pytest.LogCaptureFixture) -> None:
    """tf.logging has TensorFlow's names and obeys the verbosity."""
    before = tf.logging.get_verbosity()
    try:
        tf.logging.set_verbosity(tf.logging.INFO)
        with caplog.at_level("INFO", logger="absl"):
            tf.logging.info("step %d", 7)
            tf.logging.warn("careful")
            tf.logging.debug("not shown")
    finally:
        tf.logging.set_verbosity(before)
    assert [r.getMessage() for r in caplog.records if r.getMessage() != "not shown"] == [
        "step 7",
        "careful",
    ]


def test_old_and_new_summaries_merge() -> None:
    """Summaries by old and new names merge into one."""
    with tf.Graph().as_default():
        assert tf.merge_all_summaries() is None
        tf.scalar_summary("loss", tf.constant(1.0))
        tf.summary.scalar("rate", 2.0)
        tf.histogram_summary(["h"], tf.constant([1.0, 2.0]), name="unused")
        merged = tf.merge_all_summaries()
        part = tf.merge_summary(tf.get_collection(tf.GraphKeys.SUMMARIES)[:1])
        with tf.Session() as sess:
            both, one = sess.run([merged, part])
        assert (
            all(tag in both for tag in (b"loss", b"rate", b"h"))
            and b"loss" in one
            and b"rate" not in one
        )
        with pytest.raises(TypeError, match="one tag"):
            tf.scalar_summary(["a", "b"], tf.constant([1.0, 2.0]))
    assert tf.train.SummaryWriter is tf.summary.FileWriter
