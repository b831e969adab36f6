"""The launcher as its user sees it: real tasks, real signals, and nothing left behind."""

import contextlib
import dataclasses
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator

import psutil
import pytest

pytestmark = pytest.mark.cluster

ROOT = pathlib.Path(__file__).resolve().parents[3]
MARK = "LAUNCH_TEST_MARK"
WATCHING = ("| what the tasks do: ", "| curves: ")
# What every task script of these tests begins with.
PRELUDE = """
import os, signal, subprocess, sys, threading
flags = dict(argument[2:].split("=", 1) for argument in sys.argv[1:] if argument.startswith("--"))
job, index, attempt = flags["job_name"], int(flags["task_index"]), int(os.environ["BELLWETHER_ATTEMPT"])
forever = threading.Event()
"""


@dataclasses.dataclass
class Launch:
    """A launcher under test.

    It is a cold process, not one of the common kit: what is promised are its own process, its two
    streams, its signals, and that no process with its mark is left, which only the environment at a
    program's start shows. It imports no JAX.
    """

    popen: subprocess.Popen[str]
    mark: str

    def read_until(self, text: str) -> list[str]:
        """The lines of the tasks up to the one that contains `text`; the test's own time limit bounds the wait."""
        assert self.popen.stdout is not None
        lines: list[str] = []
        while line := self.popen.stdout.readline():
            lines.append(line.rstrip("\n"))
            if text in line:
                return lines
        raise AssertionError(f"the launcher ended before {text!r}: {lines}")

    def finish(self) -> tuple[int, list[str], list[str]]:
        """Exit code, lines of the tasks, lines of the launcher; fails if any process of the launch is left."""
        out, err = self.popen.communicate()
        assert self.left() == []
        shown = [line for line in err.splitlines() if not any(text in line for text in WATCHING)]
        return self.popen.returncode, out.splitlines(), shown

    def left(self) -> list[psutil.Process]:
        """The processes of this launch, whoever their parent is now; they are known by their environment."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self.mark
        except (psutil.Error, OSError):  # Gone, a zombie, or somebody else's.
            return False


Starter = Callable[..., Launch]


@pytest.fixture
def launch(tmp_path: pathlib.Path) -> Iterator[Starter]:
    """Starts a launcher with flags; `script` is the body of every task."""
    started: list[Launch] = []

    def start(
        *flags: str, script: str | None = None, command: tuple[str, ...] = (), **environment: str
    ) -> Launch:
        if script is not None:
            path = tmp_path / "task.py"
            path.write_text(PRELUDE + textwrap.dedent(script))
            command = ("--", "python", str(path))
        mark = uuid.uuid4().hex
        popen = subprocess.Popen(
            [sys.executable, "-m", "harness.launch", *flags, *command],
            cwd=ROOT,
            env={**os.environ, MARK: mark, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(Launch(popen, mark))
        return started[-1]

    yield start
    for one in started:
        one.popen.kill()
        one.popen.communicate()
        for process in one.left():
            # its guard may end it at the same moment
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def test_tasks_know_cluster_and_ps_end(
    launch: Starter,
) -> None:
    """Every task receives the whole cluster, and the ps tasks end after the workers."""
    run = launch(
        "--ps=2",
        "--workers=2",
        script="""
        if job == "ps":
            forever.wait()
        print("ps", len(flags["ps_hosts"].split(",")), "workers", flags["worker_hosts"].split(",")[index], attempt)
        """,
    )
    code, lines, messages = run.finish()
    assert (code, messages, len(lines)) == (0, [], 2)
    for index in range(2):
        assert any(line.startswith(f"worker/{index} | ps 2 workers 127.0.0.1:") for line in lines)


def test_ps_receive_sigterm_after_workers(launch: Starter) -> None:
    """A ps receives SIGTERM once the workers are done, and its environment keeps it off the GPU."""
    run = launch(
        "--ps=1",
        "--workers=1",
        script="""
        import socket
        port = int(flags["ps_hosts"].split(":")[1])
        if job == "ps":
            def leave(*_):
                print("told to leave")
                sys.exit(0)
            signal.signal(signal.SIGTERM, leave)
            print("environment", [os.environ[name] for name in
                  ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "MALLOC_MMAP_THRESHOLD_", "PYTHONUNBUFFERED")])
            listener = socket.create_server(("127.0.0.1", port))
            connection, _ = listener.accept()
            connection.recv(1)
            forever.wait()
        while True:
            try:
                connection = socket.create_connection(("127.0.0.1", port))
                break
            except ConnectionRefusedError:
                forever.wait(0.01)
        print("worker is done")
        """,
    )
    code, lines, messages = run.finish()
    assert (code, messages) == (0, [])
    assert "ps/0     | environment ['', 'cpu', '1048576', '1']" in lines
    assert lines.index("worker/0 | worker is done") < lines.index("ps/0     | told to leave")


def test_crashed_task_restarts_with_attempt_number(launch: Starter) -> None:
    """A task that crashes is started again and knows the number of its attempt."""
    run = launch(
        "--ps=0",
        "--workers=2",
        script="""
        print(f"attempt {attempt}")
        if index == 1 and attempt < 2:
            os.kill(os.getpid(), signal.SIGKILL) if attempt else sys.exit(7)
        """,
    )
    code, lines, messages = run.finish()
    assert code == 0
    assert sorted(lines) == [
        "worker/0 | attempt 0",
        "worker/1 | attempt 0",
        "worker/1 | attempt 1",
        "worker/1 | attempt 2",
    ]
    assert messages == [
        "launch   | worker/1 exited with code 7; restart 1 of 3 in 0.5 s",
        "launch   | worker/1 was killed by SIGKILL; restart 2 of 3 in 1 s",
    ]


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(5)", 5), ("os.kill(os.getpid(), signal.SIGABRT)", 128 + 6)]
)
def test_failed_chief_gives_code_and_tail(launch: Starter, end: str, code: int) -> None:
    """A chief that fails for good ends the launcher with the chief's code and last lines."""
    run = launch(
        "--ps=1",
        "--workers=2",
        "--max_restarts=1",
        script=f"""
        if job == "ps" or index == 1:
            forever.wait()
        for number in range(30):
            print(f"attempt {{attempt}} line {{number}}")
        {end}
        """,
    )
    returned, _, messages = run.finish()
    assert returned == code
    tail = [f"worker/0 | attempt 1 line {number}" for number in range(10, 30)]
    assert messages[1:-1] == ["launch   | the last lines of worker/0:", *tail]
    assert messages[-1].startswith("launch   | worker/0 ")
    assert messages[-1].endswith("failed for good after 1 restart; stopping everything")


def test_others_outlive_a_failed_worker(
    launch: Starter,
) -> None:
    """The other workers finish without a worker that failed for good, and the exit code is that
    worker's.
    """
    run = launch(
        "--ps=0",
        "--workers=2",
        "--max_restarts=0",
        script="""
        if index == 1:
            sys.exit(9)
        # The parent of our parent is the launcher; worker/1's guard leaves its children when worker/1 is given up.
        import time
        launcher = int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])
        while len(open(f"/proc/{launcher}/task/{launcher}/children").read().split()) > 1:
            time.sleep(0.01)
        print("finished")
        """,
    )
    code, lines, messages = run.finish()
    assert code == 9
    assert lines[-1] == "worker/0 | finished"
    assert (
        messages[-1]
        == "launch   | worker/1 exited with code 9 and failed for good; going on without it"
    )


SERVES = """
import socket
hosts = flags[f"{job}_hosts"].split(",")
listener = socket.create_server(("127.0.0.1", int(hosts[index].partition(":")[2])))
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_is_passed_on(launch: Starter, signum: signal.Signals) -> None:
    """A signal goes to the workers first, then the ps tasks are stopped, and the launcher waits for
    both.
    """
    run = launch(
        "--ps=1",
        "--workers=2",
        script=SERVES
        + """
def leave(signum, frame):
    print("got", signal.Signals(signum).name)
    sys.exit(0)
signal.signal(signal.SIGINT, leave)
signal.signal(signal.SIGTERM, leave)
print("ready")
forever.wait()
""",
    )
    seen: list[str] = []
    while sum("ready" in line for line in seen) < 3:
        seen += run.read_until("ready")
    run.popen.send_signal(signum)
    code, lines, messages = run.finish()
    assert code == 128 + signum
    assert sorted(lines[:2]) == [f"worker/{index} | got {signum.name}" for index in range(2)]
    assert lines[2:] == ["ps/0     | got SIGTERM"]
    assert messages == [
        f"launch   | {signum.name}: stopping the workers, then the ps tasks, within 40 s each"
    ]


def test_ctrl_c_ends_a_starting_task(
    launch: Starter,
) -> None:
    """Ctrl-C ends tasks that are still importing, where Python would lose the interrupt."""
    run = launch(
        "--ps=1",
        "--workers=2",
        "--evaluators=1",
        "--grace_secs=1000",
        script="""
        signal.signal(signal.SIGINT, lambda signum, frame: None)
        print("ready")
        forever.wait()
        """,
    )
    seen: list[str] = []
    while sum("ready" in line for line in seen) < 4:
        seen += run.read_until("ready")
    run.popen.send_signal(signal.SIGINT)
    code, lines, _ = run.finish()
    assert (code, lines) == (128 + signal.SIGINT, [])


# Ignores every polite request, and so do a child in its group and a grandchild in a session of its
# own.
STUBBORN = """
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(signum, signal.SIG_IGN)
sleeper = [sys.executable, "-S", "-c", "print('asleep', flush=True); import time; time.sleep(1000)"]
for new_session in (False, True):
    child = subprocess.Popen(sleeper, start_new_session=new_session, stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
print("stubborn")
"""


def _all_stubborn(run: Launch, tasks: int) -> None:
    for _ in range(tasks):
        run.read_until("stubborn")
    # Per task: the guard, the task itself and its two children; and the launcher.
    assert len(run.left()) == 4 * tasks + 1


def test_stubborn_tasks_are_killed(launch: Starter) -> None:
    """Tasks that do not stop in time are killed with every process that they started."""
    run = launch("--ps=1", "--workers=1", "--grace_secs=0.2", script=STUBBORN + "forever.wait()")
    _all_stubborn(run, 2)
    run.popen.send_signal(signal.SIGTERM)
    code, _, messages = run.finish()
    assert code == 128 + signal.SIGTERM
    assert messages[1:] == [
        f"launch   | {task} did not stop in time: killed" for task in ("worker/0", "ps/0")
    ]


def test_second_signal_kills_at_once(launch: Starter) -> None:
    """A second signal kills every task at once."""
    run = launch("--ps=1", "--workers=1", "--grace_secs=1000", script=STUBBORN + "forever.wait()")
    _all_stubborn(run, 2)
    run.popen.send_signal(signal.SIGINT)
    assert run.popen.stderr is not None
    assert any(text in run.popen.stderr.readline() for text in WATCHING)
    assert run.popen.stderr.readline().startswith("launch   | SIGINT: stopping")
    run.popen.send_signal(signal.SIGINT)
    code, _, messages = run.finish()
    assert code == 128 + signal.SIGINT
    assert messages == ["launch   | SIGINT again: killing every task"]


def test_children_end_with_their_task(launch: Starter) -> None:
    """Processes that a task leaves behind end with the task."""
    run = launch("--ps=0", "--workers=1", script=STUBBORN)
    assert run.finish()[:2] == (0, ["worker/0 | stubborn"])


@pytest.mark.parametrize("victim", ["launcher", "guards"])
def test_sigkill_leaves_no_process(launch: Starter, victim: str) -> None:
    """No process is left when the launcher or its guards are killed by SIGKILL."""
    run = launch("--ps=1", "--workers=2", "--max_restarts=0", script=STUBBORN + "forever.wait()")
    _all_stubborn(run, 3)
    family = [process for process in run.left() if process.pid != run.popen.pid]
    if victim == "launcher":
        run.popen.kill()
    else:
        # While the launcher sleeps, so that it sees all of them gone at once.
        run.popen.send_signal(signal.SIGSTOP)
        for guard in psutil.Process(run.popen.pid).children():
            guard.kill()
        run.popen.send_signal(signal.SIGCONT)
    assert run.popen.wait() == (-signal.SIGKILL if victim == "launcher" else 128 + signal.SIGKILL)
    # Asynchronous by nature: the kernel tells the guards, and they end what they guard. Zombies
    # count as gone.
    _, alive = psutil.wait_procs(family, timeout=100)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_closed_reader_stops_the_cluster(launch: Starter) -> None:
    """The cluster stops when the reader of its output closes the pipe."""
    run = launch("--ps=1", "--workers=1", script="while True: print('more and more')")
    run.read_until("more")
    assert run.popen.stdout is not None
    run.popen.stdout.close()
    run.popen.wait()
    assert run.popen.returncode == 128 + signal.SIGTERM
    assert run.left() == []
    assert run.popen.stderr is not None
    assert any(text in run.popen.stderr.readline() for text in WATCHING)
    assert run.popen.stderr.readline() == "launch   | nobody reads the output any more\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_do_no_harm(tmp_path: pathlib.Path, closed: str) -> None:
    """A launcher whose output streams are closed still runs its tasks to the end."""
    seen = tmp_path / "seen"
    task = f"print('said', flush=True); import pathlib, sys; pathlib.Path({str(seen)!r}).write_text('whole')"
    launcher = [sys.executable, "-m", "harness.launch", "--ps=0", "--workers=1"]
    command = shlex.join([*launcher, "--", sys.executable, "-c", task])
    ended = subprocess.run(
        ["bash", "-c", f"{command} {closed}"], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert seen.read_text() == "whole"
    assert ("said" in ended.stdout) == (closed == "2>&-")
    assert "Error" not in ended.stderr


def test_lines_are_prefixed_and_escaped(launch: Starter) -> None:
    """Every line is prefixed with its task, long lines are cut, and binary bytes are escaped."""
    run = launch(
        "--ps=0",
        "--workers=1",
        script=r"""
        write = os.write
        write(1, b"one\ntwo to std")
        write(1, b"out\n")
        write(2, b"errors too\n")
        write(1, b"\xff\x00\x07bin\x7fary\n")
        write(1, b" 10%\r 20%\r100%\n")
        write(1, "grüße\n".encode())
        for _ in range(20):
            write(1, b"x" * 10_000)
        write(1, b"\n\nno end")
        """,
    )
    code, lines, _ = run.finish()
    assert code == 0
    assert all(line.startswith("worker/0 | ") for line in lines)
    texts = [line.removeprefix("worker/0 | ") for line in lines]
    assert texts[:6] == [
        "one",
        "two to stdout",
        "errors too",
        r"\xff\x00\x07bin\x7fary",
        "100%",
        "grüße",
    ]
    assert texts[-2:] == ["", "no end"]
    long = texts[6:-2]
    assert "".join(long) == "x" * 200_000
    assert [len(piece) for piece in long[:-1]] == [1 << 16] * 3


def test_help_is_not_a_failure(launch: Starter) -> None:
    """--help prints the flags and exits with 0."""
    code, lines, messages = launch("--help").finish()
    assert (code, messages) == (0, [])
    assert any("--workers" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no command to run: write it after --"),
        (["--workers=2", "--"], "no command to run: write it after --"),
        (["--workers=2", "true"], "no command to run: write it after --"),
        (["true", "--", "true"], "true stands before --"),
        (
            ["--workers=2", "python", "-m", "trainer"],
            "Unknown command line flag 'm'; the command to run goes after --",
        ),
        (["--workers=0", "--", "true"], "flag --workers=0: 0 is not a positive integer"),
        (["--ps=-1", "--", "true"], "flag --ps=-1"),
        (["--ps=some", "--", "true"], "flag --ps=some"),
        (["--max_restarts=-1", "--", "true"], "flag --max_restarts=-1"),
        (["--grace_secs=-1", "--", "true"], "flag --grace_secs=-1"),
        (
            ["--wrokers=2", "--", "true"],
            "Unknown command line flag 'wrokers'. Did you mean: workers ?",
        ),
        (["--", "no-such-program-anywhere"], "no-such-program-anywhere: no such program"),
        (["--", "true", "--job_name=ps"], "--job_name=ps is set by the launcher"),
        (["--", "true", "-ps_hosts", "a:1"], "-ps_hosts is set by the launcher"),
        (["--", "true", "--exit_codes=tfjob"], "--exit_codes goes before --"),
        (["--exit_codes=k8s", "--", "true"], "flag --exit_codes=k8s: value should be one of"),
    ],
)
def test_bad_arguments_give_one_line(launch: Starter, arguments: list[str], message: str) -> None:
    """Bad arguments give one clear line and code 2."""
    code, lines, messages = launch(command=tuple(arguments)).finish()
    assert (code, lines) == (2, [])
    assert len(messages) == 1
    assert messages[0].startswith(f"launch: {message}")
