"""Times of a master, in seconds, in one table; those that users may know are in ``runtime/timeouts.py``.

A period is the time between two turns of a loop. A patience is the longest wait for tasks or
threads. A limit is the shortest time of a call.
"""

# -- periods ----------------------------------------------------------------------------------------

TICK_SECS = 1.0
"""Longest wait of a step for news, after which each connection checks the life of its task."""
LATE_TICK_SECS = 0.1
"""The same after the deadline of the step."""
POLL_SECS = 0.1
"""Time between two looks at the silence of a task."""
AGAIN_SECS = 0.1
"""Pause between two attempts to reach a task that recovers from its backup."""

# -- patience ---------------------------------------------------------------------------------------

ANSWER_SECS = 10.0
"""Default time of an exchange with run records, beyond the order's own wait."""
ENDED_SECS = 1.0
"""Longest wait for the threads of an order to notice the end of the order."""

# -- limits -----------------------------------------------------------------------------------------

LEAST_SECS = 0.05
"""Time of a call whose deadline has passed."""
