"""Times of checkpoints, in seconds, in one table; those that users may know are in ``runtime/timeouts.py``.

A period is the pause between two pieces of work. A patience is the longest wait for a task or an
order. A limit is the time after which a job counts as lost.
"""

from runtime.limits import Limits

# -- periods ----------------------------------------------------------------------------------------

REST_SECS = 0.5
"""Longest rest: longer pieces of work have waited for the disk, not for a core."""
ASIDE_SECS = 0.05
"""Longest pause before the second attempt at a snapshot, doubled before each further attempt.

Two processes that take snapshots at once wait for random times, so that one goes first.
"""

# -- patience ---------------------------------------------------------------------------------------

ORDER_SECS = 120.0
"""Time for an order that should take milliseconds; the first of a chief waits for the writes of the one before."""
DROP_SECS = 5.0
"""Longest wait of a coordinator for a task that drops a job."""
STATES_SECS = 2.0
"""Longest wait for the states of all tasks."""
PAUSE_SECS = Limits.pause_secs
"""Longest time that a snapshot holds updates back if its coordinator dies."""
QUIET_SECS = 2.0
"""Longest wait of a snapshot for stages under way, and for the rest of half-done steps."""
JOIN_SECS = 60.0
"""Longest wait of the first order under a new leadership for orders under the leadership before."""

# -- limits -----------------------------------------------------------------------------------------

UNUSED_SECS = 600.0
"""A job unnamed for this time is ended by the next order of another job: the order to drop the job was lost."""
