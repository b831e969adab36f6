"""Times of the tensor channel, in seconds, in one table; those that users may know are in ``runtime/timeouts.py``.

A period is the time between two turns of a loop. A patience is the longest wait for another thread
or process. A limit separates two states of a connection or of this process.
"""

# -- periods ----------------------------------------------------------------------------------------

TICK_SECS = 1.0
"""Longest wait of a lane for bytes, after which it looks at its deadline and at ``cancel``."""
TLS_TICK_SECS = 0.25
"""Longest wait of a connection for the next call of its TLS client, after which it looks for the end of the server.

OpenSSL wants one thread at a time, so no other thread may say goodbye.
"""
LISTEN_SECS = 0.1
"""Time between two looks at the deadline while a call that was given up listens for its answer."""
TURN_SECS = 1.0
"""Longest wait of the listener's thread for news."""
TIDY_SECS = 0.25
"""Time between two walks over all connections and lanes, at least.

A flood of newcomers must not cause a walk each.
"""
EARLIER_RUN_SECS = 1.0
"""Time between two looks for a client that has hung up, in a wait for an earlier run of its call."""

# -- patience ---------------------------------------------------------------------------------------

JOIN_SECS = 5.0
"""Longest wait for the end of a thread."""
GOODBYE_SECS = 0.5
"""Longest wait of a leaving server for the thread of a connection to say goodbye."""
GOODBYE_READ_SECS = 0.5
"""Longest wait for the end of a beat that may read the goodbye."""
TROUBLE_SECS = 0.1
"""Pause after a connection that could not be served for want of something, so as not to spin."""

# -- limits -----------------------------------------------------------------------------------------

STEADY_SECS = 1.0
"""A connection that has lived for so long does not count with the breaks before it."""
WORKS_SECS = 5.0
"""A connection with a call or a ping in so long works, and gives way to no other."""
ASLEEP_SECS = 3.0
"""Without a turn of the listener for so long this process itself did not run: it was frozen or starved."""
YOUNG_DIRECTORY_SECS = 60.0
"""A younger directory without a socket may be that of a server that starts in another container."""
