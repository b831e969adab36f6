"""Times of the state on a task, in seconds, in one table; those that users may know are in ``runtime/timeouts.py``.

A limit separates two states of a step or of a session.
"""

# -- limits -----------------------------------------------------------------------------------------

REMEMBER_SECS = 5.0
"""Time for which a step is reported after its last write here."""
RECENT_SECS = 2.5
"""Time for which a step may be half done: an older step has ended, or has lost its worker half-way."""
QUIET_SECS = 3.0
"""A session is silent after so long without a sign of life, of which there is one every second."""
