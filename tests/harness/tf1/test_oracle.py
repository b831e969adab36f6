"""harness.tf1 gives what TensorFlow gives: every case and every program of ``oracle/`` beside the record of TensorFlow.

The cases of a table are built in one graph and run in few steps: it is compiling that takes the
time.
"""

from __future__ import annotations

import ast
import json
import pathlib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import harness.tf1 as tf
from harness.tf1.names.table import HEADINGS, TABLE
from tests.harness.tf1.oracle import differences, inputs, record, tables
from tests.harness.tf1.oracle.case import COMPUTES, REFUSES, Built, Call, Case
from tests.harness.tf1.oracle.tables import CASES, PROGRAMS

RECORD = json.loads((pathlib.Path(__file__).parent / "oracle" / "tensorflow_2_21.json").read_text())
WANTED: dict[str, Any] = RECORD["cases"]

AT_ONCE = 200
"""So many cases make one step: a longer program takes longer to compile than two short ones."""


class Run:
    """What harness.tf1 gives for ``cases``, in the form of the record: "build" or "run" (an error), "out"."""

    def __init__(self, cases: Iterable[Case]) -> None:
        self.found: dict[str, Any] = {}
        self._ready: list[tuple[str, Built, list[Any]]] = []
        with tf.Graph().as_default():
            for case in cases:
                self._build(case)
            with record.session(tf) as sess:
                alone = [r for r in self._ready if "run" in WANTED[r[0]]]
                together = [r for r in self._ready if "run" not in WANTED[r[0]]]
                for start in range(0, len(together), AT_ONCE):
                    self._run(sess, together[start : start + AT_ONCE])
                for each in alone:
                    self._run(sess, [each])

    def _build(self, case: Case) -> None:
        scope = f"case_{len(self.found)}"
        try:
            with tf.name_scope(scope):
                built = Built(tf, case, modern=False)
                out = [_within(scope, record.described(tf, r)) for r in built.results]
        except Exception as error:  # whatever it is: it is what is compared
            self.found[case.name] = {"build": error}
            return
        self.found[case.name] = {"out": out}
        if case.values and any(record.fetched(tf, r) for r in built.results):
            self._ready.append((case.name, built, out))

    def _run(self, sess: Any, ready: list[tuple[str, Built, list[Any]]]) -> None:
        fetches = {
            name: [r for r in built.results if record.fetched(tf, r)] for name, built, _ in ready
        }
        try:
            values = sess.run(
                fetches, {k: v for _, built, _ in ready for k, v in built.feeds.items()}
            )
        except Exception as error:
            if len(ready) == 1:
                self.found[ready[0][0]]["run"] = error
                return
            half = len(ready) // 2
            self._run(sess, ready[:half])
            self._run(sess, ready[half:])
            return
        for name, built, out in ready:
            got = iter(values[name])
            for i, result in enumerate(built.results):
                if record.fetched(tf, result):
                    value = next(got)
                    if value is not None:
                        out[i] += [list(np.shape(value)), np.asarray(value)]


def _within(scope: str, told: Any) -> Any:
    """Without the name scope of the case, for there is none in the record."""
    if isinstance(told, dict) and "operation" in told:
        return {"operation": told["operation"].removeprefix(f"{scope}/")}
    if isinstance(told, list):
        return [*told[:2], told[2].removeprefix(f"{scope}/")]
    return told


EPS = {
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float32": 2.0**-23,
    "float64": 2.0**-52,
    "complex64": 2.0**-23,
    "complex128": 2.0**-52,
}


def numbers(values: list[Any], dtype: str, shape: list[int]) -> Any:
    """Values of the record as an array."""
    if dtype == "string":
        return np.asarray([v.encode("latin-1") for v in values], object).reshape(shape)
    if dtype.startswith("complex"):
        pairs = np.asarray(values, np.float64).reshape(-1, 2)
        return (pairs[:, 0] + 1j * pairs[:, 1]).astype(dtype).reshape(shape)
    return np.asarray(values, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).reshape(shape)


def close(found: Any, wanted: Any, dtype: str, ulps: int) -> bool:
    """Equal; floating point numbers to ``ulps`` units of the largest number beside them."""
    if found.shape != wanted.shape:
        return False
    if dtype not in EPS:
        return bool(np.array_equal(found, wanted))
    wide = np.complex128 if dtype.startswith("complex") else np.float64
    x, y = found.astype(wide), wanted.astype(wide)
    finite = np.isfinite(y)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
        return False
    x, y = x[finite], y[finite]
    scale = np.maximum(np.abs(y), np.max(np.abs(y), initial=0) / 16)
    return bool(np.all(np.abs(x - y) <= ulps * EPS[dtype] * scale))


def unlike(case: Case, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """In what the two differ, or None."""
    mine, theirs = (found.get("build", found.get("run")), wanted.get("build", wanted.get("run")))
    if mine is None and theirs is not None:
        return f"no {theirs}"
    if mine is not None:
        # what fails before the step need not be the step's kind of error
        early = "build" in found and "run" in wanted
        if early or theirs in [t.__name__ for t in type(mine).__mro__]:
            return None
        return f"{type(mine).__name__}, not {theirs}: {mine}"
    if len(found["out"]) != len(wanted["out"]):
        return f"{len(found['out'])} results, not {len(wanted['out'])}"
    for x, y in zip(found["out"], wanted["out"], strict=True):
        told = _unlike_result(case, x, y)
        if told:
            return told
    return None


def _unlike_result(case: Case, x: Any, y: Any) -> str | None:
    if not (isinstance(x, list) and isinstance(y, list)):
        same = (
            x == y or isinstance(x, dict) and isinstance(y, dict)
        )  # the last operation of a group is TensorFlow's own
        return None if same else f"{x}, not {y}"
    if x[:2] != y[:2]:
        return f"dtype and shape {x[:2]}, not {y[:2]}"
    if not _same_name(case, x[2], y[2]):
        return f"name {x[2]}, not {y[2]}"
    if len(y) < 4:
        return None
    if x[3] != y[3] or not close(x[4], numbers(y[4], y[0], y[3]), y[0], case.ulps):
        return f"value {x[4].tolist()}, not {y[4]} of shape {y[3]}"
    return None


def _same_name(case: Case, mine: str, theirs: str) -> bool:
    """The same; or TensorFlow makes it of several operations in a scope of our name, or adds none at all."""
    if mine.startswith("gradients/"):
        return True  # derivatives have names of their own
    name = mine.partition(":")[0]
    name = {"LogSoftmax": "Softmax"}.get(
        name, name.rpartition("/")[2] if "IsInit" in name else name
    )
    inside = theirs.startswith(f"{name}/") or theirs.startswith("Placeholder")
    return (
        mine == theirs
        or inside
        or name in (RENAMED.get(theirs), RENAMED.get(theirs.partition(":")[0]))
    )


RENAMED = {
    "GatherV2": "Gather",
    "diag": "MatrixDiag",
    "diag_part": "MatrixDiagPart",
    "in_top_k/InTopKV2": "InTopK",
    "linspace/Slice": "LinSpace",
    "transpose_1": "Softmax",
    "MatMul": "BatchMatMul",
    "concat": "concat_v2",
    "ShapeN:1": "Shape_1",
    "Print": "Print/value",
    "DepthwiseConv2dNative": "depthwise",
    "IsVariableInitialized": "IsInitialized",
    "IdentityN": "Swish",
    "MirrorPad": "Pad",
    "PadV2": "Pad",
    "ShapeN": "Shape",
    "DivNoNan": "Sign",
    "RealDiv": "truediv",
    "Reshape:0": "nce_loss",
    "softmax_cross_entropy_with_logits/Reshape_2:0": "sampled_softmax_loss",
}
"""What TensorFlow 2.21 calls an operation that had our name in TensorFlow 1, or is one of several it chooses."""


def _as_here(case: Case, found: Mapping[str, Any], here: Any) -> str | None:
    """In what a case that is different on purpose is not what its difference says, or None."""
    error = found.get("build", found.get("run"))
    if here == REFUSES:
        return None if error is not None else "is not refused"
    if error is not None:
        return f"{type(error).__name__}: {error}"
    if here == COMPUTES:
        return None
    dtype, _, _, shape, values = found["out"][0]
    wanted = np.asarray(here, dtype).reshape(shape)
    return (
        None if close(values, wanted, dtype, case.ulps) else f"value {values.tolist()}, not {here}"
    )


TABLES = {
    "arithmetic": tables.arithmetic.CASES,
    "arrays": tables.arrays.CASES,
    "networks": tables.networks.CASES,
}


@pytest.mark.cluster  # thousands of operations to compile
@pytest.mark.parametrize("table", TABLES)
def test_cases_match_tensorflow(table: str) -> None:
    """Every case of a table gives TensorFlow's result or the documented difference."""
    wrong = []
    cases = TABLES[table]
    with warnings.catch_warnings():
        # numpy tells of values that a cast cannot hold
        warnings.simplefilter("ignore", RuntimeWarning)
        found = Run(cases.values()).found
    for name, case in cases.items():
        told, different = unlike(case, found[name], WANTED[name]), differences.of(name)
        if different is None:
            if told:
                wrong.append(f"{name}: {told}")
        elif told is None:
            wrong.append(f"{name}: is no different")
        else:
            told = _as_here(case, found[name], different[1])
            if told:
                wrong.append(f"{name}: {told}")
    assert not wrong, "\n".join(wrong)


def test_record_holds_these_cases() -> None:
    """The record of TensorFlow holds exactly these cases."""
    assert list(WANTED) == list(CASES)
    assert list(RECORD["programs"]) == list(PROGRAMS)
    assert len(CASES) >= 1000


def test_differences_have_a_case() -> None:
    """Every documented difference is shown by a case."""
    known = {id(of[0]) for of in map(differences.of, CASES) if of}
    assert [d.what for d in differences.DIFFERENCES if id(d) not in known and not d.programs] == []


NO_CASE = {
    **dict.fromkeys(
        "Graph GraphKeys InteractiveSession Operation RunMetadata RunOptions Tensor ConfigProto "
        "DType DeviceSpec "
        "Dimension GPUOptions GraphOptions IndexedSlices OpError OptimizerOptions "
        "PartitionedVariable TensorShape VariableScope".split(),
        "a class: what its objects do is tested by itself",
    ),
    **dict.fromkeys(
        "FIFOQueue PaddingFIFOQueue RandomShuffleQueue ConditionalAccumulator".split(),
        "waits: test_queues.py",
    ),
    **dict.fromkeys(
        "disable_control_flow_v2 disable_eager_execution disable_resource_variables "
        "disable_tensor_equality disable_v2_behavior disable_v2_tensorshape "
        "enable_resource_variables executing_eagerly executing_eagerly_outside_functions".split(),
        "says or asks which TensorFlow: test_small_names.py",
    ),
    **dict.fromkeys(
        "get_default_graph get_default_session reset_default_graph".split(),
        "the runtime's own, by another name; the first two are of every case",
    ),
    "set_random_seed": "its numbers are JAX's",
    **dict.fromkeys(
        "AttrValue Event GraphDef HistogramProto LogMessage NodeDef SessionLog Summary".split(),
        "a message",
    ),
    "AggregationMethod": "numbers that mean the same here",
    "SparseTensorValue": "what fetching gives: the cases of sparse tensors",
    **dict.fromkeys(
        "audio_summary histogram_summary image_summary merge_all_summaries merge_summary scalar_summary".split(),
        "2.21 has them no more: test_names.py",
    ),
    "op_scope": "name_scope with an order of arguments that 2.21 has no more",
    "variable_op_scope": "variable_scope with an order of arguments that 2.21 has no more",
    "initialize_all_variables": "2.21 warns of it; global_variables_initializer by its old name",
    "initialize_local_variables": "2.21 warns of it; local_variables_initializer by its old name",
    "initialize_all_tables": "2.21 warns of it; tables_initializer by its old name",
    "train.Optimizer": "the class of the others",
    "train.SyncReplicasOptimizer": "needs several workers: tests of sync training",
    "train.Server": "a process",
    "train.replica_device_setter": "the runtime's own: its tests are there",
    "train.SyncReplicasOptimizerV2": "SyncReplicasOptimizer by another name",
    **dict.fromkeys(
        "train.batch train.shuffle_batch train.input_producer train.string_input_producer "
        "train.range_input_producer "
        "train.slice_input_producer".split(),
        "queue runners: test_inputs.py",
    ),
    "train.write_graph": "writes a file: test_program_habits.py",
    "get_local_variable": "test_program_habits.py",
    **dict.fromkeys(
        "train.ClusterDef train.JobDef train.ServerDef nn.rnn_cell data.experimental io.gfile".split(),
        "messages and modules",
    ),
    **dict.fromkeys(
        "image.random_brightness image.random_contrast image.random_flip_up_down image.random_hue "
        "image.random_saturation".split(),
        "draws, whose numbers are JAX's: test_sampling.py; what it does with them has cases under "
        "its other name",
    ),
    "image.per_image_whitening": "2.21 has it as per_image_standardization only",
    **dict.fromkeys(
        "matching_files io.matching_files io.match_filenames_once io.write_graph".split(),
        "of the files of a directory: test_reading_programs.py, test_program_habits.py",
    ),
    **dict.fromkeys(
        "layers.Dense layers.dense layers.conv2d layers.max_pooling2d layers.average_pooling2d layers.flatten "
        "layers.dropout "
        "layers.batch_normalization".split(),
        "not in 2.21 without Keras: test_layers.py",
    ),
    **dict.fromkeys(
        "nn.dynamic_rnn nn.static_rnn nn.bidirectional_dynamic_rnn".split(),
        "not in 2.21 without Keras: test_rnn.py",
    ),
}
"""Names without a case -> why."""


def _called(call: Call) -> Iterable[str]:
    yield call.op
    for value in [*call.args, *call.kwargs.values()]:
        if isinstance(value, Call):
            yield from _called(value)


def test_names_have_case_or_reason() -> None:
    """Every name has a case or a reason why not."""
    programs = (tables.programs, tables.flow, tables.metrics, inputs)
    written = [pathlib.Path(str(module.__file__)).read_text() for module in programs]
    source = [node for text in written for node in ast.walk(ast.parse(text))]
    in_programs = {node.attr for node in source if isinstance(node, ast.Attribute)}
    in_programs |= {
        str(node.value) for node in source if isinstance(node, ast.Constant)
    }  # getattr(tf.metrics, "recall")
    in_cases = {op for case in CASES.values() for op in _called(case.call)}
    names = [n for n in HEADINGS if callable(TABLE["tf"][n])]
    for module in (
        "data",
        "image",
        "io",
        "layers",
        "losses",
        "metrics",
        "nn",
        "python_io",
        "train",
    ):
        # What tf.train imports at its first use is the harness's own, with tests there.
        later = getattr(getattr(tf, module), "_LATER", ())
        names += [f"{module}.{n}" for n in dir(getattr(tf, module)) if n not in later]
    without = {n for n in names if n not in in_cases and n.rpartition(".")[2] not in in_programs}
    assert without - set(NO_CASE) == set()
    assert set(NO_CASE) <= set(names)
