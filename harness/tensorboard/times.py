"""Times of event files, in seconds, in one table; those of the whole harness are in ``harness/timeouts.py``.

A period is the time between two writes.
"""

# -- periods ----------------------------------------------------------------------------------------

FLUSH_SECS = 2.0
"""Default time between two writes of the waiting events to a disk."""
FLUSH_STORE_SECS = 120.0
"""The same to an object store, where each write replaces the whole object."""
RETRY_SECS = 2.0
"""Time between two tries to write to a file with an error."""
