"""Protocols of primary-backup replication: sending this task's changes, holding the backups of other tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from runtime.tensor_spec import Array
from runtime.wire.listener import Reply


class Replicator(Protocol):
    """The sender of this task's changes to the task that holds its backup."""

    lag: int
    """How many answered updates the backup may lack."""

    def carry_out(self, run: Callable[[], Reply], client: int, *, gated: bool) -> Reply:
        """Runs a call that changes state; returns its reply when the backup lacks no more than it may.

        Args:
            run: runs the call.
            client: whose call it is.
            gated: whether it passes the write gate, where it is counted.
        """

    def count(self) -> None:
        """Notes that the state has changed."""

    def settle(self) -> None:
        """Waits until all that has changed is in the backup; as ``Primary.settle``."""

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
        """Forgets the backups: their tasks are being restored from a checkpoint."""
