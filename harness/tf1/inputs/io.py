"""``tf.io``: later releases' spellings of what reads, parses and writes."""

from __future__ import annotations

from harness.tf1.graph import framework
from harness.tf1.inputs import gfile, readers
from harness.tf1.inputs import image as _image  # noqa: F401 - adds names to the table
from harness.tf1.names.missing import namespace
from harness.tf1.names.table import TABLE, add_names

_OF_TF = """
    FixedLenFeature FixedLenSequenceFeature VarLenFeature decode_csv decode_raw matching_files parse_example
    parse_single_example parse_single_sequence_example read_file write_file
    """
_OF_IMAGE = "decode_image decode_jpeg decode_png encode_jpeg encode_png"
add_names(
    "tf.io",
    {
        **{name: TABLE["tf"][name] for name in _OF_TF.split()},
        **{name: TABLE["tf.image"][name] for name in _OF_IMAGE.split()},
        **TABLE["tf.python_io"],
        "gfile": gfile,
        "match_filenames_once": readers.match_filenames_once,
        "write_graph": framework.write_graph,
    },
)

__getattr__, __dir__ = namespace("tf.io")
