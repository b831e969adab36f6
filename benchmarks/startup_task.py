"""A task of `benchmarks.startup`: the MNIST trainer as it is, with a stopwatch on the parts of its start.

Every part is measured without the parts inside it, so the parts of the main thread add up to its
time. What it found is written as JSON to the file ``<job>-<index>.json`` of the directory in
BELLWETHER_STARTUP_DIR: by the ps when it serves and again when it is stopped, by a worker after its
first training step.
"""

import time

_FIRST_LINE = time.clock_gettime(time.CLOCK_BOOTTIME)

import builtins  # noqa: E402
import contextlib  # noqa: E402
import functools  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from typing import Any  # noqa: E402

DIRECTORY_VARIABLE = "BELLWETHER_STARTUP_DIR"
FIRST_STEP = "this worker's first step is done"
"""What a worker prints when its file is written."""


def process_start() -> float:
    """When this process was started, CLOCK_BOOTTIME seconds; the kernel counts it in hundredths."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        after_name = file.read().rpartition(")")[2].split()
    return int(after_name[19]) / os.sysconf("SC_CLK_TCK")


class Stopwatch:
    """Times of named parts, each without the parts inside it; the parts of other threads are told apart by a prefix."""

    def __init__(self) -> None:
        self.secs: dict[str, float] = {}
        self._stacks = threading.local()
        self._main = threading.get_ident()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts the block for ``name``; a part inside a part of the same name changes nothing."""
        stack: list[list[Any]] = self._stacks.__dict__.setdefault("stack", [])
        if stack and stack[-1][0] == name:
            yield
            return
        began = time.perf_counter()
        stack.append([name, 0.0])
        try:
            yield
        finally:
            took = time.perf_counter() - began
            _, inside = stack.pop()
            if stack:
                stack[-1][1] += took
            key = name if threading.get_ident() == self._main else f"other threads: {name}"
            self.secs[key] = self.secs.get(key, 0.0) + took - inside

    def on(self, owner: Any, attribute: str, name: str) -> None:
        """Puts the stopwatch on a function or method."""
        function: Callable[..., Any] = getattr(owner, attribute)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        setattr(owner, attribute, timed)


def main() -> None:
    """Imports and runs the trainer."""
    watch = Stopwatch()
    watch.on(builtins, "__import__", "imports")
    watch.on(importlib, "import_module", "imports")
    from absl import app, flags, logging

    from models.mnist import trainer

    imported = time.clock_gettime(time.CLOCK_BOOTTIME)
    _instrument(watch, trainer)
    compiled: dict[str, int] = {}
    _count(compiled)

    def report(at: float) -> None:
        found = {
            "started": process_start(),
            "first_line": _FIRST_LINE,
            "imported": imported,
            "end": at,
            "parts": dict(watch.secs),
            "compiled": compiled,
            "modules": len(sys.modules),
        }
        name = f"{flags.FLAGS.job_name}-{flags.FLAGS.task_index}.json"
        with open(
            os.path.join(os.environ[DIRECTORY_VARIABLE], name), "w", encoding="utf-8"
        ) as file:
            json.dump(found, file)

    _after_first_step(trainer, watch, report)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.set_verbosity(logging.INFO)
    app.run(trainer.main)


def _instrument(watch: Stopwatch, trainer: Any) -> None:
    from harness.training.run import supervisor
    from harness.training.start import session_manager
    from models.mnist import data
    from runtime.master import master, tasks
    from runtime.plan import lower
    from runtime.server import server
    from runtime.session import session
    from runtime.task import compiler, cpu_share, worker

    watch.on(worker, "local_devices", "devices")
    watch.on(server.Server, "__init__", "server")
    watch.on(data, "load", "data")
    watch.on(trainer, "build_graph", "graph")
    watch.on(supervisor.Supervisor, "__init__", "supervisor")
    watch.on(session, "make_plan", "plan")
    watch.on(lower, "own_program", "export")
    watch.on(lower, "write_program", "export")
    watch.on(master, "meet_tasks", "cluster ready")
    watch.on(compiler, "_compile", "compile")
    watch.on(tasks.RemoteTask, "register", "register on the ps")
    watch.on(master.MasterSession, "run", "run")
    watch.on(session.Session, "__init__", "open session")
    watch.on(supervisor.Supervisor, "prepare_or_wait_for_session", "supervisor")
    del cpu_share, session_manager


def _count(compiled: dict[str, int]) -> None:
    import jax

    def note(event: str, **_: Any) -> None:
        if event.startswith("/jax/compilation_cache/"):
            name = event.rpartition("/")[2]
            compiled[name] = compiled.get(name, 0) + 1

    jax.monitoring.register_event_listener(note)


def _after_first_step(trainer: Any, watch: Stopwatch, report: Callable[[float], None]) -> None:
    import runtime as rt

    run = rt.Session.run
    done = threading.Event()

    def first(self: rt.Session, fetches: Any, *args: Any, **kwargs: Any) -> Any:
        if done.is_set():
            return run(self, fetches, *args, **kwargs)
        trains = (
            isinstance(fetches, list) and isinstance(fetches[0], rt.Operation) and len(fetches) == 3
        )
        with watch.part("sessions, waiting for values"):
            result = run(self, fetches, *args, **kwargs)
        if trains:
            at = time.clock_gettime(time.CLOCK_BOOTTIME)
            done.set()
            report(at)
            print(FIRST_STEP, flush=True)
        return result

    rt.Session.run = first  # type: ignore[method-assign]
    join = rt.Server.join

    def serve(self: rt.Server, *arguments: Any) -> None:
        ready = time.clock_gettime(time.CLOCK_BOOTTIME)
        report(ready)
        try:
            join(self, *arguments)
        finally:
            report(ready)

    rt.Server.join = serve  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    main()
