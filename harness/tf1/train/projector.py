"""``tf.contrib.tensorboard.plugins.projector``: the configuration of TensorBoard's embedding projector.

TensorBoard does not read the checkpoints of this project, so the values are written beside the
configuration, as a table of tab-separated numbers.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from absl import logging
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

import runtime as rt
from harness.tf1.ops.lift import Public

public = Public("tf.contrib.tensorboard.plugins.projector")

_FILE = "projector_config.pbtxt"
"""The name that TensorBoard looks for in a log directory."""
_PACKAGE = "bellwether.projector"

# In the order of the numbers in TensorBoard's projector_config.proto; a star is a repeated field.
_FIELDS = {
    "SpriteMetadata": "string image_path, uint32* single_image_dim",
    "EmbeddingInfo": (
        "string tensor_name, string metadata_path, string bookmarks_path, uint32* tensor_shape, "
        "SpriteMetadata sprite, string tensor_path"
    ),
    "ProjectorConfig": (
        "string model_checkpoint_path, EmbeddingInfo* embeddings, string model_checkpoint_dir"
    ),
}


def _make_messages() -> dict[str, Any]:
    field = descriptor_pb2.FieldDescriptorProto
    kinds = {"string": field.TYPE_STRING, "uint32": field.TYPE_UINT32}
    file = descriptor_pb2.FileDescriptorProto(name="projector", package=_PACKAGE, syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for number, text in enumerate(fields.split(", "), 1):
            kind, shown = text.split()
            inner = kind.removesuffix("*")
            message.field.add(
                name=shown,
                number=number,
                label=field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL,
                type=kinds.get(inner, field.TYPE_MESSAGE),
                type_name=None if inner in kinds else f".{_PACKAGE}.{inner}",
            )
    # TensorBoard may be imported beside, which has messages of these names in the default pool.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _FIELDS
    }


_MADE = _make_messages()
SpriteMetadata, EmbeddingInfo, ProjectorConfig = (_MADE[name] for name in _FIELDS)
public.update(_MADE)


@public.add()
def visualize_embeddings(summary_writer: Any, config: Any) -> None:
    """Writes the configuration into the log directory; in a session, also the values of the embeddings.

    Args:
        summary_writer: a ``tf.summary.FileWriter``, or the path of a log directory.
        config: a ``ProjectorConfig``.

    Raises:
        ValueError: the writer has no directory.
    """
    of_writer = getattr(summary_writer, "get_logdir", None)
    logdir = of_writer() if of_writer else summary_writer
    if logdir is None:
        raise ValueError("Summary writer must have a logdir")
    os.makedirs(logdir, exist_ok=True)
    session = rt.get_default_session()
    for embedding in config.embeddings:
        if embedding.tensor_path:
            continue
        if session is None:
            logging.warning(
                "visualize_embeddings: outside of a session the values of %s are not written, and "
                "TensorBoard shows none",
                embedding.tensor_name,
            )
            continue
        name = embedding.tensor_name
        tensor = session.graph.get_tensor_by_name(name if ":" in name else f"{name}:0")
        embedding.tensor_path = f"{tensor.op.name.replace('/', '_')}.tsv"
        values = np.asarray(session.run(tensor))
        np.savetxt(os.path.join(logdir, embedding.tensor_path), values, "%.6g", "\t")
    with open(os.path.join(logdir, _FILE), "w") as file:
        file.write(text_format.MessageToString(config))
