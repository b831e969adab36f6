"""Losses as the tasks of a session report them, made in the process of a test."""

import runtime as rt


def loss_of(session: rt.Session, error: rt.OpError | None = None) -> rt.OpError:
    """Returns an error as if the tasks of a session had raised it.

    Args:
        session: The session that has lost a task.
        error: The error; an UnavailableError by default.
    """
    found = error or rt.UnavailableError("a task was lost", task="/job:ps/task:0")
    found.session = session.id
    return found
