"""Ray as the engine: PyPI's ray on this machine; deaths of tasks, of actors, of the driver; failures and results."""

import ast
import importlib.util
import json
import os
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.kit import real_mnist
from tests.kit.processes import Program
from tests.kit.waits import until

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="needs PyPI's ray: make test-ray"
    ),
]

TIMEOUT_SECS = 120.0
_ATTEMPT = "BELLWETHER_ATTEMPT"


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Callable[..., Program]]:
    """Starts the driver."""
    programs: list[Program] = []

    def begin(what: str, *further: str, **env: str | None) -> Program:
        (tmp_path / "run").mkdir(exist_ok=True)
        told = {
            "RAY_AUTH_TOKEN_PATH": str(tmp_path / "auth"),
            "RAY_DEDUP_LOGS": "0",
            "PYTHONUNBUFFERED": "1",
        }
        (tmp_path / "auth").write_text("0123456789abcdef" * 4)
        command = (
            "python",
            "-m",
            "tests.harness.ray.ray_program",
            what,
            str(tmp_path / "run"),
            *further,
        )
        programs.append(Program(*command, env={**told, **real_mnist.ENVIRON, **env}, cold=True))
        return programs[-1]

    yield begin
    for program in programs:
        if program.code is None:
            print(program.story())
        program.close()


def below(program: Program) -> list[psutil.Process]:
    return psutil.Process(program.pid).children(recursive=True)


def task(program: Program, name: str) -> psutil.Process:
    """The process that is a task: neither its guard nor its actor."""

    def look() -> psutil.Process | None:
        for process in below(program):
            try:
                command = process.cmdline()
                told = json.loads(process.environ().get("TF_CONFIG", "{}")).get("task")
            except psutil.Error:
                continue
            if (
                told
                and f"{told['type']}/{told['index']}" == name
                and not any(a.endswith("guard.py") for a in command)
            ):
                return process
        return None

    found: psutil.Process = until(look, f"{name} runs")
    return found


def results(program: Program) -> list[Any]:
    found: list[Any] = ast.literal_eval(program.expect(r"RESULTS (.*)", TIMEOUT_SECS)[1])
    assert program.wait() == 0, program.story()
    return found


def test_mnist_trains_through_killed_worker(
    start: Any,
) -> None:
    """MNIST trains from a function, and a killed worker is started again alone."""
    program = start("mnist", "--train_steps=6000")
    worker = task(program, "worker/1")
    assert worker.environ()[_ATTEMPT] == "0"
    others = [task(program, name) for name in ("ps/0", "worker/0")]
    until(lambda: worker.cpu_times().user > 2, "it is at work")
    worker.send_signal(signal.SIGKILL)
    program.expect("worker/1 was killed by SIGKILL; restart 1 of 3 in 0.5 s", TIMEOUT_SECS)
    assert task(program, "worker/1").environ()[_ATTEMPT] == "1"
    assert all(other.is_running() for other in others), "a death of that task alone"
    assert float(program.expect(r"worker/0 .*Test-Accuracy: ([\d.]+)", TIMEOUT_SECS)[1]) > 0.9
    assert results(program) == [None, None]


def test_results_come_back_after_deaths(start: Any, tmp_path: pathlib.Path) -> None:
    """A killed ps and a killed actor come back, and the results of the functions are returned."""
    program = start("count", "1000000000")
    program.expect(r"worker/1 .*step \d+ of start 0", TIMEOUT_SECS)
    until(lambda: list((tmp_path / "run").glob("model.ckpt*/[1-9]*")), "a checkpoint is there")
    task(program, "ps/0").send_signal(signal.SIGKILL)
    program.expect("ps/0 was killed by SIGKILL; restart 1 of 3", TIMEOUT_SECS)
    program.expect(r"worker/1 .*step \d+ of start 0", TIMEOUT_SECS)
    assert task(program, "ps/0").environ()[_ATTEMPT] == "1"
    # The actor of a task takes the task along, and comes back at the same address.
    worker = task(program, "worker/1")
    actor = psutil.Process(worker.ppid()).parent()
    assert actor is not None and actor.name().startswith("ray::")
    actor.send_signal(signal.SIGKILL)
    program.expect("the actor of worker/1 is gone", TIMEOUT_SECS)
    until(lambda: not worker.is_running(), "the task ends with its actor")
    program.expect(r"worker/1 .*step \d+ of start 1", TIMEOUT_SECS)
    assert task(program, "worker/1").environ()["TF_CONFIG"] == worker_config(
        task(program, "worker/0"), 1
    )
    (tmp_path / "run" / "steps").write_text("1")
    (first, second) = results(program)
    assert first[:2] == ("worker/0", 0) and second[:2] == ("worker/1", 1)


def test_evaluator_follows_checkpoints(start: Any, tmp_path: pathlib.Path) -> None:
    """An evaluator follows the checkpoints, is started again alone, and holds up no stop."""
    program = start("evaluator")
    program.expect(r"evaluator/0 .*step \d+: .*accuracy", TIMEOUT_SECS)
    evaluator, worker = task(program, "evaluator/0"), task(program, "worker/0")
    evaluator.send_signal(signal.SIGKILL)
    program.expect("evaluator/0 was killed by SIGKILL; restart 1 of 3", TIMEOUT_SECS)
    program.expect(r"evaluator/0 .*step \d+: .*accuracy", TIMEOUT_SECS)
    assert worker.is_running() and task(program, "evaluator/0").environ()[_ATTEMPT] == "1"
    assert list((tmp_path / "run" / "eval").glob("events*")), "its own series of TensorBoard"
    os.kill(program.pid, signal.SIGINT)
    program.expect(r"worker/0 .*saved .*/[1-9]\d*$", TIMEOUT_SECS)
    assert program.wait() != 0


def worker_config(other: psutil.Process, index: int) -> str:
    config = json.loads(other.environ()["TF_CONFIG"])
    config["task"]["index"] = index
    return json.dumps(config)


def test_ctrl_c_lets_chief_save(start: Any, tmp_path: pathlib.Path) -> None:
    """A command receives its role by flags, and Ctrl-C lets the chief save."""
    program = start("trainer")
    program.expect(r"worker/1 .* step \d", TIMEOUT_SECS)
    assert "--job_name=ps" in task(program, "ps/0").cmdline()
    os.kill(program.pid, signal.SIGINT)
    program.expect("SIGINT: stopping the workers, then the ps tasks, within 40 s each")
    saved = int(program.expect(r"worker/0 .*saved .*/(\d+)$", TIMEOUT_SECS)[1])
    program.expect("^KeyboardInterrupt$")
    assert program.wait() != 0
    assert (tmp_path / "run" / "model.ckpt" / str(saved)).exists()


def test_killed_driver_leaves_no_process(start: Any) -> None:
    """No process outlives a driver that is killed."""
    program = start("count", "1000000000")
    program.expect(r"worker/1 .*step \d+ of start 0", TIMEOUT_SECS)
    processes = below(program)
    assert (
        len([process for process in processes if process.name().startswith("ray::TaskActor")]) == 3
    )
    os.kill(program.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=TIMEOUT_SECS)
    assert alive == []


def test_fatal_error_comes_back_once(
    start: Any,
) -> None:
    """An error for good comes back with its code and is not tried again."""
    program = start("wrong value")
    said = program.expect(r"FAILED (.*)", TIMEOUT_SECS)[1]
    assert said == (
        "worker/0 2 worker/0 exited with code 2 and failed for good (configuration: it would end "
        "so again): "
        "InvalidArgumentError: the value of worker/0 is wrong / InvalidArgumentError"
    )
    assert program.wait() == 2
    assert not program.lines("restart 1 of")


def test_unpicklable_result_is_one_line(start: Any) -> None:
    """A result that cannot be pickled gives one line."""
    program = start("no pickle")
    assert (
        "what the function returns cannot be pickled"
        in program.expect(r"FAILED (.*)", TIMEOUT_SECS)[1]
    )
    assert program.wait() == 2


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("0.5", r"RESULTS \[\['0', '0.45'\], \['0', '0.45'\]\]"),
        ("0.05", "InvalidArgumentError: 20 training tasks on one GPU, .*enough for 18"),
    ],
)
def test_workers_share_gpu_memory(start: Any, part: str, said: str) -> None:
    """Workers that need a part of a GPU have that part of its memory, and too small parts are refused."""
    program = start("gpus", part, JAX_PLATFORMS=None)
    program.expect(said, TIMEOUT_SECS)


def test_wait_for_nodes_names_resources(start: Any) -> None:
    """A wait for nodes names the missing resources and ends by SIGTERM."""
    program = start("too large")
    said = program.expect(
        r"still waiting for nodes for ps/0, worker/0, worker/1: (.*)", TIMEOUT_SECS
    )[1]
    assert "'unobtainium': 1" in said and "CPU: 4" in said
    os.kill(program.pid, signal.SIGTERM)
    assert program.wait() == 143, program.story()
