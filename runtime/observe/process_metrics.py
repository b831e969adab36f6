"""All metrics of a task, and the counters of rare events.

The name of a metric ends in ``_total`` if the metric only grows. A reader takes differences of such
metrics.
"""

import logging as std_logging
from collections.abc import Mapping

from absl import logging

from runtime import concurrency
from runtime.errors import one_line

METRICS: Mapping[str, str] = {
    "applied_total": "updates that came over the network and were applied",
    "apply_seconds_total": "time for those updates, including the wait for their variables",
    "bytes_received_total": "bytes that came over the tensor channel",
    "bytes_sent_total": "bytes that went out over the tensor channel",
    "calls_total": "calls over the tensor channel",
    "certificate_left_seconds": "time until the certificate of this task ends",
    "certificate_near_end": "1 when a tenth of the certificate's life is left, or seven days if that is less",
    "checkpoint_bytes_total": "bytes of the checkpoints that this task coordinated",
    "checkpoint_seconds_total": "time from taking the values to the last file of those checkpoints",
    "checkpoints_failed_total": "checkpoints that could not be saved",
    "checkpoints_skipped_total": "checkpoints that were due while one was being saved",
    "checkpoints_total": "checkpoints that this task coordinated",
    "compute_seconds_total": "of the time for training steps, computing",
    "connections": "connections to the tensor channel",
    "cpu_seconds_total": "CPU time of the process, all its threads",
    "device_limit_bytes": "memory that the process may take of the accelerator",
    "device_memory_bytes": "memory in use on the accelerator",
    "device_peak_memory_bytes": "the most memory that was in use on the accelerator",
    "errors_total": "calls that failed",
    "events_lost_total": "events for TensorBoard that a full or failing disk did not take",
    "global_step": "the global step, on the task that holds it",
    "host_cpus": "CPU cores of the host",
    "host_load": "load average of the host over a minute",
    "host_memory_bytes": "memory of the host",
    "host_memory_used_bytes": "memory in use on the host",
    "insecure": "1 when the task lets everybody in who reaches its ports",
    "memory_bytes": "resident memory of the process",
    "backup_bytes_total": "bytes sent to this task's backup",
    "backup_sendings_total": "times this task's backup was brought up to date",
    "backup_lag_steps": "updates of this task that are not in its backup",
    "backup_lag_steps_max": "the most updates that were not in the backup since somebody last asked",
    "backup_recoveries_total": "times this task went on from its backup",
    "backup_seconds_total": "time for sending to the backup",
    "backup_usable": "1 while this task could go on from its backup",
    "backup_wait_seconds_total": "time that updates waited for the backup",
    "other_step_seconds_total": "time for the steps that do not train",
    "other_steps_total": "steps that do not train: reading values, summaries",
    "pull_seconds_total": "of the time for training steps, reading the variables",
    "push_seconds_total": "of the time for training steps, sending updates until they are applied",
    "queue_depth": "calls that run or wait now",
    "queue_depth_max": "calls that ran or waited at once, at the most since somebody last asked",
    "recoveries_total": "recoveries of this task's sessions after a loss",
    "recovery_seconds_total": "time that training stood still for them",
    "refused_total": "connections and calls that were refused, as they showed no token or certificate of the cluster",
    "remote_calls": "calls that may wait: steps and sessions of clients elsewhere, waits for the run record",
    "remote_sessions": "sessions of clients in other processes whose steps this task runs",
    "sessions": "sessions that are open on this task",
    "step_bytes_total": "tensor bytes that training steps sent and received",
    "step_seconds_total": "time for training steps",
    "steps_lost_total": "global steps that recoveries went back",
    "steps_total": "training steps that sessions on this task ran",
    "threads": "threads of the process",
    "updates_behind_total": "updates, by how many others had moved the variables on meanwhile; 64+ is 64 or more",
    "updates_dropped_total": "gradients that synchronous training refused as stale or repeated",
    "updates_total": "updates of this task's variables",
    "variable_bytes": "bytes of the variables of this task",
    "variables": "variables of this task",
}
"""Meaning of each metric of a task, by name. No other name may be counted."""


class Metrics:
    """The counters of rare events, by the names in ``METRICS``. Thread safe.

    Each call takes a lock, so steps count with ``runtime.observe.counters`` instead.
    """

    def __init__(self) -> None:
        self._lock = concurrency.Lock()
        self._values: dict[str, float] = {}
        self._error = ("", 0.0)

    def add(self, name: str, amount: float = 1.0) -> None:
        """Adds to a metric.

        Args:
            name: Name in ``METRICS`` that ends in ``_total``.
            amount: Amount, in the unit of the metric; 1 by default.

        Examples:
            >>> counted = Metrics()
            >>> counted.add("checkpoint_seconds_total", 1.5)
            >>> counted.read()
            {'checkpoint_seconds_total': 1.5}
        """
        # No metric lacks its line in the documentation.
        assert name in METRICS, f"{name} is not in METRICS, which explains every figure"
        assert name.endswith("_total") and amount >= 0, f"{name} only grows"
        with self._lock:
            self._values[name] = self._values.get(name, 0.0) + amount

    def read(self) -> dict[str, float]:
        """Returns a copy of all metrics that were counted."""
        with self._lock:
            return dict(self._values)

    def note_error(self, text: str) -> None:
        """Remembers an error as the last error, with the present time."""
        with self._lock:
            self._error = (text, concurrency.wall_time())

    @property
    def last_error(self) -> tuple[str, float]:
        """The text of the last error, and its time in seconds since the epoch.

        Without an error, the text is empty and the time is 0.
        """
        # The tuple is replaced as a whole, so text and time fit without a lock.
        return self._error


class _ErrorNoter(std_logging.Handler):
    def __init__(self, metrics: Metrics) -> None:
        super().__init__(std_logging.ERROR)
        self._metrics = metrics

    def emit(self, record: std_logging.LogRecord) -> None:
        self._metrics.note_error(one_line(record.getMessage()))


metrics = Metrics()
"""Counters of this process."""

logging.get_absl_logger().addHandler(_ErrorNoter(metrics))
