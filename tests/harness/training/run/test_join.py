"""join_cluster: who a process is, by flags, TF_CONFIG, Slurm or nobody; and whole programs under the launcher."""

import contextlib
import json
import pathlib
import re
import signal
import sys
import textwrap
from typing import Any

import jax
import pytest

import harness
import runtime as rt
from harness import exit_codes
from harness.launch.policy import LaunchTask
from harness.launch.tasks import (
    ClusterTopology,
    arguments,
    environment,
    takes_flags,
    watching,
)
from harness.training.run.join import Member, find_identity
from tests.kit.changes import SetVariables
from tests.kit.ports import free_ports
from tests.kit.processes import Program

TF_CONFIG = {
    "cluster": {"ps": ["a:1"], "worker": ["b:1", "c:1"]},
    "task": {"type": "worker", "index": 1},
}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
}


@pytest.fixture
def environ(set_variables: SetVariables) -> Any:
    """Sets variables of this process, which resolvers read."""

    def put(variables: dict[str, str]) -> dict[str, str]:
        set_variables(variables)
        return variables

    return put


def test_identity_sources_have_an_order(environ: Any) -> None:
    """A task's identity comes from flags, then TF_CONFIG, then Slurm, then from no cluster."""
    argv = [
        "--ps_hosts=x:1,y:1",
        "--worker_hosts",
        "z:1",
        "-job_name=ps",
        "--task_index=1",
        "--lr=0.1",
    ]
    config, slurm = environ({"TF_CONFIG": json.dumps(TF_CONFIG)}), environ(SLURM)
    found = find_identity(argv, config | slurm)
    assert (found.job, found.index, found.source) == ("ps", 1, "flags")
    assert found.cluster == rt.ClusterSpec({"ps": ["x:1", "y:1"], "worker": ["z:1"]})
    found = find_identity(["--lr=0.1"], config | slurm)
    assert (found.job, found.index, found.source) == ("worker", 1, "TF_CONFIG")
    assert found.cluster == rt.ClusterSpec(TF_CONFIG["cluster"])
    found = find_identity([], slurm)
    assert (found.job, found.index, found.source) == ("worker", 1, "Slurm")
    assert found.cluster is not None and found.cluster.num_tasks("worker") == 2
    found = find_identity([], {"SLURM_STEP_NUM_TASKS": "1"})  # sbatch's own shell
    assert found.cluster is None and (found.job, found.index) == ("worker", 0)


def test_flags_may_follow_two_dashes() -> None:
    """Flags of a task may follow two dashes."""
    found = find_identity(["--", "--ps_hosts=x:1", "--worker_hosts=z:1", "--job_name=worker"], {})
    assert (found.job, found.index, found.source) == ("worker", 0, "flags")


def test_short_flags_belong_to_the_program() -> None:
    """A program's own short flag is no beginning of a flag of a task."""
    found = find_identity(["-p", "3", "-w", "x", "-t=1"], {})
    assert found.cluster is None and (found.job, found.index) == ("worker", 0)


def test_jobset_pod_finds_its_place(environ: Any) -> None:
    """A pod of a JobSet finds its place by its variables."""
    pod = {
        "JOBSET_NAME": "b",
        "REPLICATED_JOB_NAME": "worker",
        "JOB_INDEX": "1",
        "BELLWETHER_JOBS": "ps=1,worker=2",
    }
    found = find_identity([], environ(pod))
    assert (found.job, found.index, found.source) == ("worker", 1, "JobSet")
    assert found.cluster is not None and found.cluster.num_tasks("worker") == 2


def test_evaluator_joins_without_server(environ: Any) -> None:
    """An evaluator has no server and the address of a ps."""
    config = {"cluster": TF_CONFIG["cluster"], "task": {"type": "evaluator", "index": 0}}
    environ({"TF_CONFIG": json.dumps(config)})
    with harness.join_cluster([]) as me, me.device():
        assert (me.job, me.server, me.target, me.is_chief) == (
            "evaluator",
            None,
            "grpc://a:1",
            False,
        )
        assert rt.constant(1.0).device == ""


def test_wrong_flags_end_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong flags of a task end the program with one line and the code for configuration."""
    with pytest.raises(SystemExit) as ended, harness.join_cluster(["--ps_hosts=a:1"]):
        raise AssertionError("it has joined")
    assert ended.value.code == exit_codes.CONFIGURATION.plain
    (line,) = capsys.readouterr().err.splitlines()
    assert "--ps_hosts given without --job_name" in line


def test_missing_credential_names_the_task(
    set_variables: SetVariables, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line about a missing credential begins with the task."""
    (port,) = free_ports(1)
    set_variables(BELLWETHER_SECURITY=None, BELLWETHER_BIND="0.0.0.0")
    hosts = f"--worker_hosts=localhost:{port}"
    argv = ["--ps_hosts=", hosts, "--job_name=worker", "--task_index=0"]
    with pytest.raises(SystemExit) as ended, harness.join_cluster(argv):
        raise AssertionError("it has joined")
    assert ended.value.code == exit_codes.CONFIGURATION.plain
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line.startswith("/job:worker/task:0: it listens at ") and "python -m harness.certs" in line
    )


@pytest.mark.parametrize(
    ("argv", "variables", "text"),
    [
        (["--ps_hosts=a:1"], {}, "--ps_hosts given without --job_name"),
        (
            # who trained alone, without a word
            ["--ps_host=a:1", "--worker_hosts=a:2", "--job_name=worker"],
            {},
            "--ps_host is no flag of a task; did you mean --ps_hosts",
        ),
        (["--taskindex", "1"], {}, "--taskindex is no flag of a task; did you mean --task_index"),
        (
            # it was worker 0
            ["--ps_hosts=a:1", "--worker_hosts=b:1,c:1", "--job_name=worker", "--task_id=1"],
            {},
            "--task_id is no flag of a task; did you mean --task_index",
        ),
        (["--job_name=ps"], {}, "--job_name given without --ps_hosts and --worker_hosts"),
        (
            ["--worker_hosts=a:1", "--job_name=worker", "--task_index=one"],
            {},
            "--task_index=one: give the number",
        ),
        (
            [],
            {"TF_CONFIG": json.dumps({"cluster": TF_CONFIG["cluster"]})},
            'TF_CONFIG has no "task"',
        ),
        (
            [],
            SLURM,
            r"a Slurm step of 3 tasks .* cannot have 3 ps and workers too: raise srun --ntasks",
        ),
    ],
)
def test_incomplete_identity_is_named(
    argv: list[str], variables: dict[str, str], text: str, environ: Any
) -> None:
    """An identity that is not whole is refused by name."""
    with pytest.raises(rt.InvalidArgumentError, match=text):
        find_identity(argv, environ(variables), ps=3)


def in_tf_config(role: str, index: Any) -> str:
    return json.dumps({"cluster": TF_CONFIG["cluster"], "task": {"type": role, "index": index}})


@pytest.mark.parametrize(
    ("argv", "variables", "said"),
    [
        ([], {"TF_CONFIG": "{"}, "TF_CONFIG is not JSON: "),
        ([], {"TF_CONFIG": "[]"}, "TF_CONFIG must be a JSON object"),
        ([], {"TF_CONFIG": '{"cluster": 3}'}, "TF_CONFIG: cluster must be a dictionary"),
        (
            [],
            {"TF_CONFIG": in_tf_config("boss", 0)},
            "TF_CONFIG: unknown role 'boss'; the jobs of the cluster: ps, worker",
        ),
        ([], {"TF_CONFIG": in_tf_config("worker", 9)}, "TF_CONFIG: task index 9 is out of range"),
        (
            [],
            {"TF_CONFIG": in_tf_config("worker", "x")},
            "TF_CONFIG: task index must be an integer, got 'x'",
        ),
        (
            ["--ps_hosts=a:1", "--worker_hosts=b:1", "--job_name=boss"],
            {},
            "No such job in cluster: 'boss'",
        ),
        (
            ["--ps_hosts=a:1", "--worker_hosts=b:1", "--job_name=ps", "--task_index=1"],
            {},
            "No task with index 1",
        ),
        ([], {"JOBSET_NAME": "mnist"}, "BELLWETHER_JOBS is not set"),
        (
            [],
            {**SLURM, "SLURM_PROCID": "7"},
            "SLURM_PROCID=7 is no task of a Slurm step of 3 tasks",
        ),
        ([], {**SLURM, "SLURM_PROCID": None}, "SLURM_PROCID is not set"),
        ([], {**SLURM, "SLURM_STEP_NODELIST": None}, "SLURM_STEP_NODELIST is not set"),
        (
            [],
            {**SLURM, "SLURM_STEP_NUM_TASKS": "three"},
            "a Slurm step of three tasks (SLURM_STEP_NUM_TASKS)",
        ),
    ],
)
def test_wrong_engine_variables_are_one_line(
    argv: list[str],
    variables: dict[str, str | None],
    said: str,
    environ: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Wrong variables of an engine end the program with one line and the code for configuration."""
    environ({name: value for name, value in variables.items() if value is not None})
    with pytest.raises(SystemExit) as ended, harness.join_cluster(argv):
        raise AssertionError("it has joined")
    assert ended.value.code == exit_codes.CONFIGURATION.plain
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


def test_evaluator_may_know_no_task(environ: Any) -> None:
    """An evaluator whose sparse cluster is empty is an evaluator."""
    told = {"sparseCluster": {"worker": {}, "ps": []}, "task": {"type": "evaluator", "index": 0}}
    assert find_identity([], environ({"TF_CONFIG": json.dumps(told)})).job == "evaluator"


def test_chief_is_job_or_worker_0() -> None:
    """The chief is the job of that name, or worker 0, and workers are numbered after a chief."""
    with rt.local_cluster(ps=1, workers=2) as cluster:
        server = cluster.servers["worker", 0]
        member = lambda job, index, spec: Member(rt.ClusterSpec(spec), job, index, server)  # noqa: E731
        plain, own = (
            {"ps": ["a:1"], "worker": ["b:1", "c:1"]},
            {"chief": ["a:1"], "worker": ["b:1"]},
        )
        assert [member("worker", i, plain).is_chief for i in range(2)] == [True, False]
        assert member("chief", 0, own).is_chief and not member("worker", 0, own).is_chief
        assert [member("worker", i, plain).number for i in range(2)] == [0, 1]
        assert [member("chief", 0, own).number, member("worker", 0, own).number] == [0, 1]
        assert (member("worker", 0, plain).workers, member("worker", 0, own).workers) == (2, 2)


def test_local_cluster_trains() -> None:
    """A cluster in one process places variables and runs steps on all its workers."""
    with rt.Graph().as_default(), rt.local_cluster(ps=2, workers=2) as cluster:
        with cluster.device(1):
            v, w = rt.Variable(1.0, name="v"), rt.Variable(2.0, name="w")
            total = v + w
        assert [v.device, w.device, total.device] == [
            "/job:ps/task:0",
            "/job:ps/task:1",
            "/job:worker/task:1",
        ]
        with rt.Session(cluster.target) as session:
            session.run(rt.global_variables_initializer())
        with rt.Session(cluster.target_of(1)) as session:
            assert session.run(total) == 3.0
    with rt.Graph().as_default(), rt.local_cluster(ps=0, workers=1) as cluster, cluster.device():
        assert rt.constant(1.0).device == "/job:worker/task:0"
    with pytest.raises(rt.InvalidArgumentError, match="at least one worker"):
        rt.local_cluster(workers=0)


# -- what the launcher gives -----------------------------------------------------------------------------------

TOPOLOGY = ClusterTopology(("p:1",), ("w:1", "w:2"))


def test_launcher_sets_tf_config() -> None:
    """The launcher gives each task its identity in TF_CONFIG."""
    found = json.loads(environment({}, TOPOLOGY, LaunchTask("worker", 1), 0)["TF_CONFIG"])
    assert found["cluster"] == {"ps": ["p:1"], "worker": ["w:1", "w:2"]}
    assert found["task"] == {"type": "worker", "index": 1}


def test_joining_program_receives_no_flags(tmp_path: pathlib.Path) -> None:
    """A program that joins by itself receives no flags of a task."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "joins.py").write_text("with harness.join_cluster() as me: ...\n")
    (tmp_path / "flags.py").write_text("flags.DEFINE_string('job_name', None, '')\n")
    task = LaunchTask("worker", 0)
    with contextlib.chdir(tmp_path):
        assert arguments(["python", "-m", "package.joins", "--lr=1"], TOPOLOGY, task)[1:] == [
            "-m",
            "package.joins",
            "--lr=1",
        ]
        assert not takes_flags(["python", "package/joins.py"])
        for command in (
            ["python", "flags.py"],
            ["python", "-m", "elsewhere"],
            ["./train"],
            ["python", "missing.py"],
        ):
            assert takes_flags(command)
            assert arguments(command, TOPOLOGY, task)[-2:] == [
                "--job_name=worker",
                "--task_index=0",
            ]


def test_unknown_flags_are_refused(environ: Any) -> None:
    """A flag that neither the program nor a task knows is refused."""
    own = ["--ps_hosts=p:1", "--worker_hosts=w:1", "--job_name=worker"]
    assert find_identity(own, environ({}), strict=True).job == "worker"
    for argv in (["--log_dir=/runs"], [*own, "--log_dir=/runs"]):
        assert find_identity(argv, environ({})).job == "worker"
        with pytest.raises(
            rt.InvalidArgumentError, match="^--log_dir=/runs: neither this program nor a task"
        ):
            find_identity(argv, environ({}), strict=True)


def test_launcher_says_how_to_watch() -> None:
    """The launcher prints the commands for the status and the curves."""
    assert watching(TOPOLOGY, ["python", "train.py", "--logdir=/runs/1"]) == [
        "what the tasks do: python -m harness.status --target=p:1 --watch",
        "curves: tensorboard --logdir=/runs/1",
    ]
    assert watching(TOPOLOGY, ["python", "train.py", "--logdir", "r"])[1:] == [
        "curves: tensorboard --logdir=r"
    ]
    assert len(watching(TOPOLOGY, ["python", "train.py"])) == 1


PROGRAM = """
import argparse
import numpy as np
import harness, runtime as rt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
steps = parser.parse_args().steps
with harness.join_cluster() as me:
    with me.device():
        step = harness.get_or_create_global_step()
        v = rt.Variable(np.zeros(2, np.float32), name="v")
        count = rt.group(v.assign_add(np.ones(2, np.float32)), step.assign_add(1))
    supervisor = harness.Supervisor(is_chief=me.is_chief, global_step=step)
    with supervisor.managed_session(me.target) as session:
        for _ in range(steps):
            session.run(count)
        if not me.is_chief:
            print("WORKER", me.job, me.index, me.workers, flush=True)
    print("BLOCK", me.job, flush=True)
"""


@pytest.mark.chaos
def test_plain_program_trains_under_launcher(tmp_path: pathlib.Path) -> None:
    """A plain program trains under the launcher, and only workers run its block."""
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM))
    command = (
        "python",
        "-m",
        "harness.launch",
        "--ps=1",
        "--workers=2",
        "--",
        sys.executable,
        "train.py",
        "--steps=5",
    )
    with Program(*command, cwd=tmp_path, cold=True) as program:
        program.expect(
            r"what the tasks do: python -m harness\.status --target=127\.0\.0\.1:\d+ --watch"
        )
        assert program.wait() == 0, program.story()
        assert len(program.lines("BLOCK worker")) == 2 and not program.lines("BLOCK ps")
        assert program.lines("WORKER worker 1 2")


@pytest.mark.chaos
def test_plain_program_saves_at_sigterm(tmp_path: pathlib.Path) -> None:
    """A plain program saves at SIGTERM and continues from there."""
    program = textwrap.dedent(PROGRAM).replace(
        "is_chief=me.is_chief, ", "is_chief=me.is_chief, logdir='run', "
    )
    few = "for _ in range(3):\n            session.run(count)\n        print('BEGUN AT', begun, flush=True)"
    program = program.replace(
        "for _ in range(steps):", f"begun = session.run(step)\n        {few}\n        while True:"
    )
    (tmp_path / "train.py").write_text(program)

    def saved() -> int:
        return int((harness.latest_checkpoint(str(tmp_path / "run")) or "0").rpartition("/")[2])

    for _ in range(2):
        begins = saved()
        with Program("python", "train.py", cwd=tmp_path) as alone:
            alone.expect(f"BEGUN AT {begins}$")
            alone.signal(signal.SIGTERM)
            assert alone.wait() == exit_codes.code(exit_codes.PREEMPTED), alone.story()
        assert saved() > begins, alone.story()


TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
"""Runs a command on a terminal of its own, on which it types what it reads."""
CTRL_C = "\x03"


@pytest.mark.chaos
def test_ctrl_c_saves_with_one_line(tmp_path: pathlib.Path) -> None:
    """Ctrl-C on a terminal saves the run and says so in one line."""
    program = textwrap.dedent(PROGRAM).replace(
        "is_chief=me.is_chief, ", "is_chief=me.is_chief, logdir='run', "
    )
    first = "session.run(count)\n        print('BEGUN', me.job, flush=True)\n        while True:"
    program = program.replace("for _ in range(steps):", first)
    evaluator = (
        "    if me.job == 'evaluator':\n        rt.Variable(np.zeros(2, np.float32), name='v')\n"
    )
    evaluator += (
        "        evaluator = harness.Evaluator(lambda session, step: {'two': 2.0}, 'run')\n"
    )
    evaluator += "        print('BEGUN evaluator', flush=True)\n        evaluator.run()\n"
    joined = "with harness.join_cluster() as me:\n"
    (tmp_path / "train.py").write_text(program.replace(joined, joined + evaluator))
    launch = (
        "-m",
        "harness.launch",
        "--ps=1",
        "--workers=2",
        "--evaluators=1",
        "--",
        sys.executable,
        "train.py",
    )
    with Program("python", "-c", TERMINAL, sys.executable, *launch, cwd=tmp_path) as terminal:
        for _ in ("worker/0", "worker/1", "evaluator/0"):
            terminal.expect("BEGUN")
        terminal.enter(CTRL_C)
        assert terminal.wait() == exit_codes.INTERRUPTED.plain, terminal.story()
        told = r"interrupted: step (\d+) is saved in \S+/run; the same command goes on there"
        (step,) = re.findall(told, terminal.output())
        assert not terminal.lines("Traceback|KeyboardInterrupt"), terminal.output()
    assert harness.load_variable(str(tmp_path / "run"), "global_step") == int(step) > 1


@pytest.mark.chaos
def test_ctrl_c_at_start_is_silent(tmp_path: pathlib.Path) -> None:
    """Ctrl-C during the start of a program prints no traceback."""
    begins = "import threading\nprint('STARTS', flush=True)\nthreading.Event().wait()  # as a long import would\n"
    (tmp_path / "train.py").write_text(begins + textwrap.dedent(PROGRAM))
    launch = ("-m", "harness.launch", "--ps=1", "--workers=1", "--", sys.executable, "train.py")
    with Program("python", "-c", TERMINAL, sys.executable, *launch, cwd=tmp_path) as terminal:
        for _ in ("ps/0", "worker/0"):
            terminal.expect("STARTS")
        terminal.enter(CTRL_C)
        assert terminal.wait() == exit_codes.INTERRUPTED.plain, terminal.story()
        assert not terminal.lines("Traceback|KeyboardInterrupt"), terminal.output()


def test_mesh_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A task tells once on how many devices it computes, and not for each scope."""
    me = Member(rt.ClusterSpec({"worker": ["w:1"]}), "evaluator", 7, None)
    mesh = jax.make_mesh((1,), ("batch",))
    for _ in range(2):
        with rt.Graph().as_default(), me.device(mesh=mesh):
            pass
    assert capsys.readouterr().err == "evaluator 7 computes on the 1 devices of a mesh\n"


@pytest.mark.chaos
def test_program_runs_alone_and_distributed(tmp_path: pathlib.Path) -> None:
    """One program runs alone and, by flags, on hosts."""
    (tmp_path / "train.py").write_text(
        textwrap.dedent(PROGRAM).replace("parse_args()", "parse_known_args()[0]")
    )
    script = str(tmp_path / "train.py")
    with Program("python", script, "--steps=3") as alone:
        assert alone.wait() == 0, alone.story()
        alone.expect(
            "no cluster in flags, TF_CONFIG, a JobSet or a Slurm step: this process trains alone"
        )
        alone.expect(r"^worker 0 computes on CPU:0 \(\d+ cores\)$")
        alone.expect("BLOCK worker")
    ps, worker = (f"127.0.0.1:{port}" for port in free_ports(2))
    hosts = (f"--ps_hosts={ps}", f"--worker_hosts={worker}", "--steps=3")
    with Program("python", script, "--job_name=ps", *hosts) as server:
        with Program("python", script, "--job_name=worker", *hosts) as trains:
            assert trains.wait() == 0, trains.story()
        assert server.wait() == 0, server.story()
        assert server.lines() == [f"ps 0 serves at grpc://{ps}", "worker 0 joined"]


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("line", "wrong", "name", "starts"),
    [
        ("v = rt.Variable", "v = rt.Varable", "bug", 1),
        ("session.run(count)", "session.run(count, {v: 'text'})", "configuration", 1),
        ("session.run(count)", "session.run(count); steps / 0", "failed", 2),
    ],
)
def test_buggy_program_is_not_restarted(
    tmp_path: pathlib.Path, line: str, wrong: str, name: str, starts: int
) -> None:
    """A program with a bug is not started again, and a program that failed otherwise is."""
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM).replace(line, wrong))
    launch = ("python", "-m", "harness.launch", "--ps=0", "--workers=1", "--max_restarts=1")
    with Program(*launch, "--", sys.executable, "train.py", "--steps=3", cwd=tmp_path) as program:
        (row,) = [row for row in exit_codes.TABLE if row.name == name]
        assert program.wait() == row.plain, program.story()
        assert len(program.lines("Traceback")) == starts
        assert len(program.lines(rf"\({name}: it would end so again\)")) == (starts == 1)


@pytest.mark.chaos
def test_required_gpu_is_no_restart(tmp_path: pathlib.Path) -> None:
    """A worker that lacks its required GPU ends with one line and code 2, and is not started again."""
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM))
    launch = ("python", "-m", "harness.launch", "--ps=1", "--workers=1", "--require_gpu")
    with Program(*launch, "--", sys.executable, "train.py", "--steps=3", cwd=tmp_path) as program:
        assert program.wait() == exit_codes.CONFIGURATION.plain, program.story()
        assert program.lines(
            r"^worker/0 \| /job:worker/task:0: a GPU is required, and JAX has none: "
        )
        assert program.lines(r"worker/0 exited .* \(configuration: it would end so again\)")
        assert not program.lines("Traceback|BLOCK")


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("error", "row"),
    [
        ("rt.DataLossError('damaged')", exit_codes.DATA),
        ("TypeError('of some data')", exit_codes.FAILED),
    ],
)
def test_evaluator_error_has_its_code(error: str, row: exit_codes.ExitCode) -> None:
    """An error of an evaluator ends the process with the code of the error."""
    joined = "with harness.join_cluster(['--ps_hosts=a:1', '--job_name=evaluator']):"
    with Program(
        "python", "-c", f"import harness, runtime as rt\n{joined}\n    raise {error}"
    ) as program:
        assert program.wait() == row.plain, program.story()


def test_only_uncaught_error_sets_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the error that leaves the program uncaught decides the exit code."""
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    with pytest.raises(TypeError) as caught, harness.join_cluster():
        raise TypeError("wrong")
    other = ValueError("something else, later")
    sys.excepthook(ValueError, other, None)
    with pytest.raises(SystemExit) as end:
        sys.excepthook(TypeError, caught.value, None)
    assert end.value.code == exit_codes.BUG.plain and shown == [other, caught.value]
