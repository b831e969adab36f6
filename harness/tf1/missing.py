"""What is not in ``harness.tf1``, and what to use instead: an unknown name fails with that."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

_IN_CALL = "write it in JAX inside rt.call"
_STRINGS = "strings travel, but nothing is computed of them: do it in Python before feeding"
_INPUT = "tf.train.batch and shuffle_batch, or tf.data"
_SHAPE = "its result has no static shape: fetch the input and use numpy, or use a mask"
_SPARSE = "use a dense tensor, or jax.experimental.sparse inside rt.call"
_RNN = "use jax.lax.scan inside rt.call, or a Flax or Equinox cell"
_EAGER = "JAX itself runs eagerly: use jax.numpy outside of a graph"
_XLA = "XLA optimises and compiles every step: leave it out"
_LOADED = "graphs are built by the program, not loaded; jax.export of the function"
_DENSE = "gradients are dense; an update of some rows is tf.scatter_add or tf.scatter_sub"
_CONVERT = "convert the value before an operation is given it"
_METRICS = "tf.metrics.mean of what you compute of each batch, or scikit-learn"
_LAYERS = "make weights with tf.get_variable, or call a Flax or Equinox module with rt.call"

INSTEAD: dict[str, str] = {
    "tf.hessians": "jax.hessian inside rt.call",
    "tf.boolean_mask": _SHAPE,
    "tf.dynamic_partition": _SHAPE,
    "tf.dynamic_stitch": "tf.scatter_nd",
    "tf.add_check_numerics_ops": "tf.check_numerics of the tensors that matter",
    "tf.angle": "rt.numpy.angle",
    "tf.betainc": "jax.scipy.special.betainc inside rt.call",
    "tf.depth_to_space": "tf.reshape and tf.transpose",
    "tf.igamma": "jax.scipy.special.gammainc inside rt.call",
    "tf.igammac": "jax.scipy.special.gammaincc inside rt.call",
    "tf.lbeta": "tf.lgamma",
    "tf.polygamma": "jax.scipy.special.polygamma inside rt.call",
    "tf.space_to_depth": "tf.reshape and tf.transpose",
    "tf.zeta": "jax.scipy.special.zeta inside rt.call",
    "tf.contrib.framework.list_variables": "tf.train.list_variables",
    "tf.contrib.framework.load_variable": "tf.train.load_variable",
    "tf.segment_sum": "tf.unsorted_segment_sum, which is told the number of segments",
    "tf.segment_mean": "tf.unsorted_segment_sum of the values and of ones",
    "tf.unique": _SHAPE,
    "tf.listdiff": _SHAPE,
    "tf.setdiff1d": _SHAPE,
    "tf.cholesky": "jax.numpy.linalg in Python: a task refuses programs that call LAPACK",
    "tf.matrix_inverse": "jax.numpy.linalg in Python: a task refuses programs that call LAPACK",
    "tf.matrix_determinant": "jax.numpy.linalg in Python: a task refuses programs that call LAPACK",
    "tf.matrix_solve": "jax.numpy.linalg in Python: a task refuses programs that call LAPACK",
    "tf.svd": "jax.numpy.linalg in Python: a task refuses programs that call LAPACK",
    "tf.qr": "jax.numpy.linalg in Python: a task refuses programs that call LAPACK",
    "tf.fft": "jax.numpy.fft.fft inside rt.call",
    "tf.ifft": "jax.numpy.fft.ifft inside rt.call",
    "tf.sparse_placeholder": _SPARSE,
    "tf.sparse_tensor_dense_matmul": _SPARSE,
    "tf.IndexedSlices": _DENSE,
    "tf.compiler": _XLA,
    "tf.contrib.framework.nest": "jax.tree",
    "tf.contrib.learn": "tf.train.MonitoredTrainingSession, or harness.Supervisor",
    "tf.contrib.factorization": "scikit-learn, or write it in JAX",
    "tf.contrib.session_bundle": "jax.export",
    "tf.core.protobuf.rewriter_config_pb2": _XLA,
    "tf.debug": "tf.Print and tf.Assert, or jax.debug inside rt.call",
    "tf.distributions": "jax.random and jax.scipy.stats inside rt.call",
    "tf.estimator": "tf.train.MonitoredTrainingSession, or harness.Supervisor",
    "tf.keras": _LAYERS,
    "tf.distribute": "tf.train.replica_device_setter for parameter servers, or plain jax.sharding for all-reduce",
    "tf.enable_eager_execution": _EAGER,
    "tf.framework.convert_to_constants": _LOADED,
    "tf.framework.graph_util": _LOADED,
    "tf.framework.graph_util_impl": _LOADED,
    "tf.framework.importer": _LOADED,
    "tf.framework.indexed_slices": _DENSE,
    "tf.framework.ops.register_tensor_conversion_function": _CONVERT,
    "tf.framework.tensor_conversion_registry": _CONVERT,
    "tf.function": "jax.jit",
    "tf.GradientTape": "jax.grad, or tf.gradients of a graph",
    "tf.profiler": "tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE) and harness.timeline",
    "tf.models": "it belongs to the repository tensorflow/models: put it beside the program",
    "tf.nn.seq2seq": _RNN,
    "tf.ops.data_flow_ops.StagingArea": "Dataset.prefetch, which makes elements beside training",
    "tf.saved_model": "jax.export",
    "tf.string_to_hash_bucket_fast": _STRINGS,
    "tf.util.nest": "jax.tree",
    "tf.xla": _XLA,
    "tf.random_poisson": "rt.random.poisson",
    "tf.count_up_to": "tf.assign_add, and stop in Python",
    "tf.load_op_library": "no code crosses the wire: write the operation in JAX",
    "tf.import_graph_def": "graphs are built by the program, not loaded",
    "tf.fixed_size_partitioner": "one variable for each part, on a device of its own",
    "tf.min_max_variable_partitioner": "one variable for each part, on a device of its own",
    "tf.variable_axis_size_partitioner": "one variable for each part, on a device of its own",
    "tf.create_partitioned_variables": "one variable for each part, on a device of its own",
    "tf.PartitionedVariable": "one variable for each part, on a device of its own",
    "tf.nn.raw_rnn": _RNN,
    "tf.nn.conv1d": "jax.lax.conv inside rt.call, or tf.nn.conv2d with a height of 1",
    "tf.nn.conv3d": "jax.lax.conv_general_dilated inside rt.call",
    "tf.nn.max_pool_with_argmax": _IN_CALL,
    "tf.nn.fused_batch_norm": "tf.nn.moments and tf.nn.batch_normalization: XLA fuses them",
    "tf.nn.ctc_loss": "optax.ctc_loss inside rt.call",
    "tf.nn.learned_unigram_candidate_sampler": "tf.nn.log_uniform_candidate_sampler",
    "tf.nn.fixed_unigram_candidate_sampler": "tf.nn.log_uniform_candidate_sampler",
    "tf.nn.embedding_lookup_sparse": "tf.nn.embedding_lookup and tf.unsorted_segment_sum",
    "tf.nn.crelu": "tf.concat of tf.nn.relu(x) and tf.nn.relu(-x)",
    "tf.train.batch_join": _INPUT,
    "tf.train.shuffle_batch_join": _INPUT,
    "tf.train.limit_epochs": _INPUT,
    "tf.train.FtrlOptimizer": "tf.train.AdagradOptimizer, or a transformation of your own in harness.Optimizer",
    "tf.train.ProximalGradientDescentOptimizer": "harness.Optimizer with a transformation of your own",
    "tf.train.ProximalAdagradOptimizer": "harness.Optimizer with a transformation of your own",
    "tf.train.AdagradDAOptimizer": "tf.train.AdagradOptimizer",
    "tf.train.import_meta_graph": "graphs are built by the program, not loaded; tf.train.Saver restores variables",
    "tf.train.export_meta_graph": "graphs are built by the program; the event file shows them in TensorBoard",
    "tf.train.update_checkpoint_state": "tf.train.Saver keeps the list of checkpoints",
    "tf.train.generate_checkpoint_state_proto": "tf.train.Saver keeps the list of checkpoints",
    "tf.summary.tensor_summary": "tf.summary.histogram, or tf.summary.text",
    "tf.app.flags.ArgumentParser": "absl.flags",
}
"""TensorFlow's name -> what to use instead. A name above (``tf.image``) answers for all that it holds."""

THE_REST: dict[str, str] = {
    "tf.contrib": "optax, Flax and Orbax do most of what tf.contrib did",
    "tf.contrib.metrics": _METRICS,
    "tf.contrib.rnn": _RNN,
    "tf.data": "map, filter and from_generator, which take any function",
    "tf.image": "jax.image inside rt.call, or a Python function in tf.py_func",
    "tf.io": "read the file in Python, in tf.py_func or in Dataset.from_generator",
    "tf.metrics": _METRICS,
    "tf.nn.rnn_cell": _RNN,
    "tf.test": "pytest, and numpy.testing",
}
"""Module of TensorFlow's that is here in part -> what to use instead of what is not."""


def advice(full: str) -> str:
    """What to use instead of a name such as "tf.nn.ctc_loss", or of what it lies in; empty where nobody has said."""
    parts = full.split(".")
    known = THE_REST | INSTEAD
    return next((known[name] for n in range(len(parts), 1, -1) if (name := ".".join(parts[:n])) in known), "")


def absent(namespace: str, name: str) -> AttributeError:
    """The error for a name that is not there, with advice where there is some.

    Args:
        namespace: such as "tf.nn".
        name: what was looked for in it.
    """
    full = f"{namespace}.{name}"
    said = advice(full)
    return AttributeError(f"{full} is not in harness.tf1{f': {said}' if said else '; docs/tf1.md lists what is'}")


def namespace(full: str, names: Mapping[str, Any]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A module's ``__getattr__`` and ``__dir__``: what is in ``names``, and advice for the rest.

    Args:
        full: TensorFlow's name of the module, such as "tf.nn".
        names: TensorFlow's name -> what it is here.
    """

    def __getattr__(name: str) -> Any:
        if name in names:
            return names[name]
        if name.startswith("__"):
            raise AttributeError(name)
        raise absent(full, name)

    return __getattr__, lambda: sorted(names)


class Namespace(types.ModuleType):
    """A module of TensorFlow's: what is in ``names``, and advice for the rest.

    Args:
        full: TensorFlow's name of the module, such as "tf.contrib.slim".
        names: TensorFlow's name -> what it is here.
    """

    def __init__(self, full: str, names: Mapping[str, Any]) -> None:
        super().__init__(full)
        self.__getattr__, self.__dir__ = namespace(full, names)  # type: ignore[method-assign]
