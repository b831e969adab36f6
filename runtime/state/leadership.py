"""Leadership: the claim under which a chief orders tasks.

Every task obeys one leadership at a time, and the run record keeps the leadership. A chief claims
the tasks under an epoch larger than the epoch of any chief before. After a claim the tasks refuse
late orders under an earlier epoch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from runtime.errors import AbortedError, InvalidArgumentError, OpError, PermissionDeniedError
from runtime.proto import run_record_pb2 as pb

EPOCHS_AT_ONCE = 2**32
"""Most by which a claim may raise the epoch, so that 2^31 claims of a stranger leave epochs to the chief."""
MAX_EPOCH = MAX_OWNER = 2**63
"""Epochs and the numbers of chiefs are smaller: orders to quorums carry them as int64."""


RunState: TypeAlias = Mapping[str, Any]
"""The run record, or a part of it, for the next process of the task: JSON values by name."""


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
    def from_proto(cls, message: pb.Leadership) -> "Leadership":
        """Reads a message of ``to_proto``."""
        return cls(message.epoch, message.owner)

    def to_proto(self) -> pb.Leadership:
        """Returns the leadership as a message."""
        return pb.Leadership(epoch=self.epoch, owner=self.owner)


NOBODY = Leadership()


@dataclass
class Leader:
    """The leader that a task obeys. The lock of the run record guards the fields.

    Attributes:
        leadership: the leadership in force; ``NOBODY`` without a chief.
        name: name of the leader's task; empty without a chief.
        address: address of the leader's task; may be empty.
    """

    leadership: Leadership = NOBODY
    name: str = ""
    address: str = ""

    def claim(self, wanted: Leadership, name: str, address: str, task: str) -> None:
        """Obeys a chief from now on, if no later chief leads.

        Args:
            wanted: the leadership that the chief claims.
            name: name of the chief's task.
            address: address of the chief's task.
            task: this task's name, for the error.

        Raises:
            InvalidArgumentError: The number of the chief or the epoch is not valid.
        """
        if not wanted or not 0 < wanted.owner < MAX_OWNER:
            raise InvalidArgumentError(
                "who takes the lead needs an epoch and a number below 2^63", task=task
            )
        if wanted.epoch >= min(MAX_EPOCH, self.leadership.epoch + EPOCHS_AT_ONCE):
            raise InvalidArgumentError(
                f"refused: a claim of epoch {wanted.epoch}, where the task obeys epoch "
                f"{self.leadership.epoch}: the next chief's is one more than the largest of its "
                "tasks",
                task=task,
            )
        # Without the lead the reply names the chief that leads.
        if wanted.epoch > self.leadership.epoch:
            self.leadership, self.name, self.address = wanted, name, address

    def check(
        self,
        leadership: Leadership,
        what: str,
        task: str,
        *,
        deposed: type[OpError] = PermissionDeniedError,
        outdated: type[OpError] = AbortedError,
    ) -> None:
        """Checks that an order comes under the leadership in force.

        While a caller holds the store's lock, no chief can claim the task between the check and the
        work.

        Args:
            leadership: the leadership of the order.
            what: name of the work, for the error.
            task: this task's name, for the error.
            deposed: the error if another chief leads.
            outdated: the error if no chief leads, as the task was started again, or if the same
                chief has claimed the task under another epoch.
        """
        obeyed = self.leadership
        if not obeyed:
            # A chief that takes the lead again learns what is lost.
            raise outdated(
                "restarted since a chief took the lead here, its state is gone", task=task
            )
        if leadership.owner != obeyed.owner:
            raise deposed(
                f"refused to {what}: {self.name} has taken the lead (a run has one chief at a time: "
                "give is_chief=me.is_chief, which is True on one task)",
                task=task,
            )
        if leadership != obeyed:
            raise outdated(
                f"refused to {what}: the order is of epoch {leadership.epoch}, and its chief has "
                f"claimed the task anew under epoch {obeyed.epoch}",
                task=task,
            )

    def state(self) -> RunState:
        """Returns the fields for ``take_up``, as JSON can say them."""
        return {
            "leadership": [self.leadership.epoch, self.leadership.owner],
            "leader_name": self.name,
            "leader_address": self.address,
        }

    def take_up(self, state: RunState) -> None:
        """Continues from the ``state`` of an earlier process of the task."""
        self.leadership = Leadership(*state["leadership"])
        self.name, self.address = state["leader_name"], state["leader_address"]
