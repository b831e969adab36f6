"""What the tests of harness.tf1 share: tensors evaluated in a session of their own, and programs run as processes."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import harness.tf1 as tf

ROOT = pathlib.Path(__file__).resolve().parents[2]


def evaluate(make: Callable[[], Any], feeds: dict[str, Any] | None = None, init: bool = False) -> Any:
    """Builds tensors in a fresh graph and runs them; ``feeds`` goes by tensor name."""
    with tf.Graph().as_default():
        fetches = make()
        with tf.Session() as sess:
            if init:
                sess.run(tf.global_variables_initializer())
            return sess.run(fetches, feeds)


def check_all(cases: dict[str, tuple[Any, Any]], results: dict[str, Any], rtol: float = 1e-5) -> None:
    """Compares every result with what was expected, value by value and dtype by dtype where that is an array."""
    wrong = []
    for name, (_, expected) in cases.items():
        got = results[name]
        if isinstance(expected, np.ndarray | np.generic) and np.asarray(got).dtype != expected.dtype:
            wrong.append(f"{name}: dtype {np.asarray(got).dtype}, not {expected.dtype}")
        try:
            np.testing.assert_allclose(got, expected, rtol=rtol, atol=1e-6)
        except (AssertionError, TypeError) as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)


class Program:
    """One process that runs a program of ``tests/tf1/programs``; what it says is kept."""

    def __init__(self, name: str, *flags: str, **environment: str) -> None:
        path = ROOT / "tests" / "tf1" / "programs" / f"{name}.py"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment}
        self.what = " ".join([name, *flags])
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by stop()
        self.process = subprocess.Popen(
            [sys.executable, str(path), *flags],
            cwd=ROOT,
            env=env,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def said(self) -> str:
        """All it has said so far."""
        self.output.seek(0)
        return self.output.read()

    def result(self, secs: float = 60) -> str:
        """Waits for its end and gives what it said; another end than 0 fails the test."""
        try:
            code = self.process.wait(secs)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.what} did not end in {secs} s: {self.said()}") from None
        assert code == 0, f"{self.what} ended with {code}: {self.said()}"
        return self.said()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that is not heard."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        self.output.close()


@contextlib.contextmanager
def programs() -> Iterator[Callable[..., Program]]:
    """Starts programs; all are gone at the end."""
    with contextlib.ExitStack() as stack:

        def start(name: str, *flags: str, **environment: str) -> Program:
            program = Program(name, *flags, **environment)
            stack.callback(program.stop)
            return program

        yield start
