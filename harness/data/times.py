"""Times of data shards, in seconds, in one table; those of the whole harness are in ``harness/timeouts.py``.

A period is the time between two turns of a loop. A limit separates two states of a lease.
"""

# -- periods ----------------------------------------------------------------------------------------

POLL_SECS = 0.1
"""Time between two questions for a lease while other workers have the last batches."""

# -- limits -----------------------------------------------------------------------------------------

LEASE_SECS = 10.0
"""Silence after which a worker loses its lease."""
