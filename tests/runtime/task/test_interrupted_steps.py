"""Ctrl-C may come between any two instructions of a step.

Wherever it comes, the task and its session go on.
"""

import contextlib
import functools
import gc
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import runtime as rt
from runtime.state import interrupts
from runtime.state.interrupts import uninterrupted
from runtime.state.store import Store
from runtime.task.worker import Worker
from runtime.tensor_spec import TensorSpec
from tests.kit.interruptions import interruptions
from tests.runtime.kit import target_of_kind

RUNTIME = str(pathlib.Path(rt.__file__).parent)

# one may be left to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore:.*<socket.socket")


@pytest.fixture(autouse=True)
def graph() -> Iterator[rt.Graph]:
    # it is ignored where the tests run in background
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with rt.Graph().as_default() as made:
            yield made
        gc.collect()
    finally:
        signal.signal(signal.SIGINT, before)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize("kind", ["private", "local master"])
def test_interrupted_step_is_whole(kind: str) -> None:
    """Ctrl-C at any place of a step leaves nothing half done."""
    with rt.device("/job:ps" if kind != "private" else ""):
        count, total = (
            rt.Variable(np.int64(0), name="count"),
            rt.Variable(np.zeros(2, np.float32), name="total"),
        )
        x = rt.placeholder(np.float32, [2])
        step = [rt.group(count.assign_add(1), total.assign_add(x * 2.0)), total.value()]
    with target_of_kind(kind) as target, rt.Session(target) as session:
        session.run(rt.global_variables_initializer())
        train = lambda: session.run(step, {x: np.ones(2, np.float32)})  # noqa: E731
        train()  # registers it
        worker: Worker = session._engine.worker  # type: ignore[attr-defined]
        set_before, counted_before = handlers(), 2
        for ctrl_c in interruptions(signal.SIGINT, train, RUNTIME):
            with contextlib.suppress(KeyboardInterrupt):
                ctrl_c(train)
            assert handlers() == set_before, ctrl_c.came
            # a checkpoint begins so: it raises when a stage still runs
            worker.gate.pause(1, 60.0, timeout=0.0)
            assert worker.gate.resume(1), ctrl_c.came
            assert not any(slot.readers for slot in worker.store._slots.values()), ctrl_c.came
            counted, summed = session.run([count, total])
            assert counted_before <= counted <= counted_before + 1, ctrl_c.came
            assert summed.tolist() == [2.0 * counted] * 2, ctrl_c.came
            counted_before = int(counted)
        assert counted_before > 10


@pytest.mark.parametrize("kind", ["private", "local master"])
@pytest.mark.parametrize("adds", [True, False])
def test_interrupted_queue_serves_others(kind: str, adds: bool) -> None:
    """Ctrl-C at any place of a queue's step leaves the queue to others."""
    with rt.device("/job:ps" if kind != "private" else ""):
        queue = rt.FIFOQueue(10, [np.float32, np.int64], shapes=[[2], []])
        x = rt.placeholder(np.float32, [2])
        put, take, size = queue.enqueue([x, np.int64(1)]), queue.dequeue(), queue.size()
    with target_of_kind(kind) as target, rt.Session(target) as session:
        run = functools.partial(
            session.run, feed_dict={x: np.ones(2, np.float32)}, timeout_secs=30.0
        )
        for fetch in (put, put, put, put, take, size):
            run(fetch)
        call = functools.partial(run, put if adds else take)
        for ctrl_c in interruptions(signal.SIGINT, call, RUNTIME):
            for fetch in [take] * (run(size) - 3) + [put] * (3 - run(size)):
                run(fetch)
            with contextlib.suppress(KeyboardInterrupt):
                ctrl_c(call)
            left = run(size)
            assert left in ((3, 4) if adds else (2, 3)), ctrl_c.came
            run(put)
            run(take)
            assert run(size) == left, ctrl_c.came


def test_interrupted_snapshot_frees_variables() -> None:
    """Ctrl-C at any place of a snapshot, replacement or loss leaves no variable locked."""
    store, keys = Store(), [("", "v"), ("", "w")]
    values = {key: (jnp.ones(2), TensorSpec((2,), np.dtype(np.float32))) for key in keys}
    store.replace(values)
    slots = [store.slot(*key) for key in keys]
    for call in (
        store.snapshot,
        lambda: store.replace(values),
        lambda: store.drop_lost(slots, "lost"),
    ):
        for ctrl_c in interruptions(signal.SIGINT, call, RUNTIME):
            with contextlib.suppress(KeyboardInterrupt):
                ctrl_c(call)
            assert not any(slot.lock.locked() or slot.readers for slot in slots), ctrl_c.came
            assert not store.lock.locked(), ctrl_c.came


def test_held_signals_take_effect() -> None:
    """Each signal that was held back has its effect at the end."""
    came: list[int] = []

    def raises(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise SystemExit(number)

    @uninterrupted
    def inner() -> None:
        signal.raise_signal(signal.SIGTERM)

    @uninterrupted
    def outer() -> None:
        signal.raise_signal(signal.SIGINT)
        inner()
        assert came == []

    before = {number: signal.signal(number, raises) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit):
            outer()
        assert sorted(came) == sorted(before)
        assert handlers() == [raises, raises]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_two_signals_leave_no_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals that come while handlers are given back keep no later signal from its effect."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    change, given_back = interrupts._signal.signal, []

    def interrupted(number: int, handler: Any) -> Any:
        result = change(number, handler)
        if number == signal.SIGINT and handler is signal.default_int_handler:
            given_back.append(number)
            raise KeyboardInterrupt  # by the handler that was just given back
        return result

    @uninterrupted
    def call() -> None:
        monkeypatch.setattr(interrupts._signal, "signal", interrupted)

    try:
        with pytest.raises(KeyboardInterrupt):
            call()
        monkeypatch.undo()
        assert len(given_back) == 2
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.cluster
def test_forked_child_has_programs_handlers() -> None:
    """A child that another thread forks during a step has the handlers of the program."""
    program = """
import os, signal, threading
from runtime.state.interrupts import uninterrupted

signal.signal(signal.SIGTERM, lambda number, frame: os._exit(77))
within, forked = threading.Event(), threading.Event()

def fork():
    global child
    within.wait()
    child = os.fork()
    if not child:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    forked.set()

@uninterrupted
def step():
    within.set()
    assert forked.wait(60)

thread = threading.Thread(target=fork)
thread.start()
step()
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout == "77\n"
