"""Pools of calls: what waits on the control plane takes nothing that status, orders and registrations need."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Final

import grpc

from runtime.limits import Limits
from runtime.state.cancellation import HUNG_UP, Cancellation

CALLS: Final = "calls"
ORDERS: Final = "orders"
CHECKPOINT_ORDERS: Final = "checkpoint_orders"
REGISTRATIONS: Final = "registrations"
WAITING: Final = "waiting_calls"
CLIENT_WAITING: Final = "client_waiting_calls"
"""The pools, by the limits that they have; a connection has half of one of the first four at most."""

_POOLS: Final = (CALLS, ORDERS, CHECKPOINT_ORDERS, REGISTRATIONS, WAITING)


class CallPools:
    """The pools of calls: each limits how many calls of one kind run at once.

    Every call has a thread of its own. One that may wait is refused where there are too many: others may be waiting for
    what it would do, so it must not wait for its turn unheard. Any other waits its turn, which soon comes, or until its
    client goes away.

    Args:
        limits: how many calls there may be of each kind.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._changed = threading.Condition()
        self._running: dict[str, Counter[str]] = {pool: Counter() for pool in _POOLS}

    def running(self, pool: str) -> int:
        """Returns the number of calls of a pool that run now."""
        with self._changed:
            return self._running[pool].total()

    @contextlib.contextmanager
    def place(self, pool: str, context: grpc.ServicerContext) -> Iterator[None]:
        """Holds a call's place in a pool while the block runs.

        Raises:
            ResourceExhaustedError: it may wait, and there are too many.
            CancelledError: its client has gone before its turn.
        """
        running, peer, limits = self._running[pool], context.peer(), self._limits
        most = getattr(limits, pool)
        with self._changed:
            if pool != WAITING:
                free = Cancellation()
                if not context.add_callback(lambda: free.set(HUNG_UP)):
                    free.set(HUNG_UP)
                half = max(1, most // 2)
                free.wait_for(
                    self._changed, lambda: running.total() < most and running[peer] < half, "waiting for its turn"
                )
            elif running[peer] >= limits.client_waiting_calls:
                what = f"{running[peer]} calls of this connection wait here"
                raise limits.exceeded(CLIENT_WAITING, what)
            elif running.total() >= most:
                raise limits.exceeded(WAITING, f"{running.total()} calls wait here")
            running[peer] += 1
        try:
            yield
        finally:
            with self._changed:
                running[peer] -= 1
                if not running[peer]:
                    del running[peer]
                if pool != WAITING:
                    self._changed.notify_all()
