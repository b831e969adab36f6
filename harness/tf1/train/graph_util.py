"""``tf.graph_util``: parts of a GraphDef, and values of variables in one.

A GraphDef holds names, types and values for tools that show a graph. The functions of its
operations are JAX's, so TensorFlow does not run the message, and ``jax.export`` makes a file that
runs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from absl import logging
from tensorboardX.proto.graph_pb2 import GraphDef
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto

import runtime as rt
from harness.tf1.names.missing import namespace
from harness.tf1.ops.lift import Public

public = Public("tf.graph_util")


@public.add()
def extract_sub_graph(graph_def: GraphDef, dest_nodes: Sequence[str]) -> GraphDef:
    """Returns the nodes that some nodes need, and these.

    Raises:
        TypeError: ``dest_nodes`` is one name.
        AssertionError: there is no node of a name.
    """
    if isinstance(dest_nodes, str):
        raise TypeError(
            f"dest_nodes must be an iterable of strings, but got type {type(dest_nodes)}."
        )
    nodes = {node.name: node for node in graph_def.node}
    for name in dest_nodes:
        if name not in nodes:
            raise AssertionError(f"{name} is not in graph")
    needed: set[str] = set()
    stack = list(dest_nodes)
    while stack:
        name = stack.pop()
        if name not in needed:
            needed.add(name)
            # An input is "name", "name:1", or "^name" for an order alone.
            stack += [text.lstrip("^").partition(":")[0] for text in nodes[name].input]
    return GraphDef(
        node=[node for node in graph_def.node if node.name in needed], versions=graph_def.versions
    )


@public.add()
def convert_variables_to_constants(
    sess: rt.Session,
    input_graph_def: GraphDef,
    output_node_names: Sequence[str],
    variable_names_whitelist: Collection[str] | None = None,
    variable_names_blacklist: Collection[str] | None = None,
) -> GraphDef:
    """Returns the nodes that outputs need, with the values of variables as constants.

    Args:
        sess: has the values.
        input_graph_def: ``sess.graph.as_graph_def()``.
        output_node_names: the outputs.
        variable_names_whitelist: only these variables become constants.
        variable_names_blacklist: these variables stay.

    Raises:
        AssertionError: there is no node of a name.
        FailedPreconditionError: a variable has no value.
    """
    found = extract_sub_graph(input_graph_def, output_node_names)
    there = {node.name for node in found.node}
    chosen = {
        variable.op.name: variable
        for variable in sess.graph.variables()
        if variable.op.name in there
        and (variable_names_whitelist is None or variable.op.name in variable_names_whitelist)
        and variable.op.name not in (variable_names_blacklist or ())
    }
    # One run: the values are those of one step.
    values = sess.run(chosen)
    for node in found.node:
        if node.name in values:
            _set_constant(node, np.asarray(values[node.name]))
    logging.info("Converted %d variables to const ops.", len(values))
    return found


def _set_constant(node: Any, value: np.ndarray[Any, Any]) -> None:
    kind = rt.lowlevel.data_type_number(value.dtype)
    node.op = "Const"
    del node.input[:]
    node.attr["dtype"].type = kind
    tensor = node.attr["value"].tensor
    tensor.dtype = kind
    sizes = [TensorShapeProto.Dim(size=size) for size in value.shape]
    tensor.tensor_shape.CopyFrom(TensorShapeProto(dim=sizes))
    if value.dtype.hasobject:
        tensor.string_val.extend(value.ravel().tolist())
    else:
        tensor.tensor_content = value.tobytes()


__getattr__, __dir__ = namespace("tf.graph_util")
