"""``tf.io``: later releases' spellings of what reads, parses and writes."""

from __future__ import annotations

from typing import Any

from harness.tf1.graph import framework
from harness.tf1.inputs import gfile, image, parsing, readers, records
from harness.tf1.names.missing import namespace
from harness.tf1.ops import string_ops

NAMES: dict[str, Any] = {
    **parsing.OPS,
    **{name: string_ops.OPS[name] for name in ("decode_csv", "decode_raw")},
    **{name: readers.OPS[name] for name in ("matching_files", "read_file", "write_file")},
    **{name: image.NAMES[name] for name in ("decode_image", "decode_jpeg", "decode_png", "encode_jpeg", "encode_png")},
    **records.OPS,
    "gfile": gfile,
    "match_filenames_once": readers.match_filenames_once,
    "write_graph": framework.write_graph,
}  # fmt: skip
"""TensorFlow's name in ``tf.io`` -> what it is here."""

__getattr__, __dir__ = namespace("tf.io", NAMES)
