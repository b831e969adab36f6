"""SessionConfig: the options of a session, as its user gives them and its master takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.timeouts import RECONNECT_SECS


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """Options of a session.

    Attributes:
        device_filters: such as ``("/job:ps", "/job:worker/task:0")``: the session waits for and touches only tasks
            that match one, and its target's own.
        start_timeout_secs: how long creating the session waits for tasks to join; None without limit.
        operation_timeout_secs: time limit of one step; None without limit.
        reconnect_secs: how long a step waits for a task that is silent but not known to be dead.
        prefetch: 1 lets the push of one training step and the pull of the next travel while the worker computes:
            faster, one step more of staleness, and the global step is fetched one step late. 0 is strict.
        allow_soft_placement: run on the CPU what asks for a device that its task does not have.
        log_device_placement: log the device of every operation when a step is planned.
    """

    device_filters: Sequence[str] = ()
    start_timeout_secs: float | None = None
    operation_timeout_secs: float | None = None
    reconnect_secs: float = RECONNECT_SECS
    prefetch: int = 0
    allow_soft_placement: bool = False
    log_device_placement: bool = False
