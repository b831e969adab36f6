"""A Prometheus endpoint for one task: the same figures that ``harness.status`` shows, under ``bellwether_...``.

On the loopback every process may read the figures. Elsewhere the endpoint requires the credentials
that the task requires: TLS with a certificate of the cluster's CA, or a bearer token that is
derived from the cluster's token.
"""

import contextlib
import hmac
import ipaddress
import socket
import socketserver
import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from absl import logging
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import runtime as rt
from harness.monitoring import times
from runtime import concurrency

LOCAL_HOST = "127.0.0.1"
REQUESTS = 8
"""Most requests at once; further requests are refused, and Prometheus repeats a request."""
_PREFIX = "bellwether_"


class TaskCollector(Collector):
    """The figures of a server, for Prometheus."""

    def __init__(self, server: rt.Server) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        """Yields the figures as metric families, with the labels ``job`` and ``task``."""
        report = self._server.report()
        job, index = self._server.task.job, str(self._server.task.index)
        started = GaugeMetricFamily(
            f"{_PREFIX}started_unix_secs", "when the task began to serve", labels=_LABELS
        )
        started.add_metric([job, index], report.started_unix_secs)
        yield started
        by_name: dict[str, list[tuple[str, float]]] = {}
        for name, value in report.values.items():
            base, _, device = name.partition("/")
            by_name.setdefault(base, []).append((device, value))
        for name, values in sorted(by_name.items()):
            assert len({bool(device) for device, _ in values}) == 1, "values with other labels"
            labels = [*_LABELS, "device"] if values[0][0] else list(_LABELS)
            kind: type[CounterMetricFamily | GaugeMetricFamily] = (
                CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            )
            family = kind(_PREFIX + name, rt.lowlevel.METRICS[name], labels=labels)
            for device, value in values:
                family.add_metric([job, index, device] if device else [job, index], value)
            yield family
        yield _staleness_family(job, index, report.staleness)


def _staleness_family(job: str, index: str, staleness: Sequence[int]) -> Metric:
    """Returns the number of updates by how many steps they were behind; the last label stands for more steps, too."""
    text = rt.lowlevel.METRICS["updates_behind_total"]
    family = CounterMetricFamily(f"{_PREFIX}updates_behind", text, labels=[*_LABELS, "behind"])
    last = len(staleness) - 1
    for behind, count in enumerate(staleness):
        if count:
            family.add_metric([job, index, f"{behind}+" if behind == last else str(behind)], count)
    return family


_LABELS = ("job", "task")


class _ScrapeHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing, as there is a scrape every few seconds."""


class _HttpServer(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each request, a few at most, and none for longer than a request may take."""

    daemon_threads = True

    def __init__(
        self,
        host: str,
        port: int,
        tls: Callable[[], ssl.SSLContext] | None,
        refuse: Callable[[str, str | Exception], None],
    ) -> None:
        # The base class binds the port, so all fields are set before.
        self._tls = tls
        self._refuse = refuse
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = concurrency.Semaphore(REQUESTS)
        self._lock = concurrency.Lock()
        self._begun: dict[socket.socket, float] = {}
        super().__init__((host, port), _ScrapeHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a request on a thread, or refuses the request beyond ``REQUESTS``."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        if self._tls is not None:
            try:
                # The handshake comes later, on a thread: a silent client must not hold the listener
                # up.
                request = self._tls().wrap_socket(
                    request, server_side=True, do_handshake_on_connect=False
                )
            except OSError:
                # The client has hung up.
                self._free.release()
                raise
        with self._lock:
            self._begun[request] = concurrency.monotonic()
            assert len(self._begun) <= REQUESTS
        try:
            super().process_request(request, client_address)
        except BaseException:
            # The process may have too many threads.
            self._end_request(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves a request."""
        try:
            if isinstance(request, ssl.SSLSocket):
                try:
                    request.do_handshake()
                except OSError as error:
                    self._refuse(client_address[0], error)
                    self.shutdown_request(request)
                    return
            super().process_request_thread(request, client_address)
        finally:
            self._end_request(request)

    def _end_request(self, request: socket.socket) -> None:
        with self._lock:
            del self._begun[request]
        self._free.release()

    def service_actions(self) -> None:
        """Ends requests that take too long; the server calls this at every look for a stop."""
        late = concurrency.monotonic() - times.REQUEST_SECS
        with self._lock:
            for request, begun in self._begun.items():
                if begun < late:
                    # The request may have ended a moment ago.
                    with contextlib.suppress(OSError):
                        # SSLSocket.shutdown would forget the TLS state, which the serving thread
                        # still uses.
                        socket.socket.shutdown(request, socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs clients that hang up, or are cut off, at level DEBUG only."""
        logging.debug("a request for figures from %s failed", client_address, exc_info=True)


def _guard_app(
    app: WSGIApplication, bearer: str | None, refuse: Callable[[str, str | Exception], None]
) -> WSGIApplication:
    """Returns an application that requires a bearer token, if there is a token."""
    if bearer is None:
        return app
    expected = f"Bearer {bearer}".encode()

    def guarded(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        shown = str(environ.get("HTTP_AUTHORIZATION", "")).encode(errors="replace")
        # In constant time: a difference would tell the token byte by byte.
        if hmac.compare_digest(shown, expected):
            return app(environ, start_response)
        refuse(str(environ.get("REMOTE_ADDR", "")), "it has not shown the bearer token")
        start_response(
            "401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")]
        )
        return [b"figures are for those who show the bearer token of this cluster\n"]

    return guarded


def _is_loopback(host: str) -> bool:
    # A name may have several addresses, and each has to be the loopback.
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return all(ipaddress.ip_address(sockaddr[0]).is_loopback for *_, sockaddr in found)


class MetricsServer:
    """An HTTP endpoint that Prometheus can scrape, on a thread of its own.

    Args:
        server: the task.
        port: TCP port; 0 for a free port.
        host: host name or address to listen on. The default is the loopback, where every process
            may read the figures.

    Raises:
        OSError: The port is in use.
        InvalidArgumentError: The address is no loopback, and the task has neither certificates nor
            a token.
        UnauthenticatedError: The token cannot be read any more.
    """

    def __init__(self, server: rt.Server, port: int, host: str = LOCAL_HOST) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(TaskCollector(server))
        security = server.security
        app, tls = make_wsgi_app(registry), None
        if not _is_loopback(host):
            if security is None:
                raise rt.InvalidArgumentError(
                    f"figures at {host} are for others, too, and nothing says for whom: give "
                    "BELLWETHER_SECURITY a directory of certificates, or a file with a token"
                )
            if server.certificates is not None:
                # A method, as certificates are renewed while the endpoint runs.
                tls = server.certificates.server_context
            app = _guard_app(app, security.bearer(), server.tell_refused)
        self._http = _HttpServer(host, port, tls, server.tell_refused)
        self._http.set_app(app)
        self._threads = concurrency.ThreadGroup(f"figures of {server.task} for Prometheus")
        self._threads.start(self._http.serve_forever, times.STOP_LOOK_SECS, name="metrics")
        self.port = int(self._http.server_port)
        logging.info("%s: figures for Prometheus at port %d of %s", server.task, self.port, host)

    def close(self) -> None:
        """Stops listening."""
        self._http.shutdown()
        self._http.server_close()
        self._threads.close()

    def __enter__(self) -> "MetricsServer":
        """Returns the endpoint."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stops listening."""
        self.close()
