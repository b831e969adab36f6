"""The stopwatch of `benchmarks.startup`: what is inside a part is not counted for it, and budgets add up."""

import threading
import time

import pytest

from benchmarks.startup import budget
from benchmarks.startup_task import Stopwatch, process_start


def test_parts_inside_parts_are_counted_once() -> None:
    watch = Stopwatch()
    began = time.perf_counter()
    with watch.part("outer"):
        with watch.part("inner"), watch.part("inner"):
            time.sleep(0.02)
        between = time.perf_counter()
    took = time.perf_counter() - began
    assert watch.secs["inner"] >= 0.02
    assert watch.secs["outer"] + watch.secs["inner"] <= took
    assert watch.secs["outer"] <= took - watch.secs["inner"]
    assert between - began >= watch.secs["inner"]


def test_other_threads_are_told_apart() -> None:
    watch = Stopwatch()

    def work() -> None:
        with watch.part("compile"):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert list(watch.secs) == ["other threads: compile"]


def test_a_budget_adds_up_to_the_measured_time() -> None:
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


def test_a_process_started_before_its_first_line() -> None:
    assert 0 < process_start() <= time.clock_gettime(time.CLOCK_BOOTTIME) + 0.01
