"""Times of synchronous training, in seconds, in one table; those of the whole harness are in ``harness/timeouts.py``.

A period is the time between two turns of a loop. A patience is the longest wait for a ps.
"""

# -- periods ----------------------------------------------------------------------------------------

RETRY_SECS = 0.5
"""Pause before the chief claims the ps again, and time between two of its looks for a new claim."""

# -- patience ---------------------------------------------------------------------------------------

RELEASE_SECS = 2.0
"""Longest wait at a stop for the ps to end the waits of the listeners."""
