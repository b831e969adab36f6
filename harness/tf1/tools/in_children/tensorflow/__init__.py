"""The module that ``import tensorflow`` finds in the processes of a program: ``harness.tf1``.

``python -m harness.tf1`` puts the directory above on ``PYTHONPATH``. TensorBoard, which uses
TensorFlow where there is one, is told that there is none.
"""

import pathlib
import sys

if "tensorboard" in pathlib.PurePath(sys.argv[0]).parts[-2:]:
    raise ImportError("harness.tf1 is no TensorFlow for TensorBoard", name="tensorflow")

try:
    from harness.tf1.tools import modules
except ModuleNotFoundError:  # a checkout that the parent found in its working directory
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[5]))
    from harness.tf1.tools import modules

del sys.modules["tensorflow"]
modules.install()
__import__("tensorflow")
