"""Times of monitoring, in seconds, in one table; those of the whole harness are in ``harness/timeouts.py``.

A period is the time between two turns of a loop. A patience is the longest wait for a task or a client.
"""

# -- periods ----------------------------------------------------------------------------------------

REDRAW_SECS = 0.2
"""Time between two looks of a progress line on a terminal."""
STOP_LOOK_SECS = 0.1
"""Time between two looks of the metrics server for a stop, which is the most that ``close`` takes."""

# -- patience ---------------------------------------------------------------------------------------

ANSWER_SECS = 2.0
"""Longest wait for the answer of a task, after which the task is silent."""
REQUEST_SECS = 5.0
"""Longest time of a request for metrics, from the connection to the end of the answer."""
