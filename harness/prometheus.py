"""A Prometheus endpoint for one task: the same figures that ``harness.status`` shows, under ``bellwether_...``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from wsgiref.simple_server import WSGIServer

from absl import logging
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import runtime as rt

_PREFIX = "bellwether_"


class TaskCollector(Collector):
    """Gives a server's figures when Prometheus asks."""

    def __init__(self, server: rt.Server) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        """The figures as metric families, with the labels ``job`` and ``task``."""
        report = self._server.report()
        job, index = self._server.task.job, str(self._server.task.index)
        started = GaugeMetricFamily(f"{_PREFIX}started_unix_secs", "when the task began to serve", labels=_LABELS)
        started.add_metric([job, index], report.started_unix_secs)
        yield started
        by_name: dict[str, list[tuple[str, float]]] = {}
        for name, value in report.values.items():
            base, _, device = name.partition("/")
            by_name.setdefault(base, []).append((device, value))
        for name, values in sorted(by_name.items()):
            labels = [*_LABELS, "device"] if values[0][0] else list(_LABELS)
            text = name.removesuffix("_total").replace("_", " ")
            kind: Any = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(_PREFIX + name, text, labels=labels)
            for device, value in values:
                family.add_metric([job, index, device] if device else [job, index], value)
            yield family
        stale = CounterMetricFamily(
            f"{_PREFIX}updates_behind", "updates by how far behind they were", labels=[*_LABELS, "behind"]
        )
        last = len(report.staleness) - 1
        for behind, count in enumerate(report.staleness):
            if count:
                stale.add_metric([job, index, f"{behind}+" if behind == last else str(behind)], count)
        yield stale


_LABELS = ("job", "task")


class Endpoint:
    """An HTTP endpoint that Prometheus can scrape, on a thread of its own.

    Args:
        server: the task.
        port: TCP port; 0 takes a free one.
        host: address to listen on; all by default.

    Raises:
        OSError: the port is in use.
    """

    def __init__(self, server: rt.Server, port: int, host: str = "") -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(TaskCollector(server))
        self._http: WSGIServer
        self._thread: threading.Thread
        self._http, self._thread = start_http_server(port, host or "0.0.0.0", registry)
        self.port = int(self._http.server_port)
        logging.info("%s: figures for Prometheus at port %d", server.task, self.port)

    def close(self) -> None:
        """Stops listening."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def __enter__(self) -> Endpoint:
        """Gives the endpoint itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stops listening."""
        self.close()
