"""Checkpoints below the harness: the coordinator, the tasks that take part, and the files."""
