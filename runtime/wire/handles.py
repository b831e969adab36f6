"""The fixed handles of the tensor channel, for calls outside any stage."""

FETCH = 0
"""The handle by which a task fetches a tensor that another task holds for it."""
PULL = 0xFFFF_FFFF
"""The handle by which the coordinator of a checkpoint asks for a range of bytes of a variable."""
PUSH = 0xFFFF_FFFE
"""The handle by which the coordinator of a checkpoint sends a range of bytes of a variable."""
BACKUP = 0xFFFF_FFFD
"""The handle by which a task sends a message about its backup to the task that holds the backup."""
BUNDLE = 0xFFFF_FFFC
"""The handle by which a master sends several stage calls of one step (`runtime.task.bundle`)."""
ORDERS = {
    FETCH: "fetch",
    PULL: "checkpoint.bytes",
    PUSH: "checkpoint.bytes",
    BACKUP: "backup",
    BUNDLE: "stage",
}
"""The order that the call of each handle gives (`roles.MAY`).

A call of any other handle runs one stage.
"""
