"""The options of a server: the keyword arguments of `Server`, their environment variables and their meaning."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple

from runtime.backup.primary import DEFAULT_LAG
from runtime.checkpoint.roots import ROOT_VARIABLE
from runtime.cluster.spec import ClusterSpec, TaskId
from runtime.errors import InvalidArgumentError
from runtime.limits import VARIABLE as LIMITS_VARIABLE
from runtime.limits import Limits
from runtime.observe.audit import VARIABLE as AUDIT_VARIABLE
from runtime.server.binding import BIND_VARIABLE
from runtime.trust.security import VARIABLE as SECURITY_VARIABLE
from runtime.trust.security import Security


class OptionRow(NamedTuple):
    """The description of one option, for errors and pages.

    Attributes:
        name: Keyword argument of `Server`, and field of `ServerOptions`.
        help: Meaning of the option, for the user.
        types: Types of valid values. None is valid too, for an option that is not given.
        default: Default in words.
        variable: Environment variable for servers without the argument; empty for none.
        parse: Function that turns the variable's text into the value.
    """

    name: str
    help: str
    types: tuple[type, ...]
    default: str
    variable: str
    parse: Callable[[str], Any]


def _option(
    help: str,
    *types: type,
    value: Any = None,
    default: str = "",
    variable: str = "",
    parse: Callable[[str], Any] = str,
) -> Any:
    """Returns a field for an option.

    Args:
        help: Meaning of the option.
        *types: Types of valid values.
        value: Default value.
        default: Default in words; the value itself by default.
        variable: Environment variable for servers without the argument.
        parse: Function that turns the variable's text into the value.
    """
    metadata = {
        "help": help,
        "types": types,
        "default": default or f"{value}",
        "variable": variable,
        "parse": parse,
    }
    return field(default=value, metadata=metadata)


@dataclass(frozen=True)
class ServerOptions:
    """The options of one server.

    Equal options make equal servers, but for random ids and free ports.

    Each field but ``cluster`` is a row of the table, and an argument of `Server`.

    Raises:
        InvalidArgumentError: A value is not of its kind, or the cluster lacks the task. The message
            names the argument and the environment variable.

    Examples:
        >>> options = ServerOptions(ClusterSpec({"ps": ["localhost:0"]}), unix_socket=False)
        >>> str(options.task), options.filled({"BELLWETHER_BIND": "0.0.0.0"}).bind
        ('/job:ps/task:0', '0.0.0.0')
    """

    cluster: ClusterSpec
    job_name: str | None = _option("Job of the task.", str, default="the only job of the cluster")
    task_index: int | None = _option(
        "Index of the task.", Integral, default="the index of the job's only task"
    )
    config: Any = _option(
        "Default options of sessions on this server (``runtime.SessionConfig``).", object
    )
    data_port: int = _option(
        "TCP port of the tensor channel; 0 takes a free port, which clients learn over gRPC.",
        Integral,
        value=0,
    )
    unix_socket: bool = _option(
        "True offers tasks of this host a Unix socket for tensors, which is faster than TCP. No "
        "task uses the socket "
        "where ``BELLWETHER_FAST_PATH`` is 0.",
        bool,
        value=True,
    )
    ps_backups: int = _option(
        "1 backs this task's variables up on the next task of its job. After a restart the task "
        "continues from the "
        "backup and reads no checkpoint. All tasks of the job need the same value.",
        Integral,
        value=0,
    )
    ps_backups_lag: int = _option(
        "Steps whose updates may be lost in a restart. With 0 no answered update is lost, and each "
        "update waits for "
        "its backup.",
        Integral,
        value=DEFAULT_LAG,
    )
    checkpoint_root: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = _option(
        "Directory or URL (``gs://bucket/run``), or several, below which all checkpoints must lie; "
        "the variable has "
        "commas between several. An empty list refuses all orders about checkpoints.",
        *(str, os.PathLike, Iterable),
        default="a client may have any directory of this user written and read",
        variable=ROOT_VARIABLE,
        parse=lambda text: text.split(","),
    )
    bind: str | None = _option(
        "Host name or address to listen on, if the cluster has another one (behind a NAT, in a "
        "container with a port "
        'of its host); "0.0.0.0" for all interfaces.',
        str,
        default="the task's address",
        variable=BIND_VARIABLE,
    )
    security: Security | None = _option(
        "Certificates or token of the cluster, or ``Security.insecure()``.",
        Security,
        default="a token that all processes of this user find, for a task that only this machine reaches; any other "
        "task does not start",
        variable=SECURITY_VARIABLE,
        parse=Security.from_text,
    )
    limits: Limits | None = _option(
        "Limits on the use of this task (``runtime.Limits``); ``connections=100,hello_secs=5`` in "
        "the variable.",
        Limits,
        default="those of the class",
        variable=LIMITS_VARIABLE,
        parse=Limits.from_text,
    )
    audit_log: str | os.PathLike[str] | None = _option(
        "File to which the audit log is appended (docs/security.md).",
        *(str, os.PathLike),
        default="no file",
        variable=AUDIT_VARIABLE,
    )
    require_gpu: bool | None = _option(
        "True refuses to start without a GPU; a ps needs none.",
        bool,
        default="False",
        variable="BELLWETHER_REQUIRE_GPU",
        parse=lambda text: text != "0",
    )

    def __post_init__(self) -> None:
        """Checks the cluster, the task and the kind of each value."""
        self.cluster.validate()
        for row in self.rows():
            value = getattr(self, row.name)
            if value is not None and not isinstance(value, row.types):
                kinds = " or ".join(kind.__name__ for kind in row.types)
                raise InvalidArgumentError(
                    f"the option {row.name} is {value!r}, not {kinds} (Server({row.name}=) "
                    f"{row.variable})"
                )
        # Raises for a job or index that the cluster lacks.
        self.cluster.task_address(self.task.job, self.task.index)

    @classmethod
    def rows(cls) -> list[OptionRow]:
        """Returns the table: the descriptions of all options."""
        return [
            OptionRow(found.name, **found.metadata)
            for found in dataclasses.fields(cls)
            if found.metadata
        ]

    @classmethod
    def described(cls) -> str:
        """Returns the table as the arguments of a docstring."""
        return "\n".join(
            f"    {row.name}: {row.help} By default "
            f"{f'``{row.variable}``, else ' * bool(row.variable)}{row.default}."
            for row in cls.rows()
        )

    @functools.cached_property
    def task(self) -> TaskId:
        """The task of the server."""
        job, index = self.job_name, self.task_index
        if job is None:
            if len(self.cluster.jobs) != 1:
                raise InvalidArgumentError(
                    f"Must specify an explicit `job_name`: the cluster has jobs {self.cluster.jobs}"
                )
            job = self.cluster.jobs[0]
        if index is None:
            indices = self.cluster.task_indices(job)
            if len(indices) != 1:
                raise InvalidArgumentError(
                    f"Must specify an explicit `task_index`: job {job!r} has tasks {indices}"
                )
            index = indices[0]
        return TaskId(job, index)

    def filled(self, environ: Mapping[str, str]) -> "ServerOptions":
        """Returns a copy with the values of environment variables for the options that are not given.

        Raises:
            InvalidArgumentError: A variable has an invalid value.
        """
        # An empty variable counts as unset: manifests write empty texts for values that are not
        # given.
        told = {
            row.name: row.parse(text)
            for row in self.rows()
            if row.variable
            and getattr(self, row.name) is None
            and (text := environ.get(row.variable))
        }
        return dataclasses.replace(self, **told)
