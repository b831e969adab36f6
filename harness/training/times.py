"""Times of a training run, in seconds, in one table; those of the whole harness are in ``harness/timeouts.py``.

A period is the time between two turns of a loop. A patience is the longest wait for a task, a thread,
a disk or a session. A limit separates two states of a task, or of a run that ends.
"""

# -- periods ----------------------------------------------------------------------------------------

SAVE_SECS = 600.0
"""Default time between two saves of a monitored session."""
POLL_SECS = 1.0
"""Time between two looks at a run directory and at the run records."""
FIRST_BACKOFF_SECS = 0.05
"""First pause between two attempts to open a session; each pause doubles the one before."""
LAST_BACKOFF_SECS = 1.0
"""Longest pause between two attempts to open a session."""
SESSION_PAUSE_SECS = 0.5
"""Pause before the second new session and each later one: a shortage on a task may pass."""
LOG_RARELY_SECS = 60.0
"""Time between two later lines with the same reason for a wait."""
LOCK_TRY_SECS = 0.5
"""Time between two tries to take the lock of a log directory."""
PROBE_SECS = 1.0
"""Time between two looks of the chief for a lost task that its own steps do not need at the moment."""
RETRY_SECS = 0.2
"""Time between two questions to ps tasks that do not answer while the chief waits for workers."""
SHORTEST_WAIT_SECS = 0.1
"""Shortest time of one wait for the other tasks."""
LONGEST_WAIT_SECS = 10.0
"""Longest time of one wait for the other tasks, and time between two lines in the log of the whole wait."""
STEPS_LOOK_SECS = 1.0
"""Longest time between two looks at the steps that run after a stop."""
STOP_WAIT_SECS = 60.0
"""Time of one question for an order to stop, which a ps answers at once when the order comes."""
STOP_PAUSE_SECS = 1.0
"""Time between two such questions to a ps that does not answer, or that leaves."""
SIGNAL_AGAIN_SECS = 0.01
"""Pause before a signal that has to wait is sent again."""
SIGNAL_LOOK_SECS = 0.5
"""Time between two looks for a signal while the last save waits."""
ROOM_TRY_SECS = 10.0
"""Time between two tries of the last save on a full disk."""
AWAY_TRY_SECS = 1.0
"""Time between two tries of the last save on a file system that does not answer."""

# -- patience ---------------------------------------------------------------------------------------

GIVE_UP_SECS = 7200.0
"""Default wait for a session, at the start and in each recovery."""
ATTEMPT_SECS = 10.0
"""Time of one attempt to open a session, or of one blocking wait.

After each the loop looks for a stop.
"""
OWN_SECS = 1.0
"""Time of one blocking wait where variables lie on the session's own task.

No chief initialises those, so the wait always takes its full length.
"""
RIVAL_SECS = 5.0
"""Time for which the chief of another run is watched: a chief that has just died gives no sign of life meanwhile."""
ANSWER_SECS = 10.0
"""Longest wait for the answer of a ps to a question."""
SHORT_ANSWER_SECS = 5.0
"""Longest wait of an evaluator for an answer of the run records, between two looks at the run directory."""
LOCK_SECS = 1.0
"""Longest wait of a signal, also in a lock that another thread never releases."""
IMPORT_SECS = 5.0
"""Longest wait of SIGTERM for an import."""
AT_EXIT_SECS = 5.0
"""Longest wait of the end of the process for the thread that takes orders."""
GOES_TOO_SECS = 2.0
"""Wait of a chief before it saves for a ps that stops: a chief that is to stop, too, saves at its end."""
FAILURE_GRACE_SECS = 10.0
"""Longest wait for a step after a service has failed: the step may wait in vain then."""
ROOM_SECS = 600.0
"""Longest wait of the last save of a run for room on its disk."""

# -- limits -----------------------------------------------------------------------------------------

ALIVE_SECS = 2.0
"""Silence below which a chief lives: a living chief gives a sign of life every second."""
QUIET_SECS = 3.0
"""Silence from which the log names a task as silent: a living task gives a sign of life every second."""
LEAST_SILENCE_SECS = 4.0
"""Least silence after which a task is given up, however short the grace period: signs of life may be late."""
ELASTIC_SILENCE_SECS = 10.0
"""Silence after which the end does not wait for a worker, where workers come and go: the worker may never return."""
END_SILENCE_SECS = 30.0
"""Silence after which a mark of the end that an evaluator finds at its start counts.

The tasks with the variables come up within that time where the run continues.
"""
LAST_SAVE_SECS = 10.0
"""Time between the chief's second save and the end of a ps that was asked to stop."""
