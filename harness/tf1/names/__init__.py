"""The table of TensorFlow's names, names that need no graph, and advice for missing names."""
