"""Times of the control plane, in seconds, in one table; those that users may know are in ``runtime/timeouts.py``.

A period is the time between two turns of a loop. A limit is the shortest or longest time of one
call or thread.
"""

# -- periods ----------------------------------------------------------------------------------------

LOOK_AGAIN_SECS = 0.1
"""Pause between two looks for a task that is not there yet."""

# -- limits -----------------------------------------------------------------------------------------

LEAST_SECS = 0.05
"""Shortest time limit of a call or a look.

A call whose deadline is near must still be able to fail by itself.
"""
LONGEST_LOOK_SECS = 5.0
"""Longest look before a call without a deadline."""
IDLE_SECS = 10.0
"""Time for which a thread without a call is kept for the next call."""
