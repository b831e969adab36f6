"""The state of a task between steps: variables, the write gate and the run record."""
