"""The home of threads, locks, clocks and random numbers for ``runtime`` and ``harness``.

Every module of the two packages takes them from here and imports none of ``threading``, ``time``, ``random`` and
``secrets`` itself; ``tests/test_layers.py`` keeps it so. ``harness.launch`` is the exception: a launcher starts before
the runtime is imported. The names are those of the standard library where they say what they are, and cost what they
cost there.

A thread belongs to an object, whose ``ThreadGroup`` starts and joins it. A single call is ``in_thread``, and a call for
each of many things at once is ``call_all``. ``harness.status --threads`` lists the threads of a task and their owners.
"""

from __future__ import annotations

import functools
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import NamedTuple, TypeVar

__all__ = [
    "Condition",
    "Event",
    "Lock",
    "RLock",
    "Random",
    "RunningThread",
    "Semaphore",
    "Thread",
    "ThreadGroup",
    "call_all",
    "current_thread",
    "in_thread",
    "list_threads",
    "local",
    "main_thread",
    "monotonic",
    "native_thread_id",
    "perf_counter_ns",
    "random_bytes",
    "random_hex",
    "random_id",
    "running_threads",
    "sleep",
    "thread_id",
    "uniform",
    "wall_time",
    "wall_time_ns",
]

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
# Numbers for pauses and plans, which a seed repeats.
uniform = random.uniform
Random = random.Random

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class RunningThread(NamedTuple):
    """A thread of this process, as people see it.

    Attributes:
        owner: Name of the object that the thread belongs to; empty for the main thread and threads of libraries.
        name: Name of the thread.
    """

    owner: str
    name: str


class _OwnedThread(threading.Thread):
    group: ThreadGroup


class ThreadGroup:
    """The threads of one object, which closes the group when the object itself is closed. Thread safe.

    The interpreter's own register of threads is the only one: a group forgets a thread that has ended, and is empty in
    the child of a fork.

    Args:
        owner: Name of the object, for people.
        daemon: False if the process waits for the threads at its end.

    Example:
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
        owned = [thread for thread in running_threads() if getattr(thread, "group", None) is self and thread.is_alive()]
        return [thread for thread in owned if thread is not current_thread()]


def list_threads() -> list[RunningThread]:
    """Returns the running threads of this process with their owners, sorted."""
    groups = [(getattr(thread, "group", None), thread.name) for thread in running_threads()]
    return sorted(RunningThread("" if group is None else group.owner, name) for group, name in groups)


def in_thread(work: Callable[[], _Result], name: str) -> Future[_Result]:
    """Runs ``work`` in a thread of its own; returns a future of the result.

    The thread belongs to the calling thread, and keeps no process alive.

    Args:
        work: Function to run.
        name: Name of the thread.

    Example:
        >>> in_thread(lambda: 6 * 7, "an example").result()
        42
    """
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    ThreadGroup(current_thread().name).start(run, name=name)
    return future


def call_all(call: Callable[[_Item], _Result], items: Iterable[_Item], name: str) -> dict[_Item, Future[_Result]]:
    """Calls a function for each of many things at the same time, and waits until all calls have ended.

    So the slowest call sets the time, and no failure keeps a thing from its call.

    Args:
        call: Function to call, in a thread for each item.
        items: Arguments of the calls, such as the names of tasks.
        name: Name of the threads, before the item.

    Returns:
        Futures of the results by item, in the order of the items. Each has its result or its error.

    Example:
        >>> answers = call_all(len, ["ps", "worker"], "an example")
        >>> {task: answer.result() for task, answer in answers.items()}
        {'ps': 2, 'worker': 6}
    """
    answers = {item: in_thread(functools.partial(call, item), f"{name} {item}") for item in items}
    wait(answers.values())
    return answers
