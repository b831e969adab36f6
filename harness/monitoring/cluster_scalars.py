"""The standard series: figures of the whole cluster, which the chief writes for TensorBoard.

The chief requests the figures of every task at intervals, and writes the rates and means of each
interval. So training steps send no figures, and one event file has the series of all tasks.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from absl import logging

import runtime as rt
from harness.coordinator import Coordinator, LooperThread, underlying, while_open
from harness.monitoring import times
from harness.monitoring.sampler import ClusterSampler, TaskStatus
from harness.tensorboard.plugin_messages import Layout

LAYOUT: Layout = {
    "Speed": {
        "global steps per second": ["global_step/sec"],
        "training steps per second, by worker": ["steps_per_sec/.*"],
        "step time, ms": ["step_ms/.*"],
        "pull, ms": ["pull_ms/.*"],
        "compute, ms": ["compute_ms/.*"],
        "push, ms": ["push_ms/.*"],
    },
    "Staleness and updates": {
        "staleness, mean": ["staleness_mean/.*"],
        "staleness, max": ["staleness_max/.*"],
        "updates applied per second, by ps": ["updates_per_sec/.*"],
        "updates dropped": ["updates_dropped/.*"],
    },
    "Parameter servers": {
        "time to apply an update, ms": ["apply_ms/.*"],
        "calls at once": ["queue_depth/.*"],
        "bytes of a step": ["bytes_per_step/.*"],
        "bytes per second received": ["received_per_sec/.*"],
        "bytes per second sent": ["sent_per_sec/.*"],
    },
    "Checkpoints and recovery": {
        "checkpoint, seconds": ["checkpoint_seconds/.*"],
        "checkpoint, bytes": ["checkpoint_bytes/.*"],
        "recovery, seconds": ["recovery_seconds/.*"],
        "steps lost": ["steps_lost/.*"],
        "recoveries": ["recoveries/.*", "backup_recoveries/.*"],
        "updates not in the backup, by ps": ["backup_lag_steps_max/.*"],
        "1 while a ps could go on from its backup": ["backup_usable/.*"],
    },
    "Hosts": {
        "CPU, percent of one core": ["cpu_percent/.*"],
        "memory, bytes": ["memory_bytes/.*"],
        "host memory used, bytes": ["host_memory_used_bytes/.*"],
        "device memory, bytes": ["device_memory_bytes/.*"],
    },
}
"""The groups of the standard series on TensorBoard's custom-scalars page."""

_GAUGES = (
    "memory_bytes",
    "host_memory_used_bytes",
    "host_load",
    "variable_bytes",
    "backup_lag_steps_max",
)
_SWITCHES = ("backup_usable",)
"""Gauges of which 0 is worth a point."""
_SUMS = ("updates_dropped", "recoveries", "backup_recoveries", "steps_lost", "errors")
"""Sums that are shown without a rate, once above zero; the names of their figures end in ``_total``."""
assert {*_GAUGES, *_SWITCHES, *(f"{name}_total" for name in _SUMS)} <= rt.lowlevel.METRICS.keys()


def scalars(report: rt.TaskReport, figures: Mapping[str, float]) -> dict[str, float]:
    """Returns the standard series of a task: tag -> value.

    Args:
        report: the report of ``/job:ps/task:0``; the tags end in ``ps_0``.
        figures: the figures since the report before; see ``rates.figures``.
    """
    label = "_".join(part.partition(":")[2] for part in report.task.strip("/").split("/"))
    values = report.values
    found = dict(figures)
    # A gauge of 0 stands for a task without such a thing.
    found |= {name: values[name] for name in _GAUGES if values.get(name)}
    found |= {name: values[name] for name in _SWITCHES if name in values}
    found |= {name: total for name in _SUMS if (total := values.get(f"{name}_total"))}
    tags = {f"{name}/{label}": float(value) for name, value in found.items()}
    # The figure of a device has the device in its name.
    for name, value in values.items():
        base, _, device = name.partition("/")
        if device:
            tags[f"{base}/{label}_{device.replace(':', '_')}"] = value
    return tags


@runtime_checkable
class SeriesWriter(Protocol):
    """The writer of the series: a ``FileWriter``, or a writer of the user."""

    def add_layout(self, layout: Layout) -> None:
        """Adds the groups of the custom-scalars page."""

    def add_scalars(self, values: Mapping[str, float], global_step: int | None = None) -> None:
        """Adds one number for each tag."""


class StandardSeries:
    """The standard series of a cluster, from one sample of its tasks to the next.

    Args:
        cluster: the tasks.
        writer: the writer, which receives the layout of the custom-scalars page at once.
    """

    def __init__(self, cluster: rt.ClusterSpec, writer: SeriesWriter) -> None:
        self._sampler = ClusterSampler(cluster)
        self._writer = writer
        self._silent: set[str] = set()
        writer.add_layout(LAYOUT)
        self._sample_tasks()

    def write(self, step: int) -> dict[str, float]:
        """Samples every task, writes a point of each series at ``step``, and returns the points: tag -> value."""
        found: dict[str, float] = {}
        for state in self._sample_tasks():
            # Another task may answer at the address, with figures of its own.
            if state.report is not None and state.report.task == state.task:
                found |= scalars(state.report, state.figures)
        if found:
            self._writer.add_scalars(found, step)
        return found

    def _sample_tasks(self) -> list[TaskStatus]:
        states = self._sampler.sample()
        # A task that stays silent is logged once.
        silent = {state.task for state in states if state.report is None}
        if gone := silent - self._silent:
            logging.info("no figures from %s: not reached, or done", ", ".join(sorted(gone)))
        self._silent = silent
        return states


class SeriesThread(LooperThread):
    """The thread that writes the standard series at fixed intervals, until a stop.

    Args:
        coord: the coordinator whose stop ends the thread.
        secs: the interval, seconds.
        session: a session for the global step, whose target knows the cluster.
        global_step: the tensor of the global step.
        writer: the writer of the series.
    """

    def __init__(
        self,
        coord: Coordinator,
        secs: float,
        session: rt.SessionLike,
        global_step: rt.TensorLike,
        writer: SeriesWriter,
    ) -> None:
        super().__init__(coord, secs)
        self.name = "write-series"
        self._session = session
        self._global_step = global_step
        self._writer = writer
        self._series: StandardSeries | None = None

    def run_loop(self) -> None:
        """Writes a point of each series; without an answer of the cluster the point is left out."""
        try:
            if self._series is None:
                self._series = StandardSeries(
                    rt.probe(underlying(self._session).target, times.ANSWER_SECS).cluster,
                    self._writer,
                )
                # Rates need two samples.
                return
            with while_open(self._session):
                self._series.write(int(self._session.run(self._global_step)))
        except (rt.UnavailableError, rt.AbortedError, rt.DeadlineExceededError) as error:
            logging.info("no figures of the cluster this time: %s", error)
