"""The driver of a run on Ray, which places the actors and follows the launcher's policy.

`harness.launch.policy` decides. Its events are those of the actors, and the driver carries out its
instructions. There is one thread, which waits for one queue.
"""

import contextlib
import os
import pathlib
import queue
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import FrameType
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from harness import exit_codes, timeouts
from harness.launch import policy
from harness.launch.policy import EVALUATOR, PS, WORKER, LaunchTask
from harness.launch.tasks import ClusterTopology, claimed_flags, watching
from harness.ray import times
from harness.ray.actor import SECURITY_VARIABLE, TaskActor, TaskEnd
from runtime import concurrency
from runtime.lowlevel import divide_memory

DEFAULT_RESOURCES = {"CPU": 1.0}
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}


class TaskFailedError(RuntimeError):
    """The failure of a task for good. The task's own error is the cause.

    Attributes:
        task: Name of the task, such as "worker/0".
        exit_code: Exit code of the task; 128+signal for a signal.
        results: Results of the workers, by index; None for a worker that has not returned.
    """

    def __init__(self, message: str, task: str, exit_code: int, results: Sequence[Any]) -> None:
        super().__init__(message)
        self.task, self.exit_code, self.results = task, exit_code, list(results)


def run(
    program: Callable[[], Any] | Sequence[str],
    *,
    ps: int = 1,
    workers: int = 1,
    evaluators: int = 0,
    resources: Mapping[str, Mapping[str, float]] | None = None,
    strategy: str = "PACK",
    max_restarts: int = policy.LaunchOptions.max_restarts,
    grace_secs: float = policy.LaunchOptions.grace_secs,
) -> list[Any]:
    """Runs a program as every task of a cluster on Ray, until the workers are done.

    Each task is a process of its own, below an actor that has a bundle of one placement group. Its
    environment says which task it is, as ``harness.join_cluster`` reads it. One that dies is
    started again by the same rules as with ``harness.launch``; one whose node dies, on another
    node. The lines of the tasks are where Ray shows those of actors. Ctrl-C and SIGTERM go to the
    workers, and then to the ps; a second one kills.

    Args:
        program: Function without arguments (``functools.partial`` binds some), which Ray's
            cloudpickle takes along; or a command, which gets the flags of ``harness.launch``.
        ps: Number of ps.
        workers: Number of workers; worker 0 is the chief.
        evaluators: Number of evaluators, for which no task waits.
        resources: Resources of each task of a job on its node, in Ray's words: ``{"worker": {"CPU":
            2, "GPU": 1}}``. One CPU by default.
        strategy: Ray's strategy of placement: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.
        max_restarts: Number of restarts of one task before it has failed for good. Preemptions do
            not count, nor restarts before a run of a minute.
        grace_secs: Seconds that tasks may take to stop.

    Returns:
        The result of the function on each worker, by index; None for a command.

    Raises:
        ValueError: An argument is invalid. The message names it.
        TaskFailedError: A task has failed for good.
        KeyboardInterrupt: Ctrl-C, after all tasks have ended.
        SystemExit: SIGTERM, likewise, with the exit code of "preempted".
    """
    command = None if callable(program) else tuple(program)
    if ps < 1 or workers < 1 or evaluators < 0:
        raise ValueError(
            f"ps={ps}, workers={workers}, evaluators={evaluators}: at least one ps and one worker"
        )
    asked = {job: dict(needed) for job, needed in (resources or {}).items()}
    if unknown := asked.keys() - {PS, WORKER, EVALUATOR}:
        raise ValueError(
            f"resources={asked}: there is no job {min(unknown)!r}, only {PS}, {WORKER} and "
            f"{EVALUATOR}"
        )
    if command is not None and (not command or claimed_flags(command)):
        raise ValueError(
            f"the command {shlex.join(command)!r} is empty, or has flags that are set for every "
            "task"
        )
    if not ray.is_initialized():
        ray.init()
    counts = {PS: ps, WORKER: workers, EVALUATOR: evaluators}
    tasks = [LaunchTask(job, index) for job, count in counts.items() for index in range(count)]
    options = policy.LaunchOptions(max_restarts=max_restarts, grace_secs=grace_secs)
    bundles = {task: asked.get(task.job, DEFAULT_RESOURCES) for task in tasks}
    with contextlib.ExitStack() as stack:
        # A directory of mode 0700: the file in it lets its reader into the cluster.
        own = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bellwether-")))
        cluster = _RayCluster(
            command or cloudpickle.dumps(program), bundles, strategy, options, own / "token"
        )
        stack.callback(cluster.close)
        with _stop_signals(cluster.events):
            return cluster.run()


@dataclass
class _TaskSeat:
    """The state of a task, as the driver knows it.

    Attributes:
        number: Number of the task among all, which is that of its bundle.
        actor: Actor of the task; None when it has died.
        address: Address that the cluster knows.
        place: Address that the actor holds. A worker that has moved keeps the address that the
            cluster knows. Only clients that ask for the worker's status look there.
        attempt: Number of the present start.
        placing: True from the request for an actor until the start of the process.
        runs: True from the start of the process until its end is reported.
        moving: True if the process was ended because a ps has moved.
        result: Result of the task.
        error: Last error of the task.
    """

    number: int
    actor: Any = None
    address: str = ""
    place: str = ""
    attempt: int = 0
    placing: bool = False
    runs: bool = False
    moving: bool = False
    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class _ActorAnswer:
    """An actor's answer, or its failure to answer.

    Attributes:
        task: Task of the actor.
        actor: The actor. Another one may have taken its place meanwhile.
        value: The answer.
        react: Method that takes the answer; returns the event for the policy, or None.
    """

    task: LaunchTask
    actor: Any
    value: "Future[Any]"
    react: "Callable[[LaunchTask, Any], policy.Event | None]"


_Event = _ActorAnswer | policy.StopSignal | policy.TaskExited


class _RayCluster:
    """A run from its placement to its end."""

    def __init__(
        self,
        program: bytes | Sequence[str],
        bundles: Mapping[LaunchTask, Mapping[str, float]],
        strategy: str,
        options: policy.LaunchOptions,
        token: pathlib.Path,
    ) -> None:
        self.events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._program = program
        self._bundles = bundles
        self._options = options
        self._token = token
        self._token.touch(mode=0o600)
        self._token.write_text(concurrency.random_hex(32))
        self._seats = {task: _TaskSeat(number) for number, task in enumerate(bundles)}
        self._group = placement_group([dict(bundle) for bundle in bundles.values()], strategy)
        self._placed: set[LaunchTask] = set()
        """Tasks with an address that wait for the addresses of the others."""
        self._say_at = concurrency.monotonic() + timeouts.LOG_EVERY_SECS

    def run(self) -> list[Any]:
        """Runs the tasks to their end; see the function ``run``."""
        state, instructions = policy.begin(self._seats, concurrency.monotonic())
        self._follow_instructions(instructions)
        while state.stage is not policy.RunStage.FINISHED:
            for event in (*self._next_events(policy.next_due(state)), policy.ClockTick()):
                state, instructions = policy.react(
                    state, event, concurrency.monotonic(), self._options
                )
                self._follow_instructions(instructions)
        results = [seat.result for task, seat in self._seats.items() if task.job == WORKER]
        if state.failure is not None:
            failed = state.failure
            cause = self._seats[failed.task].error
            said = f": {type(cause).__name__}: {cause}" if cause is not None else ""
            raise TaskFailedError(
                f"{failed.why}{said}", str(failed.task), failed.code, results
            ) from cause
        if state.signal_code is not None:
            if state.signal_code == 128 + signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(exit_codes.code(exit_codes.PREEMPTED))
        return results

    def close(self) -> None:
        """Ends the actors, and all processes below them."""
        actors = [seat.actor for seat in self._seats.values() if seat.actor is not None]
        if actors:
            ray.wait(
                [actor.close.remote() for actor in actors],
                num_returns=len(actors),
                timeout=times.CLOSE_SECS,
            )
        # The processes below an actor end with it.
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(self._group)

    # -- places ------------------------------------------------------------------------------------

    def _place_task(self, task: LaunchTask) -> None:
        """Makes an actor for a task, in its bundle. The address comes as an event."""
        seat = self._seats[task]
        assert seat.actor is None, "an actor has gone before another one takes its place"
        seat.placing = True
        needed = dict(self._bundles[task])
        options = {name: needed.pop(known, 0) for known, name in _OPTIONS.items()}
        # The driver may have been given a credential; all else is the environment of the node.
        environ = {name: os.environ[name] for name in (SECURITY_VARIABLE,) if name in os.environ}
        # Ray puts as many tasks on a GPU as parts fit.
        environ |= divide_memory(int(1 / (options["num_gpus"] or 1)), os.environ)
        seat.actor = (
            ray.remote(TaskActor)
            .options(
                **options,
                resources=needed,
                # The policy of the launcher starts the actor again, not Ray.
                max_restarts=0,
                runtime_env={"env_vars": environ},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=seat.number
                ),
            )
            .remote(str(task), self._program, self._token.read_text())
        )
        self._await_answer(task, seat.actor.hold.remote(seat.place), self._on_place)

    def _make_topology(self) -> ClusterTopology:
        def hosts(job: str) -> tuple[str, ...]:
            return tuple(seat.address for task, seat in self._seats.items() if task.job == job)

        return ClusterTopology(hosts(PS), hosts(WORKER), evaluators=len(hosts(EVALUATOR)))

    def _say_where(self) -> None:
        command = [""] if isinstance(self._program, bytes) else self._program
        credential = os.environ.get(SECURITY_VARIABLE, str(self._token))
        first, *others = watching(self._make_topology(), command)
        for line in (f"{first} --security={credential}", *others):
            _print_line(line)

    def _say_waiting(self, tasks: Sequence[LaunchTask]) -> None:
        asked = sorted({str(dict(self._bundles[task])) for task in tasks})
        _print_line(
            f"still waiting for nodes for {', '.join(map(str, tasks))}: each needs "
            f"{' or '.join(asked)}, and the nodes of this Ray cluster have {_free_resources()} to give"
        )
        self._say_at = concurrency.monotonic() + timeouts.LOG_EVERY_SECS

    # -- events ------------------------------------------------------------------------------------

    def _await_answer(
        self,
        task: LaunchTask,
        reference: Any,
        react: "Callable[[LaunchTask, Any], policy.Event | None]",
    ) -> None:
        """Puts an event into the queue when an actor has answered."""
        actor = self._seats[task].actor
        reference.future().add_done_callback(
            lambda value: self.events.put(_ActorAnswer(task, actor, value, react))
        )

    def _next_events(self, due: float | None) -> Iterator[policy.Event]:
        """Waits for an event, or until time is due. Yields the events of the policy."""
        waiting = [
            task for task, seat in self._seats.items() if seat.placing and task not in self._placed
        ]
        times = [secs for secs in (due, self._say_at if waiting else None) if secs is not None]
        try:
            event = self.events.get(
                timeout=max(0.0, min(times) - concurrency.monotonic()) if times else None
            )
        except queue.Empty:
            if waiting and concurrency.monotonic() >= self._say_at:
                self._say_waiting(waiting)
            return
        if not isinstance(event, _ActorAnswer):
            yield event
        elif event.actor is self._seats[event.task].actor:
            try:
                value = event.value.result()
            except RayError as error:
                yield self._lose_actor(event.task, error)
            else:
                if (told := event.react(event.task, value)) is not None:
                    yield told

    def _on_place(self, task: LaunchTask, place: str) -> None:
        seat = self._seats[task]
        assert seat.placing, "a place was asked for"
        seat.place = place
        if seat.address and seat.address != place and task.job == PS:
            _print_line(
                f"{task} is on another node now, at {place}: all tasks are started again with "
                "this address"
            )
            for other, its in self._seats.items():
                its.address = its.place
                if its.runs and other != task:
                    its.moving = True
                    its.actor.send.remote(signal.SIGKILL)
        seat.address = seat.address or place
        self._placed.add(task)
        # Every task is started with the addresses of all.
        if all(each.address for each in self._seats.values()):
            if len(self._placed) == len(self._seats):
                self._say_where()
            for placed in self._placed:
                self._start_process(placed)
            self._placed.clear()

    def _on_end(self, task: LaunchTask, ended: TaskEnd) -> policy.TaskExited:
        seat = self._seats[task]
        assert seat.runs, "an end follows a start"
        seat.runs = False
        seat.error = cloudpickle.loads(ended.error) if ended.error is not None else None
        if ended.returncode == 0 and ended.result is not None:
            seat.result = cloudpickle.loads(ended.result)
        # A process that the driver has ended for a new address of a ps has not failed.
        killed, seat.moving = seat.moving and ended.returncode == -signal.SIGKILL, False
        return policy.TaskExited(task, -signal.SIGTERM if killed else ended.returncode)

    def _lose_actor(self, task: LaunchTask, error: RayError) -> policy.TaskExited:
        """Records the loss of an actor, and so of its task's process."""
        seat = self._seats[task]
        # The actor may only be out of reach. Then it ends before another actor takes its place.
        ray.kill(seat.actor)
        seat.actor, seat.runs, seat.placing, seat.error = None, False, False, error
        self._say_at = concurrency.monotonic() + timeouts.LOG_EVERY_SECS
        preempted = bool(getattr(error, "preempted", False))
        _print_line(f"the actor of {task} is gone: {_first_line(error)}")
        return policy.TaskExited(task, -signal.SIGTERM if preempted else -signal.SIGKILL)

    # -- instructions ------------------------------------------------------------------------------

    def _follow_instructions(self, instructions: Iterable[policy.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case policy.StartTask(task, attempt):
                    self._seats[task].attempt = attempt
                    if self._seats[task].actor is None:
                        self._place_task(task)
                    else:
                        self._start_process(task)
                case policy.SendSignal(task, signum):
                    self._send_signal(task, signum)
                case policy.LogLine(text):
                    _print_line(text)
                case policy.ShowTail():
                    # Ray has shown the lines of the task already.
                    pass

    def _start_process(self, task: LaunchTask) -> None:
        seat = self._seats[task]
        assert not seat.runs, "a task has one process"
        seat.placing, seat.runs = False, True
        bind = "" if seat.place == seat.address else seat.place.rpartition(":")[0].strip("[]")
        answer = seat.actor.run.remote(self._make_topology(), task, seat.attempt, seat.number, bind)
        self._await_answer(task, answer, self._on_end)

    def _send_signal(self, task: LaunchTask, signum: int) -> None:
        seat = self._seats[task]
        if seat.runs:
            seat.actor.send.remote(signum)
        elif seat.placing:
            ray.kill(seat.actor)
            seat.actor, seat.placing = None, False
            self._placed.discard(task)
            self.events.put(policy.TaskExited(task, -signum))


@contextlib.contextmanager
def _stop_signals(events: "queue.SimpleQueue[_Event]") -> Iterator[None]:
    """Puts requests to stop into the queue, where signals come to this thread."""
    if concurrency.current_thread() is not concurrency.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        # A handler may do this: a SimpleQueue is reentrant.
        events.put(policy.StopSignal(signum))

    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _free_resources() -> str:
    """Describes the free resources of the nodes, without Ray's own markers of nodes and bundles."""
    markers = ("node:", "bundle_group_")
    free = {
        name: amount
        for name, amount in ray.available_resources().items()
        if not name.startswith(markers)
    }
    return ", ".join(f"{name}: {amount:g}" for name, amount in sorted(free.items())) or "nothing"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _print_line(text: str) -> None:
    print(f"ray: {text}", file=sys.stderr, flush=True)
