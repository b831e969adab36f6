"""Times of the launcher, in seconds, in one table; those of the whole harness are in ``harness/timeouts.py``.

A patience is the longest wait for a process.
"""

# -- patience ---------------------------------------------------------------------------------------

CONNECT_SECS = 1.0
"""Longest wait for a connection that shows whether a process listens."""
SMI_SECS = 10.0
"""Longest wait for nvidia-smi, which hangs where a driver is broken."""
KILL_GRACE_SECS = 5.0
"""Longest wait for a task to vanish after SIGKILL, after which the launcher leaves without the task."""
IMPORT_SECS = 60.0
"""Longest wait for the modules of the fork server; then tasks are started in the ordinary way."""
FORK_SECS = 5.0
"""Longest wait for a fork of the fork server."""
