"""Handles that nobody registers: calls of the tensor channel that belong to no stage."""

FETCH = 0
"""A task fetches a tensor that another one holds for it."""
PULL = 0xFFFF_FFFF
"""The coordinator of a checkpoint asks for a range of bytes of a variable."""
PUSH = 0xFFFF_FFFE
"""The coordinator of a checkpoint sends a range of bytes of a variable."""
BACKUP = 0xFFFF_FFFD
"""A task sends a message about its backup to the task that holds it."""
ORDERS = {FETCH: "fetch", PULL: "checkpoint.bytes", PUSH: "checkpoint.bytes", BACKUP: "backup"}
"""What a call of each orders (`roles.MAY`); that of any other handle runs a stage."""
