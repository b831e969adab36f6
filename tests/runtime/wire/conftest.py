import contextlib
import os
import threading
import time
from collections.abc import Iterator

import pytest

from runtime.cluster.endpoint import host_id
from runtime.wire import times
from tests.faults.processes import ZygoteProcess
from tests.kit.changes import SetTimes


@pytest.fixture
def no_open_ends() -> Iterator[None]:
    """Fails a test that leaves a thread (daemons too), a connection or a descriptor behind."""
    host_id()  # reads a file, once
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    deadline = time.monotonic() + 30
    threads |= ZygoteProcess.lasting_threads()
    for thread in set(threading.enumerate()) - threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert set(threading.enumerate()) <= threads
    while len(left := _descriptors()) > len(descriptors) and time.monotonic() < deadline:
        time.sleep(0.01)  # a library's own thread may look into a file just now
    assert len(left) <= len(descriptors), (left - descriptors, descriptors - left)


def _descriptors() -> set[tuple[int, str]]:
    """The open descriptors of this process, with what they are of; without those that last for the whole test run."""
    found = set()
    for name in set(os.listdir("/proc/self/fd")) - set(
        map(str, ZygoteProcess.lasting_descriptors())
    ):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found


@pytest.fixture
def often(set_times: SetTimes) -> None:
    """Has servers and calls look every twentieth of a second at what time has passed, not every second."""
    set_times(times, TURN_SECS=0.05, TIDY_SECS=0.05, TICK_SECS=0.05)
