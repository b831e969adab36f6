"""Pools of the calls of the control plane.

Waiting calls leave room for status, orders and registrations.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator

import grpc

from runtime import concurrency
from runtime.limits import Limits
from runtime.state.cancellation import HUNG_UP, Cancellation

CALLS = "calls"
ORDERS = "orders"
CHECKPOINT_ORDERS = "checkpoint_orders"
REGISTRATIONS = "registrations"
WAITING = "waiting_calls"
CLIENT_WAITING = "client_waiting_calls"
"""Names of the pools, which are the names of their limits.

A connection gets at most half of the first four.
"""

_POOLS = (CALLS, ORDERS, CHECKPOINT_ORDERS, REGISTRATIONS, WAITING)
assert all(hasattr(Limits, pool) for pool in (*_POOLS, CLIENT_WAITING)), "a pool has no limit"


class CallPools:
    """The pools of calls. Each pool limits the calls of one kind that run at once. Thread safe.

    Every call has a thread of its own. A call over the limit of the pool ``WAITING`` is refused,
    because other calls may wait for its effect and it must not wait as well. A call over the limit
    of another pool waits for its turn, or until its client hangs up. Calls of these pools are
    short, so the turn comes soon.

    Args:
        limits: Limits on the calls of each kind.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._changed = concurrency.Condition()
        self._running: dict[str, Counter[str]] = {pool: Counter() for pool in _POOLS}

    def running(self, pool: str) -> int:
        """Returns the number of calls of a pool that run now."""
        with self._changed:
            return self._running[pool].total()

    @contextlib.contextmanager
    def place(self, pool: str, context: grpc.ServicerContext) -> Iterator[None]:
        """Holds a place for a call in a pool during the block.

        Args:
            pool: Name of the pool.
            context: Context of the call.

        Raises:
            ResourceExhaustedError: The pool ``WAITING`` is full, for this connection or for all.
            CancelledError: The client hung up before the call's turn.
        """
        running, peer, limits = self._running[pool], context.peer(), self._limits
        most = getattr(limits, pool)
        with self._changed:
            if pool != WAITING:
                free = Cancellation()
                # gRPC adds no callback to a call that has ended already.
                if not context.add_callback(lambda: free.set(HUNG_UP)):
                    free.set(HUNG_UP)
                # A single connection must not keep all others from their turn.
                half = max(1, most // 2)
                free.wait_for(
                    self._changed,
                    lambda: running.total() < most and running[peer] < half,
                    "waiting for its turn",
                )
            # One client must not take all places from the others.
            elif running[peer] >= limits.client_waiting_calls:
                what = f"{running[peer]} calls of this connection wait here"
                raise limits.exceeded(CLIENT_WAITING, what)
            elif running.total() >= most:
                raise limits.exceeded(WAITING, f"{running.total()} calls wait here")
            running[peer] += 1
            assert running.total() <= most, "a pool has more calls than places"
        try:
            yield
        finally:
            with self._changed:
                assert running[peer] > 0
                running[peer] -= 1
                # Connections come and go for as long as the task lives, so the counters of idle
                # ones are removed.
                if not running[peer]:
                    del running[peer]
                if pool != WAITING:
                    self._changed.notify_all()
