"""Primary-backup replication of a task."""
