"""Names that are not in ``harness.tf1``, with the advice that the error of each gives."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from harness.tf1.names.table import TABLE, look_up

_RNN = "use jax.lax.scan inside rt.call, or a Flax or Equinox cell"

INSTEAD: dict[str, str] = {
    f"tf.{name}": advice
    for names, advice in {
        "add_check_numerics_ops": "tf.check_numerics of the tensors that matter",
        "angle": "rt.numpy.angle",
        "app.flags.ArgumentParser": "absl.flags",
        "betainc": "jax.scipy.special.betainc inside rt.call",
        "boolean_mask dynamic_partition listdiff setdiff1d unique": (
            "its result has no static shape: fetch the input and use numpy, or use a mask"
        ),
        "cholesky matrix_determinant matrix_inverse matrix_solve qr svd": (
            "jax.numpy.linalg in Python: a task refuses programs that call LAPACK"
        ),
        "compiler core.protobuf.rewriter_config_pb2 xla": "XLA optimises and compiles every step: leave it out",
        "contrib.factorization": "scikit-learn, or write it in JAX",
        "contrib.framework.list_variables": "tf.train.list_variables",
        "contrib.framework.load_variable": "tf.train.load_variable",
        "contrib.framework.nest util.nest": "jax.tree",
        "estimator": "tf.train.MonitoredTrainingSession, or harness.Supervisor",
        "contrib.session_bundle saved_model": "jax.export",
        "count_up_to": "tf.assign_add, and stop in Python",
        "debug": "tf.Print and tf.Assert, or jax.debug inside rt.call",
        "depth_to_space space_to_depth": "tf.reshape and tf.transpose",
        "distribute": "tf.train.replica_device_setter for parameter servers, or plain jax.sharding for all-reduce",
        "distributions": "jax.random and jax.scipy.stats inside rt.call",
        "dynamic_stitch": "tf.scatter_nd",
        "enable_eager_execution enable_v2_behavior": "JAX itself runs eagerly: use jax.numpy outside of a graph",
        "fft": "jax.numpy.fft.fft inside rt.call",
        "framework.convert_to_constants framework.graph_util_impl framework.importer": (
            "graphs are built by the program, not loaded; jax.export of the function"
        ),
        "framework.indexed_slices": (
            "gradients are dense; an update of some rows is tf.scatter_add or tf.scatter_sub"
        ),
        "framework.ops.register_tensor_conversion_function framework.tensor_conversion_registry": (
            "convert the value before an operation is given it"
        ),
        "function": "jax.jit",
        "GradientTape": "jax.grad, or tf.gradients of a graph",
        "hessians": "jax.hessian inside rt.call",
        "ifft": "jax.numpy.fft.ifft inside rt.call",
        "igamma": "jax.scipy.special.gammainc inside rt.call",
        "igammac": "jax.scipy.special.gammaincc inside rt.call",
        "import_graph_def": "graphs are built by the program, not loaded",
        "lbeta": "tf.lgamma",
        "load_op_library": "no code crosses the wire: write the operation in JAX",
        "models": "it belongs to the repository tensorflow/models: put it beside the program",
        "nn.conv1d": "jax.lax.conv inside rt.call, or tf.nn.conv2d with a height of 1",
        "nn.conv3d": "jax.lax.conv_general_dilated inside rt.call",
        "nn.crelu": "tf.concat of tf.nn.relu(x) and tf.nn.relu(-x)",
        "nn.ctc_loss": "optax.ctc_loss inside rt.call",
        "nn.fixed_unigram_candidate_sampler nn.learned_unigram_candidate_sampler": (
            "tf.nn.log_uniform_candidate_sampler"
        ),
        "nn.fused_batch_norm": "tf.nn.moments and tf.nn.batch_normalization: XLA fuses them",
        "nn.max_pool_with_argmax": "write it in JAX inside rt.call",
        "nn.raw_rnn nn.seq2seq": _RNN,
        "ops.data_flow_ops.StagingArea": "Dataset.prefetch, which makes elements beside training",
        "polygamma": "jax.scipy.special.polygamma inside rt.call",
        "profiler": "tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE) and harness.timeline",
        "random_poisson": "rt.random.poisson",
        "segment_mean": "tf.unsorted_segment_sum of the values and of ones",
        "segment_sum": "tf.unsorted_segment_sum, which is told the number of segments",
        "summary.tensor_summary": "tf.summary.histogram, or tf.summary.text",
        "train.AdagradDAOptimizer": "tf.train.AdagradOptimizer",
        "train.batch_join train.limit_epochs train.shuffle_batch_join": "tf.train.batch and shuffle_batch, or tf.data",
        "train.export_meta_graph": "graphs are built by the program; the event file shows them in TensorBoard",
        "train.FtrlOptimizer": "tf.train.AdagradOptimizer, or a transformation of your own in harness.Optimizer",
        "train.generate_checkpoint_state_proto train.update_checkpoint_state": (
            "tf.train.Saver keeps the list of checkpoints"
        ),
        "train.ProximalAdagradOptimizer train.ProximalGradientDescentOptimizer": (
            "harness.Optimizer with a transformation of your own"
        ),
        "zeta": "jax.scipy.special.zeta inside rt.call",
    }.items()
    for name in names.split()
}
"""TensorFlow's name -> what to use instead.

A name above (``tf.image``) answers for all that it holds.
"""

THE_REST: dict[str, str] = {
    f"tf.{name}": advice
    for names, advice in {
        "contrib": "optax, Flax and Orbax do most of what tf.contrib did",
        "contrib.learn": "tf.train.MonitoredTrainingSession, or harness.Supervisor",
        "contrib.metrics metrics": "tf.metrics.mean of what you compute of each batch, or scikit-learn",
        "contrib.rnn nn.rnn_cell": _RNN,
        "data": "map, filter and from_generator, which take any function",
        "image": "jax.image inside rt.call, or a Python function in tf.py_func",
        "keras": "make weights with tf.get_variable, or call a Flax or Equinox module with rt.call",
        "io": "read the file in Python, in tf.py_func or in Dataset.from_generator",
        "test": "pytest, and numpy.testing",
    }.items()
    for name in names.split()
}
"""Module of TensorFlow's that is here in part -> what to use instead of what is not."""


def advice(full: str) -> str:
    """Returns what to use instead of a name such as "tf.nn.ctc_loss", or of its module; empty without advice."""
    parts = full.split(".")
    known = THE_REST | INSTEAD
    return next(
        # The advice for the longest name that holds the wanted one goes first.
        (known[name] for n in range(len(parts), 1, -1) if (name := ".".join(parts[:n])) in known),
        "",
    )


def absent(namespace: str, name: str) -> AttributeError:
    """Makes the error for a missing name, with advice where there is some."""
    full = f"{namespace}.{name}"
    said = advice(full)
    return AttributeError(
        f"{full} is not in "
        f"harness.tf1{f': {said}' if said else '; docs/tf1_names.md lists what is'}"
    )


def namespace(full: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns a module's ``__getattr__`` and ``__dir__``, which answer from the table, with advice for other names."""
    names = TABLE.setdefault(full, {})

    def __getattr__(name: str) -> Any:
        if name in names:
            return look_up(full, name)
        # Python asks modules for names such as __path__, which are no names of TensorFlow's.
        if name.startswith("__"):
            raise AttributeError(name)
        raise absent(full, name)

    return __getattr__, lambda: sorted(names)


class Namespace(types.ModuleType):
    """A module of TensorFlow's that is no module here: it answers from the table, with advice for other names."""

    def __init__(self, full: str) -> None:
        super().__init__(full)
        self.__getattr__, self.__dir__ = namespace(full)  # type: ignore[method-assign]
