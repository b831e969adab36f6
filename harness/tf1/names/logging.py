"""``tf.logging``: absl logging by TensorFlow's names."""

from absl import logging as _logging
from absl.logging import debug as debug
from absl.logging import error as error
from absl.logging import fatal as fatal
from absl.logging import flush as flush
from absl.logging import get_verbosity as get_verbosity
from absl.logging import info as info
from absl.logging import log as log
from absl.logging import log_every_n as log_every_n
from absl.logging import log_first_n as log_first_n
from absl.logging import set_verbosity as set_verbosity
from absl.logging import vlog as vlog
from absl.logging import warning as warning

from harness.tf1.names.missing import namespace as _namespace

DEBUG = _logging.DEBUG
INFO = _logging.INFO
WARN = _logging.WARNING
ERROR = _logging.ERROR
FATAL = _logging.FATAL
warn = warning

__getattr__, _ = _namespace("tf.logging")
