"""What the tests of harness.tf1 share: tensors evaluated in a session of their own, and programs started by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import harness.tf1 as tf
from tests.kit import processes
from tests.kit.processes import Program


def evaluate(
    make: Callable[[], Any], feeds: dict[str, Any] | None = None, init: bool = False
) -> Any:
    """Builds tensors in a fresh graph and runs them; ``feeds`` goes by tensor name."""
    with tf.Graph().as_default():
        fetches = make()
        with tf.Session() as sess:
            if init:
                sess.run(tf.global_variables_initializer())
            return sess.run(fetches, feeds)


def check_all(
    cases: dict[str, tuple[Any, Any]], results: dict[str, Any], rtol: float = 1e-5
) -> None:
    """Compares every result with what was expected, value by value and dtype by dtype where that is an array."""
    wrong = []
    for name, (_, expected) in cases.items():
        got = results[name]
        if (
            isinstance(expected, np.ndarray | np.generic)
            and np.asarray(got).dtype != expected.dtype
        ):
            wrong.append(f"{name}: dtype {np.asarray(got).dtype}, not {expected.dtype}")
        try:
            np.testing.assert_allclose(got, expected, rtol=rtol, atol=1e-6)
        except (AssertionError, TypeError) as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)


@contextlib.contextmanager
def programs() -> Iterator[Callable[..., Program]]:
    """Starts programs of ``tests/harness/tf1/programs`` by name, flags and variables; all are gone at the end."""
    with processes.programs() as start:
        yield lambda name, *flags, **env: start(
            "python", "-m", f"tests.harness.tf1.programs.{name}", *flags, env=env
        )
