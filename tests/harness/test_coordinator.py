"""Coordinator and LooperThread: who stops whom, and which error comes out of join()."""

import logging
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from harness.coordinator import Coordinator, LooperThread
from runtime.errors import AbortedError, OutOfRangeError

LIMIT = 30.0
"""Seconds after which a wait in here has failed; nothing is near it."""


def start(
    target: Callable[..., object], *args: object, name: str | None = None
) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    return thread


def fail_deep_inside(coord: Coordinator, error: BaseException) -> None:
    with coord.stop_on_exception():
        raise error


def test_threads_stop_together_on_request() -> None:
    """A requested stop ends all waiting threads."""
    coord = Coordinator()
    threads = [start(coord.wait_for_stop, LIMIT) for _ in range(4)]
    assert not coord.should_stop()
    coord.request_stop()
    coord.join(threads)
    assert coord.should_stop()
    assert coord.joined
    assert not any(thread.is_alive() for thread in threads)


def test_join_ends_with_the_threads() -> None:
    """join ends without a stop when all threads have ended."""
    coord = Coordinator()
    gate = threading.Event()
    threads = [start(gate.wait, LIMIT) for _ in range(3)]
    joiner = start(coord.join, threads)
    gate.set()
    joiner.join(LIMIT)
    assert coord.joined
    assert not coord.should_stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "coordinator-join"]


def test_join_waits_for_a_stop() -> None:
    """join waits for a stop before the grace period begins."""
    coord = Coordinator()
    worker = start(coord.wait_for_stop, LIMIT)
    joiner = start(lambda: coord.join([worker], stop_grace_period_secs=0, ignore_live_threads=True))
    joiner.join(0.05)
    assert joiner.is_alive()
    coord.request_stop()
    joiner.join(LIMIT)
    assert not joiner.is_alive()


def test_join_needs_no_threads() -> None:
    """join returns at once without threads."""
    coord = Coordinator()
    coord.join()
    assert coord.joined


def test_join_raises_with_the_traceback() -> None:
    """join raises the error of a thread with the thread's traceback."""
    coord = Coordinator()
    threads = [
        start(coord.wait_for_stop, LIMIT),
        start(fail_deep_inside, coord, AbortedError("gone", task="/job:ps")),
    ]
    for _ in range(2):
        with pytest.raises(AbortedError, match="^/job:ps: gone$") as caught:
            coord.join(threads)
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert frames.count("fail_deep_inside") == 1
        assert frames.count("join") == 1
    assert not threads[0].is_alive()


def test_first_error_wins(caplog: pytest.LogCaptureFixture) -> None:
    """join raises the first error, and later errors are logged."""
    coord = Coordinator()
    coord.request_stop(KeyError("first"))
    coord.request_stop(KeyError("second"))
    with pytest.raises(KeyError, match="first"):
        coord.join()
    levels = {record.getMessage(): record.levelno for record in caplog.records}
    assert levels == {
        "error reported to coordinator: KeyError: 'first'": logging.ERROR,
        "error after the stop, not raised: KeyError: 'second'": logging.WARNING,
    }


def test_error_after_stop_is_dropped() -> None:
    """An error after a plain stop is not raised."""
    coord = Coordinator()
    coord.request_stop()
    coord.request_stop(KeyError("consequence"))
    coord.join()


def test_many_failures_give_one_error() -> None:
    """Many threads that fail at once give one error."""
    coord = Coordinator()
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        with coord.stop_on_exception():
            barrier.wait(LIMIT)
            raise KeyError(number)

    threads = [start(work, number) for number in range(8)]
    with pytest.raises(KeyError) as caught:
        coord.join(threads)
    assert caught.value.args[0] in range(8)


def test_clean_stop_types_raise_nothing() -> None:
    """Exceptions of the clean types stop the threads without an error."""
    coord = Coordinator()
    coord.join([start(fail_deep_inside, coord, OutOfRangeError("end of input"))])
    assert coord.should_stop()

    nothing_is_clean = Coordinator(clean_stop_exception_types=[])
    with pytest.raises(OutOfRangeError):
        nothing_is_clean.join(
            [start(fail_deep_inside, nothing_is_clean, OutOfRangeError("end of input"))]
        )

    others = Coordinator(clean_stop_exception_types=(KeyError, OSError))
    others.join([start(fail_deep_inside, others, FileNotFoundError("x"))])
    assert others.should_stop()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_stop_on_exception_takes_everything(error: BaseException) -> None:
    """stop_on_exception reports interrupts and SystemExit too."""
    coord = Coordinator()
    fail_deep_inside(coord, error)
    assert coord.should_stop()
    with pytest.raises(type(error)):
        coord.join()


def test_exc_info_is_accepted() -> None:
    """request_stop accepts sys.exc_info() and refuses other values."""
    coord = Coordinator()
    try:
        raise KeyError("boom")
    except KeyError:
        coord.request_stop(sys.exc_info())
    with pytest.raises(KeyError, match="boom"):
        coord.join()
    wrong: Any = "boom"
    with pytest.raises(TypeError, match="'boom'"):
        coord.request_stop(wrong)


def test_unraised_error_is_recorded() -> None:
    """request_stop records an error that was never raised."""
    coord = Coordinator()
    coord.request_stop(KeyError("boom"))
    with pytest.raises(KeyError, match="boom"):
        coord.join()


def test_error_after_join_raises() -> None:
    """After join an error is raised at once."""
    coord = Coordinator()
    coord.join()
    with pytest.raises(KeyError):
        coord.request_stop(KeyError("late"))
    with pytest.raises(KeyError), coord.stop_on_exception():
        raise KeyError("late")
    coord.request_stop(OutOfRangeError("clean"))
    coord.request_stop()


def test_raise_requested_exception_does_not_consume() -> None:
    """raise_requested_exception raises every time, and join too."""
    coord = Coordinator()
    coord.raise_requested_exception()
    coord.request_stop(KeyError("boom"))
    for _ in range(2):
        with pytest.raises(KeyError):
            coord.raise_requested_exception()
    with pytest.raises(KeyError):
        coord.join()


def test_clear_stop_starts_over() -> None:
    """clear_stop makes a coordinator usable again."""
    coord = Coordinator()
    coord.request_stop(KeyError("boom"))
    with pytest.raises(KeyError):
        coord.join()
    coord.clear_stop()
    assert not coord.should_stop()
    assert not coord.joined
    thread = start(coord.wait_for_stop, LIMIT)
    coord.request_stop()
    coord.join([thread])


def test_wait_for_stop_reports_the_stop() -> None:
    """wait_for_stop returns whether a stop came within the time."""
    coord = Coordinator()
    assert not coord.wait_for_stop(0)
    assert not coord.wait_for_stop(-5)
    assert not coord.wait_for_stop(0.01)
    start(coord.request_stop)
    assert coord.wait_for_stop(LIMIT)
    assert coord.wait_for_stop()
    assert coord.wait_for_stop(-5)


@pytest.mark.parametrize("registered", [False, True])
def test_stragglers_are_named(registered: bool, caplog: pytest.LogCaptureFixture) -> None:
    """join names the threads that still run after the grace period."""
    gate = threading.Event()
    threads = [start(gate.wait, LIMIT, name=name) for name in ("slow-b", "slow-a")]
    passed = [] if registered else threads

    def stopping() -> Coordinator:
        coord = Coordinator()
        for thread in threads if registered else []:
            coord.register_thread(thread)
        return coord

    try:
        coord = stopping()
        coord.request_stop()
        with pytest.raises(
            RuntimeError, match="^Coordinator stopped with threads still running: slow-a slow-b$"
        ):
            coord.join(passed, stop_grace_period_secs=0.01)

        coord = stopping()
        coord.request_stop(KeyError("comes first"))
        with pytest.raises(KeyError):
            coord.join(passed, stop_grace_period_secs=0.01)

        coord = stopping()
        coord.request_stop()
        with caplog.at_level(logging.INFO):
            coord.join(passed, stop_grace_period_secs=0.01, ignore_live_threads=True)
        assert "still running: slow-a slow-b" in caplog.text
        coord.join()  # the registration is over
    finally:
        gate.set()


def test_registered_thread_may_join_others() -> None:
    """A registered thread may join the other threads."""
    coord = Coordinator()
    other = start(coord.wait_for_stop, LIMIT)
    coord.register_thread(other)

    def stop_and_join() -> None:
        coord.request_stop()
        coord.join()

    thread = threading.Thread(target=stop_and_join, daemon=True)
    coord.register_thread(thread)
    thread.start()
    thread.join(LIMIT)
    assert coord.joined
    assert not other.is_alive()


def test_signal_handler_may_stop() -> None:
    """A signal handler may stop a main thread that waits."""
    coord = Coordinator()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: coord.request_stop())
    try:
        for _ in range(50):
            coord.clear_stop()
            start(signal.pthread_kill, threading.main_thread().ident, signal.SIGUSR1)
            assert coord.wait_for_stop(LIMIT)
    finally:
        signal.signal(signal.SIGUSR1, before)


class Recorder(LooperThread):
    """Writes down what is called, and stops after a number of runs."""

    def __init__(
        self,
        coord: Coordinator,
        interval: float | None,
        runs: int,
        error: BaseException | None = None,
    ) -> None:
        super().__init__(coord, interval)
        self.coord = coord
        self.left = runs
        self.error = error
        self.calls: list[str] = []

    def start_loop(self) -> None:
        self.calls.append("start")

    def run_loop(self) -> None:
        self.calls.append("run")
        self.left -= 1
        if self.left == 0:
            if self.error is not None:
                raise self.error
            self.coord.request_stop()

    def stop_loop(self) -> None:
        self.calls.append("stop")


@pytest.mark.parametrize("interval", [None, 0.0, 0.002])
def test_looper_calls_in_order(interval: float | None) -> None:
    """A looper calls start_loop, run_loop and stop_loop in order."""
    coord = Coordinator()
    looper = Recorder(coord, interval, runs=3)
    assert looper.daemon
    looper.start()
    coord.join()
    assert looper.calls == ["start", "run", "run", "run", "stop"]


def test_looper_skips_stop_loop_after_error() -> None:
    """A looper skips stop_loop after an error."""
    coord = Coordinator()
    looper = Recorder(coord, None, runs=2, error=KeyError("boom"))
    looper.start()
    with pytest.raises(KeyError, match="boom"):
        coord.join()
    assert looper.calls == ["start", "run", "run"]


def test_looper_stops_within_an_interval() -> None:
    """A looper runs at once and stops within a long interval."""
    coord = Coordinator()
    ran = threading.Event()
    looper = LooperThread.loop(coord, 3600, ran.set)
    assert ran.wait(LIMIT)
    coord.request_stop()
    coord.join(stop_grace_period_secs=LIMIT)
    assert not looper.is_alive()


def test_looper_keeps_its_pace() -> None:
    """A looper waits an interval between runs."""
    coord = Coordinator()
    runs = iter(range(5))

    def tick() -> None:
        if next(runs) == 4:
            coord.request_stop()

    began = time.monotonic()
    LooperThread.loop(coord, 0.05, tick)
    coord.join()
    assert time.monotonic() - began >= 4 * 0.05


def test_looper_makes_up_one_run() -> None:
    """A looper makes up for several missed runs by a single run."""
    coord = Coordinator()
    runs = iter(range(4))

    def tick() -> None:
        run = next(runs)
        if run == 0:
            assert not coord.wait_for_stop(0.35)  # misses three intervals
        if run == 3:
            coord.request_stop()

    began = time.monotonic()
    LooperThread.loop(coord, 0.1, tick)
    coord.join()
    # Made up one by one, all four runs would be over after 0.35 s.
    assert time.monotonic() - began >= 0.35 + 2 * 0.1


def test_looper_passes_arguments() -> None:
    """A looper passes its arguments and has the name of its target."""
    coord = Coordinator()
    seen: list[Any] = []

    def save_model(*args: int, **kwargs: int) -> None:
        seen.append((args, kwargs))
        coord.request_stop()

    looper = LooperThread.loop(coord, None, save_model, args=(1, 2), kwargs={"c": 3})
    coord.join()
    assert seen == [((1, 2), {"c": 3})]
    assert looper.name == "save_model"


def test_looper_refuses_wrong_arguments() -> None:
    """A looper refuses a missing coordinator and arguments without a target."""
    wrong: Any = None
    with pytest.raises(ValueError, match="coord must be a Coordinator"):
        LooperThread(wrong, 1.0)
    with pytest.raises(ValueError, match="need a target"):
        LooperThread(Coordinator(), 1.0, args=(1,))
