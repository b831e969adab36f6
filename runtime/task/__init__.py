"""What a task does: it registers stages and runs them against its state."""
