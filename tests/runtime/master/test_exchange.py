"""The exchange of a step: its connections in any order of openings, replies, losses and ends."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import runtime as rt
from runtime.master.calls import RemoteCall
from runtime.master.exchange import Exchange, StepRun
from runtime.task.ending import StepEnding
from runtime.tensor_spec import TensorSpec
from runtime.wire.codec import TensorLayout


class Lane:
    """A connection that answers each call with one number, or is lost."""

    def __init__(self) -> None:
        self.is_lost = False
        self.cancelled = 0

    def send(self, *args: Any, **options: Any) -> None:
        self._check()

    def receive(self, layout: Any, buffer: Any) -> list[np.ndarray]:
        self._check()
        return [np.zeros((), np.float32)]

    def cancel(self) -> None:
        self.cancelled += 1

    def _check(self) -> None:
        if self.is_lost:
            raise rt.UnavailableError("the task is lost")


class Peer:
    """The connections to one task: those given out, and those given back."""

    def __init__(self) -> None:
        self.out: list[Lane] = []
        self.idle: list[Lane] = []

    def acquire(self, deadline: float | None) -> Lane:
        self.out.append(self.idle.pop() if self.idle else Lane())
        return self.out[-1]

    def release(self, lane: Lane) -> None:
        self.out.remove(lane)
        if not lane.is_lost:
            self.idle.append(lane)


EXCHANGE_TURNS = st.tuples(
    st.sampled_from(["open", "open", "send", "receive", "receive", "lose", "close", "give back"]),
    st.integers(0, 3),
)


@given(st.lists(EXCHANGE_TURNS, max_size=30), st.booleans())
def test_exchange_returns_each_connection_once(turns: list[tuple[str, int]], foreign: bool) -> None:
    """Open calls have a connection each, which the end of the step ends until the connection is returned."""
    peers = [Peer() for _ in range(2)]
    layout = TensorLayout([TensorSpec((), np.dtype(np.float32))])
    calls: list[Any] = [
        RemoteCall(
            peers[n % 2], f"task {n % 2}", 0, n, (), layout, (n,), False, [], True, False, False
        )  # type: ignore[arg-type]
        for n in range(4)
    ]
    ending = StepEnding() if foreign else None
    run = StepRun(1, 1, None, ending, [None] * 4, {})  # type: ignore[list-item]
    exchange = Exchange(run)
    for what, number in turns:
        call, under_way = calls[number], dict(exchange.lanes())
        if what == "open" and call not in under_way:
            exchange.open([call])
        elif what == "close":
            exchange.close()
        elif what == "give back":
            run.give_back()
        elif what == "lose" and call in under_way:
            under_way[call].is_lost = True  # type: ignore[attr-defined]
        elif what in ("send", "receive") and call in under_way:
            try:
                exchange.send(call) if what == "send" else exchange.receive(call)
            except rt.UnavailableError:
                exchange.close()
        exchange.validate()
        assert sum(len(peer.out) for peer in peers) == len(exchange)
        assert (
            not any(ending.covers(lane) for peer in peers for lane in peer.idle) if ending else True
        )  # type: ignore[arg-type]
    exchange.close()
    run.give_back()
    assert not any(peer.out for peer in peers)
    assert all(len({id(buffer) for buffer in call.buffers}) == len(call.buffers) for call in calls)


def test_call_is_opened_once() -> None:
    """A second connection for a call would be lost."""
    call: Any = RemoteCall(Peer(), "task", 0, 0, (), None, (), False, [], False, False, False)  # type: ignore[arg-type]
    exchange = Exchange(StepRun(1, 1, None, None, [], {}))
    exchange.open([call])
    with pytest.raises(AssertionError, match="open already"):
        exchange.open([call])
