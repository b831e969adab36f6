"""Times of a task's stages and programs, in seconds, in one table; those of all rooms are in ``runtime/timeouts.py``.

A period is the time between two turns of a loop. A patience is the longest time for another task or
for the compiler. A limit separates two states of a client or of this process.
"""

# -- periods ----------------------------------------------------------------------------------------

LOOK_SECS = 1.0
"""Longest time between two looks at the programs that run."""

# -- patience ---------------------------------------------------------------------------------------

KEEP_SECS = 600.0
"""Time that a tensor is kept if no task fetches the tensor, because the step has failed or the session has died."""
COMPILE_SECS = 600.0
"""Time for all parts of a list, whose cost is limited one by one.

A list that takes longer is refused.
"""

# -- limits -----------------------------------------------------------------------------------------

WINDOW_SECS = 60.0
"""The time of which a client's share is counted: short beside a training run, long beside an honest program."""
ASLEEP_SECS = 5.0
"""Without a look for so long this process itself did not run: it was frozen or starved."""
