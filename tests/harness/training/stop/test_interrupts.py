"""Ctrl-C and SIGTERM come out of what the main thread does, and leave no lock behind that others wait for."""

import _weakrefset
import ctypes
import gc
import importlib
import inspect
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest

import harness
from harness.training import times
from harness.training.stop import preemption
from harness.training.stop.preemption import _IMPORTING, _LOCKING, interrupt_between_locks
from tests.kit.changes import SetTimes
from tests.kit.interruptions import Interruption

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
def test_signal_leaves_log_unlocked(
    number: signal.Signals, log: logging.Logger, ctrl_c_as_python_has_it: None
) -> None:
    """A signal leaves no lock of the log locked."""
    lock = log.handlers[0].lock
    assert lock is not None
    wanted, over = threading.Event(), threading.Event()

    def send() -> None:
        while wanted.wait() and not over.is_set():
            wanted.clear()
            # The signal comes wherever the main thread is after this time.
            time.sleep(0.002)
            os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    left = 0
    try:
        for _ in range(TIMES):
            with pytest.raises((KeyboardInterrupt, SystemExit)):
                with (
                    harness.preemptible()
                    if number == signal.SIGTERM
                    else nullcontext(interrupt_between_locks())
                ):
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


def test_endless_lock_wait_is_interrupted(
    ctrl_c_as_python_has_it: None,
) -> None:
    """A thread that waits for a lock for ever is interrupted."""
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


def test_ctrl_c_survives_garbage_collection(
    ctrl_c_as_python_has_it: None,
) -> None:
    """Ctrl-C within a callback of the garbage collector is not lost."""
    interrupt_between_locks()
    sent = False

    def interrupted(phase: str, info: dict[str, int]) -> None:
        nonlocal sent
        if not sent and threading.current_thread() is threading.main_thread():  # others collect too
            sent = True
            signal.raise_signal(signal.SIGINT)

    # what other tests have left: Python discards what is raised in a weak reference's callback
    gc.collect()
    try:
        with pytest.raises(KeyboardInterrupt):
            gc.callbacks.append(interrupted)
            gc.collect()
            threading.Event().wait(60)
    finally:
        gc.callbacks.remove(interrupted)


def test_own_signal_handler_stays(ctrl_c_as_python_has_it: None) -> None:
    """A signal handler of the program's own stays."""
    for own in (signal.SIG_IGN, lambda number, frame: None):
        signal.signal(signal.SIGINT, own)
        interrupt_between_locks()
        assert signal.getsignal(signal.SIGINT) is own


class Kept:
    """An object in a weak collection."""


@pytest.mark.parametrize(
    "kind", [weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary]
)
def test_ctrl_c_survives_weak_collections(kind: type, ctrl_c_as_python_has_it: None) -> None:
    """Ctrl-C within the callback of a weak collection is not lost."""
    interrupt_between_locks()
    kept = [Kept()]
    collection = (
        kind()
        if kind is weakref.WeakSet
        else kind({0: kept[0]} if "Value" in kind.__name__ else {kept[0]: 0})
    )
    if kind is weakref.WeakSet:
        collection.add(kept[0])
    handler = signal.getsignal(signal.SIGINT)
    interruption = Interruption(signal.SIGINT, 0, (weakref.__file__, _weakrefset.__file__))
    with pytest.raises(KeyboardInterrupt):
        interruption(kept.clear)
        assert interruption.came
        threading.Event().wait(60)
    assert not len(collection)
    assert signal.getsignal(signal.SIGINT) is handler


def test_locking_functions_exist_in_python() -> None:
    """The functions that take locks exist in Python's own modules."""
    import importlib._bootstrap

    assert inspect.isfunction(vars(importlib._bootstrap)[_IMPORTING[1]])
    modules = {
        "logging": logging,
        "threading": threading,
        "importlib._bootstrap": importlib._bootstrap,
        "_weakrefset": _weakrefset,
        "weakref": weakref,
    }
    names = {module: {f for m, f in _LOCKING if m == module} for module in modules}
    assert {m for m, _ in _LOCKING} == set(modules)
    for name, module in modules.items():
        assert module.__name__ == name
        known = set(vars(module)) | {
            f for c in vars(module).values() if isinstance(c, type) for f in vars(c)
        }
        within_functions = {"cb", "remove", "_remove"}
        until_3_12 = {"_acquireLock", "_releaseLock"}
        missing = names[name] - known - within_functions - until_3_12
        assert not missing


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is swallowed is raised again after a tenth of a second of the hundred here."""
    monkeypatch.setattr(preemption, "SWALLOWED_SHARE", 0.001)


class Asked:
    def __getattr__(self, name: str) -> object:
        signal.raise_signal(signal.SIGTERM)
        raise AttributeError(name)


def by_a_library_in_c() -> None:
    """Before Python 3.13 this function of its C interface drops what is raised; then sys.unraisablehook gets it."""
    has = ctypes.pythonapi.PyObject_HasAttrString
    has.argtypes = [ctypes.py_object, ctypes.c_char_p]
    assert not has(Asked(), b"name")


def by_a_library_in_python() -> None:
    with suppress(BaseException):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("swallow", [by_a_library_in_c, by_a_library_in_python])
def test_swallowed_sigterm_is_raised_again(soon: None, swallow: Callable[[], None]) -> None:
    """SIGTERM that a library swallows is raised once more."""
    went_on = False
    with pytest.raises(SystemExit):
        with harness.preemptible(grace_secs=100):
            swallow()
            went_on = True
            threading.Event().wait(60)
    assert went_on


def test_sigterm_repeats_until_obeyed(soon: None) -> None:
    """SIGTERM that is swallowed again is raised again."""
    count = 0
    with harness.preemptible(grace_secs=100):
        while count < 3:
            try:
                if count == 0:
                    signal.raise_signal(signal.SIGTERM)
                assert not threading.Event().wait(60)
            except SystemExit:
                count += 1


def test_ending_program_is_not_interrupted(soon: None) -> None:
    """A program that is ending is not interrupted once more."""
    long = 0.5
    ends = []

    @contextmanager
    def block() -> Iterator[None]:
        try:
            yield
        except SystemExit as error:
            kept = error
        time.sleep(long)
        ends.append("named")
        raise kept

    with pytest.raises(SystemExit) as raised:
        with harness.preemptible(grace_secs=100), block():
            try:
                try:
                    signal.raise_signal(signal.SIGTERM)
                finally:
                    time.sleep(long)
                    ends.append("finally")
            except BaseException:
                time.sleep(long)
                ends.append("except")
                raise
    assert ends == ["finally", "except", "named"]
    assert raised.value.code == 143


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Imports a module with the text that it is given."""

    def run(text: str) -> None:
        (tmp_path / "told_meanwhile.py").write_text(text)
        importlib.invalidate_caches()
        importlib.import_module("told_meanwhile")

    monkeypatch.syspath_prepend(tmp_path)
    yield run
    sys.modules.pop("told_meanwhile", None)


IMPORTED = (
    "import signal, time; signal.raise_signal(signal.SIGTERM); time.sleep({}); import gc; "
    "gc.told_meanwhile = True"
)


@pytest.mark.parametrize("secs", [100.0, 0.1])
def test_sigterm_waits_for_imports(
    secs: float,
    imported: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    set_times: SetTimes,
) -> None:
    """SIGTERM waits for an import up to its limit."""
    set_times(times, IMPORT_SECS=secs)
    monkeypatch.setattr(gc, "told_meanwhile", False, raising=False)
    with pytest.raises(SystemExit):
        with harness.preemptible(grace_secs=100):
            imported(IMPORTED.format(0.3 if secs == 100.0 else 60))
            threading.Event().wait(60)
    assert gc.told_meanwhile is (secs == 100.0)  # type: ignore[attr-defined]


def test_imported_program_ends_at_once(
    imported: Callable[[str], None], set_times: SetTimes
) -> None:
    """A program that is imported as a module ends at once."""
    set_times(times, IMPORT_SECS=100.0)
    with pytest.raises(SystemExit):
        imported(
            "import harness, signal, threading\n"
            "with harness.preemptible(100):\n"
            "    signal.raise_signal(signal.SIGTERM)\n"
            "    threading.Event().wait(60)\n"
            "    raise AssertionError\n"
        )
