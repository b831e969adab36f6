"""SessionConfig: the options of a session, from its user to its master."""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.timeouts import LOG_EVERY_SECS, RECONNECT_SECS


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """Options of a session.

    Attributes:
        device_filters: Filters such as ``("/job:ps", "/job:worker/task:0")``. The session waits for
            and touches only tasks that match a filter, and its target's own task.
        start_timeout_secs: Seconds that the start of the session waits for tasks; None without
            limit.
        operation_timeout_secs: Time limit of one step; None without limit.
        reconnect_secs: Seconds that a step waits for a silent task which may still live.
        prefetch: The number of this worker's newest gradients that the parameters of a step may
            lack. 1 lets push, computation and pull of several training steps overlap, in both
            directions of the network at once. 2 gains more where the network is slow. The global
            step is fetched one step late. 0 is strict.
        allow_soft_placement: True to run an operation on the best device of its task if the task
            lacks the requested device.
        log_device_placement: True to log the device of every operation when a step is planned.
        log_secs: Seconds between two lines in which a training session tells step, rate and loss; 0
            for none. Other sessions write no such lines.

    Examples:
        >>> import runtime as rt
        >>> config = rt.SessionConfig(device_filters=["/job:ps"], operation_timeout_secs=60.0)
        >>> with rt.Session(config=config) as session:
        ...     session.config.operation_timeout_secs
        60.0
    """

    device_filters: Sequence[str] = ()
    start_timeout_secs: float | None = None
    operation_timeout_secs: float | None = None
    reconnect_secs: float = RECONNECT_SECS
    prefetch: int = 0
    allow_soft_placement: bool = False
    log_device_placement: bool = False
    log_secs: float = LOG_EVERY_SECS
