"""Programs in processes of their own: forked from the process that ``tests.faults`` keeps, read, told, and ended.

A ``Program`` is a command with its output; a ``Task`` is a function of a test module that talks
with the test through a pipe. Both start in a tenth of a second, because JAX and the rest are
imported once for the whole test run.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import os
import pathlib
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from tests.faults import PRELOAD
from tests.faults.processes import TaskProcesses, ZygoteProcess
from tests.kit.waits import TIMEOUT_SECS

ROOT = pathlib.Path(__file__).resolve().parents[2]
_END_SECS = 1.0
_SHOWN = 25
_ONLY = "the program"


class Program:
    """A process that runs a command, and whose output is read and kept.

        with Program("python", "-c", "print(input())") as program:
            program.enter("hello")
            program.expect("hello")

    Args:
        *command: Program and arguments. ``python`` is this interpreter, and then these forms are
            forked: ``"python", "-m", module``, ``"python", "-c", code`` and ``"python", file``.
        cwd: Working directory.
        cold: True starts a new interpreter, for promises of a start and for variables that imports
            read.
        stdin: Descriptor that becomes the standard input; by default ``enter`` writes to it.
        env: Environment variables beside those of the test run; None removes a variable.
    """

    def __init__(
        self,
        *command: str,
        cwd: str | os.PathLike[str] = ROOT,
        cold: bool = False,
        stdin: int | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        argv = [sys.executable if command[0] == "python" else command[0], *command[1:]]
        base = {**os.environ, "JAX_PLATFORMS": "cpu"}
        if pathlib.Path(cwd) != ROOT or command[0] != "python" or command[1] not in ("-m", "-c"):
            # else the modules of the checkout are found in the working directory
            base["PYTHONPATH"] = str(ROOT)
        given = {**base, **(env or {})}
        self.name = " ".join(command)[:80]
        present = {name: value for name, value in given.items() if value is not None}
        reader, self._input = os.pipe()
        self._processes = TaskProcesses(
            ZygoteProcess.lasting(() if cold else PRELOAD, base), [_ONLY]
        )
        self._start = functools.partial(self._processes.spawn, _ONLY, argv, present, cwd=cwd)
        try:
            self._life = self._start(stdin=reader if stdin is None else stdin)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(reader)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the program. Shows the end of its output when the test fails."""
        if error is not None:
            print(self.story())
        self.close()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._life.pid

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while the program runs."""
        return self._life.code

    def lines(self, pattern: str = "") -> list[str]:
        """Returns the lines that the program has written so far, or those that match."""
        return [line.text for line in self._processes.lines(_ONLY, pattern)]

    def output(self) -> str:
        """Returns the output so far."""
        return "\n".join(self.lines())

    def expect(self, pattern: str, secs: float = TIMEOUT_SECS) -> re.Match[str]:
        """Waits for a line that matches, after the line that was found last; see ``LocalCluster.expect``."""
        return self._processes.expect(_ONLY, pattern, secs)

    def story(self) -> str:
        """Returns the last lines and the end of the program, for failures."""
        with contextlib.suppress(TimeoutError):
            self.wait(_END_SECS)  # what it has said comes to an end a moment before itself
        ended = "" if self.code is None else f", and has ended with {self.code}"
        return "\n".join([f"{self.name} has written{ended}:", *self.lines()[-_SHOWN:]])

    def enter(self, line: str) -> None:
        """Writes a line to the standard input."""
        os.write(self._input, f"{line}\n".encode())

    def wait(self, secs: float = TIMEOUT_SECS) -> int:
        """Waits for the end.

        Returns the exit code, negative for a signal, or raises TimeoutError.
        """
        return self._processes.wait(_ONLY, secs)

    def result(self, secs: float = TIMEOUT_SECS) -> str:
        """Waits for the end, and returns the output. An exit code other than 0 fails the test."""
        code = self.wait(secs)
        assert code == 0, f"{self.name} ended with {code}: {self.output()}"
        return self.output()

    def signal(self, signum: int) -> None:
        """Sends a signal to the process group. Does nothing after the end."""
        self._processes.signal(_ONLY, signum)

    def handles(self, signum: int) -> bool:
        """Returns True if the program has a handler for a signal by now."""
        return bool(_caught(self.pid) >> (signum - 1) & 1)

    def freeze(self) -> None:
        """Stops the program by SIGSTOP. Returns when all of its threads have stopped."""
        assert self.code is None, f"{self.name} has ended: {self.story()}"
        self._processes.freeze(_ONLY)

    def thaw(self) -> None:
        """Continues the program by SIGCONT."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Sends SIGKILL, and waits for the end."""
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self, secs: float = 10.0) -> None:
        """Sends SIGTERM, and SIGKILL after ``secs``."""
        self.signal(signal.SIGTERM)
        try:
            self.wait(secs)
        except TimeoutError:
            self.kill()

    def restart(self) -> None:
        """Starts the command again after its end."""
        with open(os.devnull, "rb") as nothing:
            self._life = self._start(stdin=nothing.fileno())

    def close(self) -> None:
        """Ends the program and closes its pipes. Does nothing the second time."""
        self._processes.close()
        if self._input >= 0:
            os.close(self._input)
            self._input = -1


class Task(Program):
    """A process that runs ``function(*arguments, pipe)`` and sends tuples to the test.

    The function sends by ``pipe.send``. The first element of a tuple is its kind. Orders of the
    test come by ``pipe.recv``.

    Args:
        function: Function of a module that can be imported.
        *arguments: Arguments of the function, which are pickled.
        cold: As for ``Program``.
        env: As for ``Program``.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *arguments: Any,
        cold: bool = False,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        module = inspect.getmodule(function)
        assert module is not None
        self.said: list[tuple[Any, ...]] = []
        """The tuples so far; ("GONE",) at the end."""
        self._heard = 0
        self._new = threading.Condition()
        self._pipe, theirs = multiprocessing.Pipe()
        self._pipe.send((module.__name__, function.__name__, arguments))
        try:
            super().__init__(
                "python", "-m", "tests.kit.task", cold=cold, stdin=theirs.fileno(), env=env
            )
        except BaseException:
            self._pipe.close()
            raise
        finally:
            theirs.close()
        self.name = f"{function.__name__}{arguments[:2]}"
        self._reader = threading.Thread(
            target=self._read, name=f"reader of {self.name}", daemon=True
        )
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                what = self._pipe.recv()
                with self._new:
                    self.said.append(what)
                    self._new.notify_all()
        with self._new:
            self.said.append(("GONE",))
            self._new.notify_all()

    def tell(self, *order: Any) -> None:
        """Sends the task an order."""
        self._pipe.send(order)

    def hear(self, kind: str, pattern: str = "", secs: float = TIMEOUT_SECS) -> tuple[Any, ...]:
        """Waits for the next tuple of a kind (and of a matching text).

        The end of the process is a failure.
        """
        with self._new:
            deadline = time.monotonic() + secs
            while True:
                while self._heard < len(self.said):
                    what = self.said[self._heard]
                    self._heard += 1
                    if what[0] == kind and (not pattern or re.search(pattern, str(what[1]))):
                        return what
                    assert what != ("GONE",), (
                        f"{self.name} ended without {kind} {pattern}: {self.story()}"
                    )
                left = deadline - time.monotonic()
                assert left > 0, (
                    f"{self.name} did not say {kind} {pattern} in {secs} s: {self.story()}"
                )
                self._new.wait(left)

    def request(self, order: str, *arguments: Any, answer: str = "") -> Any:
        """Sends an order and returns the value of its answer.

        By default the kind is the order in capitals.
        """
        self.tell(order, *arguments)
        return self.hear(answer or order.upper())[1]

    def wait_for(
        self, holds: Callable[[list[tuple[Any, ...]]], bool], secs: float = TIMEOUT_SECS
    ) -> None:
        """Waits until a condition of the tuples holds. Fails after ``secs``."""
        with self._new:
            self._new.wait_for(lambda: holds(self.said) or self.said[-1:] == [("GONE",)], secs)
            assert holds(self.said), f"{self.name}: {self.story()}"

    def said_so_far(self, kind: str, pattern: str = "") -> list[Any]:
        """Returns the values of all tuples of a kind (and of a matching text)."""
        with self._new:
            return [
                what[1]
                for what in self.said
                if what[0] == kind and re.search(pattern, str(what[1]))
            ]

    def story(self) -> str:
        """Returns the last tuples and lines, for failures."""
        shown = [str(what) for what in self.said if what[0] != "STEP"]
        return "\n".join([f"{self.name} has said:", *shown[-_SHOWN:], super().story()])

    def close(self) -> None:
        super().close()
        self._reader.join()
        self._pipe.close()


def _caught(pid: int) -> int:
    """Returns the signals for which a process has a handler; bit 0 is signal 1."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return next(
        int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:")
    )


@contextlib.contextmanager
def programs() -> Iterator[Callable[..., Program]]:
    """Opens a function that starts programs with the arguments of ``Program``.

    All end with the block.
    """
    with contextlib.ExitStack() as stack:
        yield lambda *command, **options: stack.enter_context(Program(*command, **options))
