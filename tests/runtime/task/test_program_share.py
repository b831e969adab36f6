"""A client whose programs keep updates of others waiting for most of a minute is refused, and no other client is."""

import heapq
import pathlib
import threading
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import runtime as rt
from runtime.state.ledger import NOBODY
from runtime.task.program_share import ClientShares, ProgramTurn, WatchedProgram
from tests.kit.waits import until
from tests.runtime import kit
from tests.runtime.kit import in_thread
from tests.runtime.task.test_program_watch import BOUND, PS, audited, serve

PROGRAM = WatchedProgram("0" * 64, ("w",), "", "")
SHARE = rt.Limits().program_share


class Load(NamedTuple):
    """The programs of one client: seconds of each, and seconds between two."""

    secs: float
    pause: float = 0.001
    updates: bool = True


def refused(loads: dict[int, Load], secs: float = 600.0) -> dict[int, int]:
    """Runs programs one after the other, in the order in which they come; returns how many of each were refused."""
    shares, counts, now = ClientShares(SHARE), dict.fromkeys(loads, 0), 0.0
    coming = [(0.0, client) for client in loads]

    def admit_until(end: float) -> None:
        while coming and coming[0][0] <= end:
            began, client = heapq.heappop(coming)
            if shares.refusal(client, began) is None:
                shares.turns[ProgramTurn(PROGRAM, client, loads[client].updates, began)] = None
            else:
                counts[client] += 1
                heapq.heappush(coming, (began + 1.0, client))

    while now < secs:
        if not shares.turns:
            now = max(now, coming[0][0])
            admit_until(now)
            continue
        turn = next(iter(shares.turns))
        now += loads[turn.client].secs
        admit_until(now)
        shares.end(turn, now)
        heapq.heappush(coming, (now + loads[turn.client].pause, turn.client))
    return counts


def test_client_above_share_is_refused() -> None:
    """A client whose programs keep others' updates waiting above its share is refused."""
    counts = refused({1: Load(2.3), 2: Load(0.001)})
    assert counts[1] > 0 and not counts[2]


def test_one_long_program_counts() -> None:
    """A program that is longer than the window keeps others waiting as many short ones do."""
    assert refused({1: Load(200.0), 2: Load(0.001)}, 3000.0)[1] > 0


@pytest.mark.parametrize(
    "loads",
    [
        pytest.param({1: Load(2.3)}, id="alone"),
        pytest.param({1: Load(0.5, 0.0), 2: Load(0.5, 0.0)}, id="two that always wait"),
        pytest.param({n: Load(0.2, 0.0) for n in range(1, 17)}, id="sixteen that always wait"),
        pytest.param({1: Load(0.4), 2: Load(0.1)}, id="four times as long"),
        pytest.param({1: Load(2.0, 0.01), 2: Load(2.0, 60.0)}, id="a fast worker and a slow one"),
        pytest.param({1: Load(2.0, 1.0), 2: Load(0.001)}, id="long updates with pauses"),
        pytest.param(
            {1: Load(2.0)} | {n: Load(0.001, updates=False) for n in range(2, 34)},
            id="readers only",
        ),
        pytest.param({NOBODY: Load(2.0), 2: Load(0.001), 3: Load(0.001)}, id="updates of a quorum"),
    ],
)
def test_honest_client_is_never_refused(loads: dict[int, Load]) -> None:
    """Unequal workers, a client alone, readers and a quorum keep their turns for as long as they like."""
    assert not any(refused(loads).values())


def test_sleep_counts_for_nobody() -> None:
    """A process that was frozen in a program blames no client."""
    shares = ClientShares(SHARE)
    turns = [ProgramTurn(PROGRAM, client, True, 0.0) for client in (1, 2)]
    shares.turns.update(dict.fromkeys(turns))
    shares.forget(1000.0)
    assert not shares.end(turns[0], 1001.0) and not shares.refused


def test_turns_that_waited_extend_a_refusal() -> None:
    """Many connections of a client do not shorten its refusal."""
    shares = ClientShares(SHARE)
    first, second = ProgramTurn(PROGRAM, 1, True, 0.0), ProgramTurn(PROGRAM, 1, True, 0.0)
    shares.turns.update(dict.fromkeys((first, second, ProgramTurn(PROGRAM, 2, True, 0.0))))
    assert shares.end(first, 60.0) and shares.refused[1] == (120.0, 60.0)
    assert not shares.end(second, 100.0) and shares.refused[1] == (160.0, 100.0)
    assert shares.refusal(1, 130.0) == (30.0, 100.0) and shares.refusal(1, 160.0) is None


def busy(value: Any) -> Any:
    """Computes for some tenths of a second, then ends."""
    square = jax.lax.fori_loop(0, 200, lambda _, s: jax.numpy.tanh(s @ s), jax.numpy.eye(256) * 0.5)
    return value + square[0, 0] * 0


@pytest.mark.cluster
def test_attacker_is_refused_training_continues(tmp_path: pathlib.Path) -> None:
    """A client that sends a long program again and again is refused, and another session trains on."""
    cluster = kit.addresses(ps=1, worker=2)
    with rt.Graph().as_default() as made, rt.device(PS):
        w = rt.Variable(np.zeros(3, np.float32), name="w")
        step = w.assign_add(np.ones(3, np.float32))
        attack = w.assign(rt.call(busy, w, name="busy")).op
    heard: list[str] = []
    stop = threading.Event()

    def send(session: rt.Session) -> None:
        try:
            while not stop.is_set():
                session.run(attack)
        except rt.ResourceExhaustedError as error:
            heard.append(error.message)

    def train(session: rt.Session) -> int:
        steps = 0
        while not stop.is_set():
            session.run(step)
            steps += 1
        return steps

    with (
        rt.Server(cluster, "worker", 0) as good,
        rt.Server(cluster, "worker", 1) as bad,
        serve(cluster, tmp_path, BELLWETHER_LIMITS="program_share=0.05") as ps,
        rt.Session(good.target, made) as session,
        rt.Session(bad.target, made) as hostile,
    ):
        session.run(w.initializer)
        threads = [in_thread(lambda: send(hostile))[0] for _ in range(4)]
        trainer, steps = in_thread(lambda: train(session))
        try:
            until(lambda: len(heard) == 4, secs=BOUND)
        finally:
            stop.set()
            for thread in (*threads, trainer):
                thread.join(BOUND)
        assert (
            "have kept updates of others waiting" in heard[0]
            and "program_share is 0.05" in heard[0]
        )
        # A refused program has changed nothing.
        assert session.run(step)[0] == steps[0] + 1 > 1
        assert session.run(step)[0] == steps[0] + 2
        (line,) = audited(tmp_path, "program.share")
        assert line["what"] and line["peer"] and line["outcome"].startswith("refused session ")
        assert ps.code is None, ps.story()
