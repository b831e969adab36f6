"""Endings: random histories of starts, ends, kills and freezes, and whether every run comes to an end that adds up.

    python -m benchmarks.endings --runs=20
    python -m benchmarks.endings --seed=1234567            # one history again
    python -m benchmarks.endings --classic --runs=50       # 1 ps, 3 workers, sv.stop()

One to three workers, each of which ends in its own way, and one or two ps, as processes that no
launcher looks after; what is killed or preempted is started again, or not. It adds up when every
process ends in time and with the code that docs/endings.md tells, no process is left, and every
step that was trained is in the last checkpoint, or a line of somebody's log tells that it is not.
The last line is the verdict; the exit code is 0 only if it is good.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import harness
from benchmarks import chaos_ledger
from harness import exit_codes
from harness.command_line import ToolParser
from tests.faults import PRELOAD, Life, Line, LocalCluster, no_leaks

STYLES = (
    *("stop", "block", "close", "managed", "should_stop", "monitored", "after_stop", "saver_hook"),
)
"""How a worker ends: ``sv.stop()`` after the block of its session, that block alone, the session closed by hand before
``sv.stop()``, ``managed_session`` with a loop of its own length, with ``should_stop`` too, a
monitored session, a step after ``sv.stop()``, or a monitored session whose saving hook every worker
has."""
QUEUE_SHARE = 0.2
"""How many of the histories have ps tasks that wait for a token of each worker, and then end by themselves."""
GRACE_SECS = 2.0
SILENCE_SECS = 4.0
"""What ``harness.training.stop.task_run`` makes of that: nobody is given up who was silent for less."""
LATE_SECS = 6.0
START_SECS = 30.0
"""How long a worker waits for its cluster at its start: one that is killed and comes back when all is over."""
AGAIN_SECS = 0.3
"""After so long a task that was killed, or has failed, is started again."""
LIMIT_SECS = 90.0
"""Within so long after its last event a run has ended."""
_POLL_SECS = 0.02
TOLD = re.compile(
    r"steps \d+ to \d+ are (?:lost|not saved)|steps are lost|STEPS SO FAR ARE LOST|since the "
    r"(?:last|newest) checkpoint"
    r"|goes on from the newest checkpoint|what was not saved is lost"
)
"""What tells that steps are in no checkpoint."""
EXPECTED_ERROR = re.compile(
    r"TaskLeftError|start this task again|Session was not ready after "
    r"waiting|DeadlineExceededError.*waiting"
)
"""What a process that ends with code 1 has said: its ps have left, steps are lost, or there is no cluster any more."""


@dataclass(frozen=True)
class Part:
    """The part of a worker in a history.

    Attributes:
        style: how it ends; see ``STYLES``.
        steps: the length of its loop.
        step_secs: pause after each step.
        after_secs: when it is started.
        stops: whether it asks for a stop before its block ends, where its style has one that can.
    """

    style: str
    steps: int
    step_secs: float = 0.01
    after_secs: float = 0.0
    stops: bool = False


@dataclass(frozen=True)
class Event:
    """An event of a history that hits a task.

    Attributes:
        at_secs: when, after the first step of the run.
        what: "kill", "freeze" or "stop" (SIGTERM).
        task: whom.
        secs: after so long it is started again, or goes on; None: never.
    """

    at_secs: float
    what: str
    task: str
    secs: float | None

    def __str__(self) -> str:
        """In words."""
        then = "for good" if self.secs is None else f"for {self.secs:.1f} s"
        return f"{self.what} {self.task} {then} at {self.at_secs:.1f} s"


@dataclass(frozen=True)
class History:
    """A run with its events."""

    seed: int
    ps: int
    parts: tuple[Part, ...]
    events: tuple[Event, ...]
    queue: bool = False

    def __str__(self) -> str:
        """In words."""
        asks = {True: " and request_stop", False: ""}
        parts = ", ".join(
            f"{part.style} after {part.steps} steps{asks[part.stops]}" for part in self.parts
        )
        ps = f"{self.ps} ps{' with a done queue' if self.queue else ''}"
        return f"seed {self.seed}: {ps}; {parts}; {'; '.join(map(str, self.events)) or 'nothing happens'}"


def classic(seed: int) -> History:
    """Returns the ending of the old tutorials: loops of different lengths, then ``sv.stop()``."""
    draw = random.Random(seed)
    lengths = draw.sample(range(5, 300), 3)
    return History(seed, 1, tuple(Part("stop", steps, 0.002) for steps in lengths), ())


def random_history(seed: int) -> History:
    """Draws a history. The same seed gives the same history."""
    draw = random.Random(seed)
    ps, workers = draw.randint(1, 2), draw.randint(1, 3)
    asks = random.Random(f"stops {seed}")
    parts = tuple(
        Part(
            draw.choice(STYLES),
            draw.randint(5, 150),
            draw.choice((0.002, 0.02)),
            draw.choice((0.0, 0.0, 1.0)),
            asks.random() < 0.5,
        )
        for _ in range(workers)
    )
    tasks = [f"worker:{index}" for index in range(workers)]
    # A ps that loses its variables needs a chief, and one that wakes after all is over must find
    # nobody new.
    mood = draw.choice(("ps", "long", "good"))
    events = []
    for _ in range(draw.randint(0, 3)):
        at = draw.uniform(0.0, 3.0)
        kind = draw.choice(
            ("kill", "freeze", "stop") if mood != "ps" else ("kill", "freeze", "stop", "kill ps")
        )
        if kind == "kill ps":
            events.append(Event(at, "kill", f"ps:{draw.randrange(ps)}", AGAIN_SECS))
        elif kind == "freeze":
            long = mood == "long" and draw.random() < 0.5
            task = draw.choice(tasks if long else [*tasks, "ps:0"])
            events.append(
                Event(
                    at, "freeze", task, draw.uniform(6.0, 8.0) if long else draw.uniform(0.3, 1.5)
                )
            )
        else:
            for_good = mood == "good" and draw.random() < 0.5
            events.append(Event(at, kind, draw.choice(tasks), None if for_good else AGAIN_SECS))
    events.sort(key=lambda event: event.at_secs)
    # A worker that dies may put two tokens into the queues, or none: such a program has no end.
    queue = random.Random(f"queue {seed}").random() < QUEUE_SHARE
    if queue:
        events = [e for e in events if e.what == "freeze" and (e.secs or 0.0) < SILENCE_SECS]
    return History(seed, ps, parts, tuple(events), queue)


class Clusters:
    """The clusters, one for each number of tasks, whose processes are started again and again."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], LocalCluster] = {}

    def get(self, ps: int, workers: int) -> LocalCluster:
        """Returns the cluster. None of its tasks runs."""
        if (ps, workers) not in self._made:
            command = ["python", "-m", "benchmarks.endings_task"]
            self._made[ps, workers] = LocalCluster(
                command, ps=ps, workers=workers, preload=PRELOAD, start=False
            )
        return self._made[ps, workers]

    def close(self) -> None:
        """Ends all clusters."""
        for cluster in self._made.values():
            cluster.close()


@contextlib.contextmanager
def clusters() -> Iterator[Clusters]:
    """Opens clusters for a number of runs. Nothing is left of them."""
    with no_leaks(secs=10):
        made = Clusters()
        try:
            yield made
        finally:
            made.close()


class Run:
    """One run of a history. It plays the cluster manager: what ends badly is started again.

    Args:
        history: what is to happen.
        made: gives the cluster.
        directory: of checkpoints and ledgers; empty.
    """

    def __init__(self, history: History, made: Clusters, directory: Path) -> None:
        self._history = history
        self._directory = directory
        self._cluster = made.get(history.ps, len(history.parts))
        self._began = time.monotonic()
        self._before = {task: len(self._cluster.lives(task)) for task in self._cluster.tasks}
        self._gone: set[str] = set()
        self._stopped: set[str] = set()
        self._reborn: set[str] = set()

    def run(self) -> list[str]:
        """Runs the history. Returns what does not add up."""
        try:
            problems = self._play()
        finally:
            left = [task for task in self._cluster.tasks if self._cluster.running(task)]
            for task in left:
                self._cluster.kill(task)
        return [*problems, *self._codes(), *self._untold()]

    # -- what happens ------------------------------------------------------------------------------------------

    def _play(self) -> list[str]:
        for index in range(self._history.ps):
            self._start(f"ps:{index}")
        due: list[tuple[float, str, str]] = [
            (self._began + part.after_secs, "start", f"worker:{index}")
            for index, part in enumerate(self._history.parts)
        ]
        events = list(self._history.events)
        first_step: float | None = None
        deadline = self._began + LIMIT_SECS
        while True:
            now = time.monotonic()
            for item in [item for item in due if item[0] <= now]:
                due.remove(item)
                self._do(item[1], item[2])
            if first_step is None and self._lines("worker:0", "READY"):
                first_step = now
            while events and first_step is not None and now >= first_step + events[0].at_secs:
                due += self._happen(events.pop(0), now)
                deadline = now + LIMIT_SECS
            due += self._again(due, now)
            workers = [f"worker:{index}" for index in range(len(self._history.parts))]
            if not any(self._cluster.running(w) for w in workers) and not any(
                w in workers for _, _, w in due
            ):
                break
            if now >= deadline:
                return [
                    f"{task} hangs: {self._tail(task)}"
                    for task in workers
                    if self._cluster.running(task)
                ]
            time.sleep(_POLL_SECS)
        for _, what, task in due:
            if what == "thaw":
                self._do(what, task)
        return self._end_of_the_ps()

    def _happen(self, event: Event, now: float) -> list[tuple[float, str, str]]:
        chief_ended = not self._cluster.running("worker:0") and "worker:0" not in self._gone
        if not self._cluster.running(event.task) or (event.task.startswith("ps") and chief_ended):
            return []
        if event.what == "freeze":
            self._cluster.freeze(event.task)
            return [(now + (event.secs or 0.0), "thaw", event.task)]
        if event.secs is None:
            self._gone.add(event.task)
        if event.what == "stop":
            self._stopped.add(event.task)
            self._cluster.stop(event.task)
        else:
            self._cluster.kill(event.task)
        return []

    def _again(self, due: list[tuple[float, str, str]], now: float) -> list[tuple[float, str, str]]:
        """Returns the tasks that have ended badly and are to be started again."""
        found = []
        serving = [
            index for index in range(self._history.ps) if self._cluster.running(f"ps:{index}")
        ]
        for task in self._cluster.tasks:
            lives = self._lives(task)
            planned = any(of == task and what == "start" for _, what, of in due)
            if (
                not lives
                or lives[-1].code in (None, 0)
                or task in self._gone
                or planned
                or len(lives) > 5
            ):
                continue
            over = not serving and all(
                self._lives(f"ps:{i}")[-1].code == 0 for i in range(self._history.ps)
            )
            if task.startswith("worker") and over:
                continue
            found.append((now + AGAIN_SECS, "start", task))
        return found

    def _do(self, what: str, task: str) -> None:
        if what == "thaw":
            self._cluster.thaw(task)
        elif not self._cluster.running(task):
            if task.startswith("ps") and self._lives(task):
                self._reborn.add(task)
            self._start(task)

    def _start(self, task: str) -> None:
        job, _, index = task.partition(":")
        options: dict[str, object] = {
            "LOGDIR": self._directory,
            "GRACE_SECS": GRACE_SECS,
            "LATE_SECS": LATE_SECS,
            "START_SECS": START_SECS,
            "TIMER_SECS": 0.5,
            "QUEUE": int(self._history.queue),
        }
        if job == "worker":
            part = self._history.parts[int(index)]
            options |= {"STYLE": part.style, "STEPS": part.steps, "STEP_SECS": part.step_secs}
            options["STOPS"] = int(part.stops)
        self._cluster.start(
            task, **{f"ENDING_{name}": str(value) for name, value in options.items()}
        )

    def _end_of_the_ps(self) -> list[str]:
        """Waits until the ps leave.

        Stops a ps that was started again, and all without a chief that ended well.
        """
        problems = []
        for index in range(self._history.ps):
            task = f"ps:{index}"
            chief = self._lives("worker:0")
            if "worker:0" in self._gone or task in self._reborn or not chief or chief[-1].code != 0:
                if self._cluster.running(task):
                    self._stopped.add(task)
                    self._cluster.stop(task)
            try:
                self._cluster.wait(task, SILENCE_SECS + LATE_SECS + 20)
            except TimeoutError:
                problems.append(f"{task} does not leave: {self._tail(task)}")
        return problems

    # -- whether it adds up ------------------------------------------------------------------------------------

    def _codes(self) -> list[str]:
        problems = []
        for task in self._cluster.tasks:
            for life in self._lives(task):
                said = [line for line in self._lines(task) if line.life == life.number]
                if life.code == 1 and any(EXPECTED_ERROR.search(line.text) for line in said):
                    continue
                # A worker that is stopped before it can hold the signal back, or after, ends by it.
                expected = {0, -9} | (
                    {exit_codes.PREEMPTED.plain, -signal.SIGTERM}
                    if task in self._stopped
                    else set()
                )
                if life.code not in expected:
                    tail = "\n".join(["", *(f"    {line.text}" for line in said[-12:])])
                    problems.append(f"{task} ended with code {life.code}: {tail}")
        return problems

    def _untold(self) -> list[str]:
        ledgers = []
        for path in sorted(self._directory.glob("*.ledger")):
            entries = map(chaos_ledger.Entry.parse, path.read_text(errors="replace").splitlines())
            ledgers.append([entry for entry in entries if entry is not None])
        restored = max((restore.at for restore in chaos_ledger.restores(ledgers)), default=0.0)
        done = [entry for ledger in ledgers for entry in ledger if entry.what == "done"]
        reached = max((entry.step for entry in done if entry.at > restored), default=0)
        newest = harness.latest_checkpoint(str(self._directory))
        saved = int(Path(newest).name) if newest else 0
        told = [
            line.text
            for task in self._cluster.tasks
            for line in self._lines(task)
            if TOLD.search(line.text)
        ]
        if reached > saved and not told:
            return [
                f"the last checkpoint is of step {saved}, step {reached} was done, and nobody has "
                "told"
            ]
        return []

    # -- looking -----------------------------------------------------------------------------------------------

    def _lives(self, task: str) -> list[Life]:
        return self._cluster.lives(task)[self._before[task] :]

    def _lines(self, task: str, pattern: str = "") -> list[Line]:
        return [
            line for line in self._cluster.lines(task, pattern) if line.life >= self._before[task]
        ]

    def _tail(self, task: str) -> str:
        return "\n".join(["", *(f"    {line.text}" for line in self._lines(task)[-12:])])


def run_all(histories: list[History], *, keep: bool = False) -> list[str]:
    """Runs histories one after the other.

    Args:
        histories: what is to happen.
        keep: whether directories of good runs stay.

    Returns:
        What does not add up, in words; empty when all is well.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    problems = []
    with clusters() as made:
        for number, history in enumerate(histories, 1):
            directory = Path(tempfile.mkdtemp(prefix="endings-"))
            began = time.monotonic()
            found = Run(history, made, directory).run()
            verdict = f"{len(found)} things do not add up, see {directory}" if found else "well"
            print(f"{number}: {history}: {verdict} ({time.monotonic() - began:.1f} s)", flush=True)
            problems += [f"seed {history.seed}: {problem}" for problem in found]
            if not found and not keep:
                shutil.rmtree(directory)
    return problems


def main() -> int:
    """Runs the histories of the flags. Returns the exit code."""
    options = _parser().parse_args()
    draw = classic if options.classic else random_history
    seeds = (
        [options.seed]
        if options.seed is not None
        else [random.randrange(10**9) for _ in range(options.runs)]
    )
    if options.seed is not None and options.runs_given:
        seeds = [options.seed] * options.runs
    began = time.monotonic()
    problems = run_all([draw(seed) for seed in seeds], keep=options.keep)
    took = time.monotonic() - began
    for problem in problems:
        print(f"endings: {problem}", flush=True)
    if problems:
        print(
            f"FAILED after {took:.0f} s: {len(problems)} things do not add up in {len(seeds)} runs",
            flush=True,
        )
        return 1
    print(f"OK after {took:.0f} s: {len(seeds)} runs came to a good end", flush=True)
    return 0


def _parser() -> ToolParser:
    parser = ToolParser("benchmarks.endings", __doc__ or "")
    runs, seed = os.environ.get("RUNS"), os.environ.get("SEED")
    parser.add_argument("--runs", type=int, default=int(runs or 10), help="how many ($RUNS, or 10)")
    parser.add_argument(
        "--seed",
        type=int,
        default=int(seed) if seed else None,
        help="of one history ($SEED), again",
    )
    parser.add_argument(
        "--classic", action="store_true", help="1 ps, 3 workers, sv.stop(), and nothing happens"
    )
    parser.add_argument("--keep", action="store_true", help="keep the directories of good runs too")
    parser.set_defaults(runs_given=bool(runs) or any(a.startswith("--runs") for a in sys.argv[1:]))
    return parser


if __name__ == "__main__":
    sys.exit(main())
