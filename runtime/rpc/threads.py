"""Threads for the calls of the control plane: as many as there are calls, so that those that wait hold up nobody."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent import futures
from typing import Any

from absl import logging

IDLE_SECS = 10.0
"""How long a thread without a call is kept for the next one."""


class CallThreads(futures.ThreadPoolExecutor):
    """An executor for gRPC's server, without a bound unless one is given.

    A step of a client elsewhere may wait for another step (a queue that is full), and a session for a task that is not
    there yet. With a bound, waits that reach it would keep out the very call that ends them: ``runtime.server.pools``
    counts and refuses them instead. Idle threads are used again and end after a while. Unlike those of
    ``ThreadPoolExecutor``, which gRPC wants it to be, they do not keep the process alive, and serve until it has ended.

    Args:
        name: of the threads.
        most: threads at once. A call beyond them waits for one; right for calls that wait for nothing.
    """

    def __init__(self, name: str, most: float = math.inf) -> None:
        super().__init__(1)
        self._name = name
        self._most = most
        self._count = 0
        self._changed = threading.Condition()
        self._waiting: deque[tuple[futures.Future[Any], Callable[[], Any]]] = deque()
        self._idle = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        """Runs a call on a thread that has nothing to do, or on a new one; never waits and never raises."""
        future: futures.Future[Any] = futures.Future()
        with self._changed:
            self._waiting.append((future, lambda: fn(*args, **kwargs)))
            if self._idle >= len(self._waiting):
                self._changed.notify()
                return future
            if self._count >= self._most:
                return future
            self._count += 1
        try:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        except RuntimeError as error:  # a limit of the system; the next thread that is free takes the call
            with self._changed:
                self._count -= 1
            logging.error("No thread for a call of the control plane, which waits for one: %s", error)
        return future

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            future, call = taken
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del taken, future, call  # what they hold must not live until the next call comes

    def _take(self) -> tuple[futures.Future[Any], Callable[[], Any]] | None:
        with self._changed:
            self._idle += 1
            try:
                self._changed.wait_for(lambda: self._waiting, IDLE_SECS)
                if self._waiting:
                    return self._waiting.popleft()
                self._count -= 1
                return None
            finally:
                self._idle -= 1
