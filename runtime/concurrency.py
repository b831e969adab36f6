"""The home of threads, locks, clocks and random numbers for ``runtime`` and ``harness``.

Every module of the two packages takes them from here and imports none of ``threading``, ``time``,
``random`` and ``secrets`` itself; ``tests/test_layers.py`` keeps it so. ``harness.launch`` is the
exception: a launcher starts before the runtime is imported. The names are those of the standard
library where they say what they are, and cost what they cost there. All names without an underscore are
public.

A thread belongs to an object, whose ``ThreadGroup`` starts and joins it. A single call is
``in_thread``, and a call for each of many things at once is ``call_all``. Periodic work is
``every``: one timer thread serves the process. ``harness.status --threads`` lists the threads of a
task and their owners.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import os
import random
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

from absl import logging

Condition = threading.Condition
Event = threading.Event
Lock = threading.Lock
RLock = threading.RLock
Semaphore = threading.Semaphore
Thread = threading.Thread
local = threading.local
current_thread = threading.current_thread
main_thread = threading.main_thread
running_threads = threading.enumerate
thread_id = threading.get_ident
native_thread_id = threading.get_native_id

monotonic = time.monotonic
perf_counter_ns = time.perf_counter_ns
sleep = time.sleep
# Only for people and files: a wall clock may jump.
wall_time = time.time
wall_time_ns = time.time_ns

# Numbers that no other process may draw again, or guess.
random_bytes = secrets.token_bytes
random_hex = secrets.token_hex
random_id = secrets.randbits
random_state = random.getstate
# Numbers for pauses and plans, which a seed repeats.
uniform = random.uniform
Random = random.Random


def holds(condition: Condition) -> bool:
    """Returns True if the lock of a condition is held, for asserts.

    Of a condition with a re-entrant lock, the calling thread must be the holder.
    """
    # The standard library asks its own conditions so, and has no public name for the question.
    return bool(condition._is_owned())  # type: ignore[attr-defined]


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, order=True)
class RunningThread:
    """A thread of this process, as people see it.

    Attributes:
        owner: Name of the object that the thread belongs to; empty for the main thread and threads
            of libraries.
        name: Name of the thread.
    """

    owner: str
    name: str


class _OwnedThread(threading.Thread):
    group: ThreadGroup


class ThreadGroup:
    """The threads of one object, which closes the group when the object itself is closed.

    Thread safe.

    The interpreter's own register of threads is the only one: a group forgets a thread that has
    ended, and is empty in the child of a fork.

    Args:
        owner: Name of the object, for people.
        daemon: False if the process waits for the threads at its end.

    Examples:
        >>> ended, threads = Event(), ThreadGroup("the example")
        >>> thread = threads.start(ended.wait, 60.0, name="waiting")
        >>> [thread.name for thread in list_threads() if thread.owner == "the example"]
        ['waiting']
        >>> ended.set()
        >>> threads.close(60.0)
        []
    """

    __slots__ = ("_daemon", "owner")

    def __init__(self, owner: str, *, daemon: bool = True) -> None:
        self.owner = owner
        self._daemon = daemon

    def create(self, target: Callable[..., object], *args: object, name: str) -> Thread:
        """Returns a thread of the group that the caller starts.

        Args:
            target: Function that the thread calls.
            args: Arguments of the function.
            name: Name of the thread.
        """
        thread = _OwnedThread(target=target, args=args, name=name, daemon=self._daemon)
        thread.group = self
        return thread

    def start(self, target: Callable[..., object], *args: object, name: str) -> Thread:
        """Starts a thread of the group; arguments as of ``create``.

        Raises:
            RuntimeError: The system has no thread left.
        """
        thread = self.create(target, *args, name=name)
        thread.start()
        return thread

    def close(self, timeout: float | None = None) -> list[str]:
        """Joins the threads, all within ``timeout`` seconds; returns the names of threads that still run.

        The calling thread is not waited for.
        """
        deadline = None if timeout is None else monotonic() + timeout
        for thread in self._others():
            thread.join(None if deadline is None else max(0.0, deadline - monotonic()))
        return [thread.name for thread in self._others()]

    def _others(self) -> list[Thread]:
        # A thread whose start is under way elsewhere is in the register and cannot be joined yet.
        owned = [
            thread
            for thread in running_threads()
            if getattr(thread, "group", None) is self and thread.is_alive()
        ]
        return [thread for thread in owned if thread is not current_thread()]


def before_exit(method: Callable[[], object]) -> None:
    """Calls a method when the main thread has ended, before the process waits for threads and ends.

    ``atexit`` comes too late for work with threads: Python 3.12 starts no thread then, and the
    executors of ``concurrent.futures`` are shut down. Python 3.12.0 and 3.12.1 start no thread in
    these calls either. The object is not kept alive. Without a main thread there is no call: the
    process ends with its last thread.

    Args:
        method: Method of an object. It should raise no error, which would keep other methods from
            their call.
    """
    known = weakref.WeakMethod(method)

    def call() -> None:
        if found := known():
            found()

    # The standard library has no public name for the hook of its own executors.
    # A program may leave its work to a thread that outlives the main thread.
    with contextlib.suppress(RuntimeError):
        threading._register_atexit(call)  # type: ignore[attr-defined]


def list_threads() -> list[RunningThread]:
    """Returns the running threads of this process with their owners, sorted."""
    # A thread of a library may have an attribute of the same name.
    return sorted(
        RunningThread(thread.group.owner if isinstance(thread, _OwnedThread) else "", thread.name)
        for thread in running_threads()
    )


def in_thread(work: Callable[[], _Result], name: str) -> Future[_Result]:
    """Runs ``work`` in a thread of its own; returns a future of the result.

    The thread belongs to the calling thread, and keeps no process alive.

    Args:
        work: Function to run.
        name: Name of the thread.

    Examples:
        >>> in_thread(lambda: 6 * 7, "an example").result()
        42
    """
    return _start_work(ThreadGroup(current_thread().name), work, name)


def _start_work(threads: ThreadGroup, work: Callable[[], _Result], name: str) -> Future[_Result]:
    future: Future[_Result] = Future()
    threads.start(_fulfil, future, work, name=name)
    return future


def _fulfil(future: Future[_Result], work: Callable[[], _Result]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
        # The error's traceback has this frame. With the future in the frame, the error and all
        # that the work holds, such as the arrays of a checkpoint, would live on in a cycle.
        del future, work


def call_all(
    call: Callable[[_Item], _Result], items: Iterable[_Item], name: str
) -> dict[_Item, Future[_Result]]:
    """Calls a function for each of many things at the same time, and waits until all calls have ended.

    So the slowest call sets the time, and no failure keeps a thing from its call. A call for which
    the system has no thread is made in the calling thread.

    Args:
        call: Function to call, in a thread for each item.
        items: Arguments of the calls, such as the names of tasks.
        name: Name of the threads, before the item.

    Returns:
        Futures of the results by item, in the order of the items. Each has its result or its error.

    Examples:
        >>> answers = call_all(len, ["ps", "worker"], "an example")
        >>> {task: answer.result() for task, answer in answers.items()}
        {'ps': 2, 'worker': 6}
    """
    # The threads have no bound: the calls of silent tasks would keep others from their turn. A
    # thousand threads take 0.1 s.
    threads = ThreadGroup(current_thread().name)
    answers: dict[_Item, Future[_Result]] = {}
    try:
        for item in items:
            work = functools.partial(call, item)
            try:
                answers[item] = _start_work(threads, work, f"{name} {item}")
            except RuntimeError as error:
                logging.error("No thread for %s %s, which is called here: %s", name, item, error)
                answers[item] = future = Future[_Result]()
                _fulfil(future, work)
        wait(answers.values())
    except BaseException:
        # Ctrl-C does not leave calls behind, which would meet the end of their session or of the
        # interpreter. A second Ctrl-C does.
        threads.close()
        raise
    return answers


class PeriodicCall:
    """A periodic call, made by ``every``.

    Attributes:
        secs: Seconds between two calls.
        stopped: True once no further call is made.
    """

    __slots__ = ("_blocks", "_method", "_under_way", "secs", "stopped")

    def __init__(self, secs: float, method: Callable[[], object], *, blocks: bool) -> None:
        self.stopped = False
        self.secs = secs
        # A reference to the object would keep an object alive that a program has dropped.
        self._method = weakref.WeakMethod(method)
        self._blocks = blocks
        self._under_way: Future[object] | None = None

    def stop(self) -> None:
        """Makes no further call. A call under way is not waited for.

        Takes no lock, so finalizers and signal handlers may call this.
        """
        self.stopped = True

    def make_call(self) -> bool:
        """Makes a call that is due; returns False if there is no further call."""
        method = None if self.stopped else self._method()
        if method is None:
            return False
        call = functools.partial(_log_errors, method)
        if not self._blocks:
            call()
        elif self._under_way is None or self._under_way.done():
            try:
                self._under_way = in_thread(call, method.__qualname__)
            except RuntimeError as error:
                logging.error("No thread for %s, which has to wait: %s", method.__qualname__, error)
        return True


def _log_errors(method: Callable[[], object]) -> None:
    try:
        method()
    # Also SystemExit, which would end the thread of all periodic calls without a word.
    except BaseException:
        logging.exception("A periodic call has failed")


class _CallTimer:
    """The thread of all periodic calls of this process.

    It starts with the first call and ends with the last.
    """

    def __init__(self) -> None:
        # Guards the heap of calls by the time when each is due.
        self._changed = Condition()
        self._due: list[tuple[float, int, PeriodicCall]] = []
        self._numbers = itertools.count()
        self._runs = False

    def add(self, periodic: PeriodicCall) -> None:
        """Has the next call made after the period."""
        with self._changed:
            if not self._runs:
                ThreadGroup("periodic calls").start(self._run, name="timer")
                self._runs = True
            heapq.heappush(self._due, (monotonic() + periodic.secs, next(self._numbers), periodic))
            self._changed.notify()

    def _run(self) -> None:
        while (periodic := self._take()) is not None:
            if periodic.make_call():
                self.add(periodic)
            # Nothing of a call may live until the next call is due.
            del periodic

    def _take(self) -> PeriodicCall | None:
        """Waits for the next call that is due; returns None when no call is left."""
        with self._changed:
            while self._due:
                left = self._due[0][0] - monotonic()
                if left <= 0:
                    return heapq.heappop(self._due)[2]
                # The system refuses a longer wait than some centuries, and an infinite one.
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            self._runs = False
            return None


_timer = _CallTimer()


def _forget_calls() -> None:
    """Makes a timer for the child of a fork: the thread and the objects of all calls belong to the parent."""
    global _timer
    _timer = _CallTimer()


os.register_at_fork(after_in_child=_forget_calls)


def every(secs: float, method: Callable[[], object], *, blocks: bool = False) -> PeriodicCall:
    """Has a method called again and again, for the first time after ``secs``.

    All periodic calls of the process share one thread. A method that may wait, such as for an
    answer or a file, would hold up all others and needs ``blocks=True``: each of its calls has a
    short thread of its own, and a call that is due during the call before is left out.

    The calls end with ``PeriodicCall.stop``, with the end of the method's object, and in the child of a
    fork. An error is logged, and the calls continue.

    Args:
        secs: Seconds between two calls.
        method: Bound method; the object is not kept alive.
        blocks: True for a method that may wait.

    Examples:
        >>> class Clock:
        ...     def __init__(self):
        ...         self.ticked = Event()
        ...     def tick(self):
        ...         self.ticked.set()
        >>> clock = Clock()
        >>> calls = every(0.01, clock.tick)
        >>> clock.ticked.wait(60.0)
        True
        >>> calls.stop()
    """
    periodic = PeriodicCall(secs, method, blocks=blocks)
    _timer.add(periodic)
    return periodic
