"""Collectives: means and broadcasts over the processes of a group, each of which has a graph of its own."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.graph.graph import Graph, Tensor
from runtime.graph.op_kinds import Host
from runtime.graph.operators import TensorLike
from runtime.graph.ops import as_tensor


def group_mean(tensors: Sequence[TensorLike], name: str = "group_mean") -> list[Tensor]:
    """The mean of each tensor over all processes that ``jax.distributed`` has joined.

    Every process must run it, the same number of times and in the same order: it waits for all.

    Args:
        tensors: floating point tensors of known shape, the same shapes in every process.
        name: operation name.

    Raises:
        InternalError: when it runs: a process of the group is lost.
    """
    return _collective("collective/mean", tensors, name)


def group_broadcast(tensors: Sequence[TensorLike], name: str = "group_broadcast") -> list[Tensor]:
    """The tensors of process 0, in every process; as ``group_mean``, every process must run it."""
    return _collective("collective/broadcast", tensors, name)


def _collective(kernel: str, tensors: Sequence[TensorLike], name: str) -> list[Tensor]:
    with Graph.of(*tensors).as_default() as graph:
        inputs = [as_tensor(t) for t in tensors]
    op = graph.add_operation(
        name.rsplit("/", 1)[-1], Host(kernel, {}, True), inputs, [(t.shape, t.dtype) for t in inputs], name=name
    )
    return list(op.outputs)
