"""Forks: an object with connections knows the process of its birth, and refuses to act in a forked child.

A forked child has the sockets of the parent but no threads, and perhaps locks that no thread will
release. A goodbye from the child would end connections of the parent. So in the child `close` and
`stop` do nothing, and a method that needs a connection raises.
"""

import os

from runtime.errors import FailedPreconditionError

_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class HomeProcess:
    """The process that made an object.

    Args:
        what: name of the object in errors: "the session".
    """

    # A count and not a process id: ids are used again.
    __slots__ = ("_forks", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._forks = _forks

    @property
    def was_left(self) -> bool:
        """True in a forked child of the process."""
        return self._forks != _forks

    def check(self) -> None:
        """Raises FailedPreconditionError in a forked child of the process."""
        if self._forks != _forks:
            raise FailedPreconditionError(
                f"{self._what} was made before a fork, and its connections belong to the parent "
                "process: start processes by spawn, or make another one here"
            )
