"""Threads that have owners, calls of many at once, and the timer of the process."""

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable

import pytest

from runtime import concurrency
from runtime.concurrency import ThreadGroup, call_all, every, in_thread, list_threads
from tests.kit.waits import until


def test_a_group_ends_with_its_threads() -> None:
    """`close` joins the threads of the group, and no others."""
    ended, other = threading.Event(), threading.Event()
    group, others = ThreadGroup("one"), ThreadGroup("another")
    first = group.start(ended.wait, 60.0, name="first")
    second = others.start(other.wait, 60.0, name="second")
    assert group.close(0.01) == ["first"]
    ended.set()
    assert group.close(60.0) == [] and not first.is_alive()
    assert second.is_alive()
    other.set()
    assert others.close() == []


def test_thread_may_close_its_group() -> None:
    """`close` does not wait for the calling thread."""
    group = ThreadGroup("one")
    left: list[list[str]] = []
    group.start(lambda: left.append(group.close()), name="closer").join(60)
    assert left == [[]]


def test_unstarted_thread_is_no_thread() -> None:
    """`close` and the list know only threads that run."""
    group = ThreadGroup("one")
    thread = group.create(print, name="created")
    assert group.close() == []
    assert all(known.owner != "one" for known in list_threads())
    thread.start()
    assert group.close(60.0) == []


def test_threads_are_listed_with_their_owners() -> None:
    """The list has the owner and the name of each running thread; the main thread has no owner."""
    ended = threading.Event()
    group = ThreadGroup("the test")
    group.start(ended.wait, 60.0, name="waits")
    answer = in_thread(ended.wait, "asks")
    try:
        listed = {(thread.owner, thread.name) for thread in list_threads()}
        assert {("the test", "waits"), ("MainThread", "asks"), ("", "MainThread")} <= listed
    finally:
        ended.set()
    assert answer.result(60) and group.close(60.0) == []


def test_daemons_keep_no_process_alive() -> None:
    """Only a group that says so keeps its process alive."""
    assert ThreadGroup("one").create(print, name="x").daemon
    assert not ThreadGroup("one", daemon=False).create(print, name="x").daemon


def test_all_calls_run_at_once() -> None:
    """No call waits for another, and a failure is the answer of its item alone."""
    barrier = threading.Barrier(3)

    def call(item: int) -> int:
        barrier.wait(60)
        return 6 // item

    answers = call_all(call, [3, 0, 2], "call")
    assert list(answers) == [3, 0, 2]
    assert answers[3].result() == 2 and answers[2].result() == 3
    assert isinstance(answers[0].exception(), ZeroDivisionError)
    assert call_all(call, [], "call") == {}


class Calls:
    """A method that counts its calls."""

    def __init__(self) -> None:
        self.count = 0
        self.threads: set[threading.Thread] = set()
        self.wait: Callable[[], object] = lambda: None

    def call(self) -> None:
        self.count += 1
        self.threads.add(threading.current_thread())
        self.wait()


def until_all_end(threads: set[threading.Thread]) -> None:
    """Waits for the end of the threads that have made calls."""
    until(lambda: not any(thread.is_alive() for thread in threads))


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> concurrency._CallTimer:
    """A timer of the test alone: servers and sessions of other tests may have calls, too."""
    made = concurrency._CallTimer()
    monkeypatch.setattr(concurrency, "_timer", made)
    return made


def test_one_thread_makes_all_periodic_calls(timer: concurrency._CallTimer) -> None:
    """Calls with other periods share the thread, which ends with the last call."""
    one, other = Calls(), Calls()
    watches = [every(0.01, one.call), every(0.02, other.call)]
    until(lambda: one.count > 2 and other.count > 2)
    assert one.threads == other.threads and [thread.name for thread in one.threads] == ["timer"]
    for watch in watches:
        watch.stop()
    until_all_end(one.threads)
    made = one.count, other.count
    threading.Event().wait(0.1)
    assert (one.count, other.count) == made


def test_waiting_call_holds_up_no_other(timer: concurrency._CallTimer) -> None:
    """A method that may wait has its own thread, and is not called again meanwhile."""
    slow, quick, ended = Calls(), Calls(), threading.Event()
    slow.wait = lambda: ended.wait(60)
    watches = [every(0.01, slow.call, blocks=True), every(0.01, quick.call)]
    until(lambda: slow.count == 1)
    now = quick.count
    until(lambda: quick.count > now + 5)
    assert slow.count == 1 and [thread.name for thread in slow.threads] == ["Calls.call"]
    ended.set()
    until(lambda: slow.count > 2)
    for watch in watches:
        watch.stop()


def test_calls_end_with_their_object(timer: concurrency._CallTimer) -> None:
    """The timer keeps no object alive."""
    calls, called = Calls(), threading.Event()
    calls.wait = called.set
    every(0.01, calls.call)
    assert called.wait(60)
    threads = calls.threads
    del calls
    gc.collect()
    until_all_end(threads)


@pytest.mark.parametrize("blocks", [False, True])
def test_failed_call_is_made_again(
    blocks: bool, timer: concurrency._CallTimer, caplog: pytest.LogCaptureFixture
) -> None:
    """An error is logged and ends no call, neither of its own method nor of others."""
    calls = Calls()
    calls.wait = lambda: 1 // 0
    watch = every(0.01, calls.call, blocks=blocks)
    until(lambda: calls.count > 2)
    watch.stop()
    until_all_end(calls.threads)
    assert "A periodic call has failed" in caplog.text and "ZeroDivisionError" in caplog.text


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_has_its_own_timer() -> None:
    """The child makes its own calls, and none of its parent's."""
    calls = Calls()
    watch = every(0.01, calls.call)
    until(lambda: calls.count)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            inherited, own = calls.count, Calls()
            every(0.01, own.call)
            until(lambda: own.count > 2, secs=30)
            code = (
                0 if calls.count == inherited and [t.name for t in own.threads] == ["timer"] else 2
            )
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    watch.stop()


def test_a_failed_call_leaves_nothing_behind() -> None:
    """An error lives in no cycle, which would keep the arrays of a failed checkpoint."""

    def fail(held: Calls) -> weakref.ref[Calls]:
        def work() -> None:
            held.count = 1 // 0

        with pytest.raises(ZeroDivisionError):
            in_thread(work, "fails").result(60)
        return weakref.ref(held)

    gc.disable()
    try:
        held = fail(Calls())
        until(lambda: held() is None)
    finally:
        gc.enable()


def test_library_thread_may_have_a_group() -> None:
    """The list of threads takes no attribute of a library's thread for an owner."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, args=(60,), name="of a library")
    thread.group = "a name"  # type: ignore[attr-defined]
    thread.start()
    try:
        assert ("", "of a library") in [(t.owner, t.name) for t in list_threads()]
    finally:
        ended.set()
        thread.join()


def test_all_are_called_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call without a thread of its own is made all the same."""
    start, caller = ThreadGroup.start, threading.current_thread()

    def refuse(group: ThreadGroup, *args: object, name: str) -> threading.Thread:
        if name == "call 2":
            raise RuntimeError("can't start new thread")
        return start(group, *args, name=name)  # type: ignore[arg-type]

    monkeypatch.setattr(ThreadGroup, "start", refuse)
    answers = call_all(lambda item: threading.current_thread() is caller, [1, 2, 3], "call")
    assert [answer.result() for answer in answers.values()] == [False, True, False]


def test_no_period_ends_the_timer(timer: concurrency._CallTimer) -> None:
    """A call that is never due keeps no other call from the timer."""
    never, other = Calls(), Calls()
    watches = [every(float("inf"), never.call), every(0.01, other.call)]
    until(lambda: other.count > 2)
    watches[1].stop()
    until(lambda: len(timer._due) == 1)
    watches[1] = every(0.01, other.call)
    until(lambda: other.count > 5)
    for watch in watches:
        watch.stop()


def test_exit_in_call_ends_no_other(
    timer: concurrency._CallTimer, caplog: pytest.LogCaptureFixture
) -> None:
    """SystemExit is an error of the call, and not the end of the timer."""
    leaves, other = Calls(), Calls()

    def leave() -> None:
        raise SystemExit(1)

    leaves.wait = leave
    watches = [every(0.01, leaves.call), every(0.01, other.call)]
    until(lambda: leaves.count > 2 and other.count > 2)
    for watch in watches:
        watch.stop()
    until_all_end(leaves.threads | other.threads)
    assert "SystemExit" in caplog.text


def test_an_interrupt_leaves_no_call_behind() -> None:
    """Ctrl-C takes effect when all calls have ended."""
    ended: list[int] = []

    def call(item: int) -> None:
        signal.raise_signal(signal.SIGINT)
        # Ctrl-C interrupts the wait of the main thread while this call still runs.
        concurrency.sleep(0.3)
        ended.append(item)

    with pytest.raises(KeyboardInterrupt):
        call_all(call, [1], "call")
    assert ended == [1]
