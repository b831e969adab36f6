"""The server of one task, with a gRPC port and a tensor port.

A program makes one `Server` per process and calls ``join``, or opens sessions on its ``target``. A notebook may have
several in one process.
"""

from __future__ import annotations

import functools
import itertools
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import jax
from absl import logging
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from runtime import concurrency, retired
from runtime.backup import takeover
from runtime.backup.holder import BackupHolder, Header, packed_message, read_message
from runtime.backup.image import capture
from runtime.backup.primary import DEFAULT_LAG, Primary
from runtime.checkpoint.roots import ROOT_VARIABLE, roots_of
from runtime.cluster.spec import EVALUATOR, ClusterSpec, TaskId, agree, join_address, split_address
from runtime.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    TaskLeftError,
    UnavailableError,
    UnknownError,
)
from runtime.limits import Limits
from runtime.master import tasks
from runtime.master.master import Master
from runtime.master.tasks import LocalTask, RemoteTask, Task
from runtime.observe.audit import VARIABLE as AUDIT_VARIABLE
from runtime.observe.audit import AuditLog
from runtime.rpc import rpc
from runtime.rpc.threads import CallThreads
from runtime.server import binding
from runtime.server.call_control import CallControl
from runtime.server.pools import CallPools
from runtime.server.ports import wait_for_port
from runtime.server.remote_sessions import RemoteSessions
from runtime.server.report import TaskReport, report, report_from_proto
from runtime.server.services import add_services
from runtime.state.forks import HomeProcess
from runtime.task import cpu_share
from runtime.task.worker import Worker
from runtime.timeouts import HEARTBEAT_TIMEOUT_SECS, LOG_EVERY_SECS
from runtime.trust import roles
from runtime.trust.certificates import Certificates
from runtime.trust.roles import ANYBODY, Identity, identity_of
from runtime.trust.security import WAYS_OUT, Refusals, Security, leave_token, no_handshake, share
from runtime.trust.token_files import KEY_BYTES
from runtime.wire.connection import ServerContext, current_identity
from runtime.wire.dial import ChannelOptions
from runtime.wire.listener import TensorServer

DRAIN_VARIABLE = "BELLWETHER_DRAIN_SECS"
"""Environment variable: most seconds for which a task serves after SIGTERM while training tasks are connected."""
_STOP_SECS = 2.0
LATE_SECS = 600.0
"""Default seconds after the chief's end for which a task waits for workers that never came."""
_POLL_SECS = 1.0
# A certificate may near its end, or be replaced, while no client connects.
_CHECK_SECS = 60.0
_INSECURE = "%s is insecure: whoever reaches its ports can use it as its user can, and nothing is encrypted"
_NOT_ENCRYPTED = "%s asks for a token, which keeps strangers out, but nothing is encrypted: certificates would do both"
_DRAIN_POLL_SECS = 0.1
_NO_ROOT = (
    "%s has no checkpoint root: whoever reaches its ports can have any directory written and read that this user may; "
    f"give Server(checkpoint_root=...) or {ROOT_VARIABLE}"
)


class Server:
    """The server of one task of a cluster. Serves until ``stop``, or until the end of a ``with`` block or ``join``.

    Args:
        cluster: A ClusterSpec, or a dict or ClusterDef of one.
        job_name: Job of the task; by default the only job of the cluster.
        task_index: Index of the task; by default the index of the job's only task.
        config: Default options of sessions on this server (``runtime.SessionConfig``).
        start: True starts the server at once.
        data_port: TCP port of the tensor channel; 0 takes a free port, which clients learn over gRPC.
        unix_socket: True offers tasks of this host a Unix socket for tensors, which is faster than TCP. No task uses
            the socket where ``BELLWETHER_FAST_PATH`` is 0.
        ps_backups: 1 backs this task's variables up on the next task of its job. After a restart the task continues
            from the backup and reads no checkpoint. All tasks of the job need the same value.
        ps_backups_lag: Steps whose updates may be lost in a restart. With 0 no answered update is lost, and each update
            waits for its backup.
        checkpoint_root: Directory or URL (``gs://bucket/run``), or several, below which all checkpoints must lie. An
            empty list refuses all orders about checkpoints. By default ``BELLWETHER_CHECKPOINT_ROOT``, with commas
            between several; without both, a client may have any directory of this user written and read.
        bind: Host name or address to listen on, if the cluster has another one (behind a NAT, in a container with a
            port of its host); "0.0.0.0" for all interfaces. By default ``BELLWETHER_BIND``, else the task's address.
        security: Certificates or token of the cluster, or ``Security.insecure()``; by default from
            ``BELLWETHER_SECURITY``. Without both, a task that only this machine reaches draws a token that all
            processes of this user find, and any other task does not start.
        limits: Limits on the use of this task (``runtime.Limits``); by default from ``BELLWETHER_LIMITS``
            (``connections=100,hello_secs=5``).
        audit_log: File to which the audit log is appended (docs/security.md); by default from
            ``BELLWETHER_AUDIT_LOG``, else none.

    Attributes:
        task: The task.
        cluster: The cluster from the task's own view, with the port in place of a port 0.
        address: ``host:port`` of the control plane.
        listens_on: Addresses of this machine at which both ports are open.
        config: Default options of sessions.
        limits: Limits on the use of the task. With few open files, the connections are fewer than were given.
        security: Security settings; None if the task has drawn a token for the processes of its user.
        certificates: Certificates of the task; None without.
        incarnation: Random id of this process of the task. A task that continues from its backup keeps its id.
        started_unix_secs: Start of this process of the task, seconds since the epoch.
        takeovers: Number of times the task has continued from its backup.
        worker: State and stages of the task.
        master: Runner of the steps of sessions on this task.
        tensors: Server of the tensor channel, with its port, Unix socket and counters.
        remote_sessions: Sessions of clients in other processes.
        pools: Pools of the calls of the control plane.

    Raises:
        InvalidArgumentError: The job or index is not in the cluster; the address is unusable or not this machine's;
            no next task can hold a backup; other machines reach the task and no security is given; or
            ``jax_disable_jit`` is set. The message says which.
        UnauthenticatedError: The token's file cannot be read, or other users can read the file; or the host has no
            certificate, or an expired one.
        PermissionDeniedError: No directory for a token is private to this user; or the certificate is that of another
            task, or of no task.
        UnknownError: Another process has the port. The message names both.

    Example:
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
    ) -> None:
        retired.check_environment(os.environ)
        spec = ClusterSpec(cluster)
        spec.validate()
        self.task = _own_task(spec, job_name, task_index)
        roots = roots_of(checkpoint_root, os.environ)
        given_limits = limits or Limits.from_environ(os.environ)
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            raise InvalidArgumentError("JAX_DISABLE_JIT is set, and a server compiles what it runs: unset it")
        # A process without free file descriptors can neither accept a connection nor open a checkpoint.
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limits = given_limits if descriptors == resource.RLIM_INFINITY else given_limits.within(descriptors)
        self.limits = limits
        self._holder = takeover.holder(spec, self.task, ps_backups, ps_backups_lag)
        self._lag = ps_backups_lag
        self.config = config
        self.incarnation = concurrency.random_id(63) | 1
        self.started_unix_secs = concurrency.wall_time()
        self._home = HomeProcess("the server")
        self._peers: dict[str, Task] = {}
        self._peers_lock = concurrency.Lock()
        self._stopped = concurrency.Event()
        # Set when ``join`` should end: the server has stopped, or no task needs this task any more.
        self._over = concurrency.Event()
        self._started = self._open = False
        self.takeovers = 0
        with cpu_share.limited(spec, self.task):
            self.worker = Worker(self.task.job, self.task.index, tasks.make_fetcher(self._peer), limits)
        self.worker.checkpoint_participant.roots = roots
        self.worker.checkpoint_participant.cores = cpu_share.share(spec, self.task, os.cpu_count() or 1, of_job=True)
        host, port = split_address(spec.task_address(self.task.job, self.task.index))
        self.listens_on = binding.listen_on(spec, self.task, bind, os.environ)
        # Other tasks know this process as a client by its own id. The incarnation will not do: a task that continues
        # from its backup takes over the incarnation of a process whose lanes the other tasks remember.
        self._client_id = concurrency.random_id(63) | 1
        local = binding.is_loopback(self.listens_on)
        given = security or Security.from_environ(os.environ)
        if given is None and not local:
            raise InvalidArgumentError(
                f"it listens at {', '.join(self.listens_on)}, which others reach, and nothing says whom it lets in: "
                f"{WAYS_OUT}",
                task=str(self.task),
            )
        self.security = None if given is None else given.of_host(host)
        token = self.security.token() if self.security else None
        self._key = token.key if token else concurrency.random_bytes(KEY_BYTES) if self.security is None else None
        self.certificates = self.security.tls() if self.security else None
        # The certificates may come from an earlier server of this process, and may have expired meanwhile.
        if self.certificates is not None:
            self.certificates.check()
        self._own = self._own_identity()
        self._audit = AuditLog(str(self.task), audit_log or os.environ.get(AUDIT_VARIABLE))
        self.worker.program_watch.audit = self._audit
        self.worker.check_is_one_of = self._check_is_one_of
        refusals = self._refusals = Refusals(str(self.task), self._audit)
        check = rpc.ClientCheck(str(self.task), self._key, refusals)
        self.pools = CallPools(limits)
        self._grpc = grpc.server(
            CallThreads("grpc"),
            interceptors=[
                check,
                CallControl(
                    str(self.task), self._own, self.certificates is not None, check, self.pools, self._audit, refusals
                ),
            ],
            options=rpc.server_options(limits),
        )
        self._grpc_started = False
        # The port is taken now and not in start(), because sessions and other tasks need the address.
        wait_for_port(self.listens_on, port, self.task, spec, self.security)
        bound = _bind(self._grpc, self.listens_on, port, self.task, self.certificates)
        check.addresses = [join_address(name, bound) for name in (host, *self.listens_on)]
        self._tokens = [] if self._key is None or not local else leave_token(self._key, self.listens_on, bound)
        self.address = join_address(host, bound)
        self.cluster = _with_address(spec, self.task, self.address) if bound != port else spec
        self._known = {str(task): address for task, address in self.cluster.tasks().items()}
        run = self.worker.store.run
        around = run.environment
        around.address = self.address
        around.expected = frozenset(str(t) for t in spec.tasks() if t.job not in (self.task.job, EVALUATOR))
        around.when_all_done = self._over.set
        around.silent, around.lives = self._silent_secs, self._lives
        self.worker.registry.connected = self._is_connected
        context = ServerContext(
            handler=self.worker,
            key=self._key,
            incarnation=self.incarnation,
            task=str(self.task),
            limits=limits,
            own=self._own,
            tls=None if self.certificates is None else self.certificates.server_context,
            refusals=refusals,
        )
        self.tensors = TensorServer(context, hosts=self.listens_on, port=data_port, unix=unix_socket)
        self.master = Master(self.cluster, (self.task.job, self.task.index), self.worker, self.security)
        self.remote_sessions = RemoteSessions(limits)
        self._health = health.HealthServicer()
        add_services(self._grpc, self, self.remote_sessions)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        # From here on sessions and peers of this process use the server without a connection.
        tasks.publish(self.address, self)
        self._unshare = share(self.security) if self.security else lambda: None
        if start:
            self.start()

    @staticmethod
    def create_local_server(config: Any = None, start: bool = True) -> Server:
        """Returns the server of a new cluster with one task.

        The task is ``/job:local/task:0``, on a free port of the loopback.

        Args:
            config: Default options of sessions on the server.
            start: True starts the server at once.

        Example:
            >>> with Server.create_local_server() as server:
            ...     str(server.task)
            '/job:local/task:0'
        """
        return Server({"local": ["localhost:0"]}, "local", 0, config, start)

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
        return report_from_proto(report(self, variables=variables, threads=threads))

    def tell_refused(self, peer: str, why: str | Exception) -> None:
        """Logs and audits a client refused by the HTTP endpoint with this task's figures.

        Args:
            peer: Address of the client, without a port.
            why: Reason in words, or the error of the TLS handshake.
        """
        self._refusals.tell(peer, f"{no_handshake(why) if isinstance(why, Exception) else why} (metrics)")

    def start(self) -> None:
        """Starts the server. Does nothing the second time.

        Raises:
            UnknownError: Another process has the port of the tensor channel. The server is stopped then.
        """
        if self._started:
            return
        self._started = True
        try:
            self._start()
        except BaseException:
            self.stop(0)
            raise
        self._open = True
        self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        if self.certificates is not None:
            concurrency.Thread(target=self._watch, args=(self.certificates,), name="certificates", daemon=True).start()
        elif self._key is None:
            logging.warning(_INSECURE, self.task)
        elif not binding.is_loopback(self.listens_on):
            logging.info(_NOT_ENCRYPTED, self.task)
        # Without a credential and a root, any host of the network can have any directory of this user written.
        local_only, lets_all_in = binding.is_loopback(self.listens_on), self.certificates is None and self._key is None
        if lets_all_in and not local_only and self.worker.checkpoint_participant.roots.paths is None:
            logging.log_first_n(logging.WARNING, _NO_ROOT, 1, self.task)
        logging.info("%s serves at %s (tensors at port %d)", self.task, self.target, self.tensors.port)

    def _start(self) -> None:
        if self._holder:
            self.worker.hold_backups(BackupHolder(self._audit, self._check_is_task))
            # gRPC starts first, because tasks that start together request each other's backups. The tensor channel
            # starts last, because no client may call before the backup is read.
            self._start_grpc()
            self._replicate(self._holder)
            self._start_tensors()
        else:
            self._start_tensors()
            self._start_grpc()

    def _watch(self, certificates: Certificates) -> None:
        """Warns while the certificate is near its end, even if no client connects."""
        certificates.tell_near_end(str(self.task))
        while not self._stopped.wait(_CHECK_SECS):
            certificates.tell_near_end(str(self.task))

    def _start_grpc(self) -> None:
        self._grpc_started = True
        self._grpc.start()

    def _start_tensors(self) -> None:
        port = self.tensors.port
        wait_for_port(self.listens_on, port, self.task, self.cluster, self.security, tensors=True)
        try:
            self.tensors.start()
        # Another process may have taken the port after the wait.
        except OSError as error:
            text = f"cannot listen on the data port {port}: {error.strerror or error}"
            raise UnknownError(text, task=str(self.task)) from error

    def _replicate(self, holder: str) -> None:
        """Continues from the task's backup, if any, and starts the next backup.

        Args:
            holder: Name of the task that holds the backup.
        """

        def send(header: Header, arrays: Sequence[Any]) -> tuple[Header, Sequence[Any]]:
            return read_message(self._peer(holder).about_backup(packed_message(header, arrays)))

        process_id = concurrency.random_id(62)
        resumed = takeover.take_up(self.worker, holder, process_id, send)
        # Clients repeat their calls to the same incarnation. The answers in the backup keep a repeated update from
        # being applied twice.
        if resumed is not None:
            self.incarnation, self.takeovers = resumed.incarnation, resumed.takeovers
            self.tensors.inherit(self.incarnation, {key: (a.seq, a.reply) for key, a in resumed.answered.items()})
        about = {"incarnation": self.incarnation, "takeovers": self.takeovers, "lag": self._lag}
        primary = self.worker.primary = Primary(
            self.worker.task,
            holder,
            self._lag,
            process_id,
            about,
            functools.partial(capture, self.worker),
            send,
            functools.partial(self.worker.leave, replaced=True),
        )
        if resumed is not None:
            primary.inherit(resumed.answered)
        primary.start()

    def _own_identity(self) -> Identity:
        """Returns the identity in the task's own certificate.

        Raises:
            PermissionDeniedError: The certificate is that of another task, or of no task.
        """
        if self.certificates is None:
            return ANYBODY
        try:
            names = self.certificates.current.names
            own = identity_of(names)
            roles.check_serves(names, str(self.task))
        except PermissionDeniedError as error:
            text = f"{self.certificates.pair.certificate} is not for this server: {error.message}"
            raise PermissionDeniedError(text, task=str(self.task)) from None
        return own

    def _check_is_task(self, task: str) -> None:
        """Checks that the present call of the tensor channel comes from ``task``.

        A client without a certificate passes.

        Args:
            task: Name of the task.

        Raises:
            PermissionDeniedError: The certificate belongs to another task or host, or the cluster has no such task.
        """
        # Only the own cluster counts. The addresses from hear_of come from clients, which may lie.
        address = next((a for known, a in self.cluster.tasks().items() if str(known) == task), None)
        if address is None:
            raise PermissionDeniedError(f"the cluster has no {task}", task=str(self.task))
        roles.check_is_task(current_identity(), task, split_address(address)[0])

    def _check_is_one_of(self, names: frozenset[str]) -> None:
        """Checks that the present fetch of a tensor comes from a task of ``names``.

        A client without a certificate passes.

        Args:
            names: Names of the tasks for which the tensor is held; empty for any task.

        Raises:
            PermissionDeniedError: The certificate belongs to another task or host.
        """
        who = current_identity()
        if not names or not who.names or who.task in names:
            return
        # A task at an unknown address may be on any host, so a certificate without a task passes for such a task.
        addresses = [self._known.get(name) for name in names]
        if not who.task and any(a is None or who.names_host(split_address(a)[0]) for a in addresses):
            return
        raise PermissionDeniedError(
            f"the tensor is held for {', '.join(sorted(names))}, and the certificate is that of {who}",
            task=str(self.task),
        )

    def check_session(self, session: int) -> None:
        """Checks that a session belongs to the client of the present gRPC call.

        Raises:
            PermissionDeniedError: The session belongs to another client.
        """
        # Without certificates all clients have the same token, so there is nothing to compare.
        if self.certificates is not None:
            self.tensors.lanes.check_client(session, rpc.caller())

    def check_open(self) -> None:
        """Checks that the server has started.

        Raises:
            UnavailableError: The server is starting.
        """
        # Before the end of the start the task does not know if it will continue from a backup, under the old id.
        if not self._open:
            raise UnavailableError("it is starting", task=self.worker.task)

    def _is_connected(self, session: int) -> bool:
        return tasks.is_local_session(session) or self.tensors.lanes.connected(session)

    def _silent_secs(self, session: int) -> float | None:
        """Returns the seconds since a session's last sign of life; None for an unknown session."""
        return 0.0 if tasks.is_local_session(session) else self.tensors.silent_secs(session)

    def _lives(self, session: int) -> bool:
        """Returns True if a session is connected here and the session's process shows life."""
        silent = self._silent_secs(session)
        return self._is_connected(session) and (silent is None or silent < HEARTBEAT_TIMEOUT_SECS)

    def stop(self, grace_secs: float = _STOP_SECS, *, leaving: bool = False) -> None:
        """Stops the server, closes its sessions and connections, and releases its ports.

        Does nothing the second time, and nothing in a forked child of the process that made the server.

        Args:
            grace_secs: Seconds for the calls under way; 2 by default.
            leaving: True at the end of training: later calls of clients fail with a TaskLeftError. With False, clients
                wait for the task to come back.
        """
        if self._home.was_left or self._stopped.is_set():
            return
        tasks.withdraw(self.address, self)
        self._health.enter_graceful_shutdown()
        self.master.stop()
        self.remote_sessions.end_all()
        if leaving:
            self.worker.store.run.close(TaskLeftError("it has left: training is over", task=self.worker.task))
        # The tensor channel reports the end first. A client that saw a closed gRPC port before would wait for the task
        # to come back.
        if leaving and self._started:
            self.tensors.stop(grace_secs, leaving=True)
        tasks.leave(self.address, self)
        if self.worker.primary is not None:
            self.worker.primary.close()
        with self._peers_lock:
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.close(0)
        if not self._grpc_started:
            # gRPC releases a port only at a stop, and stops only a started server.
            self._start_grpc()
        self._grpc.stop(grace_secs).wait()
        if self._started:
            self.tensors.stop(grace_secs)
        for left in self._tokens:
            left.close()
        self._unshare()
        self._audit.close()
        self._stopped.set()
        self._over.set()

    def join(self, late_secs: float = LATE_SECS, drain_secs: float | None = None) -> bool:
        """Serves until training is over, until ``stop`` is called, or until SIGTERM arrives.

        SIGTERM is handled only if the caller is the main thread.

        Training is over for this task when every task of the other jobs has reported its end, as a Supervisor does, and
        none of these tasks runs under a launcher that stops this task itself. Then the server stops. After the chief
        has finished, the task waits for each worker without a report while the worker's connections show life. The
        wait for a silent worker ends after the time set by the chief (``stop_grace_secs``).

        Args:
            late_secs: Seconds after the chief's end for which the task waits for workers that never came; 600 by
                default.
            drain_secs: Most seconds for which the task serves after SIGTERM while training tasks are connected. If all
                tasks receive SIGTERM at once, the chief needs this time for its last checkpoint. By default
                ``BELLWETHER_DRAIN_SECS``, else 0.

        Returns:
            False if SIGTERM has ended the task before the end of training, else True. After False the process should
            exit with the code for "preempted" (docs/launch.md). With code 0 an engine would count the task as complete.

        Raises:
            InvalidArgumentError: ``BELLWETHER_DRAIN_SECS`` is no number.
        """
        drain = _drain_secs(os.environ) if drain_secs is None else drain_secs
        if concurrency.current_thread() is concurrency.main_thread():
            before = signal.getsignal(signal.SIGTERM)
            # A signal handler interrupts the main thread at any instruction, maybe with a lock held. So the handler
            # only starts a thread.
            stop = concurrency.ThreadGroup(str(self.task), daemon=False).create(self._drain, drain, name="stop")
            # The signal may come twice: from an engine that signals all processes, and from a launcher.
            times = itertools.count()
            signal.signal(signal.SIGTERM, lambda *_: None if next(times) else stop.start())
            try:
                self._wait_over(late_secs)
            finally:
                signal.signal(signal.SIGTERM, before)
            return stop.ident is None or self.worker.store.run.finished_at is not None
        self._wait_over(late_secs)
        return True

    def _drain(self, secs: float) -> None:
        """Stops the server when no training task is connected, at the latest after ``secs``."""
        deadline = concurrency.monotonic() + secs
        living = self._living()
        if living and secs:
            logging.warning("%s: SIGTERM: serving on for %g s at most, for %s", self.task, secs, ", ".join(living))
            # The chief learns the time and saves before. Steps after the last checkpoint end with this task.
            self.worker.store.run.go_at(deadline)
        while (left := deadline - concurrency.monotonic()) > 0 and self._living():
            if self._over.wait(min(_DRAIN_POLL_SECS, left)):
                break
        self.stop()

    def _living(self) -> list[str]:
        """Returns the names of the connected tasks that take part in training."""
        sessions = self.worker.store.run.training()
        return sorted(t for t, s in sessions.items() if self._is_connected(s))

    def _wait_over(self, late_secs: float) -> None:
        run = self.worker.store.run
        try:
            # A short wait belongs to every normal end. Only a longer wait deserves a warning.
            log_at, log = 0.0, logging.info
            while not self._over.wait(_POLL_SECS):
                if run.may_leave(late_secs):
                    break
                awaited = run.awaited()
                if awaited and concurrency.monotonic() >= log_at:
                    log_at = concurrency.monotonic() + LOG_EVERY_SECS
                    who = "training is over" if not run.unfinished() else "some are done with training"
                    log("%s: %s; waiting for %s", self.task, who, ", ".join(map(str, awaited)))
                    log = logging.warning
            if self._stopped.is_set():
                if run.unfinished():
                    what = "started again, it goes on from the newest checkpoint"
                    logging.warning("%s stops before training has ended: %s", self.task, what)
                return
            for who_is_gone in run.awaited():
                logging.warning("%s: not waiting any longer for %s", self.task, who_is_gone)
            self._log_unsaved()
            logging.info("%s: training is over, nobody needs this task any more", self.task)
            self.stop(leaving=True)
        except KeyboardInterrupt:
            self.stop()
            raise

    def _log_unsaved(self) -> None:
        """Warns of steps after the chief's last checkpoint."""
        # A worker that the chief no longer waited for may have trained on.
        saved = self.worker.store.run.saved
        if saved is None or self.worker.store.uninitialized([saved[0]]):
            return
        now = int(self.worker.store.snapshot([saved[0]])[saved[0]])
        if now > saved[1]:
            logging.warning(
                "%s: the last checkpoint is of step %d, and training has come to step %d: steps %d to %d are not saved",
                *(self.task, saved[1], now, saved[1] + 1, now),
            )

    def __enter__(self) -> Server:
        """Returns the server itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the server."""
        self.stop()

    def hear_of(self, cluster: ClusterSpec) -> None:
        """Learns the addresses of the other ps from the cluster of a worker.

        Args:
            cluster: Cluster of the worker.
        """
        # Only a ps that was started with a cluster of its own task alone needs to learn, and only from a cluster that
        # contains the task.
        if len(self.cluster.tasks()) == 1 and agree(self.cluster, cluster):
            self._known.update({str(task): address for task, address in cluster.tasks().items() if task.job == "ps"})

    def _peer(self, name: str) -> Task:
        """Returns another task of the cluster, for a direct transfer of tensors.

        Raises:
            InvalidArgumentError: The address of the task is unknown.
        """
        with self._peers_lock:
            found = self._peers.get(name)
            # The task was restarted without its state. A channel belongs to one process, so a new channel is needed.
            if isinstance(found, RemoteTask) and found.peer.incarnation is not None and found.peer.lost:
                found.close(0)
                found = None
            if found is None:
                address = self._known.get(name)
                if address is None:
                    raise InvalidArgumentError(f"nobody has told it where {name} is", task=str(self.task))
                local = tasks.find_local(address)
                if local is not None:
                    return LocalTask(name, local)
                found = self._peers[name] = RemoteTask(name, address, self._client_id, ChannelOptions(), self.security)
            return found


def _drain_secs(environ: Mapping[str, str]) -> float:
    text = environ.get(DRAIN_VARIABLE) or "0"
    try:
        return float(text)
    except ValueError:
        raise InvalidArgumentError(f"{DRAIN_VARIABLE}={text!r} is no number of seconds") from None


def _own_task(spec: ClusterSpec, job: str | None, index: int | None) -> TaskId:
    if job is None:
        if len(spec.jobs) != 1:
            raise InvalidArgumentError(f"Must specify an explicit `job_name`: the cluster has jobs {spec.jobs}")
        job = spec.jobs[0]
    if index is None:
        indices = spec.task_indices(job)
        if len(indices) != 1:
            raise InvalidArgumentError(f"Must specify an explicit `task_index`: job {job!r} has tasks {indices}")
        index = indices[0]
    # Raises for a job or index that the cluster lacks.
    spec.task_address(job, index)
    return TaskId(job, index)


def _bind(server: grpc.Server, hosts: Sequence[str], port: int, task: TaskId, certificates: Certificates | None) -> int:
    add = server.add_insecure_port
    if certificates is not None:
        add = functools.partial(server.add_secure_port, server_credentials=rpc.server_credentials(certificates))
    # A free port is chosen at the first address and must be the same at all others.
    bound = port
    for host in hosts:
        try:
            bound = int(add(join_address(host, bound)))
        except RuntimeError:
            bound = 0
        if not bound:
            raise UnknownError(
                f"cannot listen on port {port} of {host}: gRPC could not bind it; give {task.job} task {task.index} "
                "another port",
                task=str(task),
            )
    return bound


def _with_address(spec: ClusterSpec, own: TaskId, address: str) -> ClusterSpec:
    jobs: dict[str, dict[int, str]] = {}
    for task, known in spec.tasks().items():
        jobs.setdefault(task.job, {})[task.index] = address if task == own else known
    return ClusterSpec(jobs)
