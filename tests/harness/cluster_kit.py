"""Clusters of real processes for the recovery tests: started fast, driven by what they say, killed and frozen at will.

The processes are forked from a server process that has imported everything, so that starting one takes milliseconds.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.launch.ports import free_ports
from tests.harness import cluster_program

TIMEOUT_SECS = 30.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.harness.cluster_program"])


class Task:
    """One process of a cluster."""

    def __init__(self, job: str, index: int, cluster: dict[str, list[str]], options: dict[str, Any]) -> None:
        self.name = f"{job} {index}"
        self.lines: list[tuple[Any, ...]] = []
        self._seen = 0
        self._changed = threading.Condition()
        self._pipe, child = _context.Pipe()
        self.process = _context.Process(target=cluster_program.run, args=(job, index, cluster, options, child))
        self.process.start()
        child.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                line = self._pipe.recv()
                with self._changed:
                    self.lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self.lines.append(("GONE",))
            self._changed.notify_all()

    def send(self, *order: Any) -> None:
        """Gives the task an order."""
        self._pipe.send(order)

    def expect(self, what: str, pattern: str = "", secs: float = TIMEOUT_SECS) -> tuple[Any, ...]:
        """Waits for the next line of a kind (and of a matching text); the end of the process is a failure."""
        deadline = time.monotonic() + secs
        with self._changed:
            while True:
                while self._seen < len(self.lines):
                    line = self.lines[self._seen]
                    self._seen += 1
                    if line[0] == what and (not pattern or re.search(pattern, str(line[1]))):
                        return line
                    if line[0] == "GONE":
                        raise AssertionError(f"{self.name} ended without {what} {pattern}: {self.story()}")
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise AssertionError(f"{self.name} did not say {what} {pattern} in {secs} s: {self.story()}")

    def logged(self, pattern: str) -> list[str]:
        """All log lines so far that match."""
        with self._changed:
            return [line[1] for line in self.lines if line[0] == "LOG" and re.search(pattern, line[1])]

    def request(self, order: str, *arguments: Any, answer: str = "") -> Any:
        """Gives an order and returns what its answer carries."""
        self.send(order, *arguments)
        return self.expect(answer or order.upper())[1]

    def story(self) -> str:
        """The last lines, for failures."""
        shown = [line for line in self.lines if line[0] != "STEP"]
        return "\n".join(map(str, shown[-25:]))

    def kill(self) -> None:
        """Ends it as a power cut would."""
        self.process.kill()
        self.process.join(TIMEOUT_SECS)

    def freeze(self) -> None:
        """Stops it without closing anything."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets it go on."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def exit_code(self, secs: float = TIMEOUT_SECS) -> int | None:
        """Waits for its end."""
        self.process.join(secs)
        assert self.process.exitcode is not None, f"{self.name} did not end in {secs} s: {self.story()}"
        return self.process.exitcode

    def close(self) -> None:
        """Leaves nothing behind."""
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # a ps may leave by itself just now
                self.thaw()
            self.kill()
        self._reader.join(TIMEOUT_SECS)
        self._pipe.close()
        self.process.close()


class Cluster:
    """A cluster on this machine; its tasks are started one by one, as often as wanted."""

    def __init__(self, ps: int, workers: int, **options: Any) -> None:
        ports = iter(free_ports(ps + workers))
        self.spec = {
            "ps": [f"127.0.0.1:{next(ports)}" for _ in range(ps)],
            "worker": [f"127.0.0.1:{next(ports)}" for _ in range(workers)],
        }
        self.options = options
        self._tasks: list[Task] = []

    def start(self, job: str, index: int, **options: Any) -> Task:
        """Starts a task."""
        task = Task(job, index, options.pop("cluster", self.spec), {**self.options, **options})
        self._tasks.append(task)
        return task

    def ps(self, index: int) -> Task:
        """Starts a ps and waits until it serves."""
        task = self.start("ps", index)
        task.expect("SERVING")
        return task

    def worker(self, index: int, **options: Any) -> Task:
        """Starts a worker and waits until its session is ready."""
        task = self.start("worker", index, **options)
        task.expect("READY")
        return task

    def close(self) -> None:
        """Ends all tasks."""
        for task in self._tasks:
            task.close()


@contextlib.contextmanager
def cluster(ps: int, workers: int, **options: Any) -> Iterator[Cluster]:
    """A cluster for one test."""
    made = Cluster(ps, workers, **options)
    try:
        yield made
    finally:
        made.close()


def warm_up() -> None:
    """Starts the process that the tasks are forked from."""
    process = _context.Process(target=time.monotonic)
    process.start()
    process.join()
    process.close()


def wait_saved(logdir: Path, step: int) -> None:
    """Waits until a checkpoint that is written in the background is there."""
    deadline = time.monotonic() + TIMEOUT_SECS
    while not (logdir / "model.ckpt" / str(step)).is_dir():  # it gets this name when it is whole
        assert time.monotonic() < deadline, f"no checkpoint of step {step} in {logdir}"
        time.sleep(0.01)


def consistent(values: list[Any]) -> int:
    """The step that the variables agree on; fails when they do not."""
    step, first, second = values
    assert set(first) == set(second) == {float(step)}, values
    return int(step)
