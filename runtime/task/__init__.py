"""The work of a task: registering stages and running them against its state."""
