"""The tasks of a run, and the end and the silence of each."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from runtime import concurrency
from runtime.errors import InvalidArgumentError
from runtime.limits import Limits
from runtime.proto import run_record_pb2 as pb
from runtime.state import times
from runtime.state.leadership import RunState


@dataclass(frozen=True)
class TaskEnvironment:
    """The surroundings of a run record, as the server of the task describes them.

    Without a server the defaults hold.

    Attributes:
        address: returns the address of the task, which is known once the server's port is open.
        expected: tasks that must be done before ``when_all_done`` is called.
        limits: the limits of waits and of participants.
        when_all_done: called without the lock when every expected task is done and a task has asked
            for the end.
        when_joined: called without the lock, with the name of a task, when a new process of the
            task joins.
        when_loading: called, under the lock, before the leader gives the variables new values.
        silent: returns the seconds since the last sign of life of a session; None for an unknown
            session.
        lives: returns True if a session gives signs of life; a lost session may come back.
        connected: returns True if a session has a connection to this task now.
        own: returns True if a session belongs to a master of this process, and ends with it.
    """

    address: Callable[[], str] = lambda: ""
    expected: frozenset[str] = frozenset()
    limits: Limits = field(default_factory=Limits)
    when_all_done: Callable[[], None] = lambda: None
    when_joined: Callable[[str], None] = lambda task: None
    when_loading: Callable[[], None] = lambda: None
    silent: Callable[[int], float | None] = lambda session: None
    lives: Callable[[int], bool] = lambda session: True
    connected: Callable[[int], bool] = lambda session: True
    own: Callable[[int], bool] = lambda session: False


@dataclass
class Participant:
    """A task in the run.

    Attributes:
        address: address of the task; may be empty.
        session: number of the training session; 0 if unknown.
        heard_at: ``time.monotonic()`` of the session's last sign of life here; None before the
            first.
    """

    address: str = ""
    session: int = 0
    heard_at: float | None = None


@dataclass(frozen=True)
class AwaitedTask:
    """A task that a ps waits for at the end of training.

    Attributes:
        task: name of the task.
        address: address of the task; may be empty.
        silent_secs: seconds since the last sign of life here; None before the first.
        limit_secs: seconds of silence after which the wait ends; None until the chief has set the
            limit.
    """

    task: str
    address: str
    silent_secs: float | None
    limit_secs: float | None

    def is_given_up(self, over_secs: float | None, late_secs: float) -> bool:
        """Returns True if the wait for the task has ended.

        Args:
            over_secs: seconds since the end of the run; None before the end.
            late_secs: seconds after the end in which absent tasks may still come.
        """
        # A task that has never come has no silence.
        if self.silent_secs is None:
            return over_secs is not None and over_secs >= late_secs
        return self.limit_secs is not None and self.silent_secs >= self.limit_secs

    def __str__(self) -> str:
        """Returns the task and its silence in words, for the log."""
        where = f"{self.task} at {self.address}" if self.address else self.task
        if self.silent_secs is None:
            return f"{where} (has not come)"
        if self.limit_secs is None or self.silent_secs < times.QUIET_SECS:
            return where
        return f"{where} (no sign of life for {self.silent_secs:.0f} s, given up after {self.limit_secs:g} s)"


class Participants:
    """The tasks of a run. The lock of the run record guards the fields.

    Attributes:
        joined: tasks that have joined, by name.
        done: tasks that are done, in order.
        states: small named states of the tasks that are done, by task.
        left: tasks that have said goodbye: a part of ``done``.
        elastic: True where workers come and go, so that no worker is expected.
        leave: True once a task has ordered this task to leave at the end.
        silence_secs: seconds of silence after which the wait for a task ends; None until a chief
            has set the limit.
    """

    def __init__(self, environment: TaskEnvironment) -> None:
        self._environment = environment
        self.silence_secs: float | None = None
        self.joined: dict[str, Participant] = {}
        self.done: dict[str, None] = {}
        self.reset()

    def reset(self) -> None:
        """Begins the next run, without the tasks that were done."""
        # A worker that was given up during the last run may still train, and takes part in the next
        # run.
        self.joined = {name: part for name, part in self.joined.items() if name not in self.done}
        self.done = {}
        self.states: dict[str, dict[str, bytes]] = {}
        self.left: set[str] = set()
        self.elastic = self.leave = False

    def check_room(self, names: Iterable[str], task: str) -> None:
        """Checks that the record has room for tasks of these names; ``task`` is this task, for the error.

        Raises:
            ResourceExhaustedError: The record would hold too many tasks.
        """
        count, limits = len({*self.joined, *self.done, *names}), self._environment.limits
        if count > limits.participants:
            raise limits.exceeded("participants", f"{count} tasks in the run record", task)

    def check_single(self, name: str, address: str, task: str) -> None:
        """Checks that no other living process is the task of this name; ``task`` is this task, for the error.

        Raises:
            InvalidArgumentError: Another process, at another address, gives signs of life.
        """
        # A worker that was started again elsewhere has another address, but its old session gives
        # no sign of life.
        known = None if name in self.done else self.joined.get(name)
        if known and known.address != address and self._environment.lives(known.session):
            raise InvalidArgumentError(
                f"two tasks say that they are {name}: one at {known.address}, which lives, and one "
                f"at {address}: give each an index (--task_index) of its own",
                task=task,
            )

    def is_new(self, name: str, order: pb.RunOrder.Join) -> bool:
        """Returns True if an order is the first of a process of the task of this name."""
        known = self.joined.get(name)
        # An order without a reply comes twice. A session of this process needs no introduction.
        if self._environment.own(order.session):
            return False
        return not (known and (order.again or known.session == order.session))

    def join(self, name: str, participant: Participant) -> None:
        """Adds a task to the run, also a task that was done."""
        self.joined[name] = participant
        self.done.pop(name, None)
        self.states.pop(name, None)
        self.left.discard(name)

    @property
    def may_go(self) -> bool:
        """True if the task leaves at the end.

        Without expected workers a task stays, unless workers come and go.
        """
        return self.leave and (bool(self._environment.expected) or self.elastic)

    def awaited(self, finished: bool) -> list[AwaitedTask]:
        """Returns the tasks to wait for at the end."""
        silences = self.silences(concurrency.monotonic())
        parts = {task: self.joined.get(task, Participant()) for task in self.missing()}
        limit = self.silence_secs if finished else None
        return [
            AwaitedTask(task, part.address, silences.get(task), limit)
            for task, part in parts.items()
        ]

    def missing(self) -> list[str]:
        """Returns the joined and expected tasks that need this task.

        A task that is done may still evaluate in its session, until the session is closed or its
        process ends. An open session of this process would keep this task for ever.
        """
        # A task that has joined need not be in the cluster that this task knows: workers may be
        # added.
        expected = () if self.elastic else sorted(self._environment.expected)
        everybody = {**dict.fromkeys(expected), **dict.fromkeys(self.joined)}
        own, connected = self._environment.own, self.connected()
        return [
            task
            for task in everybody
            if task not in self.done or (task in connected and not own(connected[task]))
        ]

    def connected(self) -> dict[str, int]:
        """Returns the training sessions that have a connection to this task, by task."""
        sessions = ((name, part.session) for name, part in self.joined.items())
        return {name: s for name, s in sessions if s and self._environment.connected(s)}

    def silences(self, now: float) -> dict[str, float]:
        """Returns the seconds since the last sign of life, by joined task that needs this task."""
        for part in self.joined.values():
            # A connection gives the last sign of life of its session.
            silent = self._environment.silent(part.session) if part.session else None
            if silent is not None:
                # The end of a session or a takeover may be later than the last sign of a
                # connection.
                part.heard_at = max(now - silent, part.heard_at or 0.0)
        missing = set(self.missing())
        return {
            task: max(0.0, now - part.heard_at)
            for task, part in self.joined.items()
            if task in missing and part.heard_at is not None
        }

    def state(self) -> RunState:
        """Returns the fields for ``take_up``, as JSON can say them."""
        return {
            "joined": {name: [part.address, part.session] for name, part in self.joined.items()},
            "done": list(self.done),
            "states": {
                task: {n: state.hex() for n, state in states.items()}
                for task, states in self.states.items()
            },
            "left": sorted(self.left),
            "elastic": self.elastic,
            "leave": self.leave,
            "silence_secs": self.silence_secs,
        }

    def take_up(self, state: RunState, now: float) -> None:
        """Continues from the ``state`` of an earlier process of the task."""
        # A task that was silent then gets its whole time from now on.
        joined = state["joined"].items()
        self.joined = {
            name: Participant(address, session, now) for name, (address, session) in joined
        }
        self.done = dict.fromkeys(state["done"])
        self.states = {
            task: {name: bytes.fromhex(told) for name, told in states.items()}
            for task, states in state["states"].items()
        }
        self.left, self.elastic, self.leave = set(state["left"]), state["elastic"], state["leave"]
        self.silence_secs = state["silence_secs"]

    def validate(self) -> None:
        """Asserts the invariants; for tests."""
        self.check_room((), "")
        assert self.states.keys() | self.left <= self.done.keys()
        assert self.silence_secs is None or self.silence_secs >= 0
