r"""The state of a cluster in the terminal: `python -m harness.status --target=host:port`, or with `--cluster=...`.

--cluster takes "ps=a:2222,b:2222;worker=c:2222". With --target a task tells the cluster. Workers
that have joined the run besides are shown too, also when they have left or are gone. On a terminal
the table is coloured, and redrawn in place by --watch. The exit code is 0 if every task of the
cluster answers and knows the same cluster, or is done with training, else 1. It is 2 for invalid
arguments.
"""

import argparse
import json
import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime

import runtime as rt
from harness import exit_codes
from harness.command_line import ToolParser
from harness.launch.output import wants_colour
from harness.monitoring import times
from harness.monitoring.rates import sizes, table
from harness.monitoring.sampler import ClusterSampler, TaskStatus, explain_error
from runtime import concurrency

_COLUMNS = {
    "STEP": "{global_step:.0f}",
    "STEPS/S": "{steps_per_sec:.1f}",
    "STEP MS": "{step_ms:.2f}",
    "PULL/COMP/PUSH": "{pull_ms:.2f}/{compute_ms:.2f}/{push_ms:.2f}",
    "APPLY MS": "{apply_ms:.2f}",
    "STALE": "{staleness_mean:.1f} max {staleness_max:.0f}",
    "QUEUE": "{queue_depth:.0f}",
    "ON": "{computes_on}",
    "CPU": "{cpu_percent:.0f}%",
    "MEM": "{memory_size}",
    "BYTES": "{variable_size}",
    "VARS": "{variables:.0f}",
    "CONN": "{connections:.0f}",
    "INCARNATION": "{incarnation}",
}
"""The cells of a task that answers, by heading, the most useful first: a narrow terminal cuts lines off."""


_NO_REPORT: dict[str, object] = {
    **dict.fromkeys(rt.TaskReport.__dataclass_fields__.keys() - {"cluster"}),
    "values": {},
    **dict.fromkeys(("staleness", "variables", "threads", "devices"), ()),
}
"""The fields of a task that does not answer, in JSON."""


def parse_cluster(text: str) -> rt.ClusterSpec:
    """Returns the cluster of ``--cluster``.

    Raises:
        InvalidArgumentError: The text is not of the form ``job=host:port,host:port;job=...``.
    """
    jobs: dict[str, list[str]] = {}
    for part in filter(None, text.split(";")):
        job, _, hosts = part.partition("=")
        jobs[job.strip()] = [host.strip() for host in hosts.split(",")]
        if not all((job.strip(), *jobs[job.strip()])):
            raise rt.InvalidArgumentError(
                f"--cluster: {part!r} is not of the form job=host:port,host:port"
            )
    return rt.ClusterSpec(jobs)


def as_rows(states: list[TaskStatus], now: float) -> list[list[str]]:
    """Returns the table of tasks, with its heading."""
    return [["TASK", "STATE", *_COLUMNS], *(_task_row(state, now) for state in states)]


def _task_row(state: TaskStatus, now: float) -> list[str]:
    report = state.report
    if report is None:
        return [state.task, state.fate or state.problem, *[""] * len(_COLUMNS)]
    values = report.values
    notes = [f"up {_format_duration(now - report.started_unix_secs)}"]
    if values.get("backup_usable") == 0:
        # A ps that has lost its backup trains on. The figure is absent without backups.
        notes.append("no backup")
    if values.get("insecure"):
        notes.append("insecure")
    if values.get("certificate_near_end"):
        notes.append(f"certificate ends in {_format_duration(values['certificate_left_seconds'])}")
    if state.problem:
        notes.append(state.problem)
    shown: dict[str, float | str] = {
        **values,
        **state.figures,
        "memory_size": sizes(values.get("memory_bytes", 0)),
        "variable_size": sizes(values.get("variable_bytes", 0)),
        "computes_on": _computing_devices(report),
        "incarnation": f"{report.incarnation:016x}"[:8],
    }
    return [
        state.task,
        ", ".join(notes),
        *(_format_cell(form, shown) for form in _COLUMNS.values()),
    ]


def _computing_devices(report: rt.TaskReport) -> str:
    """Returns the devices on which a task computes, such as "8 GPU".

    A mesh comes before accelerators, and these before the CPU.
    """
    if mesh := next((kind for name, kind in report.devices.items() if "MESH" in name), ""):
        return mesh
    found = [name for name in report.devices if not name.startswith("CPU")]
    return f"{len(found)} {found[0].partition(':')[0]}" if found else "CPU"


def _format_cell(form: str, shown: Mapping[str, float | str]) -> str:
    try:
        return form.format_map(shown)
    except KeyError:
        # The task has no such figure.
        return ""


def _format_duration(seconds: float) -> str:
    seconds = max(0, round(seconds))
    hours, rest = divmod(seconds, 3600)
    minutes, secs = divmod(rest, 60)
    return (
        f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{secs:02d}s" if minutes else f"{secs}s"
    )


def variable_rows(states: list[TaskStatus]) -> list[list[str]]:
    """Returns the table of variables, with its heading; an array of a ``runtime.Table`` has one row for a task."""
    rows = [["VARIABLE", "TASK", "DTYPE", "SHAPE", "BYTES"]]
    for state in states:
        shapes: dict[tuple[str, rt.lowlevel.DType], list[Sequence[int]]] = {}
        for v in state.report.variables if state.report else ():
            name = f"{v.container}:{v.name}" if v.container else v.name
            array, _, page = name.rpartition("/page_")
            shapes.setdefault((array if page.isdigit() and array else name, v.dtype), []).append(
                v.shape
            )
        for (name, dtype), parts in shapes.items():
            shape = [sum(part[0] for part in parts), *parts[0][1:]] if parts[0] else []
            nbytes = _variable_bytes(dtype, shape)
            shown = "" if nbytes is None else sizes(nbytes)
            rows.append([name, state.task, rt.lowlevel.dtype_name(dtype), str(shape), shown])
    return [rows[0], *sorted(rows[1:])]


def _variable_bytes(dtype: rt.lowlevel.DType, shape: Sequence[int]) -> int | None:
    """Returns the bytes of a variable's elements; None for strings, which have no fixed size."""
    return None if dtype.hasobject else dtype.itemsize * math.prod(shape)


def thread_rows(states: list[TaskStatus]) -> list[list[str]]:
    """Returns the table of threads, with its heading: a row for each owner and name on a task."""
    rows = [["TASK", "OWNER", "THREAD", "COUNT"]]
    for state in states:
        counts = Counter(state.report.threads if state.report else ())
        rows += [
            [state.task, thread.owner, thread.name, str(count)]
            for thread, count in sorted(counts.items())
        ]
    return rows


def _ordered_devices(report: rt.TaskReport) -> list[tuple[str, str, dict[str, float | None]]]:
    """Returns name, kind and memory figures of each device; None stands for a figure without a report."""
    return [
        (
            name,
            kind,
            {
                f"{figure}_bytes": report.values.get(f"device_{figure}_bytes/{name}")
                for figure in ("memory", "peak_memory", "limit")
            },
        )
        # GPU:10 comes after GPU:9.
        for name, kind in sorted(report.devices.items(), key=lambda item: (len(item[0]), item[0]))
    ]


def device_rows(states: list[TaskStatus]) -> list[list[str]]:
    """Returns the table of accelerators, with its heading."""
    rows = [["DEVICE", "KIND", "IN USE", "PEAK", "LIMIT"]]
    for state in states:
        for name, kind, memory in _ordered_devices(state.report) if state.report else ():
            if not name.startswith("CPU"):
                cells = [sizes(size) if size else "" for size in memory.values()]
                rows.append([f"{state.task}/device:{name}", kind, *cells])
    return rows


def as_json(states: list[TaskStatus]) -> dict[str, object]:
    """Returns the states as a JSON object."""
    tasks = []
    for state in states:
        entry: dict[str, object] = {**_NO_REPORT, **vars(state), "up": state.report is not None}
        # Fields of the report stand beside those of the task.
        del entry["report"]
        if state.report is not None:
            report = asdict(state.report)
            del report["cluster"]
            report["incarnation"] = f"{report['incarnation']:016x}"
            report["devices"] = [
                {"name": name, "kind": kind, **memory}
                for name, kind, memory in _ordered_devices(state.report)
            ]
            for variable in report["variables"]:
                variable["bytes"] = _variable_bytes(variable["dtype"], variable["shape"])
                variable["dtype"] = rt.lowlevel.dtype_name(variable["dtype"])
            entry |= report
        tasks.append(entry)
    return {"whole": is_whole(states), "tasks": tasks}


def is_whole(states: list[TaskStatus]) -> bool:
    """Returns True if every task answers as itself and knows the same cluster, or is done with training."""
    return all(not state.problem for state in states)


def _row_colour(state: TaskStatus) -> int:
    """Returns the ANSI colour of a task's row: green, yellow, red, or grey where the task is done or gone."""
    if state.problem:
        return 31
    if state.report is None:
        return 90
    values = state.report.values
    doubtful = (
        values.get("backup_usable") == 0
        or values.get("insecure")
        or values.get("certificate_near_end")
    )
    return 33 if doubtful else 32


def _screen_lines(
    states: list[TaskStatus], variables: bool, threads: bool, width: int | None
) -> list[str]:
    """Returns the lines that show a cluster, for a terminal of so many characters or for a pipe."""
    now = concurrency.wall_time()
    lines = table(as_rows(states, now)).splitlines()
    # A cluster of CPUs needs no such table.
    if len(found := device_rows(states)) > 1:
        lines += ["", *table(found).splitlines()]
    if variables:
        lines += ["", *table(variable_rows(states)).splitlines()]
    if threads:
        lines += ["", *table(thread_rows(states)).splitlines()]
    lines += [
        f"{state.task}, {_format_duration(now - state.report.last_error_unix_secs)} ago: "
        f"{rt.lowlevel.printable(state.report.last_error)}"
        for state in states
        if state.report is not None and state.report.last_error
    ]
    if missing := [state.task for state in states if state.problem]:
        lines += ["", f"not whole: {', '.join(missing)}"]
    # Before the colours, because escapes have no width.
    lines = [line[:width] for line in lines]
    if width and wants_colour(sys.stdout):
        for number, state in enumerate(states, 1):
            lines[number] = f"\033[{_row_colour(state)}m{lines[number]}\033[0m"
    return lines


def _make_display(options: argparse.Namespace) -> Callable[[list[TaskStatus]], None]:
    """Returns the function that shows the state of the cluster, by the arguments and the terminal."""
    if options.json:
        return lambda states: print(json.dumps(as_json(states)), flush=True)
    on_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    # Lines of the table above the cursor.
    drawn = 0

    def show(states: list[TaskStatus]) -> None:
        nonlocal drawn
        room = shutil.get_terminal_size()
        lines = _screen_lines(
            states, options.variables, options.threads, room.columns if on_terminal else None
        )
        if options.watch and not on_terminal:
            lines = [f"-- {datetime.now():%H:%M:%S}", *lines]
        elif options.watch:
            # One row is left for the cursor.
            lines = [f"{line}\033[K" for line in lines[: room.lines - 1]]
            lines[0] = f"\033[{drawn}A{lines[0]}" if drawn else lines[0]
            # The table before may have been longer.
            lines[-1] += "\033[J"
            drawn = len(lines)
        print("\n".join(lines), flush=True)

    return show


def _make_parser() -> ToolParser:
    parser = ToolParser("harness.status", __doc__ or "")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--cluster", help='as in "ps=a:1,b:1;worker=c:1"')
    which.add_argument(
        "--target",
        metavar="HOST:PORT",
        type=_check_address,
        help="one task, which is asked for the cluster",
    )
    parser.add_argument(
        "--security",
        metavar="DIR|FILE",
        help="the cluster's directory of certificates, or file with its token; $BELLWETHER_SECURITY by default",
    )
    parser.add_argument(
        "--watch", action="store_true", help="show again every --interval seconds, until Ctrl-C"
    )
    parser.add_argument(
        "--interval",
        type=_positive_number,
        default=1.0,
        help="seconds over which rates are taken (1)",
    )
    parser.add_argument(
        "--timeout_secs",
        type=_positive_number,
        default=times.ANSWER_SECS,
        help="seconds to wait for a task's answer (2)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="a JSON object instead of a table; one a line with --watch",
    )
    parser.add_argument("--variables", action="store_true", help="list which variables live where")
    parser.add_argument(
        "--threads", action="store_true", help="list the running threads of each task, by owner"
    )
    return parser


def _check_address(text: str) -> str:
    host, _, port = text.removeprefix("grpc://").rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form host:port")
    return text


def _positive_number(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


@exit_codes.printing()
def main(argv: Sequence[str] | None = None) -> int:
    """Shows the state of the cluster that the arguments name; returns the exit code."""
    options = _make_parser().parse_args(argv)
    secs = options.timeout_secs
    try:
        security = None if options.security is None else rt.Security.from_text(options.security)
        if options.cluster is not None:
            cluster = parse_cluster(options.cluster)
        else:
            cluster = rt.probe(options.target, secs, security=security).cluster
    except (rt.UnavailableError, rt.DeadlineExceededError) as error:
        print(f"harness.status: {options.target} is {explain_error(error, secs)}", file=sys.stderr)
        return 1
    except (rt.OpError, OSError, ValueError, TypeError) as error:
        print(f"harness.status: {error}", file=sys.stderr)
        return exit_codes.CONFIGURATION.plain
    sampler, show = ClusterSampler(cluster, security, secs), _make_display(options)
    never = concurrency.Event()
    try:
        # A rate needs two samples, so the first table comes after an interval.
        sampler.sample()
        while True:
            never.wait(options.interval)
            states = sampler.sample(options.variables, options.threads)
            show(states)
            if not options.watch:
                return 0 if is_whole(states) else 1
    except KeyboardInterrupt:
        return 0
