"""Names of modules that few programs use: file_io, the writer of events, slim's prefetch queue, old summaries."""

import pathlib

import numpy as np
import pytest

import harness.tf1 as tf
from harness.tf1.inputs import file_io
from harness.tf1.train import pywrap

pytestmark = pytest.mark.cluster


def test_file_io_functions_work(tmp_path: pathlib.Path) -> None:
    """The functions of file_io read, copy and delete files."""
    file_io.recursive_create_dir(str(tmp_path / "a/b"))
    file_io.write_string_to_file(str(tmp_path / "a/b/x.txt"), "some text")
    file_io.copy(str(tmp_path / "a/b/x.txt"), str(tmp_path / "a/y.txt"))
    with file_io.FileIO(str(tmp_path / "a/y.txt"), "a") as file:
        file.write(" more")
    assert file_io.read_file_to_string(str(tmp_path / "a/y.txt")) == "some text more"
    assert (
        file_io.read_file_to_string(str(tmp_path / "a/b/x.txt"), binary_mode=True) == b"some text"
    )
    assert file_io.get_matching_files(str(tmp_path / "a/*.txt")) == [str(tmp_path / "a/y.txt")]
    file_io.delete_recursively(str(tmp_path / "a"))
    assert not file_io.file_exists(str(tmp_path / "a"))
    with pytest.raises(
        AttributeError, match=r"tf\.python\.lib\.io\.file_io\.no_such is not in harness\.tf1"
    ):
        file_io.no_such  # noqa: B018


def test_events_writer_writes_event_files(tmp_path: pathlib.Path) -> None:
    """EventsWriter writes an event file in TensorFlow's format."""
    writer = pywrap.EventsWriter(str(tmp_path / "events").encode())
    for step in range(3):
        value = tf.Summary.Value(tag="loss", simple_value=step / 2)
        writer.WriteEvent(tf.Event(wall_time=1.0, step=step, summary=tf.Summary(value=[value])))
    assert writer.Flush() and writer.Close()
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("events.out.tfevents.") and str(path).encode() == writer.FileName()
    first, *events = [
        tf.Event.FromString(record) for record in tf.python_io.tf_record_iterator(str(path))
    ]
    assert first.file_version == "brain.Event:2"
    assert [(e.step, e.summary.value[0].simple_value) for e in events] == [
        (0, 0.0),
        (1, 0.5),
        (2, 1.0),
    ]
    with pytest.raises(tf.errors.FailedPreconditionError):
        writer.WriteEvent(tf.Event())


def test_prefetch_queue_passes_elements_on() -> None:
    """A prefetch queue passes on the elements of its tensors in order."""
    prefetch_queue = tf.contrib.slim.prefetch_queue.prefetch_queue
    with tf.Graph().as_default(), tf.Session() as sess:
        number = tf.train.range_input_producer(5, shuffle=False, num_epochs=1).dequeue()
        queue = prefetch_queue([number, tf.stack([number, number * number])], capacity=2)
        taken = queue.dequeue()
        with pytest.raises(TypeError, match="not a dictionary"):
            prefetch_queue({"a": number})
        with pytest.raises(ValueError, match="dynamic_pad"):
            prefetch_queue([number], dynamic_pad=True)
        sess.run(tf.local_variables_initializer())
        coord = tf.train.Coordinator()
        threads = tf.train.start_queue_runners(sess, coord)
        found = [sess.run(taken) for _ in range(5)]
        assert [(int(n), pair.tolist()) for n, pair in found] == [(n, [n, n * n]) for n in range(5)]
        with pytest.raises(tf.errors.OutOfRangeError):
            sess.run(taken)
        coord.request_stop()
        coord.join(threads)


def test_contrib_metrics_take_predictions_first() -> None:
    """The metrics of contrib take the predictions first."""
    with tf.Graph().as_default(), tf.Session() as sess:
        labels, scores = [True, False, True], [0.9, 0.8, 0.7]
        area = tf.contrib.metrics.streaming_auc(scores, labels)
        hits = tf.contrib.metrics.streaming_accuracy([1, 0, 1], [1, 1, 1])
        batch = tf.contrib.metrics.accuracy(tf.constant([1, 0, 1]), tf.constant([1, 1, 1]))
        mine = tf.contrib.framework.local_variable(3.0, name="mine")
        assert mine in tf.local_variables() and mine not in tf.trainable_variables()
        sess.run(tf.local_variables_initializer())
        found = sess.run([area[1], hits[1], batch, mine])
        np.testing.assert_allclose(found, [0.5, 2 / 3, 2 / 3, 3.0], atol=1e-5)


def test_oldest_summary_names_work() -> None:
    """Summaries work by their oldest names."""
    with tf.Graph().as_default(), tf.Session() as sess:
        text = sess.run(tf.contrib.deprecated.scalar_summary("loss", 2.0))
        assert tf.Summary.FromString(text).value[0].simple_value == 2.0


def test_programs_may_disable_version_two() -> None:
    """The switches at the head of a program for TensorFlow 2 leave everything as TensorFlow 1 has it."""
    for name in (
        "disable_v2_behavior",
        "disable_eager_execution",
        "disable_control_flow_v2",
        "disable_resource_variables",
        "disable_tensor_equality",
        "disable_v2_tensorshape",
        "enable_resource_variables",
    ):
        getattr(tf, name)()
    assert not tf.executing_eagerly()
    with pytest.raises(AttributeError, match="JAX itself runs eagerly"):
        tf.enable_v2_behavior()
