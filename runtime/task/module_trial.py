"""Trials of modules: what a task is sent as StableHLO is first read, verified and compiled by a process of its own.

MLIR's reader and XLA's compiler end the process for some modules, and keep it busy for others. The process is kept for
the next module; a module that ends it, or takes it too much time or memory, is refused, and the next has a new one. It
is in a sandbox (`runtime.sandbox`): a module that takes it over can compute, and reach nothing.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from typing import IO, Any, Final

import jax
import numpy as np
import psutil
from jax import export

from runtime import sandbox
from runtime.errors import InvalidArgumentError, OpError, one_line
from runtime.plan.exporting import export_program
from runtime.plan.plan import Program
from runtime.task.compiler import Compiler, warm_up
from runtime.task.program_verifier import verify_program
from runtime.tensor_spec import TensorSpec, canonical_dtype, dtype_name

SECS: Final = 120.0
"""How long one module may take."""
START_SECS: Final = 300.0
"""How long the process may take to start."""
MEMORY: Final = 8 << 30
"""How much resident memory it may have."""
KNOWN: Final = 4096
"""Of how many programs it is remembered that they have passed."""
_LOOK_SECS: Final = 0.05
_START: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from runtime.task import module_trial as t; t.main()"
)
_KEPT: Final = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "XLA_FLAGS")
"""Of the environment; the rest, with the paths of credentials, is none of its business."""


class ModuleTrials:
    """A process in which modules are tried out, one at a time; it is started by the first of them.

    Args:
        secs: how long one module may take.
        memory: how much resident memory the process may have, in bytes.
    """

    def __init__(self, secs: float = SECS, memory: int = MEMORY) -> None:
        self._secs = secs
        self._memory = memory
        self._lock = threading.Lock()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._process: subprocess.Popen[bytes] | None = None
        self.tried = 0
        """How many modules were tried out, for tests that count."""

    def try_out(self, program: Program) -> None:
        """Has a module tried out, unless it has passed before.

        Raises:
            InvalidArgumentError: it is refused, or has ended the process, or took it too much time or memory.
        """
        with self._lock:
            if program.sha256 not in self._known:
                self.tried += 1
                refused = self._answer(_request(program))
                if refused:
                    raise InvalidArgumentError(refused)
            self._known[program.sha256] = None
            self._known.move_to_end(program.sha256)
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._end()

    def _answer(self, request: bytes) -> str:
        """Why a module is refused; empty when it is not."""
        if self._process is None:
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
            line = self._line(process, self._secs)
        except BrokenPipeError:
            line = b""
        except InvalidArgumentError as error:
            self._end()
            return error.message
        if line:
            return str(json.loads(line))
        code = process.wait()
        self._end()
        how = signal.Signals(-code).name if code < 0 else f"code {code}"
        return f"it ended the process in which programs are tried out, with {how}"

    def _start(self) -> None:
        environ = {name: os.environ[name] for name in _KEPT if name in os.environ} | {"JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environ,
            cwd="/",
        )
        try:
            line = self._line(self._process, START_SECS)
            if not line:
                raise InvalidArgumentError("the process in which programs are tried out does not start")
        except InvalidArgumentError:
            self._end()
            raise
        if unconfined := str(json.loads(line)):
            sandbox.warn_without(unconfined)

    def _line(self, process: subprocess.Popen[bytes], secs: float) -> bytes:
        """The next line that the process says; empty when it has ended.

        Raises:
            InvalidArgumentError: it takes too long, or too much memory.
        """
        assert process.stdout is not None
        deadline, watched = time.monotonic() + secs, psutil.Process(process.pid)
        poll = select.poll()  # a task of a thousand workers has descriptors that select() does not take
        poll.register(process.stdout, select.POLLIN)
        while True:
            try:
                if watched.memory_info().rss > self._memory:
                    raise InvalidArgumentError(f"to read and compile it takes more than {self._memory} bytes of memory")
            except psutil.NoSuchProcess:  # it has just ended, which its output tells
                pass
            if poll.poll(1000 * _LOOK_SECS):
                return process.stdout.readline()
            if time.monotonic() > deadline:
                raise InvalidArgumentError(f"to read and compile it takes more than {secs:g} s")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            try:
                if stream is not None:
                    stream.close()
            except BrokenPipeError:  # what it has not read is lost, as it should be
                continue


def _request(program: Program) -> bytes:
    specs = {
        "arguments": [[list(spec.shape), dtype_name(spec.dtype)] for spec in program.arguments],
        "results": [[list(spec.shape), dtype_name(spec.dtype)] for spec in program.results],
        "bytes": len(program.blob),
    }
    return json.dumps(specs).encode() + b"\n" + program.blob


def _read(source: IO[bytes]) -> Program | None:
    line = source.readline()
    if not line:
        return None
    about: dict[str, Any] = json.loads(line)
    arguments, results = (
        tuple(TensorSpec(tuple(shape), np.dtype(canonical_dtype(name))) for shape, name in about[which])
        for which in ("arguments", "results")
    )
    return Program(source.read(about["bytes"]), arguments, results)


def confine() -> str:
    """Does in this process what is done once only, and then takes from it what a trial does not need.

    Returns:
        As `sandbox.confine`.
    """
    warm_up()
    shape = TensorSpec((2, 2), np.dtype(np.float32))
    problem = _problem(export_program(lambda a: (a @ a,), [shape], "cpu"), jax.local_devices()[0])
    assert not problem, problem
    return sandbox.confine()


def _problem(program: Program, device: jax.Device) -> str:
    """Reads, verifies and compiles a module: why it is refused; empty when it is not."""
    try:
        verify_program(program)
        if "cpu" in export.deserialize(bytearray(program.blob)).platforms:
            Compiler().executable(program, (), device)
    except OpError as error:
        return error.message or "it is refused"
    except Exception as error:
        return f"it cannot be read: {one_line(error)}"
    return ""


def main() -> None:
    """The process: says that it has started, and then of each module why it is refused, as lines of JSON."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed

    def answer(text: str) -> None:
        answers.write(json.dumps(text).encode() + b"\n")
        answers.flush()

    answer(confine())
    device = jax.local_devices()[0]
    while (program := _read(sys.stdin.buffer)) is not None:
        answer(_problem(program, device))
