"""What a task holds between steps: its variables, the write gate and the run record."""
