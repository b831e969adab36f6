"""What holds for every test: JAX on the CPU, reproducible property tests, and no leaked thread or process."""

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator

# Before anything imports JAX.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import psutil
import pytest

from runtime.graph.placement import OpInfo, current_device, device
from runtime.graph.tracing import x64_enabled
from tests.faults.processes import ZygoteProcess

# How many examples a property test tries. The first one may compile for a second: the time of one
# says nothing.
for _name, _examples in {"dev": 20, "ci": 100, "nightly": 2000}.items():
    hypothesis.settings.register_profile(
        _name, max_examples=_examples, deadline=None, print_blob=True
    )
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

pytest_plugins = ("tests.tiers", "tests.kit.changes")

# A shell's background job ignores Ctrl-C, and so would every program that a test starts from it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Spares the garbage collector JAX and the tests themselves: it would walk through what stays again and again."""
    gc.collect()
    gc.freeze()


LEAK_TIMEOUT_SECS = 30.0
"""How long threads and processes that a test has told to stop may take to be gone."""


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fails a test after which a Supervisor, a thread that is no daemon, or a child process still lives.

    Fixtures of a wider scope start before this one looks, so what they own is not counted.
    """
    threads_before = set(threading.enumerate())
    processes_before = {process.pid for process in _children()}
    yield
    deadline = time.monotonic() + LEAK_TIMEOUT_SECS
    for thread in _new_threads(threads_before):
        thread.join(max(0.0, deadline - time.monotonic()))
    leaked_processes = [process for process in _children() if process.pid not in processes_before]
    _, alive = psutil.wait_procs(leaked_processes, timeout=max(0.0, deadline - time.monotonic()))
    leaks = [f"thread {thread.name}" for thread in _new_threads(threads_before)]
    for process in alive:
        leaks.append(f"process {process.pid}: {_describe(process)}")
        process.kill()
    psutil.wait_procs(alive, timeout=LEAK_TIMEOUT_SECS)
    if leaks:
        pytest.fail(f"the test left behind: {'; '.join(leaks)}", pytrace=False)


@pytest.fixture(autouse=True)
def absl_logger_as_it_was() -> Iterator[None]:
    """Undoes what a test does to the process-wide absl logger: the next one may look at its lines."""
    logger = logging.getLogger("absl")
    level, handlers, propagate = logger.level, list(logger.handlers), logger.propagate
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers
    logger.propagate = propagate


@pytest.fixture(autouse=True)
def narrow_mode_as_it_was() -> Iterator[None]:
    """Fails a test that leaves JAX's 64-bit mode on in the main thread: later tests would make wider variables."""
    yield
    left = x64_enabled()
    if left:
        jax.enable_x64(False).__enter__()
    assert not left, "the test left JAX's 64-bit mode on"


@pytest.fixture(autouse=True)
def device_scopes_as_they_were() -> Iterator[None]:
    """Starts every test without device scopes, and fails one that leaves a scope open."""
    with device(None):
        yield
        left = current_device(OpInfo(type="", name=""))
    assert left == "", f"the test left a device scope open: {left}"


def _new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    # A Supervisor that nobody stops would wait for orders during later tests.
    return [
        thread
        for thread in threading.enumerate()
        if thread not in before and (not thread.daemon or thread.name == "await-stop")
    ]


def _children() -> list[psutil.Process]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    # none at all: a hundredth of the time of the look through all processes below
    except ChildProcessError:
        return []
    # Python's own helper for shared memory, and what tasks are forked from, stay for the life of
    # the process.
    lasting = ZygoteProcess.lasting_processes()
    children = psutil.Process().children(recursive=True)
    return [p for p in children if p.pid not in lasting and "resource_tracker" not in _describe(p)]


def _describe(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return "already ending"
