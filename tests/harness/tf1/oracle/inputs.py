"""Programs that read: files of records, examples, text, datasets, pictures; each run by TensorFlow and harness.tf1.

``python -m tests.harness.tf1.oracle.inputs FILE`` writes down what TensorFlow gives (a part of
``make tf1-oracle``).
"""

from __future__ import annotations

import base64
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

Case = Callable[[Any], Any]
CASES: dict[str, Case] = {}
"""Name -> a function of the module ``tf``; what it gives is compared."""


def case(fn: Case) -> Case:
    """Adds a program under its own name."""
    CASES[fn.__name__] = fn
    return fn


def value_of(tf: Any, fetches: Any, feeds: Any = None) -> Any:
    """What a step gives."""
    with tf.Session() as sess:
        return sess.run(fetches, feeds)


def shape_of(tensor: Any) -> str:
    """A static shape, as text."""
    found = tensor.get_shape() if hasattr(tensor, "get_shape") else tensor
    return (
        "unknown"
        if found.ndims is None
        else ",".join("?" if d is None else str(d) for d in found.as_list())
    )


def elements(tf: Any, dataset: Any, most: int = 40) -> list[Any]:
    """The static shapes and dtypes of a dataset, its elements, and how it ends."""
    batch = dataset.make_one_shot_iterator().get_next()
    parts = (
        [batch]
        if not isinstance(batch, tuple | dict)
        else [batch[k] for k in sorted(batch)]
        if isinstance(batch, dict)
        else batch
    )
    out: list[Any] = [[shape_of(p) for p in parts], [tf.as_dtype(p.dtype).name for p in parts]]
    with tf.Session() as sess:
        for _ in range(most):
            try:
                out.append(list(sess.run(tuple(parts))))
            except tf.errors.OutOfRangeError:
                return [*out, "end"]
    return [*out, "more"]


def written(
    tf: Any, folder: str, *records: bytes, name: str = "a.tfrecord", options: Any = None
) -> str:
    """A file of records."""
    path = os.path.join(folder, name)
    with tf.python_io.TFRecordWriter(path, options) as writer:
        for record in records:
            writer.write(record)
    return path


def example(tf: Any, **features: Any) -> bytes:
    """A serialized example of lists of ints, floats or bytes."""
    kinds = {int: ("int64_list", tf.train.Int64List), float: ("float_list", tf.train.FloatList)}
    made = {}
    for name, values in features.items():
        field, kind = kinds.get(
            type(values[0]) if values else int, ("bytes_list", tf.train.BytesList)
        )
        made[name] = tf.train.Feature(**{field: kind(value=values)})
    return tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString(
        deterministic=True
    )


def error_of(tf: Any, fetches: Any, feeds: Any = None) -> str:
    """The type of the error that a step ends with."""
    try:
        value_of(tf, fetches, feeds)
    except Exception as error:
        return type(error).__name__
    return "none"


def drained(tf: Any, fetches: Any) -> list[Any]:
    """What a pipeline of queues gives until it ends."""
    out = []
    with tf.Session() as sess:
        sess.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        coord = tf.train.Coordinator()
        threads = tf.train.start_queue_runners(sess, coord)
        try:
            while not coord.should_stop():
                out.append(sess.run(fetches))
        except tf.errors.OutOfRangeError:
            out.append("end")
        finally:
            coord.request_stop()
        coord.join(threads)
    return out


RECORDS = (b"first", b"", b"\x00\xff" * 30)

# -- files of records --------------------------------------------------------------------------------------------------


@case
def the_bytes_of_a_file_of_records(tf: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = written(tf, folder, *RECORDS)
        return base64.b64encode(pathlib.Path(path).read_bytes()).decode()


@case
def records_are_read_as_written(tf: Any) -> Any:
    out = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("NONE", "GZIP", "ZLIB"):
            options = tf.python_io.TFRecordOptions(
                getattr(tf.python_io.TFRecordCompressionType, kind)
            )
            path = written(tf, folder, *RECORDS, name=kind, options=options)
            out.append(list(tf.python_io.tf_record_iterator(path, options)))
    return out


def _damaged(tf: Any, change: Callable[[bytes], bytes]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(written(tf, folder, *RECORDS))
        path.write_bytes(change(path.read_bytes()))
        out: list[Any] = []
        try:
            for record in tf.python_io.tf_record_iterator(str(path)):
                out.append(record)
        except tf.errors.OpError as error:
            out.append(type(error).__name__)
        return out


def _changed(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


CASES |= {
    "a_changed_byte_of_a_record": lambda tf: _damaged(tf, lambda data: _changed(data, 13)),
    "a_changed_byte_of_a_length": lambda tf: _damaged(tf, lambda data: _changed(data, 21)),
    "a_changed_byte_of_a_crc": lambda tf: _damaged(tf, lambda data: _changed(data, 18)),
    "a_file_cut_off_in_a_record": lambda tf: _damaged(tf, lambda data: data[:-9]),
    "a_file_cut_off_in_a_length": lambda tf: _damaged(tf, lambda data: data[:27]),
    "an_empty_file": lambda tf: _damaged(tf, lambda data: b""),
}


@case
def a_file_that_is_not_there(tf: Any) -> Any:
    try:
        return list(tf.python_io.tf_record_iterator("/no/such/file"))
    except tf.errors.OpError as error:
        return type(error).__name__


@case
def other_spellings(tf: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "a")
        with tf.io.TFRecordWriter(path) as writer:
            writer.write(b"one")
        return [list(tf.io.tf_record_iterator(path)), tf.io.FixedLenFeature([1], tf.int64).shape]


@case
def what_a_checkpoint_holds(tf: Any) -> Any:
    tf.Variable(np.ones((2, 3), np.float32), name="w")
    tf.Variable(7, name="n")
    with tempfile.TemporaryDirectory() as folder, tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        path = tf.train.Saver().save(sess, os.path.join(folder, "model"))
        reader = tf.train.NewCheckpointReader(path)
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        told = [
            f"{name} {tf.as_dtype(dtypes[name]).name} {shapes[name]}" for name in sorted(shapes)
        ]
        told += [
            str(reader.has_tensor("w")),
            str(reader.has_tensor("v")),
            str(tf.train.list_variables(folder)),
        ]
        return [*told, reader.get_tensor("w"), tf.train.load_checkpoint(folder).get_tensor("n")]


# -- readers -----------------------------------------------------------------------------------------------------------


def _read(tf: Any, reader: Any, files: dict[str, bytes], epochs: int = 1) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for name, data in files.items():
            paths.append(os.path.join(folder, name))
            pathlib.Path(paths[-1]).write_bytes(data)
        queue = tf.train.string_input_producer(paths, num_epochs=epochs, shuffle=False)
        key, value = reader.read(queue)
        found = drained(tf, [key, value])
        return [[shape_of(key), shape_of(value)]] + [
            f
            if isinstance(f, str)
            else [f[0].replace(folder.encode() + b"/", b""), f[1].replace(folder.encode(), b"")]
            for f in found
        ]


TEXT = {"a.txt": b"one\ntwo\r\n\nfour", "b.txt": b"", "c.txt": b"last\n"}

CASES |= {
    "lines_of_files": lambda tf: _read(tf, tf.TextLineReader(), TEXT, 2),
    "lines_without_their_header": lambda tf: _read(
        tf, tf.TextLineReader(skip_header_lines=1), TEXT
    ),
    "whole_files": lambda tf: _read(tf, tf.WholeFileReader(), TEXT),
    "names_of_files": lambda tf: _read(tf, tf.IdentityReader(), TEXT),
    "records_of_one_size": lambda tf: _read(
        tf, tf.FixedLengthRecordReader(3), {"a": b"abcdefgh", "b": b"xyz"}
    ),
    "records_between_a_header_and_a_footer": lambda tf: _read(
        tf, tf.FixedLengthRecordReader(2, header_bytes=1, footer_bytes=2), {"a": b"Habcdefff"}
    ),
    "records_that_overlap": lambda tf: _read(
        tf, tf.FixedLengthRecordReader(4, hop_bytes=2), {"a": b"abcdefgh"}
    ),
}


@case
def records_by_a_reader(tf: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(written(tf, folder, *RECORDS)).read_bytes()
    return _read(tf, tf.TFRecordReader(), {"a": data, "b": data}, 1)


@case
def several_records_at_once_and_the_counts(tf: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "a")
        pathlib.Path(path).write_bytes(b"1\n2\n3\n4\n5\n")
        reader = tf.TextLineReader()
        queue = tf.train.string_input_producer([path], num_epochs=1, shuffle=False)
        _, lines = reader.read_up_to(queue, 3)
        with tf.Session() as sess:
            sess.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            coord = tf.train.Coordinator()
            threads = tf.train.start_queue_runners(sess, coord)
            out: list[Any] = [sess.run(lines) for _ in range(2)]
            try:
                sess.run(lines)
            except tf.errors.OutOfRangeError:
                out.append("end")
            out += [
                sess.run(reader.num_records_produced()),
                sess.run(reader.num_work_units_completed()),
            ]
            coord.request_stop()
            coord.join(threads)
        return [*out, shape_of(lines)]


@case
def files_read_and_written(tf: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "new", "a")
        value_of(tf, tf.write_file(path, "text\n"))
        again = tf.read_file(tf.constant(path))
        return [value_of(tf, again), shape_of(again), error_of(tf, tf.read_file(path + "x"))]


@case
def examples_in_batches(tf: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = written(
            tf,
            folder,
            *(example(tf, image=[np.full(4, i, np.uint8).tobytes()], label=[i]) for i in range(7)),
        )
        queue = tf.train.string_input_producer([path], num_epochs=1)
        _, serialized = tf.TFRecordReader().read(queue)
        features = {
            "image": tf.FixedLenFeature([], tf.string),
            "label": tf.FixedLenFeature([], tf.int64),
        }
        parsed = tf.parse_single_example(serialized, features=features)
        image = tf.decode_raw(parsed["image"], tf.uint8)
        image.set_shape([4])
        image = tf.cast(image, tf.float32) * (1.0 / 255) - 0.5
        label = tf.cast(parsed["label"], tf.int32)
        images, labels = tf.train.batch([image, label], 3, allow_smaller_final_batch=True)
        found = drained(tf, [images, labels])
        return [shape_of(images), shape_of(labels), *found]


@case
def batches_of_one_tensor_and_of_several(tf: Any) -> Any:
    """A list of one tensor gives a tensor; a dictionary of one a dictionary."""
    found = []
    for make in (tf.train.batch, lambda t, n: tf.train.shuffle_batch(t, n, 8, 2, seed=1)):
        for pick in (lambda x: [x], lambda x: (x,), lambda x: {"x": x}, lambda x: [x, x]):
            with tf.Graph().as_default():
                number = tf.train.range_input_producer(4, num_epochs=1, shuffle=False).dequeue()
                batch = make(pick(number), 4)
                kind = type(batch).__name__ if isinstance(batch, list | dict) else "tensor"
                first = drained(tf, batch)[0]
                rows = first["x"] if kind == "dict" else first[0] if kind == "list" else first
                found += [kind, sorted(np.asarray(rows).tolist())]
    return found


@case
def slices_of_names_and_labels(tf: Any) -> Any:
    """How programs pair the names of their files with labels; strings are picked by their place."""
    name, label = tf.train.slice_input_producer(
        [["a", "b", "c"], [1, 2, 3]], num_epochs=2, shuffle=False
    )
    names, labels = tf.train.batch([name, label], 4, allow_smaller_final_batch=True)
    return [shape_of(names), shape_of(labels), *drained(tf, [names, labels])]


@case
def strings_by_their_place(tf: Any) -> Any:
    words, place = [["a", "bc", ""], ["d", "e", "f"]], tf.placeholder(tf.int64, [None, 2])
    found: list[Any] = []
    for axis in (0, 1, -1):
        picked = tf.gather(words, place, axis=axis)
        found += [
            shape_of(picked),
            value_of(tf, picked, {place: [[1, 0]]}),
            error_of(tf, picked, {place: [[0, 3]]}),
        ]
    return [*found, value_of(tf, tf.gather(tf.constant(["x", "y"]), 1))]


# -- examples ----------------------------------------------------------------------------------------------------------

FEATURES: dict[str, Any] = {
    "i": [1, 2],
    "f": [0.5],
    "s": [b"a\x00", b"b"],
}


def _parse(tf: Any, features: Any, **given: Any) -> Any:
    parsed = tf.parse_single_example(example(tf, **{**FEATURES, **given}), features(tf))
    found = value_of(tf, parsed)
    return [
        [k, shape_of(parsed[k]), *(list(v) if isinstance(v, tuple) else [v])]
        for k, v in sorted(found.items())
    ]


def _parses(name: str, features: Any, **given: Any) -> None:
    CASES[f"example_{name}"] = lambda tf: _parse(tf, features, **given)


_parses(
    "of_numbers",
    lambda tf: {"i": tf.FixedLenFeature([2], tf.int64), "f": tf.FixedLenFeature([], tf.float32)},
)
_parses("of_text", lambda tf: {"s": tf.FixedLenFeature(2, tf.string)})
_parses("as_a_matrix", lambda tf: {"i": tf.FixedLenFeature([2, 1], tf.int64)})
_parses(
    "with_a_default",
    lambda tf: {"x": tf.FixedLenFeature([2], tf.float32, default_value=[1.0, 2.0])},
)
_parses(
    "with_one_default_for_all", lambda tf: {"x": tf.FixedLenFeature([2], tf.int64, default_value=7)}
)
_parses(
    "with_a_default_text", lambda tf: {"x": tf.FixedLenFeature([], tf.string, default_value="none")}
)
_parses("that_lacks_a_feature", lambda tf: {"x": tf.FixedLenFeature([], tf.int64)})
_parses("of_another_size", lambda tf: {"i": tf.FixedLenFeature([3], tf.int64)})
_parses("of_another_kind", lambda tf: {"i": tf.FixedLenFeature([2], tf.float32)})
_parses("of_a_dtype_that_none_has", lambda tf: {"i": tf.FixedLenFeature([2], tf.int32)})
_parses(
    "of_variable_length",
    lambda tf: {"i": tf.VarLenFeature(tf.int64), "x": tf.VarLenFeature(tf.string)},
)
_parses(
    "of_a_sequence", lambda tf: {"i": tf.FixedLenSequenceFeature([], tf.int64, allow_missing=True)}
)


@case
def a_batch_of_examples(tf: Any) -> Any:
    texts = [example(tf, n=[1, 2, 3], k=[1.5]), example(tf, k=[2.5]), example(tf, n=[4], k=[3.5])]
    parsed = tf.parse_example(
        tf.constant(texts),
        {"n": tf.VarLenFeature(tf.int64), "k": tf.FixedLenFeature([1], tf.float32)},
    )
    dense = tf.sparse_tensor_to_dense(parsed["n"], default_value=-1)
    found = value_of(
        tf, [parsed["n"].indices, parsed["n"].values, parsed["n"].dense_shape, parsed["k"], dense]
    )
    return [*found, shape_of(parsed["k"]), shape_of(parsed["n"].values), shape_of(dense)]


@case
def sequences_of_a_batch_are_padded(tf: Any) -> Any:
    texts = tf.placeholder(tf.string, [None])
    spec = {"n": tf.FixedLenSequenceFeature([], tf.int64, allow_missing=True, default_value=9)}
    parsed = tf.parse_example(texts, spec)["n"]
    return [
        shape_of(parsed),
        value_of(tf, parsed, {texts: [example(tf, n=[1, 2]), example(tf, x=[1])]}),
    ]


@case
def no_example_at_all(tf: Any) -> Any:
    return error_of(
        tf, tf.parse_single_example(b"\xff\xff\xff", {"x": tf.FixedLenFeature([], tf.int64)})
    )


@case
def features_over_time(tf: Any) -> Any:
    made = tf.train.SequenceExample(
        context=tf.train.Features(
            feature={"n": tf.train.Feature(int64_list=tf.train.Int64List(value=[2]))}
        ),
        feature_lists=tf.train.FeatureLists(
            feature_list={
                "words": tf.train.FeatureList(
                    feature=[
                        tf.train.Feature(int64_list=tf.train.Int64List(value=[i]))
                        for i in (5, 6, 7)
                    ]
                )
            }
        ),
    )
    context, sequence = tf.parse_single_sequence_example(
        made.SerializeToString(),
        context_features={"n": tf.FixedLenFeature([], tf.int64)},
        sequence_features={"words": tf.FixedLenSequenceFeature([], tf.int64)},
    )
    return [*value_of(tf, [context["n"], sequence["words"]]), shape_of(sequence["words"])]


@case
def messages_go_both_ways(tf: Any) -> Any:
    text = example(tf, a=[1, -2], b=[0.25], c=[b"x"])
    again = tf.train.Example.FromString(text)
    kept = again.features.feature
    return [
        base64.b64encode(text).decode(),
        list(kept["a"].int64_list.value),
        list(kept["b"].float_list.value),
        list(kept["c"].bytes_list.value),
        kept["a"].WhichOneof("kind"),
    ]


# -- text and bytes ----------------------------------------------------------------------------------------------------


def _of_call(tf: Any, make: Callable[[Any], Any]) -> Any:
    made = make(tf)
    made = list(made) if isinstance(made, list | tuple) else [made]
    return [
        [shape_of(t) for t in made],
        [tf.as_dtype(t.dtype).name for t in made],
        value_of(tf, made),
    ]


def _calls(**makes: Callable[[Any], Any]) -> None:
    for name, make in makes.items():
        CASES[name] = lambda tf, make=make: _of_call(tf, make)


NUMBERS = np.array([1, 258, -3], "<i2").tobytes()
_calls(
    raw_bytes=lambda tf: tf.decode_raw(b"\x01\xff", tf.uint8),
    raw_shorts=lambda tf: tf.decode_raw(NUMBERS, tf.int16),
    raw_shorts_the_other_way=lambda tf: tf.decode_raw(NUMBERS, tf.int16, little_endian=False),
    raw_of_a_batch=lambda tf: tf.decode_raw([b"ab", b"cd"], tf.uint8),
    raw_of_nothing=lambda tf: tf.decode_raw(b"", tf.float32),
    raw_of_other_sizes=lambda tf: tf.decode_raw([b"ab", b"c"], tf.uint8),
    raw_with_a_rest=lambda tf: tf.decode_raw(b"abc", tf.int16),
    columns=lambda tf: tf.decode_csv("1,2.5,word", [[0], [0.0], [""]]),
    columns_of_lines=lambda tf: tf.decode_csv(["1,a", "2,b"], [[0], ["x"]]),
    columns_with_defaults=lambda tf: tf.decode_csv(",,", [[7], [1.5], ["none"]]),
    columns_that_must_be_there=lambda tf: tf.decode_csv(
        "1,", [tf.constant([], tf.int32), tf.constant([], tf.int32)]
    ),
    columns_in_quotation_marks=lambda tf: tf.decode_csv('"a,b","say ""so"""', [[""], [""]]),
    columns_without_quotation=lambda tf: tf.decode_csv(
        '"a,b"', [[""], [""]], use_quote_delim=False
    ),
    columns_between_semicolons=lambda tf: tf.decode_csv("1;2", [[0], [0]], field_delim=";"),
    columns_too_many=lambda tf: tf.decode_csv("1,2,3", [[0], [0]]),
    columns_too_few=lambda tf: tf.decode_csv("1", [[0], [0]]),
    columns_of_no_numbers=lambda tf: tf.decode_csv("one", [[0]]),
    columns_with_no_value=lambda tf: tf.decode_csv("NA,2", [[5], [0]], na_value="NA"),
    columns_chosen=lambda tf: tf.decode_csv("1,2,3", [[0], [0]], select_cols=[0, 2]),
    columns_of_wide_numbers=lambda tf: tf.decode_csv("12345678901", [tf.constant([0], tf.int64)]),
    a_number_of_a_string=lambda tf: tf.string_to_number(["1.5", "-2"]),
    an_integer_of_a_string=lambda tf: tf.string_to_number("12", tf.int64),
    no_number_of_a_string=lambda tf: tf.string_to_number("word"),
    strings_joined=lambda tf: tf.string_join([["a", "b"], "c"], separator="-"),
    integers_written_down=lambda tf: tf.as_string([1, -20]),
    fractions_written_down=lambda tf: tf.as_string(tf.constant([1.5, 2.0])),
    fractions_written_with_precision=lambda tf: tf.as_string(tf.constant([1.2345]), precision=2),
    truth_written_down=lambda tf: tf.as_string([True, False]),
    dense_of_numbers=lambda tf: tf.sparse_to_dense([1, 3], [5], 2.0),
    dense_of_pairs=lambda tf: tf.sparse_to_dense(
        [[0, 1], [1, 0]], [2, 2], [7, 8], default_value=-1
    ),
    dense_of_one=lambda tf: tf.sparse_to_dense(2, [4], 1, 0),
)


@case
def words_of_lines(tf: Any) -> Any:
    words = tf.string_split(["a  b", "", "c d e"])
    return [value_of(tf, [words.indices, words.values, words.dense_shape]), shape_of(words.values)]


@case
def a_sparse_tensor_by_hand(tf: Any) -> Any:
    sparse = tf.SparseTensor([[0, 1], [2, 0]], [5, 6], [3, 2])
    kept = value_of(tf, sparse)
    dense = tf.sparse_tensor_to_dense(sparse)
    return [kept.indices, kept.values, kept.dense_shape, value_of(tf, dense), shape_of(sparse)]


# -- Python functions --------------------------------------------------------------------------------------------------


@case
def python_functions(tf: Any) -> Any:
    x = tf.placeholder(tf.float32, [2])
    doubled = tf.py_func(lambda a: a * 2, [x], tf.float32)
    both = tf.py_func(lambda a, b: (a + b, np.float64(3)), [x, doubled], [tf.float32, tf.float64])
    text = tf.py_func(lambda: "word", [], tf.string)
    shapes = [shape_of(doubled), shape_of(both[1])]
    return [shapes, value_of(tf, [doubled * 1, *both, text], {x: [1, 2]})]


@case
def a_python_function_that_gives_another_dtype(tf: Any) -> Any:
    return error_of(tf, tf.py_func(lambda: np.float32(1), [], tf.int32))


@case
def a_python_number_is_wide(tf: Any) -> Any:
    return value_of(
        tf, [tf.py_func(lambda: 3, [], tf.int64), tf.py_func(lambda: 1.5, [], tf.float64)]
    )


@case
def no_gradient_through_python(tf: Any) -> Any:
    x = tf.placeholder(tf.float32, [])
    return [str(g) for g in tf.gradients(tf.py_func(lambda a: a, [x], tf.float32), [x])]


# -- datasets ----------------------------------------------------------------------------------------------------------


def _datasets(**makes: Callable[[Any], Any]) -> None:
    for name, make in makes.items():
        CASES[f"dataset_{name}"] = lambda tf, make=make: elements(tf, make(tf.data.Dataset))


PAIRS = (np.arange(6).reshape(3, 2), np.array(["a", "b", "c"]))


def _count(n: int) -> Any:
    return lambda: iter(range(n))


_datasets(
    of_one=lambda D: D.from_tensors([1, 2]),
    of_slices=lambda D: D.from_tensor_slices(PAIRS),
    of_slices_by_name=lambda D: D.from_tensor_slices({"x": np.float32([1, 2]), "y": [3, 4]}),
    of_slices_of_a_number=lambda D: D.from_tensor_slices(1),
    of_slices_that_differ=lambda D: D.from_tensor_slices(([1, 2], [1, 2, 3])),
    of_a_list=lambda D: D.from_tensor_slices([1.5, 2.5]),
    of_numbers=lambda D: D.range(3),
    of_numbers_from=lambda D: D.range(2, 5),
    of_numbers_in_steps=lambda D: D.range(5, 0, -2),
    in_batches=lambda D: D.range(5).batch(2),
    in_whole_batches=lambda D: D.range(5).batch(2, drop_remainder=True),
    in_batches_of_batches=lambda D: D.range(7).batch(2).batch(2, drop_remainder=True),
    in_batches_of_strings=lambda D: D.from_tensor_slices(["a", "bc"]).batch(3),
    in_batches_of_none=lambda D: D.range(3).batch(0),
    again=lambda D: D.range(2).repeat(2),
    again_and_again=lambda D: D.range(2).repeat().take(5),
    never_again=lambda D: D.range(2).repeat(0),
    of_nothing_again=lambda D: D.range(0).repeat(),
    skipped=lambda D: D.range(5).skip(3),
    skipped_all=lambda D: D.range(5).skip(-1),
    taken=lambda D: D.range(5).take(2),
    taken_all=lambda D: D.range(3).take(-1),
    of_a_worker=lambda D: D.range(7).shard(3, 1),
    of_no_worker=lambda D: D.range(7).shard(3, 3),
    in_a_row=lambda D: D.range(2).concatenate(D.range(5, 7)),
    in_a_row_of_other_dtypes=lambda D: D.range(2).concatenate(D.from_tensors(1.0)),
    in_a_row_of_other_shapes=lambda D: D.from_tensors([1, 2]).concatenate(D.from_tensors([3])),
    side_by_side=lambda D: D.zip((D.range(3), D.range(5, 9).map(lambda x: x * 2))),
    mapped=lambda D: D.range(4).map(lambda x: x * x),
    mapped_pairs=lambda D: D.from_tensor_slices(PAIRS).map(lambda x, y: (x + 1, y, x[0])),
    mapped_to_a_dictionary=lambda D: D.range(2).map(lambda x: {"b": x, "a": x + 1}),
    mapped_by_name=lambda D: D.from_tensor_slices({"x": [1, 2]}).map(lambda d: d["x"] * 2),
    mapped_to_a_list=lambda D: D.range(2).map(lambda x: [x, x + 1]),
    mapped_to_a_constant=lambda D: D.range(2).map(lambda x: 1.5),
    kept=lambda D: D.range(6).filter(lambda x: x % 2 < 1),
    kept_by_a_number=lambda D: D.range(6).filter(lambda x: x),
    flattened=lambda D: D.range(1, 4).flat_map(lambda n: D.range(n)),
    flattened_slices=lambda D: D.from_tensor_slices([[1, 2], [3, 4]]).flat_map(D.from_tensor_slices),
    flattened_no_dataset=lambda D: D.range(3).flat_map(lambda n: n),
    interleaved=lambda D: D.range(1, 5).interleave(
        lambda n: D.from_tensors(n).repeat(n), cycle_length=2, block_length=2
    ),
    interleaved_one_by_one=lambda D: D.range(1, 6).interleave(
        lambda n: D.range(n), cycle_length=3, block_length=1
    ),
    interleaved_of_few=lambda D: D.range(2).interleave(lambda n: D.range(3), cycle_length=4, block_length=2),
    ahead=lambda D: D.range(5).prefetch(2).batch(2),
    kept_in_memory=lambda D: D.range(3).cache().repeat(2),
    of_a_generator=lambda D: D.from_generator(_count(3), "int64"),
    of_a_generator_of_a_shape=lambda D: D.from_generator(_count(3), "int32", []).batch(2),
    of_a_generator_of_pairs=lambda D: D.from_generator(
        lambda: iter([([1, 2], "a"), ([3], b"b")]), ("float32", "string"), ([None], [])
    ),
    of_a_generator_that_gives_words=lambda D: D.from_generator(lambda: iter(["x"]), "int32"),
    of_a_generator_of_another_shape=lambda D: D.from_generator(lambda: iter([[1, 2]]), "int32", [3]),
    applied=lambda D: D.range(4).apply(lambda d: d.batch(2)),
)  # fmt: skip


@case
def dataset_padded_batches(tf: Any) -> Any:
    rows = tf.data.Dataset.range(1, 5).map(lambda n: tf.fill([tf.cast(n, tf.int32)], n))
    return [
        elements(tf, rows.padded_batch(2, padded_shapes=[None])),
        elements(
            tf, rows.padded_batch(3, padded_shapes=[5], padding_values=tf.constant(-1, tf.int64))
        ),
    ]


@case
def dataset_padded_too_small(tf: Any) -> Any:
    rows = tf.data.Dataset.from_tensors([1, 2, 3])
    return error_of(tf, rows.padded_batch(2, padded_shapes=[2]).make_one_shot_iterator().get_next())


@case
def dataset_padded_pairs(tf: Any) -> Any:
    rows = tf.data.Dataset.from_generator(
        lambda: iter([([1], "a"), ([2, 3], "b")]), (tf.int32, tf.string), ([None], [])
    )
    return elements(tf, rows.padded_batch(2, padded_shapes=([None], [])))


@case
def dataset_of_shapes_that_do_not_stack(tf: Any) -> Any:
    rows = tf.data.Dataset.from_generator(lambda: iter([[1], [2, 3]]), tf.int32, [None]).batch(2)
    return error_of(tf, rows.make_one_shot_iterator().get_next())


@case
def dataset_of_records(tf: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        paths = [written(tf, folder, b"a", b"b", name="1"), written(tf, folder, b"c", name="2")]
        packed = written(tf, folder, b"z", name="3", options=tf.python_io.TFRecordOptions("GZIP"))
        return [
            elements(tf, tf.data.TFRecordDataset(paths)),
            elements(tf, tf.data.TFRecordDataset(packed, compression_type="GZIP")),
            elements(
                tf, tf.data.Dataset.from_tensor_slices(paths).flat_map(tf.data.TFRecordDataset)
            ),
            elements(
                tf,
                tf.data.Dataset.list_files(folder + "/[12]", shuffle=False).interleave(
                    tf.data.TFRecordDataset, 2
                ),
            ),
        ]


@case
def dataset_of_damaged_records(tf: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(written(tf, folder, b"a"))
        path.write_bytes(path.read_bytes()[:-1])
        return error_of(tf, tf.data.TFRecordDataset(str(path)).make_one_shot_iterator().get_next())


@case
def dataset_of_lines(tf: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        for name, data in TEXT.items():
            pathlib.Path(folder, name).write_bytes(data)
        paths = [os.path.join(folder, name) for name in sorted(TEXT)]
        lines = tf.data.TextLineDataset(paths)
        return [
            elements(tf, lines),
            elements(
                tf, lines.skip(1).filter(lambda line: True if line is None else tf.constant(True))
            ),
        ]


@case
def dataset_of_records_of_one_size(tf: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "a")
        pathlib.Path(path).write_bytes(b"Habcdef")
        return elements(tf, tf.data.FixedLengthRecordDataset([path], 3, header_bytes=1))


@case
def dataset_of_examples(tf: Any) -> Any:
    def parse(text: Any) -> Any:
        features = {
            "image": tf.FixedLenFeature([], tf.string),
            "label": tf.FixedLenFeature([], tf.int64),
        }
        parsed = tf.parse_single_example(text, features)
        image = tf.reshape(tf.decode_raw(parsed["image"], tf.uint8), [2, 2])
        return tf.cast(image, tf.float32) / 255.0, tf.cast(parsed["label"], tf.int32)

    with tempfile.TemporaryDirectory() as folder:
        path = written(
            tf, folder, *(example(tf, image=[bytes([i] * 4)], label=[i]) for i in range(5))
        )
        return elements(tf, tf.data.TFRecordDataset([path]).map(parse).repeat(2).batch(4))


@case
def dataset_that_begins_anew(tf: Any) -> Any:
    top, size = tf.placeholder(tf.int64, []), tf.placeholder(tf.int64, [])
    iterator = tf.data.Dataset.range(top).batch(size).make_initializable_iterator()
    batch = iterator.get_next()
    with tf.Session() as sess:
        out: list[Any] = []
        for feeds in (None, {top: 3, size: 2}, {top: 4, size: 4}):
            try:
                if feeds:
                    sess.run(iterator.initializer, feeds)
                while True:
                    out.append(sess.run(batch))
            except tf.errors.OpError as error:
                out.append(type(error).__name__)
        return [shape_of(batch), *out]


@case
def dataset_of_a_placeholder_needs_an_initializer(tf: Any) -> Any:
    try:
        tf.data.Dataset.from_tensor_slices(
            tf.placeholder(tf.int32, [None])
        ).make_one_shot_iterator()
    except ValueError:
        return "ValueError"
    return "none"


@case
def datasets_of_one_structure(tf: Any) -> Any:
    train, test = tf.data.Dataset.range(3), tf.data.Dataset.range(10, 12)
    iterator = tf.data.Iterator.from_structure(train.output_types, train.output_shapes)
    item = iterator.get_next()
    begin = [iterator.make_initializer(d) for d in (train, test)]
    with tf.Session() as sess:
        out = []
        for which in (0, 1, 0):
            sess.run(begin[which])
            out.append([sess.run(item), sess.run(item)])
    try:
        iterator.make_initializer(tf.data.Dataset.from_tensors(1.5))
    except TypeError:
        out.append("TypeError")
    return out


@case
def datasets_by_their_handles(tf: Any) -> Any:
    one, two = (tf.data.Dataset.range(*r).make_one_shot_iterator() for r in ((3,), (10, 12)))
    handle = tf.placeholder(tf.string, [])
    item = tf.data.Iterator.from_string_handle(handle, tf.int64, tf.TensorShape([])).get_next()
    with tf.Session() as sess:
        first, second = sess.run(one.string_handle()), sess.run(two.string_handle())
        return [sess.run(item, {handle: h}) for h in (first, second, first, first)]


@case
def one_element_for_a_step(tf: Any) -> Any:
    item = tf.data.Dataset.range(9).make_one_shot_iterator().get_next()
    with tf.Session() as sess:
        return [sess.run([item, item * 10, item + 1]) for _ in range(2)]


@case
def two_next_ones_of_a_step(tf: Any) -> Any:
    iterator = tf.data.Dataset.range(9).make_one_shot_iterator()
    pair = [iterator.get_next(), iterator.get_next()]
    with tf.Session() as sess:
        return [sorted(int(n) for n in sess.run(pair)) for _ in range(2)]


@case
def each_session_goes_over_all(tf: Any) -> Any:
    item = tf.data.Dataset.range(3).make_one_shot_iterator().get_next()
    return [value_of(tf, item), value_of(tf, item)]


@case
def a_dataset_of_everything_shuffled(tf: Any) -> Any:
    found = elements(tf, tf.data.Dataset.range(8).shuffle(4, seed=1).repeat(2))
    return [
        sorted(int(n) for (n,) in found[2:10]),
        sorted(int(n) for (n,) in found[10:18]),
        found[-1],
    ]


@case
def a_monitored_session_ends_with_the_data(tf: Any) -> Any:
    item = tf.data.Dataset.range(3).make_one_shot_iterator().get_next()
    total = tf.Variable(0, dtype=tf.int64, trainable=False)
    add = tf.assign_add(total, item)
    out = []
    with tf.train.MonitoredTrainingSession() as sess:
        while not sess.should_stop():
            out.append(sess.run(add))
    return out


@case
def what_map_takes_from_outside(tf: Any) -> Any:
    factor = tf.constant(3, tf.int64)
    return elements(tf, tf.data.Dataset.range(3).map(lambda x: x * factor))


# -- pictures ----------------------------------------------------------------------------------------------------------

PICTURE = (np.arange(5 * 4 * 3).reshape(5, 4, 3) * 4 % 256).astype(np.uint8)
SMOOTH = np.linspace(0.05, 0.95, 5 * 4 * 3, dtype=np.float32).reshape(5, 4, 3)[:, ::-1]


def _pictures(name: str, make: Callable[[Any, Any], Any], given: Any = PICTURE) -> None:
    """As a literal, fed with an unknown size, and in a batch."""

    def compared(tf: Any) -> Any:
        dtype = tf.as_dtype(given.dtype)
        unknown = tf.placeholder(dtype, [None, None, 3])
        known, fed = make(tf, tf.constant(given)), make(tf, unknown)
        with tf.Session() as sess:
            return [
                [shape_of(known), shape_of(fed)],
                tf.as_dtype(known.dtype).name,
                sess.run([known, fed], {unknown: given}),
            ]

    CASES[f"picture_{name}"] = compared


for _method in ("BILINEAR", "NEAREST_NEIGHBOR", "BICUBIC"):
    for _size in ([7, 9], [3, 2], [5, 4], [1, 1], [10, 8]):
        for _corners in (False, True):
            _pictures(
                f"resized_{_method.lower()}_{_size[0]}_{_size[1]}{'_corners' if _corners else ''}",
                lambda tf, p, m=_method, s=_size, c=_corners: tf.image.resize_images(
                    p, s, getattr(tf.image.ResizeMethod, m), align_corners=c
                ),
            )
_pictures(
    "resized_in_a_batch", lambda tf, p: tf.image.resize_bilinear(tf.expand_dims(p, 0), [2, 8])[0]
)
_pictures(
    "resized_nearest_in_a_batch",
    lambda tf, p: tf.image.resize_nearest_neighbor(tf.expand_dims(p, 0), [10, 2])[0],
)
_pictures("cropped", lambda tf, p: tf.image.crop_to_bounding_box(p, 1, 1, 3, 2))
_pictures("cropped_beyond", lambda tf, p: tf.image.crop_to_bounding_box(p, 1, 1, 5, 2))
_pictures("padded", lambda tf, p: tf.image.pad_to_bounding_box(p, 1, 2, 7, 8))
_pictures("padded_beyond", lambda tf, p: tf.image.pad_to_bounding_box(p, 4, 2, 7, 8))
for _size in ([3, 2], [8, 9], [3, 9], [8, 2], [5, 4], [4, 3], [6, 5]):
    _pictures(
        f"cropped_or_padded_{_size[0]}_{_size[1]}",
        lambda tf, p, s=_size: tf.image.resize_image_with_crop_or_pad(p, *s),
    )
for _fraction in (0.25, 0.5, 0.7, 1.0):
    _pictures(f"middle_{_fraction}", lambda tf, p, f=_fraction: tf.image.central_crop(p, f))
_pictures("in_a_mirror", lambda tf, p: tf.image.flip_left_right(p))
_pictures("upside_down", lambda tf, p: tf.image.flip_up_down(p))
_pictures("transposed", lambda tf, p: tf.image.transpose_image(p))
for _turns in (1, 2, 3, 5):
    _pictures(f"turned_{_turns}", lambda tf, p, k=_turns: tf.image.rot90(p, k))
_pictures("standardized", lambda tf, p: tf.image.per_image_standardization(p))
_pictures("standardized_of_one_colour", lambda tf, p: tf.image.per_image_standardization(p * 0))
for _kind, _given in (("bytes", PICTURE), ("fractions", SMOOTH)):
    for _delta in (-0.1, 0.3):
        _pictures(
            f"brighter_{_kind}_{_delta}",
            lambda tf, p, d=_delta: tf.image.adjust_brightness(p, d),
            _given,
        )
    for _factor in (0.5, 2.0):
        _pictures(
            f"contrast_{_kind}_{_factor}",
            lambda tf, p, f=_factor: tf.image.adjust_contrast(p, f),
            _given,
        )
        _pictures(
            f"saturated_{_kind}_{_factor}",
            lambda tf, p, f=_factor: tf.image.adjust_saturation(p, f),
            _given,
        )
    _pictures(f"of_another_hue_{_kind}", lambda tf, p: tf.image.adjust_hue(p, 0.3), _given)
    _pictures(f"grey_{_kind}", lambda tf, p: tf.image.rgb_to_grayscale(p), _given)
    for _dtype in ("uint8", "float32", "int32", "uint16", "int16"):
        _pictures(
            f"of_{_kind}_as_{_dtype}",
            lambda tf, p, d=_dtype: tf.image.convert_image_dtype(p, d),
            _given,
        )
_pictures("to_hsv", lambda tf, p: tf.image.rgb_to_hsv(p), SMOOTH)
_pictures("from_hsv", lambda tf, p: tf.image.hsv_to_rgb(p), SMOOTH)
_pictures("grey_in_colours", lambda tf, p: tf.image.grayscale_to_rgb(tf.image.rgb_to_grayscale(p)))
_pictures("by_gamma", lambda tf, p: tf.image.adjust_gamma(p, 2.0), SMOOTH)
CASES["no_picture"] = lambda tf: error_of(tf, tf.image.decode_png(b"no picture"))


@case
def pictures_from_files(tf: Any) -> Any:
    out = []
    for pixels in (PICTURE, PICTURE[:, :, :1]):
        text = value_of(tf, tf.image.encode_png(tf.constant(pixels)))
        for channels in (0, 1, 3):
            picture = tf.image.decode_png(text, channels)
            back = value_of(tf, picture)
            exact = channels in (0, pixels.shape[2])
            out.append([shape_of(picture), back if exact else list(back.shape)])
    return out


@case
def pictures_of_jpeg_files(tf: Any) -> Any:
    flat = np.full((16, 16, 3), 100, np.uint8)
    text = value_of(tf, tf.image.encode_jpeg(tf.constant(flat)))
    picture = tf.image.decode_jpeg(text, channels=3)
    return [shape_of(picture), bool(np.abs(value_of(tf, picture).astype(int) - 100).max() <= 1)]


@case
def flipped_by_chance(tf: Any) -> Any:
    flipped = tf.image.random_flip_left_right(tf.constant(PICTURE))
    with tf.Session() as sess:
        seen = {sess.run(flipped).tobytes() for _ in range(40)}
    return [seen == {PICTURE.tobytes(), PICTURE[:, ::-1].tobytes()}, shape_of(flipped)]


def main(path: str) -> None:
    """Records everything into the file ``path``."""
    from tests.harness.tf1.oracle import record

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.FATAL)
    found = {name: record.program(tf, run) for name, run in CASES.items()}
    lines = ",\n".join(
        f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in found.items()
    )
    pathlib.Path(path).write_text(
        f'{{"tensorflow": {json.dumps(tf.__version__)},\n"programs": {{\n{lines}\n}}}}\n'
    )


if __name__ == "__main__":
    main(sys.argv[1])
