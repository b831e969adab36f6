"""The command lines, and modules that answer for others of TensorFlow's."""
