"""A Prometheus endpoint for one task: the same figures that ``harness.status`` shows, under ``bellwether_...``."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from absl import logging
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import runtime as rt

LOCAL_HOST = "127.0.0.1"
REQUESTS = 8
"""How many requests are served at once; further ones are turned away, and Prometheus comes again."""
REQUEST_SECS = 5.0
"""How long a request may take, from its connection to the end of its answer."""
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
            kind: Any = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(_PREFIX + name, rt.lowlevel.METRICS[name], labels=labels)
            for device, value in values:
                family.add_metric([job, index, device] if device else [job, index], value)
            yield family
        stale = CounterMetricFamily(
            f"{_PREFIX}updates_behind",
            rt.lowlevel.METRICS["updates_behind_total"],
            labels=[*_LABELS, "behind"],
        )
        last = len(report.staleness) - 1
        for behind, count in enumerate(report.staleness):
            if count:
                stale.add_metric([job, index, f"{behind}+" if behind == last else str(behind)], count)
        yield stale


_LABELS = ("job", "task")


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: a scrape every few seconds is no news."""


class _HttpServer(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each request, a few at most, and none for longer than a request may take."""

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = threading.Semaphore(REQUESTS)
        self._lock = threading.Lock()
        self._begun: dict[socket.socket, float] = {}
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Has a thread serve a request, or turns it away."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            self._begun[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread to be had
            self._over(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves a request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._over(request)

    def _over(self, request: socket.socket) -> None:
        with self._lock:
            del self._begun[request]
        self._free.release()

    def service_actions(self) -> None:
        """Called twice a second: ends requests that take too long."""
        late = time.monotonic() - REQUEST_SECS
        with self._lock:
            for request, begun in self._begun.items():
                if begun < late:
                    with contextlib.suppress(OSError):  # it has just ended
                        request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of clients that hang up, or are cut off."""
        logging.debug("a request for figures from %s failed", client_address, exc_info=True)


class MetricsServer:
    """An HTTP endpoint that Prometheus can scrape, on a thread of its own.

    Args:
        server: the task.
        port: TCP port; 0 takes a free one.
        host: host name or address to listen on; by default only this machine reaches it. Anybody may ask who does.

    Raises:
        OSError: the port is in use.
    """

    def __init__(self, server: rt.Server, port: int, host: str = LOCAL_HOST) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(TaskCollector(server))
        self._http = _HttpServer(host, port)
        self._http.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._http.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.port = int(self._http.server_port)
        logging.info("%s: figures for Prometheus at port %d of %s", server.task, self.port, host)

    def close(self) -> None:
        """Stops listening."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        """Gives the endpoint itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stops listening."""
        self.close()
