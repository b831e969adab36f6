"""Times in manifests, in seconds, in one table; those of the whole harness are in ``harness/timeouts.py``.

A limit separates two states of a pod that ends.
"""

# -- limits -----------------------------------------------------------------------------------------

SAVE_SECS = 30
"""Time of a worker after SIGTERM for its last checkpoint: the trainer's --preempt_grace_secs."""
WORKER_GRACE_SECS = 60
"""Time of a worker from SIGTERM to SIGKILL."""
PS_PAUSE_SECS = 5
"""Time for which a ps that is to go is left alone first: its workers receive their own SIGTERM in that time."""
PS_DRAIN_SECS = SAVE_SECS + 5
"""Time for which the ps then serves on while a worker lives: the chief needs the ps for its last checkpoint."""
PS_GRACE_SECS = PS_PAUSE_SECS + PS_DRAIN_SECS + 20
"""Time of a ps from the order to go to SIGKILL."""
