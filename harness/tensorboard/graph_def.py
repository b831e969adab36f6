"""A graph as TensorFlow's GraphDef message: what TensorBoard's graph page shows, with scopes, shapes and devices."""

from tensorboardX.proto import attr_value_pb2, graph_pb2, node_def_pb2, tensor_shape_pb2

import runtime as rt

# The version of GraphDef of these messages.
_PRODUCER = 22


def graph_def(graph: rt.Graph) -> graph_pb2.GraphDef:
    """Returns the GraphDef of ``graph``, with a node for each operation.

    A node has the name (with name scopes as its path), type, requested device, inputs and control
    inputs of the operation, and the attributes ``dtype`` and ``_output_shapes``.
    """
    message = graph_pb2.GraphDef()
    message.versions.producer = _PRODUCER
    for op in graph.get_operations():
        message.node.append(_make_node(op))
    names = {node.name for node in message.node}
    for op, node in zip(graph.get_operations(), message.node, strict=False):
        assert node.name == op.name, "a node of another operation"
        # What an update writes is no input of it, but a reader wants to see the edge.
        written = [v.name for v in getattr(op.body, "variables", ())]
        node.input.extend(v for v in written if v in names and v != op.name and v not in node.input)
    return message


def _make_node(op: rt.Operation) -> node_def_pb2.NodeDef:
    node = node_def_pb2.NodeDef(name=op.name, op=op.type, device=op.device)
    # TensorFlow leaves the number of the first output out.
    node.input.extend(t.op.name if t.index == 0 else t.name for t in op.inputs)
    node.input.extend(f"^{control.name}" for control in op.control_inputs)
    if op.outputs:
        node.attr["dtype"].type = rt.lowlevel.data_type_number(op.outputs[0].dtype)
        shapes = attr_value_pb2.AttrValue.ListValue(shape=[_shape_message(t) for t in op.outputs])
        node.attr["_output_shapes"].list.CopyFrom(shapes)
    return node


def _shape_message(tensor: rt.Tensor) -> tensor_shape_pb2.TensorShapeProto:
    if tensor.shape is None:
        return tensor_shape_pb2.TensorShapeProto(unknown_rank=True)
    sizes = (-1 if size is None else size for size in tensor.shape)
    return tensor_shape_pb2.TensorShapeProto(
        dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=n) for n in sizes]
    )
