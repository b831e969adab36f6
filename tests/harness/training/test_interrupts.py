"""Ctrl-C and SIGTERM come out of what the main thread does, and leave no lock behind that others wait for."""

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

import harness
from harness.training.preemption import _LOCKING, interrupt_between_locks

TIMES = 20
"""So many signals: before Python 3.13 every third or so left the lock locked."""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[logging.Logger]:
    """A log that another thread writes to without a pause."""
    logger = logging.Logger("busy")
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            logger.info("from a thread")

    with open(tmp_path / "log", "w") as file:
        logger.addHandler(logging.StreamHandler(file))
        thread = threading.Thread(target=write)
        thread.start()
        yield logger
        over.set()
        thread.join(60)


@pytest.fixture
def ctrl_c_as_python_has_it() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_lock_of_the_log_locked(
    number: signal.Signals, log: logging.Logger, ctrl_c_as_python_has_it: None
) -> None:
    lock = log.handlers[0].lock
    assert lock is not None
    wanted, over = threading.Event(), threading.Event()

    def send() -> None:
        while wanted.wait() and not over.is_set():
            wanted.clear()
            time.sleep(0.002)  # wherever the main thread is then
            os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    left = 0
    try:
        for _ in range(TIMES):
            with pytest.raises((KeyboardInterrupt, SystemExit)):
                with harness.preemptible() if number == signal.SIGTERM else nullcontext(interrupt_between_locks()):
                    wanted.set()
                    while True:
                        log.info("from the main thread")
            if lock._is_owned():  # type: ignore[attr-defined]
                lock.release()  # or the other thread could not end
                left += 1
        assert left == 0
    finally:
        over.set()
        wanted.set()
        sender.join(60)


def test_who_waits_for_a_lock_for_ever_is_interrupted_all_the_same(ctrl_c_as_python_has_it: None) -> None:
    interrupt_between_locks()
    handler = logging.Handler()
    assert handler.lock is not None
    taken, over = threading.Event(), threading.Event()

    def keep() -> None:
        with handler.lock:  # type: ignore[union-attr]
            taken.set()
            over.wait(60)

    keeper = threading.Thread(target=keep)
    keeper.start()
    assert taken.wait(60)
    killer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    killer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            handler.acquire()
    finally:
        over.set()
        keeper.join(60)
        killer.join(60)


def test_ctrl_c_within_a_callback_of_the_garbage_collector_is_not_lost(ctrl_c_as_python_has_it: None) -> None:
    """Python prints what is raised there, "Exception ignored in: ...", and goes on; JAX has such a callback."""
    interrupt_between_locks()
    sent = False

    def interrupted(phase: str, info: dict[str, int]) -> None:
        nonlocal sent
        if not sent:
            sent = True
            signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            gc.collect()
            threading.Event().wait(60)
    finally:
        gc.callbacks.remove(interrupted)


def test_a_handler_of_the_program_s_own_stays(ctrl_c_as_python_has_it: None) -> None:
    for own in (signal.SIG_IGN, lambda number, frame: None):
        signal.signal(signal.SIGINT, own)
        interrupt_between_locks()
        assert signal.getsignal(signal.SIGINT) is own


def test_the_functions_that_lock_are_pythons() -> None:
    import importlib._bootstrap

    modules = {"logging": logging, "threading": threading, "importlib._bootstrap": importlib._bootstrap}
    names = {module: {f for m, f in _LOCKING if m == module} for module in modules}
    assert {m for m, _ in _LOCKING} == set(modules)
    for name, module in modules.items():
        assert module.__name__ == name
        known = set(vars(module)) | {f for c in vars(module).values() if isinstance(c, type) for f in vars(c)}
        missing = names[name] - known - {"cb", "_acquireLock", "_releaseLock"}  # one within a function, two until 3.12
        assert not missing
