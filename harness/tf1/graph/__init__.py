"""Graphs, sessions, scopes and variables by TensorFlow's names."""
