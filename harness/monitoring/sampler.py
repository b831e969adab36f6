"""The tasks of a cluster and their figures, from one sample to the next.

The terminal (``status``) and TensorBoard (``cluster_scalars``) show the samples.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import runtime as rt
from harness.monitoring import times
from harness.monitoring.rates import figures
from runtime import concurrency


@dataclass(frozen=True)
class TaskStatus:
    """The state of a task of the cluster.

    Attributes:
        task: ``/job:ps/task:0``.
        address: address of the task.
        report: report of the task; None without an answer.
        problem: the reason why the task does not count as up; ``""`` if the task is up, or has a
            fate.
        fate: the reason, in words, why a task need not answer: its training is done, or it is in no
            cluster definition and has left or is gone. Such workers come and go.
        figures: figures since the sample before, or since the start of the task; see
            ``rates.figures``.
    """

    task: str
    address: str
    report: rt.TaskReport | None
    problem: str = ""
    fate: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


class ClusterSampler:
    """The samples of a cluster.

        sampler = Sampler(rt.ClusterSpec({"ps": ["a:2222"], "worker": ["b:2222"]}))
        states = sampler.sample()

    Args:
        cluster: the tasks.
        security: the credentials, as of ``runtime.probe``.
        answer_secs: seconds for an answer.
    """

    def __init__(
        self,
        cluster: rt.ClusterSpec,
        security: rt.Security | None = None,
        answer_secs: float = times.ANSWER_SECS,
    ) -> None:
        self._cluster = cluster
        self._security = security
        self._answer_secs = answer_secs
        self._before: dict[str, tuple[rt.TaskReport, float]] = {}

    def sample(self, variables: bool = False, threads: bool = False) -> list[TaskStatus]:
        """Probes every task at once, except evaluators, which serve no task.

        Workers that have joined the run besides come last.

        Args:
            variables: True if the reports list the variables.
            threads: True if the reports list the threads.
        """

        def probe(tasks: Mapping[str, str]) -> list[TaskStatus]:
            answers = concurrency.call_all(
                lambda task: self._probe_task(task, tasks[task], variables, threads),
                tasks,
                "probe of",
            )
            return [answer.result() for answer in answers.values()]

        named = {
            str(task): address
            for task, address in self._cluster.tasks().items()
            if task.job != "evaluator"
        }
        states = probe(named)
        # Workers that have joined are known to the tasks with variables.
        found = concurrency.call_all(
            lambda i: self._read_record(states[i]), range(len(states)), "run record of"
        )
        records = [record for answer in found.values() if (record := answer.result())]
        joined = {
            task: at
            for record in records
            for task, at in record.addresses.items()
            if task not in named
        }
        states += probe(dict(sorted(joined.items(), key=lambda item: (len(item[0]), item[0]))))
        fates = _find_fates(records, joined)
        return [
            replace(state, report=None, problem="", fate=fates[state.task])
            if state.task in fates and (state.report is None or state.report.task != state.task)
            else state
            for state in states
        ]

    def _probe_task(self, task: str, address: str, variables: bool, threads: bool) -> TaskStatus:
        try:
            report = rt.probe(
                address,
                self._answer_secs,
                variables=variables,
                threads=threads,
                security=self._security,
            )
        except rt.OpError as error:
            return TaskStatus(task, address, None, explain_error(error, self._answer_secs))
        now, (before, at) = concurrency.monotonic(), self._before.get(task, (None, 0.0))
        self._before[task] = (report, now)
        # The span of the first sample is the life of the task.
        secs = concurrency.wall_time() - report.started_unix_secs if before is None else now - at
        problem = ""
        if report.task != task:
            problem = f"another task answers: {report.task}"
        elif not rt.lowlevel.agree(report.cluster, self._cluster):
            problem = "knows another cluster"
        return TaskStatus(task, address, report, problem, figures=figures(before, report, secs))

    def _read_record(self, state: TaskStatus) -> rt.lowlevel.RunRecordView | None:
        """Returns the run record of a task; None for a task without variables."""
        if state.report is None or not state.report.values.get("variables"):
            return None
        only = rt.SessionConfig(device_filters=(state.task,))
        records = rt.lowlevel.RunRecords(f"grpc://{state.address}", only, security=self._security)
        records.answer_secs = self._answer_secs
        try:
            return records.inspect().get(state.task)
        except rt.OpError:
            # The task has gone meanwhile, or refuses this client.
            return None


def _find_fates(
    records: Sequence[rt.lowlevel.RunRecordView], joined: Iterable[str]
) -> dict[str, str]:
    """Returns the reasons, by task, why tasks need not answer.

    A silent task of the cluster definition is missing, so only tasks that have joined besides are
    gone.

    Args:
        records: the run records of the tasks with variables.
        joined: tasks that are in no cluster definition.
    """
    silent = {task: secs for record in records for task, secs in record.silent.items()}
    fates = {
        task: f"gone, no sign of life for {silent[task]:.0f} s" if task in silent else "gone"
        for task in joined
    }
    fates |= {task: "done" for record in records for task in record.done}
    return fates | {task: "left" for record in records for task in record.left}


def explain_error(error: rt.OpError, answer_secs: float) -> str:
    """Returns why a task is not up, by the error of its probe."""
    if isinstance(error, rt.DeadlineExceededError):
        return f"silent for {answer_secs:g} s"
    why = rt.lowlevel.why_not(error)
    if "nobody listens" in why:
        return "down: nobody listens"
    return f"down: {why}" if isinstance(error, rt.UnavailableError) else error.message
