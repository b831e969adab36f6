"""A directory for ``PYTHONPATH``: with it a process finds ``harness.tf1`` under the name of TensorFlow."""
