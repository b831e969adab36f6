"""Times of the whole harness, in seconds; those of one room are in the ``times.py`` of the room.

docs/time_limits.md lists those that users may know.
"""

# -- periods ----------------------------------------------------------------------------------------

LOG_EVERY_SECS = 10.0
"""Time between two lines in the log about the same wait."""

# -- patience ---------------------------------------------------------------------------------------

STOP_GRACE_SECS = 120.0
"""Default time of threads, steps under way and other workers to end after a stop."""
LONGEST_SECS = 1e9
"""Longest wait (31 years).

Python raises OverflowError for a wait beyond the C clock, such as infinity.
"""
