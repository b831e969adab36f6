"""Times of the whole runtime, in seconds, in one table; those of one room are in the ``times.py`` of the room.

Most decide how soon a task that has died, frozen or been cut off is noticed and reached again.
docs/time_limits.md lists all beside those of the harness. A period is the time between two turns of a
loop. A patience is the longest wait for a task. A limit separates two states of a task.
"""

# -- periods ----------------------------------------------------------------------------------------

HEARTBEAT_SECS = 1.0
"""Time between two pings to a task whose answers are awaited."""
GRPC_DNS_SECS = 1.0
"""Least time between two questions of gRPC to the name servers; gRPC's own default is 30."""
GRPC_BACKOFF_SECS = 0.1
"""Pause between two attempts of gRPC to connect; gRPC takes nothing less."""
RENEW_SECS = 5.0
"""Time between two notices of a client to a master elsewhere that the client still has its session."""
LEASE_LOOK_SECS = 1.0
"""Time between two looks of a master for dead clients."""
JOIN_PAUSE_SECS = 0.05
"""Pause between two looks at tasks that have not joined yet."""
STAGGER_SECS = 0.25
"""Time for which an attempt at one address of a host goes on alone, before the next address is tried beside."""
FIRST_BACKOFF_SECS = 0.005
"""First pause between two attempts of a tensor connection; each pause doubles the one before."""
LAST_BACKOFF_SECS = 0.5
"""Longest pause between two attempts of a tensor connection."""
LOG_EVERY_SECS = 10.0
"""Time between two lines in the log that name the task for which a wait waits."""

# -- patience ---------------------------------------------------------------------------------------

RECONNECT_SECS = 10.0
"""Longest wait of a call for a silent task."""
ATTEMPT_SECS = 2.0
"""Longest time of one attempt to connect.

A lost first packet is sent again after one second by every system.
"""
GRPC_PING_SECS = 10.0
"""Longest wait of gRPC for the answer to a ping, after which the call fails; gRPC's own default is a minute.

A tensor call waits as long (``RECONNECT_SECS``): a starved host answers late and is not gone.
"""
LAST_WORD_SECS = 0.5
"""Time for which a wait at its time limit still listens for the answer that may be on its way."""
PORT_SECS = 10.0
"""Longest wait of a server that starts for its port, which a process that is dying may still hold."""

# -- limits -----------------------------------------------------------------------------------------

HEARTBEAT_TIMEOUT_SECS = 2.0
"""Time without an answer after which a task is silent: a warning names it, and its connections are made again."""
GRPC_IDLE_SECS = 2.0
"""Time without a byte after which gRPC pings the peer of a call that is under way."""
GRPC_LEAST_IDLE_SECS = 1.0
"""Least time between two pings to a server of gRPC; the third that comes sooner ends the connection."""
LEASE_SECS = 30.0
"""Silence after which a master counts a client as dead and closes its session."""
