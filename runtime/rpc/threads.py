"""Threads for the calls of the control plane, a thread for each call.

So a waiting call holds up no other call.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent import futures
from typing import ParamSpec, TypeVar

from absl import logging

from runtime import concurrency
from runtime.rpc import times

_P = ParamSpec("_P")
_T = TypeVar("_T")


class CallThreads(futures.ThreadPoolExecutor):
    """An executor for gRPC's server, without a bound unless one is given.

    A step of a client in another process may wait for another step (at a full queue), and a session
    for a task to come up. With a bound, such waits could keep out the very call that ends them.
    Instead ``runtime.server.pools`` counts waiting calls, and refuses those beyond a limit.

    Idle threads are used again and end after ``times.IDLE_SECS``. gRPC requires a
    ``ThreadPoolExecutor``. Unlike the threads of the base class, these do not keep the process
    alive, and serve until its end.

    Args:
        name: Name of the threads.
        most: Most threads at once. Further calls wait for a thread, so a bound is right only for
            calls without waits.
    """

    def __init__(self, name: str, most: float = math.inf) -> None:
        assert most >= 1
        super().__init__(1)
        self._name = name
        # The base class has an attribute `_threads`.
        self._threads_of_calls = concurrency.ThreadGroup("calls of the control plane")
        self._most = most
        self._count = 0
        # Guards the queue and both counts. `_count` is the number of all threads, `_idle` of those
        # that wait for a call.
        self._changed = concurrency.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._idle = 0
        self._closed = False

    def submit(
        self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> futures.Future[_T]:
        """Runs a call on an idle thread or a new thread.

        Never waits and never raises.
        """
        future: futures.Future[_T] = futures.Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        with self._changed:
            self._waiting.append(run)
            # Each call in the queue, this call included, has an idle thread.
            if self._idle >= len(self._waiting):
                self._changed.notify()
                return future
            if self._count >= self._most:
                return future
            self._count += 1
        try:
            self._threads_of_calls.start(self._make_calls, name=self._name)
        except RuntimeError as error:
            # The system has no thread left. The next thread that is free takes the call.
            with self._changed:
                self._count -= 1
            logging.error(
                "No thread for a call of the control plane, which waits for one: %s", error
            )
        return future

    def join(self, secs: float) -> None:
        """Ends the idle threads, and waits for the end of the others.

        Args:
            secs: Most seconds to wait.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads_of_calls.close(secs)

    def _make_calls(self) -> None:
        while (run := self._take_call()) is not None:
            run()
            # The objects of a call must not live until the next call comes.
            del run

    def _take_call(self) -> Callable[[], None] | None:
        with self._changed:
            self._idle += 1
            try:
                self._changed.wait_for(lambda: self._waiting or self._closed, times.IDLE_SECS)
                if self._waiting:
                    return self._waiting.popleft()
                self._count -= 1
                return None
            finally:
                self._idle -= 1
                assert 0 <= self._idle <= self._count
