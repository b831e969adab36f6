"""The status command, the standard series and the Prometheus endpoint, on real tasks."""

import contextlib
import dataclasses
import json
import pathlib
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import harness
import runtime as rt
from harness.monitoring import status
from harness.monitoring.cluster_scalars import LAYOUT, scalars
from harness.monitoring.prometheus import MetricsServer
from harness.monitoring.rates import figures, sizes, table
from harness.monitoring.sampler import ClusterSampler, TaskStatus, explain_error
from harness.tensorboard.plugin_messages import custom_scalars_summary
from tests.kit.commands import Ran, run_main
from tests.kit.events import read_events
from tests.kit.processes import ROOT
from tests.kit.waits import TIMEOUT_SECS, until
from tests.runtime.kit import TARGET, addresses, processes, servers, train


def series(now: rt.TaskReport) -> dict[str, float]:
    """The standard series of a task that has just started."""
    return scalars(now, figures(None, now, 1.0))


def report(
    values: dict[str, float], staleness: tuple[int, ...] = (0, 0, 0), incarnation: int = 1
) -> rt.TaskReport:
    cluster = rt.ClusterSpec({"ps": ["a:1"], "worker": ["b:1"]})
    return rt.TaskReport(
        "/job:ps/task:0", cluster, incarnation, 0.0, "host", 1, values, staleness, "", 0.0
    )


@pytest.fixture
def run_status(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """The command, in this process."""
    return lambda *arguments: run_main(status.main, capsys, ["--interval=0.05", *arguments])


def test_finished_worker_is_done(run_status: Callable[..., Ran]) -> None:
    """A worker that has finished is shown as done, and a worker that vanished as down."""
    with servers(ps=1, worker=2) as made:
        train(made[TARGET], 1)
        finished = made["/job:worker/task:1"]
        records = rt.lowlevel.RunRecords(finished.target)
        records.join()
        hosts = {
            job: ",".join(s.address for n, s in made.items() if f":{job}/" in n)
            for job in ("ps", "worker")
        }
        cluster = f"--cluster=ps={hosts['ps']};worker={hosts['worker']}"
        records.done(leave=False)
        finished.stop()
        ran = run_status(cluster)
        assert ran.returncode == 0, ran.stdout
        assert re.search(r"^/job:worker/task:1 +done *$", ran.stdout, re.M), ran.stdout
        assert "not whole" not in ran.stdout
        found = json.loads(run_status(cluster, "--json").stdout)
        assert found["whole"] and [task["fate"] for task in found["tasks"]] == ["", "", "done"]
        records = rt.lowlevel.RunRecords(made[TARGET].target)
        records.join()
        made[TARGET].stop()  # it takes part and has not said that it is done
        ran = run_status(cluster)
        assert ran.returncode == 1 and "not whole: /job:worker/task:0" in ran.stdout


# -- figures: pure ---------------------------------------------------------------------------------------------


def test_figures_are_differences_over_time() -> None:
    """Figures are differences between two reports over their time."""
    before = report(
        {"steps_total": 10, "step_seconds_total": 1.0, "compute_seconds_total": 0.5}, (5, 0, 0)
    )
    now = report(
        {
            "steps_total": 30,
            "step_seconds_total": 1.2,
            "compute_seconds_total": 0.6,
            "queue_depth": 3,
        },
        (5, 2, 2),
    )
    found = figures(before, now, 2.0)
    assert found["steps_per_sec"] == 10
    assert found["step_ms"] == pytest.approx(10) and found["compute_ms"] == pytest.approx(5)
    assert (found["staleness_mean"], found["staleness_max"]) == (1.5, 2)
    assert not {"apply_ms", "updates_per_sec", "queue_depth"} & found.keys()


def test_restarted_task_counts_anew() -> None:
    """A task that was started again counts from its start."""
    before, now = (
        report({"steps_total": 100}, incarnation=1),
        report({"steps_total": 5}, incarnation=2),
    )
    assert figures(before, now, 1.0)["steps_per_sec"] == 5


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KB"),
        (318_000, "318 KB"),
        (2.5e9, "2.5 GB"),
        (1e17, "100000 TB"),
    ],
)
def test_sizes_have_decimal_units(count: float, text: str) -> None:
    """Sizes are shown in decimal units."""
    assert sizes(count) == text


def test_table_is_aligned() -> None:
    """The columns of a table are aligned, numbers to the right."""
    assert table([["A", "B"], ["long", "x"]]) == "A     B\nlong  x"
    rows = [
        ["A", "BYTES", "CPU"],
        ["x", "8 B", "7%"],
        ["y", "12.1 KB", ""],
        ["z", "314 KB", "100%"],
    ]
    assert table(rows) == "A    BYTES   CPU\nx      8 B    7%\ny  12.1 KB\nz   314 KB  100%"


def test_cluster_flag_lists_jobs_and_hosts() -> None:
    """--cluster lists jobs and hosts."""
    wanted = rt.ClusterSpec({"ps": ["a:1", "b:1"], "worker": ["c:1"]})
    assert status.parse_cluster("ps=a:1, b:1;worker=c:1;") == wanted


@pytest.mark.parametrize("text", ["nonsense", "ps", "ps=", "=a:1", "ps=a:1,"])
def test_malformed_cluster_is_refused(text: str) -> None:
    """A malformed --cluster is refused."""
    with pytest.raises(rt.InvalidArgumentError, match="--cluster"):
        status.parse_cluster(text)


def test_missing_backup_is_shown() -> None:
    """A ps whose backup cannot be used is shown."""

    def state(values: dict[str, float]) -> str:
        found = report(values)
        return status.as_rows([TaskStatus(found.task, "a:1", found)], 15.0)[1][1]

    assert [state({}), state({"backup_usable": 1.0}), state({"backup_usable": 0.0})] == [
        "up 15s",
        "up 15s",
        "up 15s, no backup",
    ]


GPUS = {"GPU:0": "NVIDIA H100", "GPU:1": "NVIDIA H100", "CPU:0": "cpu"}


def test_devices_and_memory_are_shown() -> None:
    """A task's row names what computes; each accelerator has a row with its memory, and a mesh with its devices."""
    memory = {"device_memory_bytes/GPU:0": 12.5e9, "device_limit_bytes/GPU:0": 60e9}
    with_gpus = dataclasses.replace(
        report({**memory, "device_peak_memory_bytes/GPU:0": 40e9}), devices=GPUS
    )
    without = dataclasses.replace(report({}), task="/job:worker/task:0", devices={"CPU:0": "cpu"})
    on_mesh = dataclasses.replace(without, devices={"CPU:0": "cpu", "MESH:0": "8 CPU"})
    states = [TaskStatus(r.task, "a:1", r) for r in (with_gpus, without, on_mesh)]
    heading, *rows = status.as_rows(states, 15.0)
    assert [row[heading.index("ON")] for row in rows] == ["2 GPU", "CPU", "8 CPU"]
    assert status.device_rows(states)[1:] == [
        ["/job:ps/task:0/device:GPU:0", "NVIDIA H100", "12.5 GB", "40.0 GB", "60.0 GB"],
        ["/job:ps/task:0/device:GPU:1", "NVIDIA H100", "", "", ""],
        ["/job:worker/task:0/device:MESH:0", "8 CPU", "", "", ""],
    ]
    gpu, cpu, mesh = (
        json.loads(json.dumps(status.as_json([state])))["tasks"][0]["devices"] for state in states
    )
    assert gpu[1] == {
        "name": "GPU:0",
        "kind": "NVIDIA H100",
        "memory_bytes": 12.5e9,
        "peak_memory_bytes": 40e9,
        "limit_bytes": 60e9,
    }
    assert [device["name"] for device in gpu] == ["CPU:0", "GPU:0", "GPU:1"]
    assert [(device["name"], device["limit_bytes"]) for device in cpu] == [("CPU:0", None)]
    assert [(device["name"], device["kind"]) for device in mesh] == [
        ("CPU:0", "cpu"),
        ("MESH:0", "8 CPU"),
    ]


# -- the command ------------------------------------------------------------------------------------------------------


def test_one_target_shows_the_cluster(run_status: Callable[..., Ran]) -> None:
    """One target shows the whole cluster, with its steps and variables."""
    with servers(ps=1, worker=2) as made:
        train(made[TARGET], 5)
        shown = run_status(f"--target={made[TARGET].address}", "--variables")
        data = run_status(f"--target={made[TARGET].address}", "--json")
        whole = run_status(f"--target={made[TARGET].address}", "--json", "--variables")
    assert shown.returncode == 0, shown.stderr
    assert all(name in shown.stdout for name in made)
    assert "up" in shown.stdout
    assert [line.split()[:3] for line in shown.stdout.splitlines() if line.startswith("w ")] == [
        ["w", "/job:ps/task:0", "float32"]
    ]
    found = json.loads(data.stdout)
    assert found["whole"] is True
    listed = json.loads(whole.stdout)["tasks"][0]["variables"]
    assert {(v["name"], v["bytes"]) for v in listed} == {("w", 1024), ("global_step", 8)}
    by_task = {task["task"]: task for task in found["tasks"]}
    assert by_task["/job:ps/task:0"]["values"]["global_step"] == 5
    assert by_task[TARGET]["values"]["steps_total"] == 5
    assert {device["name"] for device in by_task[TARGET]["devices"]} >= {"CPU:0"}
    assert "DEVICE" not in shown.stdout
    assert by_task[TARGET]["incarnation"] == f"{made[TARGET].incarnation:016x}"


@pytest.mark.cluster
def test_threads_are_listed_by_owner(run_status: Callable[..., Ran]) -> None:
    """--threads lists the owner, the name and the count of each thread of another process."""
    cluster = addresses(ps=1)
    address = cluster["ps"][0]
    with processes(cluster, ("ps", 0)):
        until(lambda: run_status(f"--target={address}").returncode == 0)
        shown = run_status(f"--target={address}", "--threads").stdout
        data = json.loads(run_status(f"--target={address}", "--threads", "--json").stdout)
        without = json.loads(run_status(f"--target={address}", "--json").stdout)
    heading, *rows = shown[shown.index("TASK  ", 4) :].splitlines()
    assert heading.split() == ["TASK", "OWNER", "THREAD", "COUNT"]
    assert all(row.startswith("/job:ps/task:0") for row in rows)
    port = next(row for row in rows if "tensor port" in row)
    assert re.fullmatch(r"/job:ps/task:0  tensor port (\d+)  +tensor port \1  +1", port)
    threads = data["tasks"][0]["threads"]
    assert {"owner": "", "name": "MainThread"} in threads
    assert any(thread["owner"] == "calls of the control plane" for thread in threads)
    assert not without["tasks"][0]["threads"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (rt.UnavailableError("Connection refused"), "down: nobody listens"),
        (rt.UnavailableError("x: Domain name not found"), "down: no such host"),
        (rt.UnavailableError("connect: No route to host"), "down: no route to that host"),
        (rt.UnavailableError("tcp handshaker shutdown: TLS"), "down: the two do not agree on TLS"),
        (rt.UnauthenticatedError("it speaks TLS and this process"), "it speaks TLS and this"),
        (rt.DeadlineExceededError("late"), "silent for 2 s"),
    ],
)
def test_absent_task_has_its_reason(error: rt.OpError, said: str) -> None:
    """A task that is not up is shown with the reason, and nobody listens only where that is so."""
    assert explain_error(error, 2.0).startswith(said)


def test_absent_task_has_all_keys() -> None:
    """A script finds the same keys of a task that answers and of one that is down."""
    with servers(worker=1) as made:
        other = rt.ClusterSpec({"worker": [made[TARGET].address], "ps": ["localhost:1"]})
        states = ClusterSampler(other).sample()
    tasks = json.loads(json.dumps(status.as_json(states)))["tasks"]
    down, up = sorted(tasks, key=lambda task: task["up"])
    assert [down["up"], up["up"]] == [False, True]
    assert up.keys() == down.keys()
    assert down["values"] == {} and down["variables"] == [] and down["pid"] is None


def test_missing_task_breaks_the_whole(run_status: Callable[..., Ran]) -> None:
    """A cluster with a missing task is not whole, and the command exits with 1."""
    cluster = addresses(ps=1, worker=1)
    with rt.Server(cluster, "worker", 0):
        shown = run_status(f"--cluster=ps={cluster['ps'][0]};worker={cluster['worker'][0]}")
    assert shown.returncode == 1
    assert "down: nobody listens" in shown.stdout and "not whole: /job:ps/task:0" in shown.stdout


def test_task_of_other_cluster_is_named() -> None:
    """A task that knows another cluster is a problem."""
    with servers(worker=1) as made:
        other = rt.ClusterSpec({"worker": [made[TARGET].address], "other": ["localhost:1"]})
        states = ClusterSampler(other).sample()
    assert [bool(state.problem) for state in states] == [True, True]
    assert states[1].problem == "knows another cluster"


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ((), 2, "one of the arguments --cluster --target is required"),
        (("--cluster=ps",), 2, "not of the form"),
        (("--cluster=ps=a:1;worker=",), 2, "'worker=' is not of the form"),
        (("--target=localhost",), 2, "not of the form host:port"),
        (("--target=",), 2, "not of the form host:port"),
        (("--target=localhost:1",), 1, "localhost:1 is down: nobody listens"),
        (("--nonsense", "--target=x:1"), 2, "nonsense"),
        (("word", "--target=localhost:1"), 2, "unrecognized arguments: word"),
    ],
)
def test_status_mistakes_are_one_line(
    run_status: Callable[..., Ran], flags: tuple[str, ...], code: int, said: str
) -> None:
    """A mistake on the command line gives one line and code 2."""
    found = run_status(*flags)
    assert (found.returncode, found.stderr.count("\n")) == (code, 1)
    assert said in found.stderr


@pytest.mark.cluster
def test_watch_continues_until_stopped() -> None:
    """--watch prints again and again until Ctrl-C, and exits with 0."""
    with servers(worker=1) as made:
        command = [
            sys.executable,
            "-m",
            "harness.status",
            f"--target={made[TARGET].address}",
            "--watch",
            "--json",
            "--interval=0.05",
        ]
        # Where the tests run as a shell's background job they ignore Ctrl-C, and what they start
        # would too.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        signal.signal(signal.SIGINT, before)
        try:
            assert process.stdout is not None
            lines = [json.loads(process.stdout.readline()) for _ in range(3)]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)
            assert process.stdout is not None
            process.stdout.close()
    assert all(line["whole"] for line in lines)
    assert process.returncode == 0


@pytest.mark.cluster
def test_watch_ends_with_its_reader() -> None:
    """--watch ends silently by SIGPIPE's code when its reader has gone."""
    with servers(worker=1) as made:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "harness.status",
                f"--target={made[TARGET].address}",
                "--watch",
                "--interval=0.05",
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline()
            process.stdout.close()
            assert process.stderr.read() == ""
            assert process.wait(TIMEOUT_SECS) == 128 + signal.SIGPIPE
        finally:
            process.kill()
            process.wait()
            process.stderr.close()


# -- series and Prometheus --------------------------------------------------------------------------------------------


def test_standard_series_are_written(tmp_path: pathlib.Path) -> None:
    """The standard series of a run are written with their layout."""
    with servers(sockets=True, ps=1, worker=1) as made, harness.FileWriter(tmp_path) as writer:
        series = harness.StandardSeries(made[TARGET].cluster, writer)
        train(made[TARGET], 5)
        found = series.write(5)
        quiet = series.write(6)
    wanted = {
        "steps_per_sec/worker_0",
        "step_ms/worker_0",
        "pull_ms/worker_0",
        "compute_ms/worker_0",
        "push_ms/worker_0",
    }
    wanted |= {
        "bytes_per_step/worker_0",
        "staleness_mean/ps_0",
        "staleness_max/ps_0",
        "apply_ms/ps_0",
        "queue_depth/ps_0",
    }
    wanted |= {"memory_bytes/ps_0", "cpu_percent/ps_0", "host_memory_used_bytes/worker_0"}
    assert wanted <= found.keys()
    assert found["steps_per_sec/worker_0"] > 0 and found["staleness_max/ps_0"] == 0
    assert quiet["steps_per_sec/worker_0"] == 0 and "step_ms/worker_0" not in quiet
    (path,) = tmp_path.glob("events*")
    events = list(read_events(str(path)))
    assert events[1].summary == custom_scalars_summary(LAYOUT)
    assert {v.tag for v in events[2].summary.value} == found.keys() and events[2].step == 5


def test_every_series_is_in_the_layout() -> None:
    """Every series is in the layout of TensorBoard."""
    values = {
        "calls_total": 1.0,
        "queue_depth_max": 1.0,
        "device_memory_bytes/GPU:0": 5.0,
        "updates_dropped_total": 1.0,
        "checkpoints_total": 1.0,
    }
    values |= {
        "recoveries_total": 1.0,
        "steps_lost_total": 3.0,
        "steps_total": 5.0,
        "updates_total": 1.0,
        "memory_bytes": 1.0,
    }
    found = series(report(values, (1, 0, 0)))
    patterns = [tag for charts in LAYOUT.values() for tags in charts.values() for tag in tags]
    hidden = {
        tag.partition("/")[0] for tag in found if not any(re.fullmatch(p, tag) for p in patterns)
    }
    assert hidden <= {"recoveries"}
    assert found["device_memory_bytes/ps_0_GPU_0"] == 5.0 and found["steps_lost/ps_0"] == 3.0


def test_absent_task_costs_own_series(tmp_path: pathlib.Path) -> None:
    """A task that is away costs its own series only."""
    cluster = addresses(ps=1, worker=1)
    with rt.Server(cluster, "worker", 0), harness.FileWriter(tmp_path) as writer:
        found = harness.StandardSeries(rt.ClusterSpec(cluster), writer).write(1)
        assert not any("ps_0" in tag for tag in found)


def scrape(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_prometheus_scrapes_the_same_figures() -> None:
    """Prometheus scrapes the figures with types, labels and help."""
    with servers(sockets=True, ps=1, worker=1) as made:
        train(made[TARGET], 4)
        with MetricsServer(made["/job:ps/task:0"], 0) as endpoint:
            found = scrape(endpoint.port)
    for name, family in found.items():
        assert family.documentation and family.documentation != name.removeprefix(
            "bellwether_"
        ).replace("_", " "), name
    updates = found["bellwether_updates"].samples[0]
    assert (updates.value, updates.labels) == (4.0, {"job": "ps", "task": "0"})
    assert (
        found["bellwether_updates"].type == "counter"
        and found["bellwether_variables"].type == "gauge"
    )
    assert [
        (s.labels["behind"], s.value)
        for s in found["bellwether_updates_behind"].samples
        if s.name.endswith("total")
    ] == [("0", 4.0)]
    with pytest.raises(OSError):
        scrape(endpoint.port)


def test_documented_series_exist() -> None:
    """The page on monitoring lists exactly the series that exist."""
    values = dict.fromkeys(rt.lowlevel.METRICS, 1.0) | {"device_memory_bytes/GPU:0": 1.0}
    values |= {"device_peak_memory_bytes/GPU:0": 1.0, "device_limit_bytes/GPU:0": 1.0}
    found = {tag.partition("/")[0] for tag in series(report(values, (1, 0, 0)))}
    rows = re.findall(
        r"^\| (`.*?) \| (.*?) \| (.*?) \| (.*?) \|$",
        (ROOT / "docs" / "monitoring.md").read_text(),
        re.M,
    )
    named = {name.partition("/")[0] for row in rows for name in re.findall(r"`([^`]+)`", row[0])}
    assert named - {"global_step"} == found
    assert all(cell.strip() for row in rows for cell in row)


def test_backup_figures_are_shown() -> None:
    """The figures of a ps with a backup are exported and written."""
    cluster = addresses(ps=2, worker=1)
    with contextlib.ExitStack() as stack:
        made = [
            stack.enter_context(rt.Server(cluster, "ps", index, ps_backups=1)) for index in (0, 1)
        ]
        worker = stack.enter_context(rt.Server(cluster, "worker", 0))
        train(worker, 3)
        now = rt.probe(made[0].address)
        found = scrape(stack.enter_context(MetricsServer(made[0], 0)).port)
    backup = {name for name in now.values if name.startswith("backup_")}
    assert backup and now.values.keys() <= rt.lowlevel.METRICS.keys()
    assert {f"bellwether_{name.removesuffix('_total')}" for name in backup} <= found.keys()
    assert {"backup_usable/ps_0"} <= series(now).keys()
    lost = report({"backup_usable": 0.0, "backup_recoveries_total": 2.0})
    assert series(lost)["backup_usable/ps_0"] == 0.0
    assert series(lost)["backup_recoveries/ps_0"] == 2.0


def test_table_shows_no_escapes() -> None:
    """A table shows no escape sequence that a task has sent."""
    assert "\x1b" not in table([["task", "error"], ["ps/0", "\x1b[2Jgone"]])
