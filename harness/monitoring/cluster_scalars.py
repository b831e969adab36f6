"""The standard series: figures of the whole cluster, which the chief writes for TensorBoard.

The chief requests the figures of every task at intervals, and writes the rates and means of each interval. So training
steps send no figures, and one event file has the series of all tasks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Protocol, runtime_checkable

from absl import logging

import runtime as rt
from harness.coordinator import Coordinator, LooperThread, while_open
from harness.monitoring.rates import Figures, figures
from harness.monitoring.status import probe_tasks
from harness.tensorboard.plugin_messages import Layout

REQUEST_SECS = 2.0
"""Seconds for an answer, after which a task is left out of a sample."""

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

_FIGURES = tuple(f.name for f in fields(Figures) if f.name != "gauges")
_SERVING = ("queue_depth", "received_per_sec", "sent_per_sec")
"""Figures only of tasks that receive calls."""
_GAUGES = ("memory_bytes", "host_memory_used_bytes", "host_load", "variable_bytes", "backup_lag_steps_max")
_SWITCHES = ("backup_usable",)
"""Gauges of which 0 is worth a point."""
_SUMS = ("updates_dropped", "recoveries", "backup_recoveries", "steps_lost", "errors")
"""Sums that are shown without a rate, once above zero; the names of their figures end in ``_total``."""


def scalars(task: str, before: rt.TaskReport | None, now: rt.TaskReport, seconds: float) -> dict[str, float]:
    """Returns the standard series of a task: tag -> value.

    Args:
        task: ``/job:ps/task:0``; the tags end in ``ps_0``.
        before: the earlier report of the task; None for the first.
        now: the later report.
        seconds: seconds between the reports.
    """
    label = _label(task)
    span = figures(before, now, seconds)
    found = {
        f"{name}/{label}": float(value)
        for name in _FIGURES
        if (value := getattr(span, name)) is not None and (name not in _SERVING or now.values.get("calls_total"))
    }
    found |= {f"{name}/{label}": span.gauges[name] for name in _GAUGES if span.gauges.get(name)}
    found |= {f"{name}/{label}": span.gauges[name] for name in _SWITCHES if name in span.gauges}
    found |= {f"{name}/{label}": total for name in _SUMS if (total := now.values.get(f"{name}_total"))}
    for name, value in span.gauges.items():
        base, _, device = name.partition("/")
        if device:
            found[f"{base}/{label}_{device.replace(':', '_')}"] = value
    return found


def _label(task: str) -> str:
    return "_".join(part.partition(":")[2] for part in task.strip("/").split("/"))


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
        self._cluster = cluster
        self._writer = writer
        self._before: dict[str, tuple[rt.TaskReport, float]] = {}
        self._silent: set[str] = set()
        writer.add_layout(LAYOUT)
        self._probe()

    def write(self, step: int) -> dict[str, float]:
        """Samples every task, writes a point of each series at ``step``, and returns the points: tag -> value."""
        before = dict(self._before)
        self._probe()
        found: dict[str, float] = {}
        for task, (report, at) in self._before.items():
            earlier = before.get(task)
            if earlier is None:
                found |= scalars(task, None, report, time.time() - report.started_unix_secs)
            elif at > earlier[1]:
                found |= scalars(task, earlier[0], report, at - earlier[1])
        if found:
            self._writer.add_scalars(found, step)
        return found

    def _probe(self) -> None:
        states = probe_tasks(self._cluster, REQUEST_SECS)
        for state in states:
            if state.report is not None and state.report.task == state.task:
                self._before[state.task] = (state.report, time.monotonic())
        silent = [state.task for state in states if state.report is None]
        if gone := [task for task in silent if task not in self._silent]:
            logging.info("no figures from %s: not reached, or done", ", ".join(gone))
        self._silent = set(silent)


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
        self, coord: Coordinator, secs: float, session: rt.Session, global_step: rt.TensorLike, writer: SeriesWriter
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
                self._series = StandardSeries(rt.probe(self._session.target, REQUEST_SECS).cluster, self._writer)
                # Rates need two samples.
                return
            with while_open(self._session):
                self._series.write(int(self._session.run(self._global_step)))
        except (rt.UnavailableError, rt.AbortedError, rt.DeadlineExceededError) as error:
            logging.info("no figures of the cluster this time: %s", error)
