"""The master: it runs the steps of sessions on the tasks."""
