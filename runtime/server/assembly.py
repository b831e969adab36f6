"""The parts of a task, made from the options of its server.

`assemble` opens no port and starts no thread. It reads the credential of the task, opens the audit
log and finds the devices of the process. `Server` then opens the ports in their order.
"""

import contextlib
import os
import resource
import sys
from dataclasses import dataclass

import jax
from absl import logging

from runtime import concurrency
from runtime.backup import takeover
from runtime.backup.holder import BackupHolder
from runtime.checkpoint.roots import ROOT_VARIABLE, Roots, roots_of
from runtime.cluster.device_spec import DeviceSpec
from runtime.cluster.spec import EVALUATOR, TaskId, split_address
from runtime.errors import InvalidArgumentError, PermissionDeniedError
from runtime.limits import Limits
from runtime.master import tasks
from runtime.master.master import Master
from runtime.observe import device_report
from runtime.observe.audit import AuditLog
from runtime.rpc.rpc import ClientCheck
from runtime.server import binding
from runtime.server.call_control import CallControl
from runtime.server.control_plane import ControlPlane
from runtime.server.options import ServerOptions
from runtime.server.peers import TaskPeers
from runtime.server.pools import CallPools
from runtime.server.remote_sessions import RemoteSessions
from runtime.server.session_signs import SessionSigns
from runtime.server.task_life import TaskLife
from runtime.server.training_end import TrainingEnd
from runtime.state.participants import TaskEnvironment
from runtime.task import cpu_share
from runtime.task.worker import Worker
from runtime.trust import roles
from runtime.trust.certificates import Certificates
from runtime.trust.roles import ANYBODY, Identity, identity_of
from runtime.trust.security import WAYS_OUT, RefusalLog, Security
from runtime.trust.token_files import KEY_BYTES
from runtime.wire.connection import Reply, ServerContext
from runtime.wire.listener import TensorServer
from runtime.wire.reply_cache import LaneTable

_INSECURE = (
    "%s is insecure: whoever reaches its ports can use it as its user can, and nothing is encrypted"
)
_NOT_ENCRYPTED = (
    "%s asks for a token, which keeps strangers out, but nothing is encrypted: certificates would "
    "do both"
)
_NO_ROOT = (
    "%s has no checkpoint root: whoever reaches its ports can have any directory written and read "
    "that this user may; "
    f"give Server(checkpoint_root=...) or {ROOT_VARIABLE}"
)


@dataclass(frozen=True)
class TaskCredential:
    """The credential of a task, and the addresses that decide if the task needs one.

    Attributes:
        hosts: Addresses of this machine on which the task listens.
        security: Security settings of the cluster; None if the task has drawn a token for the
            processes of its user.
        key: Token that clients must have; None lets every client in, or certificates decide.
        certificates: Certificates of the task; None without.
        own: Identity in the task's own certificate; ANYBODY without one.
    """

    hosts: tuple[str, ...]
    security: Security | None
    key: bytes | None
    certificates: Certificates | None
    own: Identity

    def __post_init__(self) -> None:
        assert self.key is None or self.certificates is None, "a task has one credential"
        assert self.security is not None or self.is_local, "other machines reach a drawn token"

    @property
    def is_local(self) -> bool:
        """True if only this machine reaches the task."""
        return binding.is_loopback(self.hosts)

    @property
    def lets_all_in(self) -> bool:
        """True if the task asks for no credential."""
        return self.certificates is None and self.key is None

    def warn_of_strangers(self, task: str, roots: Roots) -> None:
        """Logs which rules keep no stranger out.

        Args:
            task: Name of the task.
            roots: Directories for the checkpoints of the task.
        """
        if self.lets_all_in:
            logging.warning(_INSECURE, task)
        elif self.certificates is None and not self.is_local:
            logging.info(_NOT_ENCRYPTED, task)
        # Without a credential and a root, any host of the network can have any directory of this
        # user written.
        if self.lets_all_in and not self.is_local and roots.paths is None:
            logging.log_first_n(logging.WARNING, _NO_ROOT, 1, task)


@dataclass(frozen=True)
class TaskParts:
    """The parts of a task. No attribute of a part is set after the part was made.

    Attributes:
        task: The task.
        limits: Limits on the use of the task. With few open files, the connections are fewer than
            were given.
        credential: Credential of the task.
        life: Ids and state of this process of the task.
        backup_holder: Name of the task that holds this task's backup; empty without a backup.
        backup_lag: Most answered updates that the backup may lack.
        peers: Addresses and channels of the cluster's tasks.
        audit: Audit log of the task.
        refusals: Log of refused clients.
        worker: State and stages of the task.
        tensors: Server of the tensor channel.
        master: Runner of the steps of sessions on the task.
        remote_sessions: Sessions of clients in other processes.
        pools: Pools of the calls of the control plane.
        control: gRPC server of the control plane.
        end: Wait for the end of training.
    """

    task: TaskId
    limits: Limits
    credential: TaskCredential
    life: TaskLife
    backup_holder: str
    backup_lag: int
    peers: TaskPeers
    audit: AuditLog
    refusals: RefusalLog
    worker: Worker
    tensors: TensorServer
    master: Master
    remote_sessions: RemoteSessions
    pools: CallPools
    control: ControlPlane
    end: TrainingEnd


def assemble(options: ServerOptions) -> TaskParts:
    """Returns the parts of a task. Opens no port and starts no thread.

    Args:
        options: Options of the server, with those of the environment.

    Raises:
        InvalidArgumentError: An option does not fit the cluster or this machine.
        UnauthenticatedError: The credential cannot be used.
        PermissionDeniedError: The certificate is that of another task, or of no task.

    Examples:
        >>> from runtime.cluster.spec import ClusterSpec
        >>> parts = assemble(ServerOptions(ClusterSpec({"local": ["localhost:0"]})))
        >>> str(parts.task), parts.tensors.port
        ('/job:local/task:0', 0)
    """
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise InvalidArgumentError(
            "JAX_DISABLE_JIT is set, and a server compiles what it runs: unset it"
        )
    task, name, limits = (
        options.task,
        str(options.task),
        _limits_of_process(options.limits or Limits()),
    )
    credential, life = read_credential(options), TaskLife(name)
    audit = AuditLog(name, options.audit_log)
    refusals, pools = RefusalLog(name, audit), CallPools(limits)
    # The port may still be 0. `Server` notes the real port, and every part asks `peers` for it.
    peers = TaskPeers(options.cluster, task, credential.hosts, credential.security)
    over, lanes = concurrency.Event(), LaneTable[Reply](limits)
    # The lanes are made before their server, because the worker asks them about sessions.
    signs = SessionSigns(lanes)
    worker = _assemble_worker(options, limits, peers, audit, signs, over)
    context = ServerContext(
        handler=worker,
        key=credential.key,
        incarnation=life.incarnation,
        task=name,
        limits=limits,
        own=credential.own,
        tls=None if credential.certificates is None else credential.certificates.server_context,
        refusals=refusals,
        lanes=lanes,
    )
    check = ClientCheck(name, credential.key, refusals, lambda: peers.dialled)
    control = CallControl(
        name, credential.own, credential.certificates is not None, check, pools, audit, refusals
    )
    return TaskParts(
        task=task,
        limits=limits,
        credential=credential,
        life=life,
        backup_holder=_backup_holder(options),
        backup_lag=options.ps_backups_lag,
        peers=peers,
        audit=audit,
        refusals=refusals,
        worker=worker,
        tensors=TensorServer(
            context, hosts=credential.hosts, port=options.data_port, unix=options.unix_socket
        ),
        master=Master(lambda: peers.cluster, (task.job, task.index), worker, credential.security),
        remote_sessions=RemoteSessions(limits),
        pools=pools,
        control=ControlPlane(
            task, credential.hosts, [check, control], limits, credential.certificates
        ),
        end=TrainingEnd(name, worker.store, over),
    )


def _backup_holder(options: ServerOptions) -> str:
    return takeover.holder(
        options.cluster, options.task, options.ps_backups, options.ps_backups_lag
    )


def _assemble_worker(
    options: ServerOptions,
    limits: Limits,
    peers: TaskPeers,
    audit: AuditLog,
    signs: SessionSigns,
    over: concurrency.Event,
) -> Worker:
    cluster, task = options.cluster, options.task
    backups = BackupHolder(audit, peers.check_is_task) if _backup_holder(options) else None
    environment = TaskEnvironment(
        # Run records show this address to other tasks, and nobody asks before the port is open.
        address=lambda: peers.address,
        expected=frozenset(str(t) for t in cluster.tasks() if t.job not in (task.job, EVALUATOR)),
        limits=limits,
        when_all_done=over.set,
        when_joined=_show_joined,
        when_loading=backups.drop_all if backups else lambda: None,
        silent=signs.silent_secs,
        lives=signs.is_alive,
        connected=signs.is_connected,
        own=tasks.is_local_session,
    )
    # XLA makes its threads when the worker looks for the devices of this process.
    with cpu_share.limited(cluster, task):
        worker = Worker(
            task.job,
            task.index,
            tasks.make_fetcher(peers.find),
            environment,
            audit=audit,
            roots=roots_of(options.checkpoint_root),
            cores=cpu_share.share(cluster, task, os.cpu_count() or 1, of_job=True),
            check_is_one_of=peers.check_is_one_of,
            backups=backups,
        )
    # A ps adds numbers, on the CPU.
    if task.job != "ps":
        if options.require_gpu and not device_report.accelerators(worker.devices):
            raise InvalidArgumentError(
                f"a GPU is required, and JAX has none: {device_report.why_no_gpu(os.environ)}",
                task=str(task),
            )
        logging.info("%s computes on %s", task, worker.computes_on)
    return worker


def _limits_of_process(limits: Limits) -> Limits:
    # A process without free file descriptors can neither accept a connection nor open a checkpoint.
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limits if descriptors == resource.RLIM_INFINITY else limits.within(descriptors)


def read_credential(options: ServerOptions) -> TaskCredential:
    """Returns the credential of a task, from the files that the security settings name.

    Args:
        options: Options of the server.

    Raises:
        InvalidArgumentError: The address is unusable, or other machines reach the task and no
            security is given.
        UnauthenticatedError: The token or the certificates cannot be used.
        PermissionDeniedError: The certificate is that of another task, or of no task.
    """
    task = options.task
    host, _ = split_address(options.cluster.task_address(task.job, task.index))
    hosts = binding.listen_on(options.cluster, task, options.bind)
    if options.security is None:
        if not binding.is_loopback(hosts):
            raise InvalidArgumentError(
                f"it listens at {', '.join(hosts)}, which others reach, and nothing says whom it "
                f"lets in: {WAYS_OUT}",
                task=str(task),
            )
        # Only this machine reaches the task, so a token of this process keeps other users out.
        return TaskCredential(hosts, None, concurrency.random_bytes(KEY_BYTES), None, ANYBODY)
    security = options.security.of_host(host)
    token, certificates = security.token(), security.tls()
    # The certificates may come from an earlier server of this process, and may have expired
    # meanwhile.
    if certificates is not None:
        certificates.check()
    return TaskCredential(
        hosts, security, token and token.key, certificates, _own_identity(certificates, task)
    )


def _own_identity(certificates: Certificates | None, task: TaskId) -> Identity:
    """Returns the identity in the task's own certificate.

    Raises:
        PermissionDeniedError: The certificate is that of another task, or of no task.
    """
    if certificates is None:
        return ANYBODY
    try:
        names = certificates.current.names
        own = identity_of(names)
        roles.check_serves(names, str(task))
    except PermissionDeniedError as error:
        text = f"{certificates.pair.certificate} is not for this server: {error.message}"
        raise PermissionDeniedError(text, task=str(task)) from None
    return own


def _show_joined(task: str) -> None:
    """Logs that a task has joined, or prints the line on stderr where the program's log shows warnings only."""
    found = DeviceSpec.parse(task)
    line = f"{found.job} {found.task} joined"
    if logging.level_info():
        logging.info("%s", line)
        return
    # The caller is the order of the worker, which a closed terminal does not end.
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
