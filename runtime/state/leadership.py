"""Leadership: the claim under which a chief orders tasks.

Every task obeys one leadership at a time, and the run record keeps the leadership. A chief claims
the tasks under an epoch larger than the epoch of any chief before. After a claim the tasks refuse
late orders under an earlier epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.proto import run_record_pb2 as pb

EPOCHS_AT_ONCE = 2**32
"""Most by which a claim may raise the epoch, so that 2^31 claims of a stranger leave epochs to the chief."""
MAX_EPOCH = MAX_OWNER = 2**63
"""Epochs and the numbers of chiefs are smaller: orders to quorums carry them as int64."""


@dataclass(frozen=True)
class Leadership:
    """The claim of a chief; false for ``NOBODY``.

    Attributes:
        epoch: number of the claim, larger than of any claim before; 0 without a chief.
        owner: random number of the chief.
    """

    epoch: int = 0
    owner: int = 0

    def __bool__(self) -> bool:
        """Returns True if a chief leads."""
        return self.epoch > 0

    @classmethod
    def from_proto(cls, message: pb.Leadership) -> Leadership:
        """Reads a message of ``to_proto``."""
        return cls(message.epoch, message.owner)

    def to_proto(self) -> pb.Leadership:
        """Returns the leadership as a message."""
        return pb.Leadership(epoch=self.epoch, owner=self.owner)


NOBODY = Leadership()
