"""The life of one process of a task: its ids, its start and its state."""

import enum

from runtime import concurrency
from runtime.errors import UnavailableError


class LifeState(enum.Enum):
    """A state of a task's process. Each state follows the one above."""

    MADE = enum.auto()
    """The port of the control plane is taken, and no call is answered."""
    STARTING = enum.auto()
    """The backup is read, or a port is opened. Calls get an UnavailableError."""
    SERVING = enum.auto()
    """Calls are answered, until the ports are closed."""


class TaskLife:
    """The life of one process of a task.

    Args:
        task: Name of the task, for errors.

    Attributes:
        incarnation: Random id of this process of the task. A task that continues from its backup
            keeps its id.
        takeovers: Number of times the task has continued from its backup.
        started_unix_secs: Start of this process of the task, seconds since the epoch.
        state: State of the process.
    """

    def __init__(self, task: str) -> None:
        # 0 in a request means any process of the task, so no process has this id.
        self.incarnation = concurrency.random_id(63) | 1
        self.takeovers = 0
        self.started_unix_secs = concurrency.wall_time()
        self.state = LifeState.MADE
        self._task = task

    def begin(self) -> bool:
        """Begins the start; returns False if it has begun before."""
        if self.state is not LifeState.MADE:
            return False
        self.state = LifeState.STARTING
        return True

    def resume(self, incarnation: int, takeovers: int) -> None:
        """Continues the life of an earlier process of the task.

        Args:
            incarnation: Id of the earlier process.
            takeovers: Number of times the task has continued, this time included.
        """
        assert self.state is LifeState.STARTING
        self.incarnation, self.takeovers = incarnation, takeovers

    def open(self) -> None:
        """Ends the start: calls are answered from now on."""
        assert self.state is LifeState.STARTING
        self.state = LifeState.SERVING

    def check_open(self) -> None:
        """Checks that the start has ended.

        Raises:
            UnavailableError: The server is starting.
        """
        # Before the end of the start the task does not know if it will continue from a backup,
        # under the old id.
        if self.state is not LifeState.SERVING:
            raise UnavailableError("it is starting", task=self._task)
