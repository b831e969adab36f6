"""The command lines, and modules that stand for further modules of TensorFlow."""
