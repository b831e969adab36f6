"""The launcher's pure parts: the policy under any order of events, lines out of any bytes, ports and arguments."""

import io
import json
import random
import signal
import socket
import sys
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from harness import exit_codes
from harness.launch import policy, times
from harness.launch.output import MAX_LINE_BYTES, TAIL_LINES, LineBuffer, LinePrinter, wants_colour
from harness.launch.policy import (
    ClockTick,
    LaunchOptions,
    LaunchTask,
    RunStage,
    SendSignal,
    ShowTail,
    StartTask,
    StopSignal,
    TaskExited,
    TaskPhase,
)
from harness.launch.ports import hold_ports
from harness.launch.tasks import ClusterTopology, arguments, claimed_flags, environment
from tests.kit.changes import SetVariables

PS0, CHIEF, WORKER1 = LaunchTask("ps", 0), LaunchTask("worker", 0), LaunchTask("worker", 1)
OPTIONS = LaunchOptions(
    max_restarts=2, grace_secs=10, backoff_secs=0.5, max_backoff_secs=0.75, forgive_secs=60
)


class Machine:
    """Drives the policy and keeps what it decided."""

    def __init__(self, *tasks: LaunchTask, options: policy.LaunchOptions = OPTIONS) -> None:
        self.options = options
        self.now = 0.0
        self.state, self.last = policy.begin(tasks, self.now)

    def after(self, seconds: float, event: policy.Event) -> list[policy.Instruction]:
        self.now += seconds
        self.state, self.last = policy.react(self.state, event, self.now, self.options)
        return [
            instruction for instruction in self.last if not isinstance(instruction, policy.LogLine)
        ]


def test_backoff_doubles_and_forgives() -> None:
    """The pause before a restart doubles up to its limit and starts anew after a long run."""
    machine = Machine(PS0, CHIEF)
    assert machine.after(1, TaskExited(CHIEF, 1)) == []
    assert machine.after(0.49, ClockTick()) == []
    assert machine.after(0.01, ClockTick()) == [StartTask(CHIEF, 1)]
    assert machine.after(1, TaskExited(CHIEF, -9)) == []
    assert machine.after(0.75, ClockTick()) == [StartTask(CHIEF, 2)]
    assert machine.after(60, TaskExited(CHIEF, 1)) == []
    assert machine.after(0.5, ClockTick()) == [StartTask(CHIEF, 3)]


def test_ps_leaving_alone_is_failure() -> None:
    """A ps that exits by itself has failed, even with code 0."""
    machine = Machine(PS0, CHIEF)
    for attempt in (1, 2):
        assert machine.after(1, TaskExited(PS0, 0)) == []
        assert machine.after(0.75, ClockTick()) == [StartTask(PS0, attempt)]
    assert machine.after(1, TaskExited(PS0, 0)) == [
        ShowTail(PS0),
        SendSignal(CHIEF, signal.SIGTERM),
    ]
    assert machine.after(1, TaskExited(CHIEF, -15)) == []
    assert (machine.state.stage, machine.state.exit_code) == (RunStage.FINISHED, 1)


def test_fatal_code_prevents_restart() -> None:
    """A task that would fail in the same way again is not started again."""
    machine = Machine(PS0, CHIEF)
    assert machine.after(1, TaskExited(CHIEF, exit_codes.DATA.plain)) == [
        ShowTail(CHIEF),
        SendSignal(PS0, signal.SIGTERM),
    ]
    machine.after(1, TaskExited(PS0, 0))
    assert machine.state.failure is not None and machine.state.failure.fatal
    assert "(data: it would end so again)" in machine.state.failure.why
    assert (machine.state.stage, machine.state.exit_code) == (
        RunStage.FINISHED,
        exit_codes.DATA.plain,
    )


def test_preempted_task_has_not_failed() -> None:
    """A preempted task is started again without counting a failure."""
    machine = Machine(PS0, CHIEF)
    # more often than a failure may happen
    for attempt, returncode in enumerate((143, -signal.SIGTERM, 143, 143), 1):
        assert machine.after(1, TaskExited(CHIEF, returncode)) == []
        assert machine.after(0.5, ClockTick()) == [StartTask(CHIEF, attempt)]
    assert machine.state.tasks[CHIEF].restarts == 0


def test_single_task_gives_its_code() -> None:
    """The launcher of one task ends with the code of that task."""
    for task in (PS0, CHIEF, WORKER1):
        machine = Machine(task)
        machine.after(1, TaskExited(task, 0))
        assert (machine.state.stage, machine.state.exit_code) == (RunStage.FINISHED, 0)
        for returncode, code in ((143, 143), (0, 0), (-signal.SIGKILL, 137)):
            machine = Machine(task, options=replace(OPTIONS, per_task=True))
            assert machine.after(1, StopSignal(signal.SIGTERM)) == [
                SendSignal(task, signal.SIGTERM)
            ]
            assert machine.after(1, TaskExited(task, returncode)) == []
            assert (machine.state.stage, machine.state.exit_code) == (RunStage.FINISHED, code)


def test_single_ps_restarts_then_gives_up() -> None:
    """The launcher of one ps restarts the ps as often as allowed, then gives up."""
    machine = Machine(PS0)
    for attempt in (1, 2):
        assert machine.after(1, TaskExited(PS0, -signal.SIGKILL)) == []
        assert machine.after(0.75, ClockTick()) == [StartTask(PS0, attempt)]
    assert machine.after(1, TaskExited(PS0, -signal.SIGKILL)) == [ShowTail(PS0)]
    assert (machine.state.stage, machine.state.exit_code) == (RunStage.FINISHED, 137)
    assert machine.state.failure is not None and machine.state.failure.fatal


def test_failure_while_stopping_is_ignored() -> None:
    """A task that ends badly while the cluster stops does not change the exit code."""
    machine = Machine(PS0, CHIEF, WORKER1)
    assert machine.after(1, StopSignal(signal.SIGINT)) == [
        SendSignal(CHIEF, signal.SIGINT),
        SendSignal(WORKER1, signal.SIGINT),
    ]
    joins = Machine(PS0, CHIEF, WORKER1, options=replace(OPTIONS, joins=True))
    assert joins.after(1, StopSignal(signal.SIGINT)) == [
        SendSignal(CHIEF, signal.SIGTERM),
        SendSignal(WORKER1, signal.SIGTERM),
    ]
    assert machine.after(1, TaskExited(WORKER1, 3)) == []
    assert machine.after(1, TaskExited(CHIEF, 1)) == [SendSignal(PS0, signal.SIGTERM)]
    assert machine.after(1, TaskExited(PS0, -15)) == []
    assert (machine.state.stage, machine.state.exit_code) == (RunStage.FINISHED, 130)


def test_waiting_ps_stays_down_at_end() -> None:
    """A ps that waits for its restart is not started once the workers are done."""
    machine = Machine(PS0, CHIEF)
    assert machine.after(1, TaskExited(PS0, 1)) == []
    assert machine.after(0.1, TaskExited(CHIEF, 0)) == []
    assert (machine.state.stage, machine.state.exit_code) == (RunStage.FINISHED, 0)


def test_unkillable_task_does_not_hold() -> None:
    """A task that survives SIGKILL does not hold the launcher."""
    machine = Machine(CHIEF)
    machine.after(0, StopSignal(signal.SIGTERM))
    assert machine.after(9.9, ClockTick()) == []
    assert machine.after(0.1, ClockTick()) == [SendSignal(CHIEF, signal.SIGKILL)]
    assert machine.after(times.KILL_GRACE_SECS, ClockTick()) == []
    assert machine.state.stage is RunStage.FINISHED


@given(st.data())
def test_every_story_keeps_its_promises(data: st.DataObject) -> None:
    """Under any order of events the policy ends, and never starts a live task or signals a dead
    one.
    """
    tasks = [LaunchTask("ps", i) for i in range(data.draw(st.integers(0, 2)))]
    tasks += [LaunchTask("worker", i) for i in range(data.draw(st.integers(1, 3)))]
    machine = Machine(*tasks)
    alive: dict[LaunchTask, int] = {}
    attempts: dict[LaunchTask, int] = dict.fromkeys(tasks, -1)
    failed: list[int] = []
    interrupted = False

    def follow() -> None:
        for instruction in machine.last:
            match instruction:
                case StartTask(task, attempt):
                    assert task not in alive
                    assert attempt == attempts[task] + 1
                    assert machine.state.stage is RunStage.RUNNING
                    alive[task], attempts[task] = 0, attempt
                case SendSignal(task, signum):
                    assert task in alive
                    # The ps tasks hear nothing while a worker lives, unless everything is killed.
                    # A worker that survived SIGKILL is given up: it counts as failed.
                    phases = [
                        machine.state.tasks[other].phase for other in alive if other.job == "worker"
                    ]
                    workers = any(phase is not TaskPhase.FAILED for phase in phases)
                    assert task.job == "worker" or signum == signal.SIGKILL or not workers
                    alive[task] = max(alive[task], signum)
                case ShowTail(task):
                    assert task not in alive

    follow()
    for _ in range(200):
        if machine.state.stage is RunStage.FINISHED:
            break
        kinds = ["tick"] + ["exit"] * bool(alive) + ["signal"] * (not interrupted)
        kind = data.draw(st.sampled_from(kinds))
        if kind == "exit":
            task = data.draw(st.sampled_from(sorted(alive)))
            code = data.draw(st.sampled_from([0, 0, 1, 7, -9, 2, 75, 143]))
            del alive[task]
            before = machine.state.failure
            machine.after(data.draw(st.sampled_from([0.0, 1.0, 100.0])), TaskExited(task, code))
            if before is None and machine.state.failure is not None:
                failed.append(policy.exit_code_of(code) or 1)
        elif kind == "signal":
            interrupted = True
            machine.after(0, StopSignal(signal.SIGTERM))
        else:
            due = policy.next_due(machine.state)
            machine.after(0.0 if due is None else max(0.0, due - machine.now), ClockTick())
        follow()
    else:
        # Whatever was drawn so far, from here on everybody exits well: it must end by itself.
        while alive:
            task = min(alive, key=lambda one: one.job != "worker")
            del alive[task]
            machine.after(0, TaskExited(task, 0))
            follow()
            machine.after(100, ClockTick())
            follow()
    if machine.state.stage is RunStage.FINISHED:
        assert not alive or any(
            was.phase is TaskPhase.FAILED for was in machine.state.tasks.values()
        )
        expected = failed[0] if failed else 128 + signal.SIGTERM if interrupted else 0
        assert machine.state.exit_code == expected


@given(st.lists(st.binary(max_size=40)), st.randoms(use_true_random=False))
def test_lines_ignore_chunk_boundaries(chunks: list[bytes], chance: random.Random) -> None:
    """Lines do not depend on how their bytes arrive."""
    whole = b"\n".join(chunks)
    cuts = sorted(chance.randint(0, len(whole)) for _ in range(5))
    parts = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    at_once, in_parts = LineBuffer(), LineBuffer()
    expected = at_once.feed(whole) + at_once.flush()
    assert [line for part in parts for line in in_parts.feed(part)] + in_parts.flush() == expected
    assert list(in_parts.tail) == expected[-TAIL_LINES:]
    assert not any(character in line for line in expected for character in "\r\n\x00\x07")


def test_endless_line_has_bounded_memory() -> None:
    """An endless line is cut into pieces of bounded size."""
    buffer = LineBuffer()
    shown = [line for _ in range(10) for line in buffer.feed(b"y" * MAX_LINE_BYTES)]
    assert len(shown) == 9
    assert buffer.flush() == ["y" * MAX_LINE_BYTES]


def test_task_names_are_aligned() -> None:
    """The names of tasks are padded to one width, with or without colour."""
    for colour, expected in ((False, "ps/0     | hi\n"), (True, "\x1b[36mps/0     |\x1b[0m hi\n")):
        stream = io.BytesIO()
        LinePrinter(stream, ["ps/0", "worker/0"], colour).write("ps/0", ["hi"])
        assert stream.getvalue().decode() == expected


def test_colour_needs_a_willing_terminal(set_variables: SetVariables) -> None:
    """Colour is used on a terminal only, and not when NO_COLOR is set."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    set_variables(NO_COLOR=None)
    assert wants_colour(Terminal())
    assert not wants_colour(io.StringIO())
    set_variables(NO_COLOR="1")
    assert not wants_colour(Terminal())


def test_held_ports_are_reserved() -> None:
    """Held ports are taken for others and free after close."""
    held = hold_ports(5)
    ports = [holder.getsockname()[1] for holder in held]
    assert len(set(ports)) == 5
    for holder, port in zip(held, ports, strict=True):
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            assert other.connect_ex(("127.0.0.1", port)) != 0
            holder.close()
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_worker_and_ps_arguments() -> None:
    """Workers and ps receive their flags, TF_CONFIG and environment, and claimed flags are found."""
    topology = ClusterTopology(ps_hosts=("h:1",), worker_hosts=("h:2", "h:3"))
    assert topology.tasks() == [PS0, CHIEF, WORKER1]
    assert arguments(["python", "-m", "x"], topology, WORKER1) == [
        sys.executable,
        "-m",
        "x",
        "--ps_hosts=h:1",
        "--worker_hosts=h:2,h:3",
        "--job_name=worker",
        "--task_index=1",
    ]
    base = {"PATH": "p", "JAX_PLATFORMS": "cuda"}
    worker = environment(base, topology, WORKER1, 2)
    own = {"PYTHONUNBUFFERED": "1", "BELLWETHER_ATTEMPT": "2", "BELLWETHER_TASK_NUMBER": "2"}
    assert json.loads(worker.pop("TF_CONFIG"))["task"] == {"type": "worker", "index": 1}
    assert worker == {"PATH": "p", "JAX_PLATFORMS": "cuda", **own}
    assert environment(base, topology, WORKER1, 2, number=5)["BELLWETHER_TASK_NUMBER"] == "5"
    ps = environment(base, topology, PS0, 0)
    assert (ps["JAX_PLATFORMS"], ps["CUDA_VISIBLE_DEVICES"], ps["BELLWETHER_ATTEMPT"]) == (
        "cpu",
        "",
        "0",
    )
    assert claimed_flags(["x", "--task_index=1", "--task_index_of=2", "-job_name", "ps"]) == [
        "--task_index=1",
        "-job_name",
    ]


CHIEF_TASK, EVALUATOR = LaunchTask("chief", 0), LaunchTask("evaluator", 0)


def test_evaluator_has_the_grace_period() -> None:
    """The ps tasks do not wait for an evaluator, which has the grace period for the last
    checkpoint.
    """
    machine = Machine(PS0, CHIEF, EVALUATOR)
    assert machine.after(1, TaskExited(CHIEF, 0)) == [SendSignal(PS0, signal.SIGTERM)]
    assert (
        machine.after(1, TaskExited(PS0, -15)) == [] and machine.state.stage is RunStage.STOPPING_PS
    )
    assert machine.after(OPTIONS.grace_secs, ClockTick()) == [SendSignal(EVALUATOR, signal.SIGKILL)]
    machine.after(0, TaskExited(EVALUATOR, -9))
    assert machine.state.stage is RunStage.FINISHED and machine.state.exit_code == 0


def test_evaluator_ends_nothing() -> None:
    """An evaluator that finishes early or fails for good ends no other task."""
    machine = Machine(PS0, CHIEF, EVALUATOR)
    assert machine.after(1, TaskExited(EVALUATOR, 0)) == []
    assert (
        machine.state.tasks[EVALUATOR].phase is TaskPhase.DONE
        and machine.state.stage is RunStage.RUNNING
    )
    machine = Machine(PS0, CHIEF, EVALUATOR)
    for _ in range(OPTIONS.max_restarts):
        machine.after(1, TaskExited(EVALUATOR, 1))
        assert machine.after(1, ClockTick()) == [
            StartTask(EVALUATOR, machine.state.tasks[EVALUATOR].attempt)
        ]
    assert machine.after(1, TaskExited(EVALUATOR, 1)) == [ShowTail(EVALUATOR)]
    assert machine.state.stage is RunStage.RUNNING


def test_stop_reaches_evaluators_with_workers() -> None:
    """A stop reaches the evaluators together with the workers."""
    machine = Machine(PS0, CHIEF, EVALUATOR)
    assert machine.after(1, StopSignal(signal.SIGINT)) == [
        SendSignal(CHIEF, signal.SIGINT),
        SendSignal(EVALUATOR, signal.SIGINT),
    ]


def test_starting_task_receives_sigterm() -> None:
    """A task that is still starting receives SIGTERM in place of SIGINT."""
    stops = [SendSignal(CHIEF, signal.SIGINT), SendSignal(WORKER1, signal.SIGTERM)]
    machine = Machine(PS0, CHIEF, WORKER1)
    assert machine.after(1, StopSignal(signal.SIGINT, frozenset({PS0, WORKER1}))) == stops
    machine = Machine(PS0, CHIEF, WORKER1)
    machine.after(1, StopSignal(signal.SIGTERM, frozenset({WORKER1})))
    assert machine.last[-2:] == (
        SendSignal(CHIEF, signal.SIGTERM),
        SendSignal(WORKER1, signal.SIGTERM),
    )


def test_chief_job_leads() -> None:
    """With a chief job the chief's failure ends the run, and worker 0's does not."""
    machine = Machine(PS0, CHIEF_TASK, CHIEF)
    for _ in range(OPTIONS.max_restarts):
        machine.after(1, TaskExited(CHIEF, 1))
        machine.after(1, ClockTick())
    assert machine.after(1, TaskExited(CHIEF, 1)) == [ShowTail(CHIEF)]  # worker 0: the others go on
    assert machine.state.stage is RunStage.RUNNING
    for _ in range(OPTIONS.max_restarts):
        machine.after(1, TaskExited(CHIEF_TASK, 1))
        machine.after(1, ClockTick())
    assert machine.after(1, TaskExited(CHIEF_TASK, 1)) == [
        ShowTail(CHIEF_TASK),
        SendSignal(PS0, signal.SIGTERM),
    ]


def test_workers_end_with_the_chief() -> None:
    """The workers are finished only when the chief is finished too."""
    machine = Machine(PS0, CHIEF_TASK, WORKER1)
    assert machine.after(1, TaskExited(WORKER1, 0)) == []
    assert machine.after(1, TaskExited(CHIEF_TASK, 0)) == [SendSignal(PS0, signal.SIGTERM)]


def test_chief_and_evaluator_arguments() -> None:
    """A chief and an evaluator receive their flags."""
    topology = ClusterTopology(("h:1",), ("h:2",), ("h:3",), evaluators=1)
    assert [str(task) for task in topology.tasks()] == [
        "ps/0",
        "chief/0",
        "worker/0",
        "evaluator/0",
    ]
    own = [
        "--ps_hosts=h:1",
        "--worker_hosts=h:2",
        "--chief_hosts=h:3",
        "--job_name=evaluator",
        "--task_index=0",
    ]
    assert arguments(["x"], topology, EVALUATOR) == ["x", *own]
