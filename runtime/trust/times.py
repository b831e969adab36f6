"""Times of credentials and of looks at a task, in seconds, in one table.

A period is the time between two lines of a log. A patience is the longest wait for a name server or
a task. A limit separates two states of a certificate.
"""

# -- periods ----------------------------------------------------------------------------------------

REFUSAL_LOG_SECS = 60.0
"""Time between two lines about the same client."""
CERTIFICATE_LOG_SECS = 3600.0
"""Time between two warnings of the end of a certificate."""

# -- patience ---------------------------------------------------------------------------------------

LOOK_SECS = 1.0
"""Default time for a look at a task, and the most for a look without certificates."""
LOOK_UP_SECS = 2.0
"""Longest wait for the address of a host.

The system knows the names of the loopback without a name server. A slow name server is therefore
not waited for.
"""

# -- limits -----------------------------------------------------------------------------------------

NEAR_END_SECS = 7 * 86400.0
"""Longest rest of a certificate's life that counts as near the end."""
