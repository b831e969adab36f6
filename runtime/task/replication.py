"""Protocols of primary-backup replication.

A `Replicator` sends this task's changes to the task with its backup. A `BackupMessages` holds the
backups of other tasks. `runtime.backup` implements both.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from runtime.tensor_spec import Array
from runtime.wire.connection import Reply


class Replicator(Protocol):
    """The sender of a task's changes to the task with the backup."""

    lag: int
    """Number of answered updates that the backup may lack."""

    def carry_out(self, run: Callable[[], Reply], client: int, *, gated: bool) -> Reply:
        """Runs a call that changes state.

        Args:
            run: Runs the call.
            client: Session of the call.
            gated: True if the call passes the write gate, which counts the change.

        Returns:
            The reply, as soon as the backup lacks at most ``lag`` updates.
        """

    def count(self) -> None:
        """Notes that the state has changed."""

    def settle(self) -> None:
        """Waits until the backup has all changes; see ``Primary.settle``."""

    def forget(self, client: int) -> None:
        """Drops the last replies to a client that has closed its session from the backup."""

    def values(self) -> Mapping[str, float]:
        """Returns figures by name."""

    def close(self) -> None:
        """Ends the replication."""


class BackupMessages(Protocol):
    """The holder of other tasks' backups."""

    def answer_message(self, message: Sequence[Array]) -> list[Array]:
        """Answers a message about a backup."""

    def drop_all(self) -> None:
        """Forgets the backups, because their tasks are being restored from a checkpoint."""
