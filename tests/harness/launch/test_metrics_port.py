"""--metrics_port: each task of a launcher has an endpoint of its own, and a port in use costs the figures only."""

import logging
import pathlib
import re
import socket
import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

import runtime as rt
from harness import monitoring
from harness.launch import policy
from harness.training.stop.preemption import preemptible
from tests.kit.changes import SetVariables

pytestmark = pytest.mark.cluster

ROOT = pathlib.Path(__file__).resolve().parents[3]
PROGRAM = """
import re, time, urllib.request
from absl import app, flags, logging
import runtime as rt
from harness import monitoring
F = flags.FLAGS
flags.DEFINE_list("ps_hosts", [], ""), flags.DEFINE_list("worker_hosts", [], "")
flags.DEFINE_string("job_name", "", ""), flags.DEFINE_integer("task_index", 0, "")
def scrape(port):
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                return re.search(r'started_unix_secs{job="(.*?)",task="(.*?)"}', answer.read().decode()).groups()
        except OSError:
            time.sleep(0.1)
def main(argv):
    logging.set_verbosity(logging.INFO)
    cluster = {"ps": F.ps_hosts, "worker": F.worker_hosts}
    with rt.Server(cluster, F.job_name, F.task_index) as server, monitoring.watched(server):
        if F.job_name == "ps":
            server.join()
            return
        print("SAW", [scrape(F.metrics_port + i) for i in range(2)])
app.run(main)
"""


def two_ports() -> int:
    """The first of two ports in a row that are free."""
    while True:
        with socket.create_server(("", 0)) as first:
            port = first.getsockname()[1]
            if port < 65535:
                try:
                    socket.create_server(("", port + 1)).close()
                except OSError:
                    continue
                return int(port)


@pytest.mark.chaos
def test_each_task_has_its_port(tmp_path: pathlib.Path) -> None:
    """Each task of a launcher serves its figures at a port of its own."""
    (tmp_path / "program.py").write_text(PROGRAM)
    port = two_ports()
    launch = [
        sys.executable,
        "-m",
        "harness.launch",
        "--ps=1",
        "--workers=1",
        "--max_restarts=0",
        "--",
    ]
    task = ["python", str(tmp_path / "program.py"), f"--metrics_port={port}"]
    run = subprocess.run([*launch, *task], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "SAW [('ps', '0'), ('worker', '0')]" in run.stdout
    told = re.findall(r"(/job:\S+): figures for Prometheus at port (\d+)", run.stdout)
    assert sorted(told) == [("/job:ps/task:0", str(port)), ("/job:worker/task:0", str(port + 1))]


@pytest.mark.parametrize("number", ["0", "60000"])
def test_taken_port_costs_figures_only(
    number: str, caplog: pytest.LogCaptureFixture, set_variables: SetVariables
) -> None:
    """A metrics port that is taken or out of range costs the figures only."""
    flags.FLAGS.mark_as_parsed()
    set_variables(BELLWETHER_TASK_NUMBER=number)
    with (
        socket.create_server(("", 0)) as taken,
        rt.Server({"worker": ["localhost:0"]}, "worker", 0) as server,
    ):
        port = taken.getsockname()[1]
        with flagsaver.flagsaver(metrics_port=port), monitoring.watched(server):
            pass
    (record,) = [record for record in caplog.records if "no figures" in record.getMessage()]
    assert record.levelno == logging.ERROR and "--metrics_port" in record.getMessage()
    assert str(port + int(number)) in record.getMessage()


def test_launcher_outwaits_a_saving_chief() -> None:
    """The launcher's grace period is longer than a preempted chief's."""
    (preempt_grace_secs,) = preemptible.__wrapped__.__defaults__
    assert policy.LaunchOptions().grace_secs > preempt_grace_secs
