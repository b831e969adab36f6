"""The stopwatch of `benchmarks.startup`: what is inside a part is not counted for it, and budgets add up."""

import threading
import time

import pytest

from benchmarks.startup import budget
from benchmarks.startup_task import Stopwatch, process_start


def test_parts_inside_parts_are_counted_once() -> None:
    """A part inside another is counted once."""
    watch = Stopwatch()
    began = time.perf_counter()
    with watch.part("outer"):
        with watch.part("inner"), watch.part("inner"):
            # The stopwatch measures this time.
            time.sleep(0.02)
        between = time.perf_counter()
    took = time.perf_counter() - began
    assert watch.secs["inner"] >= 0.02
    assert watch.secs["outer"] + watch.secs["inner"] <= took
    assert watch.secs["outer"] <= took - watch.secs["inner"]
    assert between - began >= watch.secs["inner"]


def test_other_threads_count_apart() -> None:
    """The parts of other threads are counted apart."""
    watch = Stopwatch()

    def work() -> None:
        with watch.part("compile"):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert list(watch.secs) == ["other threads: compile"]


def test_budget_adds_up() -> None:
    """A budget adds up to the measured time."""
    task = {
        "started": 10.5,
        "first_line": 10.6,
        "parts": {"imports": 0.7, "compile": 0.2, "other threads: run": 9.0},
    }
    found = budget(task, 10.0, 1600.0)
    assert sum(found.values()) == pytest.approx(1600.0)
    assert found["launcher"] == pytest.approx(500.0)
    assert found["the rest"] == pytest.approx(100.0)
    assert "other threads: run" not in found


def test_process_start_precedes_now() -> None:
    """A process started before now."""
    assert 0 < process_start() <= time.clock_gettime(time.CLOCK_BOOTTIME) + 0.01
