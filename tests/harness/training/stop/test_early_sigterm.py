"""SIGTERM that comes as soon as a task serves, before it trains or joins: the program ends with the code that says so.

As the first process of a container it would not end at all otherwise: a signal without a handler is
dropped there.
"""

import pathlib
import textwrap

import pytest

from harness import exit_codes
from tests.kit.ports import free_ports
from tests.kit.processes import Program

pytestmark = pytest.mark.cluster

AT_ONCE = """
    import runpy
    import signal
    import sys

    import runtime as rt

    def start_and_hear(server):
        start(server)
        print("serves", flush=True)
        signal.raise_signal(signal.SIGTERM)

    start, rt.Server.start = rt.Server.start, start_and_hear
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
"""Runs a module, which gets SIGTERM when its server has started."""


@pytest.mark.parametrize("job", ["ps", "worker"])
@pytest.mark.parametrize("module", ["models.mnist.minimal", "models.mnist.trainer"])
def test_serving_task_obeys_sigterm(module: str, job: str, tmp_path: pathlib.Path) -> None:
    """SIGTERM ends a task that has just begun to serve, with the code for preemption."""
    ps, worker = free_ports(2)
    task = [f"--ps_hosts=localhost:{ps}", f"--worker_hosts=localhost:{worker}", f"--job_name={job}"]
    with Program(
        "python", "-c", textwrap.dedent(AT_ONCE), module, *task, f"--logdir={tmp_path}"
    ) as program:
        assert program.wait() == exit_codes.PREEMPTED.plain, program.story()
        assert program.lines("^serves$") and not program.lines("Traceback"), program.story()


EVALUATOR = """
    import signal
    import harness

    with harness.join_cluster(["--ps_hosts=a:1", "--job_name=evaluator"]) as me:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            print("left", me.job)
"""


def test_evaluator_obeys_sigterm() -> None:
    """SIGTERM ends an evaluator with the code for preemption."""
    with Program("python", "-c", textwrap.dedent(EVALUATOR)) as program:
        assert program.wait() == exit_codes.PREEMPTED.plain, program.story()
        assert program.lines("^left evaluator$") and not program.lines("Traceback"), program.story()
