"""Detection: how soon a task that has died, frozen or been cut off is noticed and reached again.

Times in seconds.

The defaults of the whole runtime, in one place; docs/time_limits.md lists them beside those of the
harness.
"""

HEARTBEAT_SECS = 1.0
"""Period of the pings to a task whose answers are awaited."""
HEARTBEAT_TIMEOUT_SECS = 2.0
"""A task without an answer for so long is silent: it is warned of, and its connections are made again."""
RECONNECT_SECS = 10.0
"""How long a call waits for a silent task before it gives up."""
ATTEMPT_SECS = 2.0
"""How long one attempt to connect may take.

A lost first packet is sent again after one second by every system.
"""
GRPC_IDLE_SECS = 2.0
"""After so long without a byte gRPC pings the peer of a call that is under way."""
GRPC_LEAST_IDLE_SECS = 1.0
"""A server of gRPC takes one ping in so long; the third that comes sooner ends the connection ("too_many_pings")."""
GRPC_PING_SECS = 10.0
"""Without an answer to that ping for so long the call fails; gRPC's own default lets it wait for a minute.

A tensor call waits as long (``RECONNECT_SECS``): a starved host answers late and is not gone."""
GRPC_DNS_SECS = 1.0
"""gRPC asks the name servers again after so long at the soonest; its own default is 30."""
GRPC_BACKOFF_SECS = 0.1
"""Pause between two attempts of gRPC to connect; it takes nothing less."""
RENEW_SECS = 5.0
"""Period in which a client of a master elsewhere says that it still has its session."""
LEASE_SECS = 30.0
"""A client that its master has not heard of for so long is dead: its session is closed."""
LEASE_LOOK_SECS = 1.0
"""Period of the looks for clients that are dead by that."""
JOIN_PAUSE_SECS = 0.05
"""Pause between two looks at tasks that have not joined yet."""
FIRST_BACKOFF_SECS = 0.005
LAST_BACKOFF_SECS = 0.5
"""Pauses between two attempts of a tensor connection: from, doubling, to."""
LAST_WORD_SECS = 0.5
"""How long a wait that has reached its time limit listens for the answer that may be on its way."""
LOG_EVERY_SECS = 10.0
"""How often a wait says on whom it waits."""
PORT_SECS = 10.0
"""How long a server that starts waits for its port, which a process that is dying may still hold."""
