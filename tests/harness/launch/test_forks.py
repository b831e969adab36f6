"""Forked tasks: a task of the fork server is what a new process would be, and the launcher needs no server."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

from harness.launch.forks import can_fork

pytestmark = pytest.mark.cluster

PRELUDE = """
import harness
import os, signal, sys
is_forked = type(sys.meta_path[0]).__name__ == "_ImportedModules"
flags = dict(argument[2:].split("=", 1) for argument in sys.argv[1:] if argument.startswith("--"))
job, attempt = flags["job_name"], int(os.environ["BELLWETHER_ATTEMPT"])
"""
WAYS = ("forked", "new")

FACTS = """
import faulthandler, gc, json, resource, threading, warnings
import numpy, jax, runtime
def command_line():
    return open("/proc/self/cmdline").read().rstrip("\\0")
facts = {
    "argv": [argument.replace(flags["worker_hosts"], "") for argument in sys.argv],
    "path": sys.path,
    "main": {name: str(value).partition(" object at")[0] for name, value in sorted(globals().items())
             if name.startswith("__") and name != "__warningregistry__"},
    "module": sys.modules["__main__"].__dict__ is globals(),
    "flags": [str(sys.flags), sys.warnoptions, str(warnings.filters)],
    "directory": os.getcwd(),
    # tensorboardX sets CRC32C_SW_MODE when a module of the harness imports it.
    "environ": {name: value for name, value in os.environ.items()
                if name not in ("TF_CONFIG", "CRC32C_SW_MODE")},
    "handlers": [str(signal.getsignal(signum)) for signum in range(1, 32)],
    "mask": sorted(map(str, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
    "group": os.getpgrp() == os.getpid(),
    "session": os.getsid(0) == os.getppid(),
    "stdio": [(s.encoding, s.errors, s.line_buffering, s.write_through) for s in (sys.stdout, sys.stderr)],
    "input": sys.stdin.read(),
    "open": sorted(f for f in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + f)),
    "processors": sorted(os.sched_getaffinity(0)),
    "limits": [resource.getrlimit(limit) for limit in range(10)],
    "threads": [thread.name for thread in threading.enumerate()],
    "gc": gc.isenabled(),
    "faulthandler": faulthandler.is_enabled(),
    "platforms": jax.config.jax_platforms,
    "command": command_line().replace(flags["worker_hosts"], ""),
    "orig": [argument.replace(flags["worker_hosts"], "") for argument in sys.orig_argv],
    "spec": jax.__spec__.name + str(jax.__spec__.loader)[:40],
}
print(json.dumps([is_forked, facts]))
"""


@pytest.fixture
def launch(tmp_path: pathlib.Path) -> "Launcher":
    """Runs a launcher to the end."""
    return Launcher(tmp_path)


class Launcher:
    """Runs programs as the tasks of a launcher."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory

    def __call__(
        self, how: str, script: str, *options: str, module: bool = False, **environ: str
    ) -> tuple[int, list[str], str]:
        """Returns the exit code, the lines of the tasks without their names, and the launcher's lines."""
        text = PRELUDE + textwrap.dedent(script)
        # The launcher does not see an import with a tab, so it does not fork such a program.
        (self.directory / "task.py").write_text(
            text if how == "forked" else text.replace("import ", "import\t")
        )
        program = ["-m", "task"] if module else ["task.py"]
        done = subprocess.run(
            [sys.executable, "-m", "harness.launch", "--ps=0", "--workers=1", "--max_restarts=0"]
            + [*options, "--", "python", *program],
            cwd=self.directory,
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
        )
        lines = [line.partition(" | ")[2] for line in done.stdout.splitlines()]
        return done.returncode, lines, done.stderr


@pytest.mark.parametrize("module", [False, True], ids=["file", "module"])
def test_fork_finds_what_processes_find(launch: Launcher, module: bool) -> None:
    """A forked task finds what a new process finds: arguments, paths, environment, signals, descriptors."""
    environ = {"PYTHONFAULTHANDLER": "1", "PYTHONWARNINGS": "error::BytesWarning"}
    facts = {}
    for how in WAYS:
        code, lines, said = launch(how, FACTS, module=module, **environ)
        assert code == 0, (lines, said)
        is_forked, facts[how] = json.loads(lines[-1])
        assert is_forked == (how == "forked")
    assert facts["forked"] == facts["new"]


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("sys.exit(7)", 7),
        ("sys.exit('a reason')", 1),
        ("import runtime\ndef fail(): raise ValueError('wrong')\nfail()", 1),
        ("signal.raise_signal(signal.SIGINT)", 130),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("import no_such_module", 1),
        ("import atexit, threading\natexit.register(print, 'at exit')\n"
         "threading.Timer(0.2, lambda: print('thread', __name__)).start()", 0),
    ],
)  # fmt: skip
def test_fork_ends_as_processes_end(launch: Launcher, script: str, code: int) -> None:
    """Exit codes, signals, tracebacks, threads and exit handlers are those of a new process."""
    ends = {how: launch(how, f"print(is_forked)\n{script}") for how in WAYS}
    (forked, *lines, _), (new, *expected, _) = (
        [code, *lines, said] for code, lines, said in ends.values()
    )
    assert (forked, new) == (code, code)
    assert (lines.pop(0), expected.pop(0)) == ("True", "False")
    assert [line.replace("\t", " ") for line in lines] == [
        line.replace("\t", " ") for line in expected
    ]


def test_variable_before_jax_starts_anew(launch: Launcher) -> None:
    """A program that sets a variable of JAX before the program imports JAX has the variable's effect."""
    script = """
    import numpy
    os.environ["JAX_ENABLE_X64"] = "true"
    import jax.numpy
    print(is_forked, jax.numpy.zeros(1).dtype)
    """
    assert launch("forked", script)[:2] == (0, ["False float64"])


def test_ps_fork_applies_its_variables(launch: Launcher) -> None:
    """A forked ps computes on the CPU, whatever the server has read."""
    script = """
    import jax
    print(job, is_forked, jax.config.jax_platforms, os.environ["CUDA_VISIBLE_DEVICES"])
    """
    _, lines, _ = launch("forked", script, "--ps=1", "--workers=1")
    assert "ps True cpu " in lines


def test_forks_draw_different_numbers(launch: Launcher) -> None:
    """Tasks of one server draw different random numbers."""
    script = """
    import random, secrets, tempfile, uuid
    import numpy.random, runtime
    from runtime import concurrency
    print(is_forked, random.random(), numpy.random.rand(), secrets.token_hex(), uuid.uuid4(),
          tempfile.mktemp(), concurrency.random_hex(8), concurrency.random_id(64))
    """
    _, lines, _ = launch("forked", script, "--workers=2")
    first, second = (line.split() for line in lines)
    assert first[0] == second[0] == "True"
    assert all(a != b for a, b in zip(first[1:], second[1:], strict=True))


def test_restart_is_a_fork_too(launch: Launcher) -> None:
    """A killed task is forked again."""
    script = """
    print(attempt, is_forked)
    attempt or os.kill(os.getpid(), signal.SIGKILL)
    """
    assert launch("forked", script, "--max_restarts=1")[:2] == (0, ["0 True", "1 True"])


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_launcher_needs_no_fork_server(launch: Launcher, signum: signal.Signals) -> None:
    """A task starts as a new process where the server is dead or hangs, and running tasks live on."""
    script = f"""
    import psutil
    print(attempt, is_forked)
    if not attempt:
        for process in psutil.Process(os.getppid()).parent().children():
            if "fork_server" in " ".join(process.cmdline()) and process.pid != os.getppid():
                process.send_signal({int(signum)})
        os._exit(1)
    """
    assert launch("forked", script, "--max_restarts=1")[:2] == (0, ["0 True", "1 False"])


def test_only_plain_programs_are_forked(tmp_path: pathlib.Path) -> None:
    """Commands with another interpreter, an option of Python, or no import of this project start anew."""
    ours, other = tmp_path / "ours.py", tmp_path / "other.py"
    ours.write_text("import os\nfrom runtime import Server\n")
    other.write_text("import numpy  # import jax\nimport jaxtyping\n")
    cpu, python = {"JAX_PLATFORMS": "cpu"}, sys.executable
    assert can_fork([python, "-m", "ours"], [ours], cpu)
    assert can_fork([python, "ours.py", "--flag"], [ours], cpu)
    for command in (
        [python, "-c", "import jax"],
        [python, "-X", "dev", "ours.py"],
        [python],
        ["/bin/sh", "ours.py"],
        ["no-such-program", "ours.py"],
    ):
        assert not can_fork(command, [ours], cpu), command
    assert not can_fork([python, "other.py"], [other], cpu)
    assert not can_fork([python, "other.py"], [], cpu)
