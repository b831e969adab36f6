"""The commands of the pages run as they are shown, and a program of ours has each flag that a page gives to it."""

import contextlib
import inspect
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import harness
import runtime as rt
from harness import exit_codes
from harness.launch.tasks import OWN_FLAGS
from tests.docs.blocks import PAGES, ROOT, Block, blocks
from tests.docs.commands import commands, given_flags, script, shell_blocks, shown_commands
from tests.kit.ports import free_ports
from tests.kit.processes import Program

pytestmark = pytest.mark.chaos

APART = {
    "README.md: make mnist": ".ci/run runs both, on every Python",
    "README.md: python -m models.mnist.minimal": "tests/models/mnist/test_minimal.py runs it, with free ports",
    "data.md: python -m harness.launch": "test_blocks.py starts the programs of the page by it",
    "models.md: python -m harness.launch": "test_blocks.py starts the programs of the page by it",
    "reinforcement.md: python -m harness.launch": "test_blocks.py starts the program of the page by it",
    "slurm.md: git clone": "needs Slurm and two hosts; tests/harness/launch/test_slurm.py submits the script there",
    "slurm.md: PS=2 WORKERS=14": "needs Slurm and four hosts; tests/harness/launch/test_slurm.py gives PS and RUN",
    "ray.md: python train.py": "needs Ray; tests/harness/ray runs such a program, and ray job submit",
    "security.md: export BELLWETHER_SECURITY": "needs Slurm; configs/slurm.sbatch has these lines",
}
"""Blocks that do not run here, by page and first words: why, and who runs the like of it.

Their flags are checked.
"""
DRY = ("CONTRIBUTING.md: make setup", "monitoring.md: make tensorboard")
"""Blocks whose targets take minutes, or serve until they are stopped: make only says what it would do."""
_ran: list[Block] = []

PROGRAM = """
import harness

with harness.join_cluster() as me:
    raise AssertionError(f"{me.job} is no ps")
"""


def name(block: Block) -> str:
    """What tells a block from others."""
    return f"{block.page.name}: {commands(block)[0]}"


def shown(page: str, text: str) -> Block:
    """The one block of a page with a text; it counts as run."""
    (block,) = (block for block in shell_blocks() if block.page.name == page and text in block.code)
    _ran.append(block)
    return block


MANIFEST = shown("kubernetes.md", "harness.manifests")
PLAN = shown("scaling.md", "benchmarks.scaling")
INSPECT = shown("monitoring.md", "inspect_checkpoint")
STATUS = shown("monitoring.md", "harness.status")
DASHBOARD = shown("monitoring.md", "prometheus --config")
CERTIFICATES = shown("security.md", "--hosts=ps0,w0,w1\n")
WITH_CERTIFICATES = shown("security.md", "--security=certs")
RENEW = shown("security.md", "--renew")
ROLES = shown("roles.md", "--role=observer")
TOKEN = shown("security.md", "rand -hex 32")
OBSERVER = shown("security.md", "printf observer")
BEARER = shown("security.md", "printf metrics")
TF1 = shown("tf1.md", "-m package.module")
TF1_CLUSTER = shown("tf1.md", "harness.launch")
TF1_CHECK = shown("tf1.md", "--check old/")


def test_every_command_block_is_run() -> None:
    """Every block of commands is run by a test or listed with a reason."""
    apart = [*APART, *DRY]
    there = shell_blocks()
    assert [
        str(b) for b in there if sum(name(b).startswith(one) for one in apart) + _ran.count(b) != 1
    ] == []
    assert [one for one in apart if not any(name(b).startswith(one) for b in there)] == []


# -- flags -----------------------------------------------------------------------------------------------------------

GIVEN = list(given_flags())


@pytest.mark.parametrize("module", sorted({given.module for given in GIVEN if given.names}))
def test_flags_of_pages_exist(module: str) -> None:
    """A program has each flag that a page gives to the program."""
    if module == "harness.tf1":  # all others are of the program that it runs
        assert {flag for given in GIVEN if given.module == module for flag in given.names[:1]} <= {
            "m",
            "check",
            "job_name",
        }
        return
    there = flags_of(module)
    used = [
        (given.where, flag) for given in GIVEN if given.module == module for flag in given.names
    ]
    assert [f"{where}: {module} has no --{flag}" for where, flag in used if flag not in there] == []


def flags_of(module: str) -> set[str]:
    """The flags of a program, as its own help tells them, and those that ``join_cluster`` reads."""
    told = help_of(module, "--help")
    if "--helpfull" in told:  # of absl, whose --help leaves out what other modules define
        told = help_of(module, "--helpfull")
    path = ROOT / f"{module.replace('.', '/')}.py"
    joins = path.is_file() and "join_cluster" in path.read_text()
    return set(re.findall(r"--(?:\[no\])?(\w+)", told)) | set(OWN_FLAGS if joins else ())


def help_of(module: str, ask: str) -> str:
    with Program("python", "-m", module, ask) as program:
        assert program.wait() in (0, 1), program.story()  # absl ends with 1
        return program.output()


RUN = [line for block in shell_blocks() for line in commands(block)]
SHOWN = [line for page in PAGES for block in blocks(page) for line in shown_commands(block)]


@pytest.mark.parametrize("line", [line for line in RUN + SHOWN if line.startswith("make ")])
def test_make_targets_exist(line: str) -> None:
    """make knows the targets and variables of the pages, and the named tests are there."""
    assert [path for path in re.findall(r"TESTS=(\S+)", line) if not (ROOT / path).exists()] == []
    command = line.replace("make ", "make --dry-run --no-print-directory ", 1)
    done = bash(command, ROOT)
    assert done.stdout and done.returncode == 0, done.stderr
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r" ([A-Z_]+)=", line.partition("#")[0])
    assert [name for name in named if not re.search(rf"\b{name}\b", makefile)] == []


# -- blocks that run as they stand -----------------------------------------------------------------------------------


def bash(commands: str, folder: pathlib.Path) -> "subprocess.CompletedProcess[str]":
    """Runs lines of a page in a folder, with the Python of the tests and the modules of the checkout."""
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
    )


def result(commands: str, folder: pathlib.Path) -> str:
    """What lines of a page write; an error of one of them fails the test."""
    done = bash(commands, folder)
    assert done.returncode == 0, f"{commands}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def test_manifest_command_prints_jobset(tmp_path: pathlib.Path) -> None:
    """The manifest command of the page prints a JobSet."""
    import yaml

    result(script(MANIFEST), tmp_path)
    kinds = [found["kind"] for found in yaml.safe_load_all((tmp_path / "job.yaml").read_text())]
    assert "JobSet" in kinds


def test_plan_command_names_ps(tmp_path: pathlib.Path) -> None:
    """The planning command of the page names a number of ps."""
    assert re.match(r"\d+ ps for 400 MB, 64 workers, ", result(script(PLAN), tmp_path))


def test_inspection_commands_work(tmp_path: pathlib.Path) -> None:
    """The inspection commands of the page list, verify, print and compare."""
    with rt.Graph().as_default(), rt.Session() as session:
        variable = rt.Variable(np.zeros((3, 2), np.float32), name="mlp/w1")
        session.run(variable.initializer)
        saver = harness.Saver()
        for step in (100, 200):
            session.run(variable.assign_add(np.ones((3, 2), np.float32)))
            saver.save(session, str(tmp_path / "runs" / "mnist" / "model.ckpt"), global_step=step)
    list_them, verify_them, print_one, compare = commands(INSPECT)
    assert {"100", "200", "mlp/w1"} <= set(result(list_them, tmp_path).split())
    assert "--verify" in verify_them and {"100", "200"} <= set(
        result(verify_them, tmp_path).split()
    )
    assert "[[2. 2.]" in result(print_one, tmp_path)
    done = bash(compare, tmp_path)
    assert (done.returncode, done.stdout) == (1, "mlp/w1: 6 of 6 elements differ, by up to 1\n"), (
        done.stderr
    )


def test_check_prints_the_pages_output(tmp_path: pathlib.Path) -> None:
    """The check of old programs prints what the page shows."""
    import harness.tf1 as tf

    names = [
        f"tf.{one}" for one in dir(tf) if one[0].islower() and inspect.isfunction(getattr(tf, one))
    ]
    (tmp_path / "old").mkdir()
    train = ["import tensorflow as tf", *names[:41]]
    train += [""] * (87 - len(train)) + ["tf.estimator"]
    (tmp_path / "old" / "train.py").write_text("\n".join(train) + "\n")
    (tmp_path / "old" / "worker.py").write_text(
        "\n".join(["import tensorflow as tf", *names[23:57]]) + "\n"
    )
    done = bash(script(TF1_CHECK), tmp_path)
    assert done.stdout.splitlines() == TF1_CHECK.code.splitlines()[1:], done.stderr


# -- blocks of a cluster ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def background(line: str, folder: pathlib.Path) -> Iterator[Program]:
    """Runs a line of a page, ``python`` and what is set before it, while a test goes on."""
    *settings, command = (
        re.split(r" (?=python )", line, maxsplit=1) if not line.startswith("python") else [line]
    )
    env = dict(setting.split("=", 1) for text in settings for setting in text.split())
    with Program(*command.split(), cwd=folder, env=env) as program:
        yield program


@pytest.mark.parametrize("given", ["certs", "token"])
def test_credential_commands_work(given: str, tmp_path: pathlib.Path) -> None:
    """The commands of the page start and watch a task with certificates or tokens."""
    (port,) = free_ports(1)

    def here(line: str) -> str:
        return line.replace("ps0:2222", f"localhost:{port}").replace("ps0", "localhost")

    (tmp_path / "train.py").write_text(PROGRAM)
    if given == "certs":
        result(here(script(CERTIFICATES)), tmp_path)
        copy, start, status = commands(WITH_CERTIFICATES)
        copied = re.findall(r"certs/[\w.]+", here(copy))[:3]
        assert copied == [one for one in copied if (tmp_path / one).is_file()]
    else:
        draw, start = commands(TOKEN)
        result(draw, tmp_path)
        make, status = commands(OBSERVER)
        result(make, tmp_path)
        result(script(BEARER), tmp_path)
        assert len({(tmp_path / file).read_text() for file in ("token", "observer", "bearer")}) == 3
    start = start.replace(" ...", f" --ps_hosts=localhost:{port}")
    with background(start, tmp_path):
        assert "/job:ps/task:0" in until(lambda: bash(here(status), tmp_path))
    if given == "certs":
        before = (tmp_path / "certs" / "w0.pem").read_bytes()
        result(here(script(RENEW)), tmp_path)
        assert (tmp_path / "certs" / "w0.pem").read_bytes() != before
        (tmp_path / "elsewhere").mkdir()
        result(script(ROLES), tmp_path / "elsewhere")
        assert (tmp_path / "elsewhere" / "certs" / "alice.pem").is_file()


def until(done: Callable[[], "subprocess.CompletedProcess[str]"]) -> str:
    """Repeats a command until it ends with 0, as somebody does who waits for a task; gives what it has written."""
    for _ in range(60):
        last = done()
        if last.returncode == 0:
            return last.stdout
    raise AssertionError(last.stdout + last.stderr)


def test_status_commands_work(tmp_path: pathlib.Path) -> None:
    """The commands of the page watch a run from a terminal."""
    launch, scrape = commands(DASHBOARD)
    # test_dashboard.py gives it to Prometheus
    assert (ROOT / re.findall(r"--config\.file=(\S+)", scrape)[0]).is_file()
    with background(launch.replace("9100", str(free_ports(1)[0])), tmp_path) as run:
        target = run.expect(r"what the tasks do: python -m harness\.status --target=(\S+)")[1]
        one, all_of_them = commands(STATUS)
        run.expect("figures for Prometheus at port")
        assert "/job:worker/task:1" in until(
            lambda: bash(one.replace("host:port", target), tmp_path)
        )
        with background(
            all_of_them.replace('"', "").replace("ps=a:2222;worker=b:2222,c:2222", f"ps={target}"),
            tmp_path,
        ) as watch:
            watch.expect("/job:ps/task:0")
            watch.expect("/job:ps/task:0")  # again, a while later
        run.signal(2)
        assert run.wait() == exit_codes.INTERRUPTED.plain, run.story()


FLAGS = """
import tensorflow as tf

for name in ("job_name", "task_index", "flag"):
    tf.app.flags.DEFINE_string(name, "", "what the page gives")


def main(_):
    print("GIVEN", tf.app.flags.FLAGS.job_name, tf.app.flags.FLAGS.flag)


if __name__ == "__main__":
    tf.app.run()
"""


def test_tensorflow_programs_start_unchanged(tmp_path: pathlib.Path) -> None:
    """Programs of TensorFlow start unchanged by the commands of the page."""
    (tmp_path / "package").mkdir()
    for file in ("mnist_replica.py", "package/module.py"):
        (tmp_path / file).write_text(FLAGS)
    assert [result(line, tmp_path).split() for line in commands(TF1)] == [
        ["GIVEN", "worker"],
        ["GIVEN", "value"],
    ]


def test_tensorflow_program_trains_under_launcher(tmp_path: pathlib.Path) -> None:
    """A program of TensorFlow trains under the launcher by the command of the page."""
    program = (ROOT / "tests" / "harness" / "tf1" / "programs" / "counter.py").read_text()
    (tmp_path / "mnist_replica.py").write_text(
        program.replace("import harness.tf1 as tf", "import tensorflow as tf")
    )
    (line,) = commands(TF1_CLUSTER)
    with background(line, tmp_path) as run:
        assert run.wait() == 0, run.story()
