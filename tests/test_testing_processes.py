"""The processes of ``tests.faults``, and the tests' own kit on top of them: programs forked from one process."""

import os
import pathlib
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest

from tests.faults import PRELOAD, LocalCluster, no_leaks
from tests.faults.processes import TaskProcesses, ZygoteProcess, thread_states
from tests.kit.processes import Program, Task, programs
from tests.kit.waits import until

pytestmark = pytest.mark.cluster

IMPORTED = "'jax' in sys.modules"


@pytest.mark.chaos
def test_python_programs_are_forked_warm(
    tmp_path: pathlib.Path,
) -> None:
    """Python programs start from a process that has imported JAX, as files, code or modules."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, sys; print(__name__, {IMPORTED}, sys.argv[1:], sys.path[0], os.getcwd())"
    )
    code = f"import os, sys; print(__name__, {IMPORTED}, sys.argv, repr(sys.path[0]))"
    with no_leaks(), programs() as start:
        of_a_file = start("python", str(script), "a", cwd=tmp_path)
        of_code = start("python", "-c", code, "b")
        of_a_module = start(
            "python", "-m", "timeit", "-n1", "-r1", f"import sys; print({IMPORTED})"
        )
        assert of_a_file.result() == f"__main__ True ['a'] {tmp_path} {tmp_path}"
        assert of_code.result() == "__main__ True ['-c', 'b'] ''"
        assert of_a_module.result().startswith("True\n1 loop")


@pytest.mark.parametrize("value", ["1", "0"])
def test_jax_import_variables_are_obeyed(value: str) -> None:
    """A forked program obeys the variables that JAX reads when it is imported."""
    code = "import jax; print(jax.config.jax_enable_x64)"
    with Program("python", "-c", code, env={"JAX_ENABLE_X64": value}) as program:
        assert program.result() == str(value == "1")


def test_cold_program_imports_nothing() -> None:
    """A cold program starts without JAX."""
    with Program("python", "-c", f"import sys; print({IMPORTED})", cold=True) as program:
        assert program.result() == "False"


def test_forked_programs_draw_own_numbers() -> None:
    """Forked programs draw random numbers of their own."""
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    with programs() as start:
        drawn = [start("python", "-c", code).result().split() for _ in range(3)]
    assert len({number for numbers in drawn for number in numbers}) == 6


def test_forked_program_ends_as_usual() -> None:
    """A forked program ends with the codes, tracebacks and exit handlers of a program of its own."""
    with programs() as start:
        assert start("python", "-c", "import sys; sys.exit(3)").wait() == 3
        raised = start(
            "python",
            "-c",
            "import atexit; atexit.register(print, 'at exit'); raise ValueError('so')",
        )
        assert raised.wait() == 1
        assert raised.lines()[-1] == "at exit" and "ValueError: so" in raised.lines()
        assert start("no-such-program").wait() == 127
        assert start("sh", "-c", "kill -TERM $$").wait() == -signal.SIGTERM


def test_program_takes_its_group_along() -> None:
    """Processes that a program leaves in its group end with the program."""
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    with Program("python", "-c", code) as program:
        left = psutil.Process(int(program.expect(r"(\d+)")[1]))
        assert program.wait() == 0
        psutil.wait_procs([left], 20)
        assert not left.is_running()


def test_clusters_share_the_forking_process(
    tmp_path: pathlib.Path,
) -> None:
    """Clusters of one process fork their tasks from one parent and end independently."""
    command = [
        "python",
        "-c",
        f"import os, sys; print('PARENT', os.getppid(), {IMPORTED}, flush=True); input_ = "
        "sys.stdin",
    ]
    command[-1] += "\nimport signal; signal.pause()"
    with no_leaks(), LocalCluster(command, preload=PRELOAD) as one:
        with LocalCluster(command, preload=PRELOAD) as other:
            parents = {c.expect("worker:0", r"PARENT (\d+ True)")[1] for c in (one, other)}
            assert len(parents) == 1
        assert other.lives("worker:0")[0].code == -signal.SIGKILL
        assert one.running("worker:0") and one.running("ps:0")


BUSY = """
import threading
print("BUSY", flush=True)
for _ in range(4):
    threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()
"""


def test_freeze_returns_when_stopped() -> None:
    """freeze returns when the task has stopped, and thaw when it runs."""
    with LocalCluster(["python", "-c", BUSY], ps=0, workers=1, preload=PRELOAD) as cluster:
        cluster.expect("worker:0", "BUSY")
        process = psutil.Process(cluster.lives("worker:0")[0].pid)
        for _ in range(20):
            cluster.freeze("worker:0")
            assert process.status() == psutil.STATUS_STOPPED
            cluster.thaw("worker:0")
            assert process.status() != psutil.STATUS_STOPPED


CHURN = """
import threading
print("begun", flush=True)
while True:
    threads = [threading.Thread(target=len, args=("",)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_ending_threads_have_no_state() -> None:
    """A thread that ends while its state is read does not disturb the look at the others."""
    with Program("python", "-c", CHURN) as program:
        program.expect("begun")
        assert program.pid is not None
        for _ in range(2000):
            assert thread_states(program.pid)


@pytest.mark.chaos
def test_killed_forking_process_is_replaced() -> None:
    """A forking process that was killed is replaced for the next cluster."""
    # one that no other test uses
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "7"}
    first = ZygoteProcess.lasting((), env)
    processes = TaskProcesses(first, ["sleeper", "another"])
    life = processes.spawn("sleeper", ["sleep", "600"], env)
    assert first is ZygoteProcess.lasting((), env)
    parent = psutil.Process(life.pid).parent()
    assert parent is not None
    parent.kill()
    assert processes.wait("sleeper", 20) == -signal.SIGKILL
    processes.close()
    with pytest.raises(RuntimeError, match="cluster is closed"):
        processes.spawn("another", ["true"], env)
    until(lambda: ZygoteProcess.lasting((), env) is not first)
    with TaskProcesses(ZygoteProcess.lasting((), env), ["task"]) as again:
        again.spawn("task", ["true"], env)
        assert again.wait("task", 20) == 0


def answer(greeting: str, pipe: Connection) -> None:
    """What the test below runs."""
    pipe.send(("READY", os.getpid()))
    while (order := pipe.recv()) != ("end",):
        pipe.send((order[0].upper(), f"{greeting} {order[1]}"))
    print("the end")
    sys.exit(4)


def test_task_answers_requests() -> None:
    """A task answers requests, may be frozen meanwhile, and its end is reported."""
    with no_leaks(), Task(answer, "hello") as task:
        ready: Any = task.hear("READY")
        assert ready == ("READY", task.pid)
        assert task.request("name", "world") == "hello world"
        task.freeze()
        task.tell("name", "again")
        assert psutil.Process(task.pid).status() == psutil.STATUS_STOPPED
        task.thaw()
        assert task.hear("NAME", "again$")[1] == "hello again"
        task.tell("end")
        assert task.wait() == 4
        with pytest.raises(
            AssertionError, match=r"ended without NAME[\s\S]*and has ended with 4:\nthe end"
        ):
            task.hear("NAME")


def test_program_reads_input_and_restarts() -> None:
    """A program reads the lines that are entered, and can be started again."""
    with (
        no_leaks(),
        Program("python", "-c", "print('read', input(), flush=True); input()") as program,
    ):
        program.enter("this")
        program.expect("read this")
        first = program.pid
        program.kill()
        assert program.code == -signal.SIGKILL
        program.restart()
        assert program.pid != first and program.wait() == 1  # nobody enters anything for the second
        program.expect("EOFError")


def test_endless_program_is_reported() -> None:
    """A program that does not end in time is reported with its last lines."""
    with Program(
        "python", "-c", "import signal; print('here', flush=True); signal.pause()"
    ) as program:
        program.expect("here")
        with pytest.raises(TimeoutError, match=r"did not end within 0.1 s; its last lines:\nhere"):
            program.wait(0.1)
        program.stop()
        assert program.code == -signal.SIGTERM
