"""A flag beside the global step by which one worker asks all others to stop training."""

from __future__ import annotations

import runtime as rt

POLL_SECS = 1.0
"""How often a worker looks at the flag."""


class StopTogether:
    """The flag; every worker makes one in its graph, before the session.

    It is a variable on the task of the global step, in no collection: it is not saved, and nobody waits for it. Without
    a value nobody has asked.

    Args:
        global_step: beside which it is kept.
    """

    def __init__(self, global_step: rt.Variable | rt.Tensor) -> None:
        with rt.name_scope(None), rt.control_dependencies(None), rt.device(global_step.device or None):
            self._flag = rt.Variable(False, name="stop_together", trainable=False, collections=[])
            self._ask = self._flag.assign(True).op
            self._forget = self._flag.assign(False).op

    def ask(self, session: rt.Session) -> None:
        """Asks everybody to stop."""
        session.run(self._ask)

    def forget(self, session: rt.Session) -> None:
        """Takes back what was asked in a run before this one: the chief does, when it begins."""
        session.run(self._forget)

    def asked(self, session: rt.Session) -> bool:
        """Whether somebody has asked; an error of the cluster is none here, training's own next step meets it too."""
        try:
            return bool(session.run(self._flag))
        except (rt.OpError, RuntimeError):  # it has no value; or a task is lost, or the session is closed
            return False
