"""Kernels of collective training: XLA's own collectives between processes that `jax.distributed` has joined."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runtime.errors import GroupLostError, one_line
from runtime.graph.op_kinds import Attrs
from runtime.task.host_kernels import Context, kernel
from runtime.tensor_spec import AnyArray

_T = TypeVar("_T")

Specs = tuple[tuple[tuple[int, ...], str], ...]


@kernel("collective/mean", raw=True)
def _mean(context: Context, attrs: Attrs, inputs: Sequence[AnyArray]) -> Sequence[AnyArray]:
    """The mean of each input over all processes; every process must call it, in the same order."""
    if jax.process_count() == 1:
        return list(inputs)
    with jax.enable_x64(True):
        reduce = _reducer(tuple((tuple(a.shape), a.dtype.name) for a in inputs))
        return list(_in_group(lambda: reduce(inputs)))


@kernel("collective/broadcast", raw=True)
def _broadcast(context: Context, attrs: Attrs, inputs: Sequence[AnyArray]) -> Sequence[AnyArray]:
    """The inputs of process 0, in every process."""
    if jax.process_count() == 1:
        return list(inputs)
    with jax.enable_x64(True):
        values = _in_group(lambda: multihost_utils.broadcast_one_to_all([np.asarray(a) for a in inputs]))
        return [np.asarray(v, np.asarray(a).dtype) for v, a in zip(values, inputs, strict=True)]


def _in_group(call: Callable[[], _T]) -> _T:
    try:
        result = call()
        jax.block_until_ready(result)
        return result
    except Exception as error:
        text = one_line(error)
        raise GroupLostError(f"the group of processes is lost, all of them must be started again: {text}") from error


@functools.cache
def _reducer(specs: Specs) -> Callable[[Sequence[AnyArray]], list[jax.Array]]:
    """A function that gives the means of arrays of these shapes: one message for each dtype, not one for each array."""
    first = [next(d for d in jax.devices() if d.process_index == p) for p in range(jax.process_count())]
    own_device = first[jax.process_index()]
    mesh = Mesh(np.array(first), ("replica",))
    split, everywhere = NamedSharding(mesh, PartitionSpec("replica")), NamedSharding(mesh, PartitionSpec())
    mean = jax.jit(lambda rows: jnp.mean(rows, axis=0), out_shardings=everywhere)
    groups: dict[str, list[int]] = {}
    for i, (_, dtype) in enumerate(specs):
        groups.setdefault(dtype, []).append(i)
    starts = {d: np.cumsum([0, *(int(np.prod(specs[i][0])) for i in places)]) for d, places in groups.items()}

    def pack(*arrays: jax.Array) -> list[jax.Array]:
        return [jnp.concatenate([arrays[i].ravel() for i in places])[None] for places in groups.values()]

    def unpack(*flat: jax.Array) -> list[jax.Array]:
        out: dict[int, jax.Array] = {}
        for values, (dtype, places) in zip(flat, groups.items(), strict=True):
            for k, i in enumerate(places):
                begin, end = int(starts[dtype][k]), int(starts[dtype][k + 1])
                out[i] = values[begin:end].reshape(specs[i][0])
        return [out[i] for i in range(len(specs))]

    packed, unpacked = jax.jit(pack), jax.jit(unpack)

    def run(inputs: Sequence[AnyArray]) -> list[jax.Array]:
        rows = [jax.device_put(row, own_device) for row in packed(*inputs)]
        shape = [(len(first), row.shape[1]) for row in rows]
        whole = [jax.make_array_from_single_device_arrays(s, split, [row]) for s, row in zip(shape, rows, strict=True)]
        return list(unpacked(*(mean(w).addressable_data(0) for w in whole)))

    return run
