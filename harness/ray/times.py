"""Times of a run on Ray, in seconds, in one table; those of the whole harness are in ``harness/timeouts.py``.

A patience is the longest wait for actors.
"""

# -- patience ---------------------------------------------------------------------------------------

CLOSE_SECS = 10.0
"""Longest wait at the end for actors that remove their files."""
