"""Evaluation: the process that evaluates the checkpoints of a run, and its decisions."""
