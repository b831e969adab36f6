"""Times of a backup, in seconds, in one table; those of the whole runtime are in ``runtime/timeouts.py``.

A period is the time between two turns of a loop. A patience is the longest wait for the holder, an
update or a thread. A limit separates two states of a lane.
"""

# -- periods ----------------------------------------------------------------------------------------

LEAST_PAUSE_SECS = 0.01
"""Shortest pause between two images."""
MOST_PAUSE_SECS = 1.0
"""Longest pause between two images while there is something to send."""
CHECK_SECS = 1.0
"""Time between two messages that check the backup at the holder when there is nothing to send."""
FIRST_BACKOFF_SECS = 0.05
"""Pause after the first failure of the holder; each further failure doubles the pause."""
LAST_BACKOFF_SECS = 0.5
"""Longest pause after a failure of the holder."""
WAIT_SECS = 1.0
"""Longest wait of an update for the end of an image's capture, after which the update looks again."""

# -- patience ---------------------------------------------------------------------------------------

SETTLE_SECS = 30.0
"""Time without an answer of the holder after which an order that is not in the backup has failed."""
DRAIN_SECS = 0.05
"""Longest wait for the updates under way before an image, while new updates wait."""
CLOSE_SECS = 1.0
"""Longest wait of a task that stops for its last updates to arrive, and for the thread."""

# -- limits -----------------------------------------------------------------------------------------

LANE_MEMORY_SECS = 600.0
"""The last answer of a lane that is idle for longer is dropped."""
