"""The server of one task, with a gRPC port and a tensor port.

A program makes one `Server` per process and calls ``join``, or opens sessions on its ``target``. A
notebook may have several in one process. `ServerOptions` describes the arguments, and `assemble`
makes the parts; the server opens the ports, starts and stops the parts in their order, and waits
for the end of training.
"""

from __future__ import annotations

import atexit
import inspect
import multiprocessing
import os
import weakref
from collections.abc import Sequence
from typing import Any

from absl import logging

from runtime import concurrency, retired
from runtime.backup import takeover
from runtime.backup.holder import Header, packed_message, read_message
from runtime.backup.primary import DEFAULT_LAG
from runtime.cluster.spec import ClusterSpec, split_address
from runtime.errors import TaskLeftError, UnknownError
from runtime.limits import Limits
from runtime.master import tasks
from runtime.server import times
from runtime.server.assembly import assemble
from runtime.server.options import ServerOptions
from runtime.server.ports import wait_for_port
from runtime.server.report import TaskReport, report, report_from_proto
from runtime.server.services import add_services
from runtime.server.training_end import read_drain_secs, started_by_sigterm
from runtime.state.forks import HomeProcess
from runtime.trust.security import Security, leave_token, no_handshake, share


class Server:
    """The server of one task of a cluster.

    Serves until ``stop``, or until the end of a ``with`` block or ``join``.

    Args:
        cluster: A ClusterSpec, or a dict or ClusterDef of one.
        start: True starts the server at once.

    All other arguments are options, which `ServerOptions` describes.

    Attributes:
        task: The task.
        listens_on: Addresses of this machine at which both ports are open.
        config: Default options of sessions.
        limits: Limits on the use of the task; fewer connections where few files may be open.
        security: Security settings; None if the task has drawn a token for the processes of its
            user.
        certificates: Certificates of the task; None without.
        worker: State and stages of the task.
        master: Runner of the steps of sessions on this task.
        tensors: Server of the tensor channel, with its port, Unix socket and counters.
        remote_sessions: Sessions of clients in other processes.
        pools: Pools of the calls of the control plane.

    Raises:
        InvalidArgumentError: The job or index is not in the cluster; the address is unusable or not
            this machine's; no next task can hold a backup; other machines reach the task and no
            security is given; a required GPU is missing; or ``jax_disable_jit`` is set.
        UnauthenticatedError: The token's file cannot be read, or other users can read the file; or
            the host has no certificate, or an expired one.
        PermissionDeniedError: No directory for a token is private to this user; or the certificate
            is that of another task, or of no task.
        UnknownError: Another process has the port. The message names both.

    Examples:
        >>> with Server({"local": ["localhost:0"]}) as server:
        ...     server.target.startswith("grpc://localhost:")
        True
    """

    @retired.explains_arguments
    def __init__(
        self,
        cluster: Any,
        job_name: str | None = None,
        task_index: int | None = None,
        config: Any = None,
        start: bool = True,
        *,
        data_port: int = 0,
        unix_socket: bool = True,
        ps_backups: int = 0,
        ps_backups_lag: int = DEFAULT_LAG,
        checkpoint_root: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        bind: str | None = None,
        security: Security | None = None,
        limits: Limits | None = None,
        audit_log: str | os.PathLike[str] | None = None,
        require_gpu: bool | None = None,
    ) -> None:
        retired.check_environment(os.environ)
        # Variables fill in what the program leaves out, so the program is checked before them.
        options = ServerOptions(
            ClusterSpec(cluster),
            *(job_name, task_index, config, data_port, unix_socket, ps_backups, ps_backups_lag),
            *(checkpoint_root, bind, security, limits, audit_log, require_gpu),
        )
        self._serve_parts(options.filled(os.environ))
        if start:
            self.start()

    def _serve_parts(self, options: ServerOptions) -> None:
        """Assembles the parts, takes the gRPC port, and publishes the server in this process."""
        parts = self._parts = assemble(options)
        self.task, self.limits, self.config = parts.task, parts.limits, options.config
        self.worker, self.master, self.tensors = parts.worker, parts.master, parts.tensors
        self.remote_sessions, self.pools = parts.remote_sessions, parts.pools
        credential = parts.credential
        self.listens_on, self.security = credential.hosts, credential.security
        self.certificates = credential.certificates
        self._home = HomeProcess("the server")
        self._certificate_watch: concurrency.PeriodicCall | None = None
        # The port is taken now and not in start(), because sessions and other tasks need the
        # address.
        _, port = split_address(self.address)
        wait_for_port(self.listens_on, port, self.task, options.cluster, self.security)
        port = parts.control.bind(port)
        parts.peers.settle(port)
        # A client that finds the port open must find the token.
        drawn = credential.key if credential.is_local else None
        self._tokens = [] if drawn is None else leave_token(drawn, self.listens_on, port)
        add_services(parts)
        # From here on sessions and peers of this process use the server without a connection.
        tasks.publish(self.address, self)
        self._unshare = share(self.security) if self.security else lambda: None

    @staticmethod
    def create_local_server(config: Any = None, start: bool = True) -> Server:
        """Returns the server of a new cluster with one task.

        The task is ``/job:local/task:0``, on a free port of the loopback.

        Args:
            config: Default options of sessions on the server.
            start: True starts the server at once.

        Examples:
            >>> with Server.create_local_server() as server:
            ...     str(server.task)
            '/job:local/task:0'
        """
        return Server({"local": ["localhost:0"]}, "local", 0, config, start)

    @property
    def cluster(self) -> ClusterSpec:
        """The cluster from the task's own view, with the port in place of a port 0."""
        return self._parts.peers.cluster

    @property
    def address(self) -> str:
        """``host:port`` of the control plane."""
        return self._parts.peers.address

    @property
    def incarnation(self) -> int:
        """The random id that tells a process of the task from earlier ones.

        A process that continues from the task's backup takes over the id of the process before.
        """
        return self._parts.life.incarnation

    @property
    def takeovers(self) -> int:
        """The number of times the task has continued from its backup."""
        return self._parts.life.takeovers

    @property
    def started_unix_secs(self) -> float:
        """The start of this process of the task, seconds since the epoch."""
        return self._parts.life.started_unix_secs

    @property
    def target(self) -> str:
        """The target for sessions: ``grpc://host:port``."""
        return f"grpc://{self.address}"

    def report(self, *, variables: bool = False, threads: bool = False) -> TaskReport:
        """Returns the figures of this task: steps, times, bytes, memory and errors.

        Args:
            variables: True lists the task's variables, too.
            threads: True lists the running threads of this process, too.
        """
        return report_from_proto(report(self._parts, variables=variables, threads=threads))

    def tell_refused(self, peer: str, why: str | Exception) -> None:
        """Logs and audits a client refused by the HTTP endpoint with this task's figures.

        Args:
            peer: Address of the client, without a port.
            why: Reason in words, or the error of the TLS handshake.
        """
        self._parts.refusals.tell(
            peer, f"{no_handshake(why) if isinstance(why, Exception) else why} (metrics)"
        )

    def start(self) -> None:
        """Starts the server. Does nothing the second time.

        Raises:
            UnknownError: Another process has the port of the tensor channel. The server has stopped.
        """
        if not self._parts.life.begin():
            return
        try:
            self._start_parts()
        except BaseException:
            self.stop(0)
            raise
        self._parts.life.open()
        concurrency.before_exit(self._outlast_sessions)
        atexit.register(_end_calls, weakref.ref(self))
        self._parts.control.announce()
        if self.certificates is not None:
            self._tell_near_end()
            self._certificate_watch = concurrency.every(
                times.CERTIFICATE_LOOK_SECS, self._tell_near_end, blocks=True
            )
        self._parts.credential.warn_of_strangers(
            str(self.task), self.worker.checkpoint_participant.roots
        )
        logging.info(
            "%s serves at %s (tensors at port %d)", self.task, self.target, self.tensors.port
        )

    def _start_parts(self) -> None:
        if self._parts.backup_holder:
            # gRPC starts first, because tasks that start together request each other's backups. The
            # tensor channel starts last, because no client may call before the backup is read.
            self._parts.control.start()
            self._begin_backup(self._parts.backup_holder)
            self._start_tensors()
        else:
            self._start_tensors()
            self._parts.control.start()

    def _tell_near_end(self) -> None:
        """Warns if the certificate is near its end.

        The files may lie on a disk that does not answer.
        """
        assert self.certificates is not None
        self.certificates.tell_near_end(str(self.task))

    def _start_tensors(self) -> None:
        port = self.tensors.port
        wait_for_port(self.listens_on, port, self.task, self.cluster, self.security, tensors=True)
        try:
            self.tensors.start()
        # Another process may have taken the port after the wait.
        except OSError as error:
            text = f"cannot listen on the data port {port}: {error.strerror or error}"
            raise UnknownError(text, task=str(self.task)) from error

    def _begin_backup(self, holder: str) -> None:
        """Continues from the task's backup, if any, and begins the next backup.

        Args:
            holder: Name of the task that holds the backup.
        """

        def send(header: Header, arrays: Sequence[Any]) -> tuple[Header, Sequence[Any]]:
            return read_message(
                self._parts.peers.find(holder).about_backup(packed_message(header, arrays))
            )

        resumed = takeover.begin_backup(
            self.worker, holder, self._parts.backup_lag, self.incarnation, send
        )
        # Clients repeat their calls to the same incarnation.
        if resumed.takeovers:
            self._parts.life.resume(resumed.incarnation, resumed.takeovers)
            self.tensors.inherit(
                self.incarnation, {key: (a.seq, a.reply) for key, a in resumed.answered.items()}
            )

    def stop(self, grace_secs: float = times.STOP_SECS, *, leaving: bool = False) -> None:
        """Stops the server, closes its sessions and connections, and releases its ports.

        Does nothing the second time, and nothing in a forked child of the process that made the
        server.

        Args:
            grace_secs: Seconds for the calls under way; 2 by default.
            leaving: True at the end of training: later calls of clients fail with a TaskLeftError.
                With False, clients wait for the task to come back.
        """
        parts = self._parts
        if self._home.was_left or parts.end.stopped.is_set():
            return
        tasks.withdraw(self.address, self)
        if self._certificate_watch is not None:
            self._certificate_watch.stop()
        parts.control.announce_end()
        self.master.stop()
        self.remote_sessions.end_all()
        if leaving:
            self.worker.store.run.close(
                TaskLeftError("it has left: training is over", task=self.worker.task)
            )
        # The tensor channel reports the end first. A client that saw a closed gRPC port before
        # would wait for the task to come back.
        if leaving:
            self.tensors.stop(grace_secs, leaving=True)
        # Sessions of this process hold the worker itself and see no closed port.
        tasks.leave(self.address, self)
        if self.worker.primary is not None:
            self.worker.primary.close()
        parts.peers.close()
        parts.control.stop(grace_secs)
        self.tensors.stop(grace_secs)
        for left in self._tokens:
            left.close()
        self._unshare()
        # The last calls write their outcome into the audit log, so the log outlives both ports.
        parts.audit.close()
        parts.end.note_stop()

    def join(self, late_secs: float = times.LATE_SECS, drain_secs: float | None = None) -> bool:
        """Serves until training is over, until ``stop`` is called, or until SIGTERM arrives.

        SIGTERM is handled only if the caller is the main thread.

        Training is over for this task when every task of the other jobs has reported its end. A
        Supervisor sends that report. Then the server stops. After the chief has finished, the task
        waits for each worker without a report while the worker's connections show life. The wait
        for a silent worker ends after the time set by the chief (``stop_grace_secs``). Under a
        launcher that stops the ps tasks itself, no report ends the server.

        Args:
            late_secs: Seconds after the chief's end for which the task waits for workers that never
                came; 600 by default.
            drain_secs: Most seconds for which the task serves after SIGTERM while training tasks
                are connected. If all tasks receive SIGTERM at once, the chief needs this time for
                its last checkpoint. By default ``BELLWETHER_DRAIN_SECS``, else 0.

        Returns:
            False if SIGTERM has ended the task before the end of training, else True. After False
            the process should exit with the code for "preempted" (docs/launch.md). With code 0 an
            engine would count the task as complete.

        Raises:
            InvalidArgumentError: ``BELLWETHER_DRAIN_SECS`` is no number.
        """
        drain = read_drain_secs(os.environ) if drain_secs is None else drain_secs
        stop = concurrency.ThreadGroup(str(self.task), daemon=False).create(
            self._drain_and_stop, drain, name="stop"
        )
        with started_by_sigterm(stop):
            self._wait_over(late_secs)
        return stop.ident is None or self.worker.store.run.finished_at is not None

    def _outlast_sessions(self) -> None:
        # A forked child ends without the sessions of its parent.
        try:
            if not self._home.was_left:
                self._parts.end.outlast_sessions()
        except KeyboardInterrupt:
            # No program is left that could handle the error, and other calls before the exit wait.
            self.stop()

    def _drain_and_stop(self, secs: float) -> None:
        """Stops the server when no training task is connected, at the latest after ``secs``."""
        self._parts.end.drain(secs)
        self.stop()

    def _wait_over(self, late_secs: float) -> None:
        try:
            if self._parts.end.wait(late_secs):
                self.stop(leaving=True)
        except KeyboardInterrupt:
            self.stop()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _end_calls(known: weakref.ref[Server]) -> None:
    """Ends the calls of other processes before Python ends.

    At its end Python ends each daemon thread that comes back from native code. Within compiled code
    that aborts the process.
    """
    server = known()
    if not server or server._home.was_left:
        return
    # Python still waits for children other than daemons, which may need the server.
    if all(child.daemon for child in multiprocessing.active_children()):
        server._parts.control.stop(0)
        server.tensors.stop()
        server._parts.control.threads.join(times.EXIT_SECS)


# help(Server) shows the options too, by the words of their table.
Server.__doc__ = inspect.cleandoc(Server.__doc__ or "").replace(
    "\n\nAll other arguments are options, which `ServerOptions` describes.",
    f"\n{ServerOptions.described()}",
)
