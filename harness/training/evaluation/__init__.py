"""Evaluation: the process for the checkpoints of a run, and the decisions of an evaluator."""
