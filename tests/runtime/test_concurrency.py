"""Threads that have owners, calls of many at once, and the timer of the process."""

import threading

from runtime.concurrency import ThreadGroup, call_all, in_thread, list_threads


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


def test_a_thread_may_close_its_own_group() -> None:
    """`close` does not wait for the calling thread."""
    group = ThreadGroup("one")
    left: list[list[str]] = []
    group.start(lambda: left.append(group.close()), name="closer").join(60)
    assert left == [[]]


def test_a_thread_that_was_not_started_is_no_thread() -> None:
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
        assert {("the test", "waits"), ("MainThread", "asks"), ("", "MainThread")} <= set(list_threads())
    finally:
        ended.set()
    assert answer.result(60) and group.close(60.0) == []


def test_daemons_keep_no_process_alive() -> None:
    """Only a group that says so keeps its process alive."""
    assert ThreadGroup("one").create(print, name="x").daemon
    assert not ThreadGroup("one", daemon=False).create(print, name="x").daemon


def test_all_are_called_at_the_same_time() -> None:
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
