"""What a task does: it keeps state (the store) and runs stages against it (the executor)."""
