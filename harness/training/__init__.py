"""One task's way through a run: Supervisor, monitored sessions, recovery and the end."""
