"""``tf.logging``: absl logging by TensorFlow's names."""

from absl import logging as absl_logging

from harness.tf1.names.missing import namespace
from harness.tf1.names.table import add_names

_SAME = """
    DEBUG INFO ERROR FATAL debug error fatal flush get_verbosity info log log_every_n log_first_n set_verbosity vlog warning
    """.split()

add_names("tf.logging", {name: getattr(absl_logging, name) for name in _SAME})
add_names("tf.logging", {"WARN": absl_logging.WARNING, "warn": absl_logging.warning})

__getattr__, __dir__ = namespace("tf.logging")
