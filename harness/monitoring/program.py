"""The reports of a training program: log lines, a Prometheus endpoint, a profile of some steps.

The import of the module defines the flags --metrics_port, --metrics_host, --log_json and
--profile_steps.

    with monitoring.watched(server), monitoring.StepProfiler.from_flags(logdir) as profiler:
        while training:
            profiler.step(step)

Progress bars are in ``harness.monitoring.progress``.
"""

import contextlib
import datetime
import json
import logging as std_logging
import os
import re
from collections.abc import Generator, Iterator
from typing import Any, Self

from absl import flags, logging

import runtime as rt
from harness.launch.tasks import ATTEMPT_VARIABLE, NUMBER_VARIABLE

FLAGS = flags.FLAGS
flags.DEFINE_integer(
    "metrics_port",
    None,
    "Port of an HTTP endpoint with this task's figures for Prometheus; 0 takes a free one. Under "
    "harness.launch this is the first task's, and each further task has the next one, the ps "
    "first. Off when not given.",
    lower_bound=0,
    upper_bound=65535,
)
flags.DEFINE_string(
    "metrics_host",
    "127.0.0.1",
    "Host name or address at which --metrics_port listens; 0.0.0.0 for all interfaces. Off the "
    "loopback it asks for what the task asks for: a certificate, or a bearer token.",
)
flags.DEFINE_bool(
    "log_json", False, "Log one JSON object a line: time, level, task, source, message."
)
flags.DEFINE_string(
    "profile_steps",
    None,
    "Steps of the chief to profile, as in 100:105: five, from global step 100 on. A jax.profiler "
    "trace is written below --logdir; Perfetto opens it.",
)
_LEVELS = {"CRITICAL": "F", "FATAL": "F", "ERROR": "E", "WARNING": "W", "INFO": "I", "DEBUG": "D"}


class TaskFormatter(std_logging.Formatter):
    """Log lines of level and time, task, place and message; line breaks become spaces.

    Args:
        task: name of the task, such as "worker/0"; "" for lines without a name.
    """

    def __init__(self, task: str) -> None:
        super().__init__()
        self._task = task

    def format(self, record: std_logging.LogRecord) -> str:
        """Returns the line of a record."""
        at = datetime.datetime.fromtimestamp(record.created)
        level = _LEVELS.get(record.levelname, record.levelname[:1])
        where = f"{record.filename}:{record.lineno}"
        # One record is one line, for grep and for the prefix of the launcher.
        message = " ".join(record.getMessage().split())
        head = f"{level}{at:%m%d %H:%M:%S}.{at.microsecond // 1000:03d} {self._task}".rstrip()
        text = f"{head} {where}] {message}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(TaskFormatter):
    """Log lines of one JSON object each, for log collectors; an exception is a field.

    Args:
        task: name of the task, such as "worker/0".
    """

    def format(self, record: std_logging.LogRecord) -> str:
        """Returns the line of a record."""
        # In UTC, as collectors mix the lines of several hosts.
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        entry: dict[str, str] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "task": self._task,
            "source": f"{record.filename}:{record.lineno}",
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure_logging(task: str, as_json: bool = False) -> None:
    """Makes absl's log lines name the task, unless the launcher does; to be called before the server starts.

    Args:
        task: name of the task, such as "worker/0".
        as_json: True for one JSON object a line.
    """
    # The launcher writes the task before every line.
    shown = "" if ATTEMPT_VARIABLE in os.environ else task
    logging.get_absl_handler().setFormatter(
        JsonFormatter(task) if as_json else TaskFormatter(shown)
    )


@contextlib.contextmanager
def watched(server: rt.Server) -> Iterator[None]:
    """Names the server's task in the log lines, and offers its figures at ``--metrics_port`` while the block runs."""
    with watched_at(
        server, _flag_value("metrics_port"), _flag_value("log_json"), _flag_value("metrics_host")
    ):
        yield


def _flag_value(name: str) -> Any:
    """Returns the value of a flag, or its default in a program that parses no flags (argparse, Hydra, a notebook)."""
    return FLAGS[name].value


@contextlib.contextmanager
def watched_at(
    server: rt.Server, port: int | None, as_json: bool = False, host: str = "127.0.0.1"
) -> Iterator[None]:
    """Does the work of ``watched`` for a program that passes options and has no flags.

    Under the launcher each task has a port of its own, from ``port`` on. A port in use, or a
    missing package prometheus-client, costs the figures and not the training: an error is logged.

    Args:
        server: the server of this task.
        port: port of the first task; 0 for a free port, None for no endpoint.
        as_json: True for one JSON object a log line.
        host: name or address at which the endpoint listens.
    """
    configure_logging(f"{server.task.job}/{server.task.index}", as_json)
    if port is None:
        yield
        return
    # A port of 0 stays a free port.
    port = port and port + int(os.environ.get(NUMBER_VARIABLE, "0"))
    with contextlib.ExitStack() as stack:
        try:
            from harness.monitoring.prometheus import MetricsServer

            stack.enter_context(MetricsServer(server, port, host))
        except (ImportError, OSError, OverflowError, rt.OpError) as error:
            logging.error(
                "no figures for Prometheus at port %d of %s: %s; install bellwether[prometheus], "
                "or give another --metrics_port, 0 for any free one, or another --metrics_host",
                port,
                host,
                error,
            )
        yield


class StepProfiler:
    """A profile of some steps of this task by jax.profiler, for Perfetto and TensorBoard's profile plugin.

    Other workers raise the global step between two steps of this task. So the profile has ``end -
    first`` steps of this task, from the first step at or after the global step ``first``. A run
    that starts after ``end`` has no profile.

    Args:
        first: the global step from which on the profile begins.
        end: the global step before which the profile ends if no other worker trains.
        directory: the directory, in which the profile is written below ``plugins/profile``.
    """

    def __init__(self, first: int, end: int, directory: str) -> None:
        if not 0 <= first < end:
            raise ValueError(
                f"the steps {first}:{end} to profile: the first must be 0 or more and below the "
                "second"
            )
        self._first = first
        self._end = end
        self._directory = directory
        # The generator runs to its first step here.
        self._profile = self._profile_steps()
        next(self._profile)

    @classmethod
    def from_flags(cls, directory: str, here: bool = True) -> Self:
        """Makes the profiler of ``--profile_steps``; arguments and errors as in ``from_text``."""
        return cls.from_text(_flag_value("profile_steps"), directory, here)

    @classmethod
    def from_text(cls, steps: str | None, directory: str, here: bool = True) -> Self:
        """Makes the profiler of the steps in a text, or an idle profiler for None or an empty text.

        Args:
            steps: the first step and the end, as in ``100:105``.
            directory: directory of the profile.
            here: False on tasks without a profile.

        Raises:
            ValueError: The text is invalid, or there is no directory.
        """
        if not steps or not here:
            # A profiler that was closed: each step finds it at its end.
            nothing = cls(0, 1, directory)
            nothing.close()
            return nothing
        found = re.fullmatch(r"(\d+):(\d+)", steps)
        if not found:
            raise ValueError(
                f"--profile_steps={steps}: give the first step and the end, as in 100:105"
            )
        if not directory:
            raise ValueError("--profile_steps needs a --logdir to write to")
        return cls(int(found[1]), int(found[2]), directory)

    def step(self, step: int) -> None:
        """Begins a step of this task.

        Args:
            step: The global step before it.
        """
        try:
            self._profile.send(step)
        except StopIteration:
            return

    def _profile_steps(self) -> Generator[None, int, None]:
        """Receives the global step before each step; the profile runs from its first step to its end, or ``close``."""
        step = yield
        if step >= self._end:
            logging.info("no profile: step %d is past %d:%d already", step, self._first, self._end)
            return
        while step < self._first:
            step = yield
        import jax

        steps = self._end - self._first
        logging.info("profiling %d steps of this task from global step %d on", steps, step)
        jax.profiler.start_trace(self._directory, create_perfetto_trace=True)
        try:
            for _ in range(steps):
                # The profile plugin shows the time of each step that is marked.
                with jax.profiler.StepTraceAnnotation("train", step_num=step):
                    step = yield
        finally:
            try:
                jax.profiler.stop_trace()
            except Exception as error:
                # The disk may be full, and no training depends on the profile.
                logging.error("the profile is not written below %s: %s", self._directory, error)
            else:
                logging.info("the profile is below %s/plugins/profile", self._directory)

    def close(self) -> None:
        """Ends and writes a running profile."""
        self._profile.close()

    def __enter__(self) -> Self:
        """Returns the profiler."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends and writes a running profile."""
        self.close()
