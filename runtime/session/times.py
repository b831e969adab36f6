"""Times of a session, in seconds, in one table; those that users may know are in ``runtime/timeouts.py``.

A patience is the longest wait for a master in another process.
"""

# -- patience ---------------------------------------------------------------------------------------

FORWARD_SECS = 120.0
"""Longest wait for one byte range of a checkpoint, or for new generations."""
RELAY_SECS = 1.0
"""Time that a master may answer later than its tasks."""
LATE_SECS = 2.0
"""Time that a master may answer later than its own time limit."""
CLOSE_SECS = 5.0
"""Longest wait of the end of a session for a master without an answer."""
