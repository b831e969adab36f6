import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from harness.testing.processes import Zygote
from runtime.transport import host_id, listener, sockets


@pytest.fixture
def no_open_ends() -> Iterator[None]:
    """Fails a test that leaves a thread (daemons too), a connection or a descriptor behind."""
    host_id()  # reads a file, once
    process = psutil.Process()
    threads, descriptors = set(threading.enumerate()), process.num_fds() - len(Zygote.lasting_descriptors())
    yield
    deadline = time.monotonic() + 30
    threads |= Zygote.lasting_threads()
    for thread in set(threading.enumerate()) - threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert set(threading.enumerate()) <= threads
    while (left := process.num_fds() - len(Zygote.lasting_descriptors())) > descriptors and time.monotonic() < deadline:
        time.sleep(0.01)  # a library's own thread may look into a file just now
    assert left <= descriptors


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has servers and calls look every twentieth of a second at what time has passed, not every second."""
    monkeypatch.setattr(listener, "_TURN_SECS", 0.05)
    monkeypatch.setattr(listener, "_TIDY_SECS", 0.05)
    monkeypatch.setattr(sockets, "TICK_SECS", 0.05)
