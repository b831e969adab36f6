"""Joining a cluster: a process finds out its task and serves that task.

Programs call ``join_cluster`` first.
"""

import argparse
import contextlib
import difflib
import functools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from absl import flags, logging
from jax.sharding import Mesh

import runtime as rt
from harness import exit_codes
from harness.training.stop.preemption import preemptible

_CHIEFS = ("chief", "master")
_HOSTS = {"chief_hosts": "chief", "ps_hosts": "ps", "worker_hosts": "worker"}
"""Flags with the addresses of a job's tasks."""
_FLAGS = (*_HOSTS, "job_name", "task_index")
"""All flags of a task."""
_OTHER_NAMES = {"task_id": "task_index", "task": "task_index", "job": "job_name"}
"""Names that other programs have for a flag of a task."""
assert {*_OTHER_NAMES.values()} <= {*_FLAGS}, "another name is that of no flag"
_ALIKE = 0.85
"""The least likeness (difflib) at which an unknown flag counts as a misspelt one."""

_show_once = functools.cache(exit_codes.show_line)
"""Shows a line for the first of several scopes of devices."""
_STEPS_OF_A_START = 100
"""More steps without training than a session takes to begin.

A task with more, such as an actor, does its work.
"""


@dataclass(frozen=True)
class TaskIdentity:
    """The place of a process in a cluster.

    Attributes:
        cluster: The cluster; None for a process that is alone.
        job: Job of the task.
        index: Number of the task in its job.
        source: The source of this identity, in words.
    """

    cluster: rt.ClusterSpec | None
    job: str
    index: int
    source: str


@dataclass(frozen=True)
class Member:
    """A task that has joined its cluster.

    Attributes:
        cluster: The cluster.
        job: "worker", as a rule; "chief" or "evaluator" where there is such a job.
        index: Number of the task in its job.
        server: Server of this task; None of an evaluator, to which no task connects.
    """

    cluster: rt.ClusterSpec
    job: str
    index: int
    server: rt.Server | None

    @property
    def target(self) -> str:
        """The target of sessions: this task; of an evaluator a ps, for ``harness.Evaluator(master=)``."""
        if self.server is not None:
            return self.server.target
        return f"grpc://{self.cluster.task_address('ps', 0)}" if "ps" in self.cluster.jobs else ""

    @property
    def is_chief(self) -> bool:
        """True on the task that initialises and saves: the task of job chief, else worker 0."""
        has_chief = any(job in _CHIEFS for job in self.cluster.jobs)
        return self.job in _CHIEFS or (self.job == "worker" and self.index == 0 and not has_chief)

    @property
    def workers(self) -> int:
        """The number of tasks that train."""
        return sum(
            self.cluster.num_tasks(job) for job in self.cluster.jobs if job in ("worker", *_CHIEFS)
        )

    @property
    def number(self) -> int:
        """The number of this task among the training tasks, the chief first: selects a share of the data."""
        before = (
            [job for job in self.cluster.jobs if job in _CHIEFS] if self.job == "worker" else []
        )
        return self.index + sum(self.cluster.num_tasks(job) for job in before)

    def device(self, *, mesh: Mesh | None = None) -> AbstractContextManager[None]:
        """Returns a device scope for the graph: variables on the ps, in turn, and all else on this task.

        Args:
            mesh: Devices on which this task computes, such as ``jax.make_mesh((4,), ("batch",))``;
                one device by default. See ``rt.mesh_device``.
        """
        on_mesh = ""
        if mesh is not None:
            on_mesh = rt.mesh_device(mesh)
            _show_once(f"{self.job} {self.index} computes on the {mesh.size} devices of a mesh")
        if self.server is None:
            # An evaluator has a graph of its own, on this machine.
            return rt.device(on_mesh) if on_mesh else contextlib.nullcontext()
        own = f"/job:{self.job}/task:{self.index}{on_mesh}"
        if "ps" not in self.cluster.jobs:
            return rt.device(own)
        return rt.device(rt.replica_device_setter(cluster=self.cluster, worker_device=own))


@contextlib.contextmanager
def join_cluster(
    argv: Sequence[str] | None = None,
    *,
    ps: int = 1,
    preempt_grace_secs: float = 30.0,
    **server_options: Any,
) -> Iterator[Member]:
    """Joins the cluster of this process, and leaves it at the end of the block.

        with harness.join_cluster() as me:
            with me.device():
                ...  # the graph
            supervisor = harness.Supervisor(is_chief=me.is_chief, logdir=logdir, global_step=global_step)
            with supervisor.managed_session(me.target) as session:
                ...

    The block is for tasks that train. A ps serves until training is over or SIGTERM comes, and then
    ends the program by SystemExit. An evaluator (``--job_name=evaluator``, or TF_CONFIG says so)
    has no server: look at ``me.job``, and give ``me.target`` to ``harness.Evaluator``.

    SIGTERM and Ctrl-C end the block in an orderly way (``harness.preemptible``). The chief of a
    Supervisor or a monitored session saves the present step, and the exit code is that of
    "preempted" or "interrupted". An error that nothing catches ends the program with the exit code
    that says whether a restart would help (``exit_codes.of_error``). So a program that is wrong
    before its first training step is not started again.

    The cluster and the task come from the first of these sources that has them:

    1. the flags ``--ps_hosts --worker_hosts --job_name --task_index``, also where the program does
        not define them;
    2. the environment variable TF_CONFIG, which ``harness.launch`` sets, and Kubeflow and others
        do;
    3. the variables of a pod of a JobSet (``rt.JobSetClusterResolver``);
    4. the variables of a Slurm step with several tasks (``srun --ntasks=3 python train.py``);
    5. none of them: this process trains alone, and a warning says so.

    Args:
        argv: Arguments that the program does not know itself, as ``parser.parse_known_args()``
            returns them. One that is no flag of a task either ends the program, as a flag that is
            misspelt should. Without ``argv`` the arguments of the process are searched, and those
            that are not a task's are passed over.
        ps: Number of ps among the tasks of a Slurm step; the others are workers.
        preempt_grace_secs: Seconds from SIGTERM to the hard end of the process.
        **server_options: Further arguments of ``rt.Server``, such as ``ps_backups=1`` or
            ``security=...``.

    Raises:
        SystemExit: The cluster is not described whole, there is no such task, or the server has no
            credential. The program ends with one line, and the exit code of a wrong configuration.
            Also after a ps has served, with the code of "done", or of "preempted" where SIGTERM has
            come before training was over.
        OpError: The server cannot start, such as UnknownError where its port is in use.
    """
    with preemptible(preempt_grace_secs):
        try:
            me = find_identity(
                sys.argv[1:] if argv is None else argv, os.environ, ps, strict=argv is not None
            )
            if me.cluster is None:
                logging.warning("%s: this process trains alone", me.source)
            # An evaluator serves no task.
            server = None
            if me.job != "evaluator":
                cluster = me.cluster or rt.ClusterSpec({"worker": ["localhost:0"]})
                server = rt.Server(cluster, me.job, me.index, **server_options)
        except (
            rt.InvalidArgumentError,
            rt.UnauthenticatedError,
            rt.PermissionDeniedError,
        ) as error:
            exit_codes.leave(exit_codes.of_error(error), str(error))
        with server or contextlib.nullcontext():
            is_ps = me.job == "ps"
            # The server has logged the line at a level that few programs show.
            if server and not logging.level_info():
                does = (
                    f"serves at {server.target}"
                    if is_ps
                    else f"computes on {server.worker.computes_on}"
                )
                print(f"{me.job} {me.index} {does}", file=sys.stderr)
            if server and is_ps:
                raise SystemExit(exit_codes.of_join(server.join()))
            # A port 0 in the cluster has become a real one when the server is up.
            cluster = server.cluster if server is not None else me.cluster or rt.ClusterSpec({})
            try:
                yield Member(cluster, me.job, me.index, server)
            except Exception as error:
                row = exit_codes.of_error(error, begun=server is None or _has_begun(server))
                exit_codes.end_with(row, error)
                raise


def _has_begun(server: rt.Server) -> bool:
    """Returns True if this task does its work: an error of Python may then be the fault of the data."""
    # Steps of training are certain. Steps of other kinds are many at the start of a session, too.
    values = server.report().values
    return values["steps_total"] > 0 or values["other_steps_total"] > _STEPS_OF_A_START


def find_identity(
    argv: Sequence[str], environ: Mapping[str, str], ps: int = 1, *, strict: bool = False
) -> TaskIdentity:
    """Returns the task that this process is; see ``join_cluster``.

    Args:
        argv: Arguments of the program.
        environ: Environment of the program.
        ps: Number of ps among the tasks of a Slurm step.
        strict: True where every argument has to be a flag of a task.

    Raises:
        InvalidArgumentError: The cluster is not described whole, or an argument is nearly a flag of
            a task, or none.

    Examples:
        >>> from harness.training.run.join import find_identity
        >>> flags = ["--ps_hosts=a:1", "--worker_hosts=b:1,c:1", "--job_name=worker", "--task_index=1"]
        >>> me = find_identity(flags, {})
        >>> me.job, me.index
        ('worker', 1)
    """
    told = _find_flags(argv, strict)
    # A person types flags, so they count before what an engine has put into the environment.
    if told:
        return _from_flags(told)
    if environ.get("TF_CONFIG") and (found := _from_tf_config()):
        return found
    if environ.get("JOBSET_NAME"):
        spec, task = rt.JobSetClusterResolver().checked()
        return TaskIdentity(spec, task.job, task.index, "JobSet")
    # A step of one task is a program that runs alone under Slurm.
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1":
        return _from_slurm(tasks, ps)
    return TaskIdentity(
        None, "worker", 0, "no cluster in flags, TF_CONFIG, a JobSet or a Slurm step"
    )


def _from_tf_config() -> TaskIdentity | None:
    """Returns the task of TF_CONFIG; None where that has no cluster."""
    resolver = rt.TFConfigClusterResolver()
    try:
        if not resolver.cluster_spec().jobs and resolver.task_type != "evaluator":
            return None
    except (TypeError, ValueError):
        pass  # ``checked`` below says in one line what is wrong
    cluster, task = resolver.checked()
    return TaskIdentity(cluster, task.job, task.index, "TF_CONFIG")


def _from_slurm(tasks: str, ps: int) -> TaskIdentity:
    if not tasks.isdecimal() or not 0 < ps < int(tasks):
        raise rt.InvalidArgumentError(
            f"a Slurm step of {tasks} tasks (SLURM_STEP_NUM_TASKS) cannot have {ps} ps and workers "
            "too: raise srun --ntasks, or change join_cluster(ps=...)"
        )
    try:
        slurm = rt.SlurmClusterResolver({"ps": ps, "worker": int(tasks) - ps})
    except RuntimeError as error:
        raise rt.InvalidArgumentError(str(error)) from None
    if slurm.task_type is None:
        number = os.environ.get("SLURM_PROCID")
        raise rt.InvalidArgumentError(
            f"SLURM_PROCID={number} is no task of a Slurm step of {tasks} tasks"
        )
    return TaskIdentity(slurm.cluster_spec(), str(slurm.task_type), slurm.task_id or 0, "Slurm")


def _find_flags(argv: Sequence[str], strict: bool) -> dict[str, str]:
    """Returns the flags of the cluster by name: those of absl where the program parses them, else of ``argv``."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in _FLAGS:
        parser.add_argument(f"--{name}")
    # One dash too, as absl accepts it. argparse knows two dashes only: of a flag with one dash it
    # would take a beginning too, such as a program's own -p.
    one_dash = {f"-{name}" for name in _FLAGS}
    parsed, rest = parser.parse_known_args(
        [
            f"-{word}" if word.partition("=")[0] in one_dash else word
            for word in argv
            if word != "--"
        ]
    )
    found = {name: value for name, value in vars(parsed).items() if value} | _absl_flags()
    for argument in rest:
        given = argument.lstrip("-").partition("=")[0]
        meant = _meant_flag(given, found)
        if argument.startswith("-") and meant and given not in flags.FLAGS:
            raise rt.InvalidArgumentError(
                f"--{given} is no flag of a task; did you mean --{meant}?"
            )
    if strict and rest:
        raise rt.InvalidArgumentError(
            f"{' '.join(rest)}: neither this program nor a task of a cluster has such a flag, see "
            f"--help; a task has {', '.join(f'--{name}' for name in _FLAGS)}"
        )
    return found


def _absl_flags() -> dict[str, str]:
    """Returns the flags that absl has parsed, flag files included; a default counts for addresses only."""
    found: dict[str, str] = {}
    for name in _FLAGS if flags.FLAGS.is_parsed() else ():
        flag = flags.FLAGS[name] if name in flags.FLAGS else None
        if (
            flag is not None
            and flag.value not in (None, "", [])
            and (name in _HOSTS or flag.present)
        ):
            found[name] = ",".join(flag.value) if isinstance(flag.value, list) else str(flag.value)
    return found


def _meant_flag(given: str, found: Mapping[str, str]) -> str:
    """Returns the flag of a task that a misspelt flag stands for; empty for none."""
    # A flag that is there already is not what a misspelt one was meant to be.
    absent = [name for name in _FLAGS if name not in found]
    other = _OTHER_NAMES.get(given, "")
    if found and other in absent:
        return other
    return next(iter(difflib.get_close_matches(given, absent, 1, _ALIKE)), "")


def _from_flags(told: Mapping[str, str]) -> TaskIdentity:
    hosts = {job: enumerate(told[flag].split(",")) for flag, job in _HOSTS.items() if flag in told}
    # Of workers that come and go a task need not know the address: it may be left out between its
    # commas.
    cluster = {
        job: {i: host.strip() for i, host in found if host.strip()} for job, found in hosts.items()
    }
    # An evaluator may know of no cluster: it reads the run directory.
    alone = told.get("job_name") == "evaluator"
    if not (cluster or alone) or "job_name" not in told:
        given = ", ".join(f"--{name}" for name in told)
        lacking = "--job_name" if cluster else "--ps_hosts and --worker_hosts"
        raise rt.InvalidArgumentError(
            f"{given} given without {lacking}: a task of a cluster needs both"
        )
    index = told.get("task_index", "0")
    if not index.isdecimal():
        raise rt.InvalidArgumentError(
            f"--task_index={index}: give the number of the task in its job, from 0"
        )
    return TaskIdentity(rt.ClusterSpec(cluster), told["job_name"], int(index), "flags")
