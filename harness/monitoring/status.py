r"""The state of a cluster in the terminal: `python -m harness.status --target=host:port`, or with `--cluster=...`.

--cluster takes "ps=a:2222,b:2222;worker=c:2222", the same as JSON, or the name of a JSON file; --target asks one task
for the cluster that it knows. Workers that have joined the training run besides are shown too, also when they have left
or are gone. On a terminal the table is coloured, and redrawn in place by --watch. The exit
code is 0 if every task of the cluster answers and knows the same cluster, or is done with training, else 1. It is 2 for
invalid arguments.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

import runtime as rt
from harness import exit_codes
from harness.command_line import Parser
from harness.launch.output import wants_colour
from harness.monitoring.rates import Figures, figures, fitting, sizes, table

_AT_ONCE = 32


@dataclass(frozen=True)
class TaskStatus:
    """The state of a task of the cluster.

    Attributes:
        task: ``/job:ps/task:0``.
        address: address of the task.
        report: report of the task; None without an answer.
        problem: the reason why the task does not count as up; ``""`` if the task is up, or done.
        done: True if the task does not answer, and has said before that its training is done.
        gone: the fate, in words, of a task that does not answer and is in no cluster definition. Such workers come
            and go.
    """

    task: str
    address: str
    report: rt.TaskReport | None
    problem: str = ""
    done: bool = False
    gone: str = ""


def parse_cluster(text: str) -> rt.ClusterSpec:
    """Returns the cluster of ``--cluster``.

    Raises:
        InvalidArgumentError: The text has none of the three forms, or is not a cluster.
        OSError: The file cannot be read.
    """
    if os.path.exists(text):
        with open(text, encoding="utf-8") as file:
            text = file.read()
    text = text.strip()
    if text.startswith("{"):
        try:
            jobs = json.loads(text)
        except ValueError as error:
            raise rt.InvalidArgumentError(f"--cluster is not JSON: {error}") from None
        return rt.ClusterSpec(jobs.get("cluster", jobs))
    parsed: dict[str, list[str]] = {}
    for part in filter(None, text.split(";")):
        job, equals, hosts = part.partition("=")
        if not equals or not job.strip():
            raise rt.InvalidArgumentError(f"--cluster: {part!r} is not of the form job=host:port,host:port")
        parsed[job.strip()] = [host.strip() for host in hosts.split(",") if host.strip()]
        if not parsed[job.strip()]:
            raise rt.InvalidArgumentError(f"--cluster: {part!r} names no task: write job=host:port,host:port")
    return rt.ClusterSpec(parsed)


def probe_tasks(
    cluster: rt.ClusterSpec, timeout_secs: float, variables: bool = False, security: rt.Security | None = None
) -> list[TaskStatus]:
    """Probes every task of a cluster at once, except evaluators, which serve no task.

    ``security`` is as of ``runtime.probe``.
    """

    def ask(item: tuple[str, str]) -> TaskStatus:
        return _probe_one(*item, cluster, timeout_secs, variables, security)

    tasks = [(str(task), address) for task, address in cluster.tasks().items() if task.job != "evaluator"]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        states = list(pool.map(ask, tasks))
        found = [record for record in pool.map(lambda state: _record(state, timeout_secs, security), states) if record]
        named = {task for task, _ in tasks}
        joined = {task: address for record in found for task, address in record.addresses.items() if task not in named}
        states += pool.map(ask, sorted(joined.items(), key=lambda item: _order(item[0])))
    done = {task for record in found for task in record.done}
    left = {task for record in found for task in record.left}
    silent = {task: secs for record in found for task, secs in record.silent.items()}
    return [_known(state, named, done, left, silent) for state in states]


def _known(
    state: TaskStatus, named: Collection[str], done: Collection[str], left: Collection[str], silent: Mapping[str, float]
) -> TaskStatus:
    """Returns the state of a task, from the run records if the task does not answer."""
    if state.report is not None and state.report.task == state.task:
        return state
    if state.task in left:
        return replace(state, report=None, problem="", gone="left")
    if state.task in done:
        return replace(state, report=None, problem="", done=True)
    if state.task in named:
        return state
    secs = f", no sign of life for {silent[state.task]:.0f} s" if state.task in silent else ""
    return replace(state, report=None, problem="", gone=f"gone{secs}")


def _order(task: str) -> tuple[str, int]:
    job, _, index = task.rpartition(":")
    return job, int(index) if index.isdecimal() else 0


def _record(state: TaskStatus, timeout_secs: float, security: rt.Security | None) -> rt.lowlevel.RunRecordView | None:
    """Returns the run record of a task; None for a task without variables."""
    if state.report is None or not state.report.values.get("variables"):
        return None
    only = rt.SessionConfig(device_filters=(state.task,))
    records = rt.lowlevel.RunRecords(f"grpc://{state.address}", only, security=security)
    records.answer_secs = timeout_secs
    try:
        return records.inspect().get(state.task)
    except rt.OpError:
        # The task has gone meanwhile, or refuses this client.
        return None


def _probe_one(
    task: str,
    address: str,
    cluster: rt.ClusterSpec,
    timeout_secs: float,
    variables: bool,
    security: rt.Security | None,
) -> TaskStatus:
    try:
        report = rt.probe(address, timeout_secs, variables=variables, security=security)
    except rt.DeadlineExceededError:
        return TaskStatus(task, address, None, f"silent for {timeout_secs:g} s")
    except rt.UnavailableError:
        return TaskStatus(task, address, None, "down: nobody listens")
    except rt.OpError as error:
        return TaskStatus(task, address, None, error.message)
    if report.task != task:
        return TaskStatus(task, address, report, f"another task answers: {report.task}")
    if not rt.lowlevel.agree(report.cluster, cluster):
        return TaskStatus(task, address, report, "knows another cluster")
    return TaskStatus(task, address, report)


def role(task: str, others: Collection[str] = ()) -> str:
    """Returns the role of a task, from its job: "ps", "chief", "worker", or the name of the job.

    Args:
        task: name of the task.
        others: the tasks of the cluster. Worker 0 is the chief of a cluster without such a job.
    """
    _, job, index = (part.rpartition(":")[2] for part in ("", *task.strip("/").split("/")))
    led = any(other.startswith(("/job:chief/", "/job:master/")) for other in others)
    chief = job in ("chief", "master") or (job == "worker" and index == "0" and not led)
    return "chief" if chief else job


def as_rows(states: list[TaskStatus], spans: Mapping[str, Figures], now: float) -> list[list[str]]:
    """Returns the table of tasks, with its heading."""
    tasks = [state.task for state in states]
    rows = [["TASK", "ROLE", "STATE", *_COLUMNS, "LAST ERROR"]]
    for state in states:
        report = state.report
        if report is None:
            text = "done" if state.done else state.gone or state.problem
            rows.append([state.task, role(state.task, tasks), text, *[""] * (len(rows[0]) - 3)])
            continue
        up = f"up {_duration(now - report.started_unix_secs)}"
        if report.values.get("backup_usable") == 0:
            # A ps that has lost its backup trains on. The figure is absent without backups.
            up += ", no backup"
        if report.values.get("insecure"):
            up += ", insecure"
        if report.values.get("certificate_near_end"):
            up += f", certificate ends in {_duration(report.values['certificate_left_seconds'])}"
        error = report.last_error and f"{_duration(now - report.last_error_unix_secs)} ago: {report.last_error}"
        shown = [show(report, spans[state.task]) for show in _COLUMNS.values()]
        rows.append(
            [state.task, role(state.task, tasks), f"{up}, {state.problem}" if state.problem else up, *shown, error[:60]]
        )
    return rows


_COLUMNS: Mapping[str, Callable[[rt.TaskReport, Figures], str]] = {
    "INCARNATION": lambda report, span: f"{report.incarnation:016x}"[:8],
    "STEP": lambda report, span: _number(report.values.get("global_step"), 0),
    "STEPS/S": lambda report, span: _number(span.steps_per_sec, 1),
    "STEP MS": lambda report, span: _number(span.step_ms, 2),
    "PULL/COMP/PUSH": lambda report, span: (
        "" if span.pull_ms is None else f"{span.pull_ms:.2f}/{span.compute_ms:.2f}/{span.push_ms:.2f}"
    ),
    "STALE": lambda report, span: (
        "" if span.staleness_mean is None else f"{span.staleness_mean:.1f} max {span.staleness_max}"
    ),
    "APPLY MS": lambda report, span: _number(span.apply_ms, 2),
    "QUEUE": lambda report, span: _number(span.queue_depth, 0),
    "VARS": lambda report, span: f"{report.values.get('variables', 0):.0f}",
    "BYTES": lambda report, span: sizes(report.values.get("variable_bytes", 0)),
    "CONN": lambda report, span: f"{report.values.get('connections', 0):.0f}",
    "MEM": lambda report, span: sizes(report.values.get("memory_bytes", 0)),
    "CPU": lambda report, span: f"{span.cpu_percent or 0:.0f}%",
}
"""The cells of a task that answers, by heading."""


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _duration(seconds: float) -> str:
    seconds = max(0, round(seconds))
    hours, rest = divmod(seconds, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{secs:02d}s" if minutes else f"{secs}s"


def variable_rows(states: list[TaskStatus]) -> list[list[str]]:
    """Returns the table of variables, with its heading."""
    rows = [["VARIABLE", "TASK", "DTYPE", "SHAPE", "BYTES"]]
    for state in states:
        for v in state.report.variables if state.report else ():
            name = f"{v.container}:{v.name}" if v.container else v.name
            nbytes = _bytes(v.dtype, v.shape)
            shown = "" if nbytes is None else sizes(nbytes)
            rows.append([name, state.task, rt.lowlevel.dtype_name(v.dtype), str(list(v.shape)), shown])
    return [rows[0], *sorted(rows[1:])]


def _bytes(dtype: rt.lowlevel.DType, shape: Sequence[int]) -> int | None:
    """Returns the bytes of a variable's elements; None for strings, which have no fixed size."""
    return None if dtype.hasobject else dtype.itemsize * math.prod(shape)


def as_json(states: list[TaskStatus], spans: Mapping[str, Figures]) -> dict[str, object]:
    """Returns the states as a JSON object."""
    tasks = []
    for state in states:
        entry: dict[str, object] = {
            **vars(state),
            "role": role(state.task, [state.task for state in states]),
            "up": state.report is not None,
        }
        del entry["report"]
        if state.report is not None:
            report = asdict(state.report)
            report.pop("cluster")
            report["incarnation"] = f"{report['incarnation']:016x}"
            report["variables"] = [
                {
                    "name": v.name,
                    "container": v.container,
                    "dtype": rt.lowlevel.dtype_name(v.dtype),
                    "shape": list(v.shape),
                    "bytes": _bytes(v.dtype, v.shape),
                }
                for v in state.report.variables
            ]
            span = asdict(spans[state.task])
            span.pop("gauges")
            entry |= report | {"figures": span}
        tasks.append(entry)
    return {"whole": is_whole(states), "tasks": tasks}


def is_whole(states: list[TaskStatus]) -> bool:
    """Returns True if every task answers as itself and knows the same cluster, or is done with training."""
    return all(not state.problem for state in states)


def _colour(state: TaskStatus) -> int:
    """Returns the ANSI colour of a task's row: green, yellow, red, or grey where the task is done or gone."""
    if state.problem:
        return 31
    if state.report is None:
        return 90
    values = state.report.values
    doubtful = values.get("backup_usable") == 0 or values.get("insecure") or values.get("certificate_near_end")
    return 33 if doubtful else 32


def _lines(states: list[TaskStatus], spans: Mapping[str, Figures], variables: bool, width: int | None) -> list[str]:
    """Returns the lines that show a cluster, for a terminal of so many characters or for a pipe."""
    rows = as_rows(states, spans, time.time())
    lines = table(fitting(rows, width) if width else rows).splitlines()
    if width and wants_colour(sys.stdout):
        coloured = (f"\033[{_colour(state)}m{line}\033[0m" for state, line in zip(states, lines[1:], strict=True))
        lines = [lines[0], *coloured]
    if variables:
        lines += ["", *table(variable_rows(states)).splitlines()]
    if missing := [state.task for state in states if state.problem]:
        lines += ["", f"not whole: {', '.join(missing)}"]
    return lines


def _display(options: argparse.Namespace) -> Callable[[list[TaskStatus], Mapping[str, Figures]], None]:
    """Returns the function that shows the state of the cluster, by the arguments and the terminal."""
    if options.json:
        return lambda states, spans: print(json.dumps(as_json(states, spans)), flush=True)
    on_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    # Lines of the table above the cursor.
    drawn = 0

    def show(states: list[TaskStatus], spans: Mapping[str, Figures]) -> None:
        nonlocal drawn
        room = shutil.get_terminal_size()
        lines = _lines(states, spans, options.variables, room.columns if on_terminal else None)
        if options.watch and not on_terminal:
            lines = [f"-- {time.strftime('%H:%M:%S')}", *lines]
        elif options.watch:
            lines = [f"{line}\033[K" for line in lines[: room.lines - 1]]
            lines[0] = f"\033[{drawn}A{lines[0]}" if drawn else lines[0]
            lines[-1] += "\033[J"
            drawn = len(lines)
        print("\n".join(lines), flush=True)

    return show


def _parser() -> Parser:
    parser = Parser("harness.status", __doc__ or "")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--cluster", help='"ps=a:1,b:1;worker=c:1", or JSON, or a JSON file')
    which.add_argument("--target", metavar="HOST:PORT", type=_address, help="one task, which is asked for the cluster")
    parser.add_argument(
        "--security",
        metavar="DIR|FILE",
        help="the cluster's directory of certificates, or file with its token; $BELLWETHER_SECURITY by default",
    )
    parser.add_argument("--watch", action="store_true", help="show again every --interval seconds, until Ctrl-C")
    parser.add_argument("--interval", type=_positive, default=1.0, help="seconds over which rates are taken (1)")
    parser.add_argument("--timeout_secs", type=_positive, default=2.0, help="seconds to wait for a task's answer (2)")
    parser.add_argument("--json", action="store_true", help="a JSON object instead of a table; one a line with --watch")
    parser.add_argument("--variables", action="store_true", help="list which variables live where")
    return parser


def _address(text: str) -> str:
    host, _, port = text.removeprefix("grpc://").rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form host:port")
    return text


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


@exit_codes.printing()
def main(argv: Sequence[str] | None = None) -> int:
    """Shows the state of the cluster that the arguments name; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        security = None if options.security is None else rt.Security.from_text(options.security)
        if options.cluster is not None:
            cluster = parse_cluster(options.cluster)
        else:
            cluster = rt.probe(options.target, options.timeout_secs, security=security).cluster
    except rt.UnavailableError:
        print(f"harness.status: nobody listens at {options.target}", file=sys.stderr)
        return 1
    except rt.DeadlineExceededError:
        print(f"harness.status: {options.target} is silent for {options.timeout_secs:g} s", file=sys.stderr)
        return 1
    except (rt.OpError, OSError, ValueError, TypeError) as error:
        print(f"harness.status: {error}", file=sys.stderr)
        return exit_codes.CONFIGURATION.plain
    before = {s.task: s for s in probe_tasks(cluster, options.timeout_secs, security=security)}
    at = time.monotonic()
    # A rate needs two reports, so the first table comes after an interval.
    never = threading.Event()
    try:
        show = _display(options)
        while True:
            never.wait(options.interval)
            states = probe_tasks(cluster, options.timeout_secs, options.variables, security)
            now = time.monotonic()
            spans = {s.task: figures(before[s.task].report, s.report, now - at) for s in states if s.report is not None}
            show(states, spans)
            if not options.watch:
                return 0 if is_whole(states) else 1
            before, at = {s.task: s for s in states}, now
    except KeyboardInterrupt:
        return 0
