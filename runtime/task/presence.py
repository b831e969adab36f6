"""The presence of a task in this process, which ends when the task leaves."""

from runtime.errors import AbortedError, OpError, UnavailableError


class TaskPresence:
    """The error that calls get once the task has left. Thread safe.

    Args:
        task: Name of the task, for the error.

    Attributes:
        gone: The error; None until the task leaves.
    """

    def __init__(self, task: str) -> None:
        self._task = task
        self.gone: OpError | None = None

    def end(self, *, replaced: bool) -> OpError:
        """Refuses all later calls; returns the error.

        Args:
            replaced: True if another server has taken the place of this task's server.
        """
        self.gone = (
            AbortedError("restarted since the session began, its state is gone", task=self._task)
            if replaced
            else UnavailableError("its server has stopped", task=self._task)
        )
        return self.gone

    def check(self) -> None:
        """Raises the error once the task has left."""
        if (gone := self.gone) is not None:
            raise type(gone)(gone.message, task=self._task)
