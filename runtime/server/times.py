"""Times of a server, in seconds, in one table; those of the whole runtime are in ``runtime/timeouts.py``.

A period is the time between two turns of a loop. A patience is the longest wait for another task,
process or thread.
"""

# -- periods ----------------------------------------------------------------------------------------

PORT_LOOK_SECS = 0.1
"""Time between two looks at a port that another process holds."""
END_LOOK_SECS = 1.0
"""Time between two looks for the end of training.

Lost workers make no event, so the task looks by itself.
"""
DRAIN_LOOK_SECS = 0.1
"""Time between two looks for connected training tasks, after SIGTERM."""
CERTIFICATE_LOOK_SECS = 60.0
"""Time between two looks at the certificate, which may near its end, or be replaced, while no client connects."""

# -- patience ---------------------------------------------------------------------------------------

LOOK_UP_SECS = 10.0
"""Longest wait for the name servers at the start."""
STOP_SECS = 2.0
"""Longest wait of a server that stops for the calls under way."""
EXIT_SECS = 10.0
"""Longest wait at Python's exit for calls of the control plane, which may compile."""
LATE_SECS = 600.0
"""Longest wait after the chief's end for workers that never came."""
